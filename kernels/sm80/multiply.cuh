// acc += A B for one warp, in steps of 16 x 16 x 16. Each block of B is fetched once and used for all rows of the warp.
#pragma once
#include "sm80/smem_tile.cuh"

namespace fa2::sm80 {

using common::PackedFragment;
using common::QuadFragment;

// fetch_a(m16, k16) and fetch_b(n16, k16) return a block in registers. A block of B has two n8 halves, in registers 0,
// 1 and 2, 3.
template <class Element, int kK16, int kM16, int kN8, class FetchA, class FetchB>
__device__ __forceinline__ void multiply(QuadFragment<kN8> (&acc)[kM16], FetchA fetch_a, FetchB fetch_b) {
#pragma unroll
    for (int k = 0; k < kK16; ++k) {
        OperandA a[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) a[m] = fetch_a(m, k);
#pragma unroll
        for (int n = 0; n < kN8 / 2; ++n) {
            const OperandA b = fetch_b(n, k);
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                mma_m16n8k16<Element>(acc[m].value[2 * n], a[m], b.reg[0], b.reg[1]);
                mma_m16n8k16<Element>(acc[m].value[2 * n + 1], a[m], b.reg[2], b.reg[3]);
            }
        }
    }
}

}  // namespace fa2::sm80
