// Merges the caller's partial results, o_parts and lse_parts (merged_row.cuh). kLanes lanes share a row; each reads 16
// bytes of it at a time where rows of 16-bit types are whole 16-byte chunks, and one element otherwise.
#pragma once
#include "common/merged_row.cuh"
#include "common/params.cuh.j2"
#include "common/statistics.cuh"

namespace fa2::common {

template <class Spec, class Params = fa2::Params>
struct MergeParts {
    using Element = typename Spec::Element;
    using Accum = typename ElementTraits<Element>::Accum;
    static constexpr bool kInChunks = sizeof(Element) == 2 && Spec::kHeadDim % 8 == 0;
    static constexpr int kVector = kInChunks ? 8 : 1;
    static constexpr int kLanes = 32 * Spec::kWarps / Spec::kBr, kPartsAtOnce = 4;
    using Chunk = Vector<Element, kVector>;

    __device__ static void run(const Params& params) {
        const int64 index = static_cast<int64>(blockIdx.x) * Spec::kBr + threadIdx.x / kLanes;  // [batch][head][row]
        const int64 rows = static_cast<int64>(params.batch) * params.num_heads * params.seqlen_q;
        if (index >= rows) return;
        const int32 row = index % params.seqlen_q, lane = threadIdx.x % kLanes;
        const int64 head_index = index / params.seqlen_q;
        const int32 head = head_index % params.num_heads, batch = head_index / params.num_heads;
        const Element* parts = params.o_parts + params.o_parts_strides.offset(batch, row, head);
        Element* o = params.o + params.o_strides.offset(batch, row, head);
        for (int32 column = lane * kVector; column < Spec::kHeadDim; column += kLanes * kVector) {
            auto merged = merge_row<Accum, kVector, kPartsAtOnce, exp_accurate>(
                params.num_parts, -infinity<Accum>(),
                [&](int32 s) { return RowStatistic<Accum>{params.lse_parts[s * rows + index], Accum(1)}; },
                [&](int32 s) {
                    const Chunk chunk = *reinterpret_cast<const Chunk*>(parts + s * params.part_stride + column);
                    Vector<Accum, kVector> x;
#pragma unroll
                    for (int c = 0; c < kVector; ++c) x.item[c] = to_accum(chunk.item[c]);
                    return x;
                });
            merged.divide();
            Chunk chunk;
#pragma unroll
            for (int c = 0; c < kVector; ++c) chunk.item[c] = rounded<Element>(merged.column[c]);
            *reinterpret_cast<Chunk*>(o + column) = chunk;
            if (column == 0) params.lse[index] = merged.statistic.shift + log(merged.statistic.sum);
        }
    }
};

}  // namespace fa2::common
