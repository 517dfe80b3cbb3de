// The product of a warp group's 64 rows of Q or dO and the rows of a key tile, both in panels of shared memory.
#pragma once
#include "sm90/layout.cuh"
#include "sm90/wgmma.cuh.j2"

namespace fa2::sm90 {

// Issues x = rows keys^T, of operands given by descriptors, without fence and commit. kAdds: x += the product.
template <int kColumns, int kRowPanelBytes, int kKeyPanelBytes, bool kAdds = false, class Scores>
__device__ __forceinline__ void multiply_panels(Scores& x, uint64 rows, uint64 keys) {
    if constexpr (!kAdds) wgmma_first_scores(x, rows, keys);
#pragma unroll
    for (int s = kAdds ? 0 : 1; s < kColumns / 16; ++s)
        wgmma_scores(x, rows + along_columns<kRowPanelBytes>(s), keys + along_columns<kKeyPanelBytes>(s), true);
}

}  // namespace fa2::sm90
