// Rows that see no key contribute nothing to gradients, even if they have NaN: zeros take their place in shared memory.
#pragma once
#include "common/fragment.cuh"
#include "common/mask.cuh"
#include "sm80/ptx.cuh"

namespace fa2::sm80 {

// Calls clear(row) for each of this warp's rows whose lse is +inf; the four lanes of a quad, which share two rows, then
// store zeros to it.
template <int kM16, class Clear>
__device__ __forceinline__ void clear_hidden_rows(int32 warp_row, const float (&lse)[kM16][2], int32 lane,
                                                  const Clear& clear) {
#pragma unroll
    for (int m = 0; m < kM16; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lse[m][i] == common::infinity<float>())
                clear(warp_row + 16 * m + common::QuadFragment<1>::row(i, lane));
    __syncwarp();
}

// The barrier behind which a query tile is there, with zeros in its rows that see no key: is_hidden(row) says which, and
// clear(row) stores the zeros. By position there are such rows only in the first tile of a head.
template <class Spec, int kThreads, class Record, class IsHidden, class Clear>
__device__ __forceinline__ void clear_hidden_tile(const Record& params, bool is_first, const IsHidden& is_hidden,
                                                  const Clear& clear) {
    if constexpr (Spec::kMayHideRows) {
        if (barrier_all(0, kThreads, !is_hidden(threadIdx.x))) return;
    } else {
        block_barrier();
        if (!is_first || common::end_of_hidden_rows<Spec>(params) <= 0) return;
    }
    const int32 row = threadIdx.x;
    if (is_hidden(row)) clear(row);
    block_barrier();
}

}  // namespace fa2::sm80
