// Rows that see no key contribute nothing to gradients, even if they have NaN: zeros take their place in shared memory.
// Their lse is +inf here.
#pragma once
#include "common/mask.cuh"
#include "simt/microtile.cuh"

namespace fa2::simt {

// Stores zeros to this warp's rows that see no key. Other warps read them behind a later barrier.
template <class Scores, class RowsOf, class Real, int kRows>
__device__ __forceinline__ void clear_hidden_rows(Real* rows, const Real (&lse)[kRows], int32 lane) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
        if (lse[i] == common::infinity<Real>())
#pragma unroll 1
            for (int32 column = lane_column(lane); column < RowsOf::kColumns; column += Scores::kLanesPerRow)
                rows[Scores::row(i, lane) * RowsOf::kRowLength + column] = 0;
    __syncwarp();
}

// Stores zeros to the rows of a query tile that see no key, by all threads of the block.
template <class Spec, class RowsOf, class Params, class Real>
__device__ __forceinline__ void clear_hidden_tile(const Params& params, Real* rows, const Real* lse_tile, int32 lane) {
    if (!common::may_hide_rows<Spec>(params)) return;
    const auto is_hidden = [&](int32 row) { return lse_tile[row] == common::infinity<Real>(); };
    bool any = false;
    for (int32 row = lane; row < Spec::kBr; row += 32) any = any || is_hidden(row);
    if (!__any_sync(common::kFullWarp, any)) return;  // and no other warp goes on, either
    RowsOf::template clear<Spec::kWarps * 32, Spec::kBr>(rows, is_hidden);
    __syncthreads();
}

}  // namespace fa2::simt
