// delta_i = sum_d dO_id O_id - dlse_i, which the softmax gradient dS = P o (dP - delta) subtracts from dP
// (FlashAttention-2, Algorithm 2, line 4). dlse, the gradient with respect to lse, is optional.
//
// The kernel is the first of a backward, and also clears the workspaces to which later ones add.
//
// kLanes lanes share a row. In each step a lane reads 16 bytes for 16-bit types, whose rows are whole 16-byte chunks,
// and one element for the others.
#pragma once
#include "common/math.cuh"
#include "common/params.cuh.j2"
#include "common/statistics.cuh"

namespace fa2::common {

template <class Spec>
struct RowProducts {
    using Element = typename Spec::Element;
    using Accum = typename ElementTraits<Element>::Accum;
    static constexpr int kVector = sizeof(Element) == 2 ? 8 : 1;
    static constexpr int kLanes = 32 * Spec::kWarps / Spec::kBr;
    static constexpr int kSteps = ceil_div(Spec::kHeadDim / kVector, kLanes);
    static_assert(Spec::kHeadDim % kVector == 0 && kLanes <= 32);

    using Load = Vector<Element, kVector>;

    // The dot product of two rows, for all lanes that share them.
    __device__ __forceinline__ static Accum dot(const Element* x, const Element* y, int32 lane, bool valid) {
        Accum sum = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int32 column = (lane + step * kLanes) * kVector;
            if (column < Spec::kHeadDim && valid) {
                const Load a = *reinterpret_cast<const Load*>(x + column);
                const Load b = *reinterpret_cast<const Load*>(y + column);
                sum = with_products(sum, a, b);
            }
        }
        return row_sum<kLanes>(sum);
    }
    // The sum and the products of what a lane has loaded at once.
    __device__ __forceinline__ static Accum with_products(Accum sum, const Load& a, const Load& b) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) sum += to_accum(a.item[e]) * to_accum(b.item[e]);
        return sum;
    }
};

// The gradient with respect to lse; zero if there is none.
template <class Spec, class Record>
__device__ __forceinline__ auto dlse_of(const Record& params, int64 index) {
    using Accum = typename ElementTraits<typename Spec::Element>::Accum;
    if constexpr (Spec::kDlse)
        return params.dlse[index];
    else
        return Accum(0);
}

// Stores zeros to this block's range of a workspace of whole tiles; all blocks together clear all of it. The loop is not
// unrolled: memory bounds it, and a backward with nothing to clear waits for each instruction that is fetched.
template <class Accum>
__device__ __forceinline__ void clear_workspace(Accum* workspace, int64 bytes) {
    using Store = Vector<uint32, 4>;
    constexpr int64 kBytes = sizeof(Store);
    const int64 step = static_cast<int64>(gridDim.x) * blockDim.x * kBytes;
    const int64 first = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) * kBytes;
#pragma unroll 1
    for (int64 offset = first; offset < bytes; offset += step)
        *reinterpret_cast<Store*>(reinterpret_cast<char*>(workspace) + offset) = {};
}

template <class Spec, class Params = fa2::Params>
struct Delta {
    using Products = RowProducts<Spec>;
    using Element = typename Products::Element;
    using Accum = typename Products::Accum;
    static constexpr int kLanes = Products::kLanes;

    __device__ static void run(const Params& params) {
        const int32 head = blockIdx.x / params.num_tiles % params.num_heads;
        const int32 batch = blockIdx.x / params.num_tiles / params.num_heads;
        const int32 row = blockIdx.x % params.num_tiles * Spec::kBr + threadIdx.x / kLanes;
        const int32 lane = threadIdx.x % kLanes;
        const bool valid = row < params.seqlen_q;
        const Element* o = params.o + params.o_strides.offset(batch, valid ? row : 0, head);
        const Element* dout = params.dout + params.dout_strides.offset(batch, valid ? row : 0, head);

        Accum sum = Products::dot(o, dout, lane, valid);
        if (lane == 0 && valid) {
            const int64 index = first_statistic<Spec>(params, batch, head) + row;
            params.delta[index] = sum - dlse_of<Spec>(params, index);
        }
        clear_workspace(params.dq_accum, params.dq_accum_bytes);
        clear_workspace(params.shares, params.shares_bytes);
    }
};

// delta and its tangent delta' = sum_d (dO_id O'_id + dO'_id O_id) - dlse'_i. dO' and dlse' are optional.
template <class Spec, class Params = fa2::Params>
struct DeltaJvp {
    using Products = RowProducts<Spec>;
    using Element = typename Products::Element;
    using Accum = typename Products::Accum;

    __device__ static void run(const Params& params) {
        constexpr int kLanes = Products::kLanes;
        const int32 head = blockIdx.x / params.num_tiles % params.num_heads;
        const int32 batch = blockIdx.x / params.num_tiles / params.num_heads;
        const int32 row = blockIdx.x % params.num_tiles * Spec::kBr + threadIdx.x / kLanes;
        const int32 lane = threadIdx.x % kLanes;
        const bool valid = row < params.seqlen_q;
        const auto row_of = [&](const Element* x, const Strides& strides) {
            return x + strides.offset(batch, valid ? row : 0, head);
        };
        const Element *o = row_of(params.o, params.o_strides), *dout = row_of(params.dout, params.dout_strides);
        Accum sum = Products::dot(o, dout, lane, valid);
        Accum tangent = Products::dot(row_of(params.ot, params.ot_strides), dout, lane, valid);
        if (params.dot != nullptr) tangent += Products::dot(o, row_of(params.dot, params.dot_strides), lane, valid);
        if (lane == 0 && valid) {
            const int64 index = first_statistic<Spec>(params, batch, head) + row;
            sum -= dlse_of<Spec>(params, index);
            if (params.dlset != nullptr) tangent -= params.dlset[index];
            params.delta[index] = sum;
            params.deltat[index] = tangent;
        }
    }
};

}  // namespace fa2::common
