// Clears padding: rows of packed arrays outside all sequences get zeros in the results and -inf in lse. All other rows
// are written by the kernels that own them, so clearing costs almost nothing where sequences fill the arrays.
//
// Each thread tests one row; then the warp writes the padding rows among its 32, one row at a time. A lane writes 16
// bytes at a time for 16-bit types, whose rows are whole 16-byte chunks, and one element for the others.
#pragma once
#include "common/sequence.cuh"
#include "common/statistics.cuh"

namespace fa2::common {

template <class Spec>
struct ClearPadding {
    using Element = typename Spec::Element;
    static constexpr int kVector = sizeof(Element) == 2 ? 8 : 1;
    using Chunk = Vector<Element, kVector>;

    // Calls clear(row, lane) with all lanes of a warp for each row in [0, total) for which owned(row) is false.
    template <class Owned, class Clear>
    __device__ static void for_rows(int32 total, Owned owned, Clear clear) {
        const int32 row = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
        uint32 padding = __ballot_sync(kFullWarp, row < total && !owned(row));
        for (; padding != 0; padding &= padding - 1) clear(row - lane + __ffs(padding) - 1, lane);
    }

    template <int kHeadDim, class Pointer>
    __device__ static void clear_row(Pointer x, const Strides& strides, int32 heads, int32 row, int32 lane) {
        constexpr int kChunks = kHeadDim / kVector;
        static_assert(kHeadDim % kVector == 0);
        for (int32 index = lane; index < heads * kChunks; index += 32)
            *reinterpret_cast<Chunk*>(x + strides.offset(0, row, index / kChunks) + index % kChunks * kVector) =
                Chunk{};
    }

    template <class Record>
    __device__ static bool has_query(const Record& params, int32 row) {
        const PackedAxis queries = packed_axis<false>(params);
        return queries.num_sequences > 0 && queries.rows(queries.sequence_of_row(row)).contain(row);
    }
    // Keys of a sequence without queries count as padding, so that no other kernel has to handle them.
    template <class Record>
    __device__ static bool has_key(const Record& params, int32 row) {
        const PackedAxis keys = packed_axis<true>(params);
        if (keys.num_sequences == 0) return false;
        const int32 number = keys.sequence_of_row(row);
        return keys.rows(number).contain(row) && packed_axis<false>(params).rows(number).length > 0;
    }
};

template <class Spec, class Record>
__device__ __forceinline__ void clear_forward(const Record& params) {
    using Padding = ClearPadding<Spec>;
    using Accum = typename ElementTraits<typename Spec::Element>::Accum;
    Padding::for_rows(
        params.total_q, [&](int32 row) { return Padding::has_query(params, row); },
        [&](int32 row, int32 lane) {
            Padding::template clear_row<Spec::kHeadDimV>(params.o, params.o_strides, params.num_heads, row, lane);
            for (int32 head = lane; head < params.num_heads; head += 32)
                params.lse[first_statistic<Spec>(params, 0, head) + row] = -infinity<Accum>();
        });
}

template <class Spec, class Record>
__device__ __forceinline__ void clear_backward(const Record& params) {
    using Padding = ClearPadding<Spec>;
    Padding::for_rows(
        params.total_q, [&](int32 row) { return Padding::has_query(params, row); },
        [&](int32 row, int32 lane) {
            Padding::template clear_row<Spec::kHeadDim>(params.dq, params.dq_strides, params.num_heads, row, lane);
        });
    Padding::for_rows(
        params.total_k, [&](int32 row) { return Padding::has_key(params, row); },
        [&](int32 row, int32 lane) {
            const int32 heads = params.num_heads / params.heads_per_group;
            Padding::template clear_row<Spec::kHeadDim>(params.dk, params.dk_strides, heads, row, lane);
            Padding::template clear_row<Spec::kHeadDimV>(params.dv, params.dv_strides, heads, row, lane);
        });
}

}  // namespace fa2::common
