// Where the forward's warps store O and lse: in the results, or (Spec::kSplit) in the block's share of the workspace.
// Record is a template parameter because no record has both.
#pragma once
#include "common/output_shares.cuh"
#include "common/statistics.cuh"
#include "sm80/smem_tile.cuh"

namespace fa2::sm80 {

// Stores lse of 16 rows, which a warp holds, from `row` of the query tile on.
template <class Spec, class Record>
__device__ __forceinline__ void store_lse(const Record& params, const common::TileCoordinates& where, int32 share,
                                          const float (&lse)[2], int32 row, int32 lane) {
    if constexpr (Spec::kSplit) {
        using Shares = common::OutputShares<Spec>;
        Shares::put_lse(Shares::of_tile(params, where, share), lse, row / 16, lane);
    } else {
        float* to = params.lse + common::first_statistic<Spec>(params, where.batch, where.head);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 at = where.tile * Spec::kBr + row + common::QuadFragment<1>::row(i, lane);
            if (lane % 4 == 0 && at < params.seqlen_q) to[at] = lse[i];
        }
    }
}

// Stores rows of O, which a warp holds, from `row` of the query tile and from column 8 * first_chunk on. `q`: the query
// tile in shared memory, through whose rows results pass on their way.
template <class Spec, class QTile, int kM16, int kN8, class Record>
__device__ __forceinline__ void store_output(const Record& params, const common::TileCoordinates& where, int32 share,
                                             common::QuadFragment<kN8> (&output)[kM16], uint32 q, int32 row,
                                             int32 first_chunk, int32 lane) {
    if constexpr (Spec::kSplit) {
        using Shares = common::OutputShares<Spec>;
        float* own = Shares::of_tile(params, where, share);
#pragma unroll
        for (int m = 0; m < kM16; ++m) Shares::put(own, output[m], row / 16 + m, first_chunk, lane);
    } else {
        store_rows<QTile, kM16, Spec::kHeadDim>(
            q, row, first_chunk, output, params.o + params.o_strides.offset(where.batch, 0, where.head),
            params.o_strides.row, where.tile * Spec::kBr + row, params.seqlen_q, lane);
    }
}

}  // namespace fa2::sm80
