// Writes a warp's 16 rows of accumulators, rounded, to shared memory: one box per panel of 64 columns, with the
// 128-byte swizzle with which TMA stores them from there, or of 32 with the 64-byte swizzle. Writes `panels` panels,
// starting with panel `first`.
#pragma once
#include "sm90/ptx.cuh"

namespace fa2::sm90 {

// The 16 bytes of its row of such a box where a lane stores its part of the accumulators n and n + 1.
template <uint32 kRowBytes>
__device__ __forceinline__ uint32 chunk_in_box(int n, int32 lane) {
    const uint32 row = lane % 16;
    return (n % 8 + lane / 16) ^ (row * kRowBytes / 128 % (kRowBytes / 16));
}

template <class Element, uint32 kRowBytes = 128, int kN8>
__device__ __forceinline__ void write_box(uint32 box, uint32 panel_bytes, const QuadFragment<kN8>& x, int32 lane,
                                          int first = 0, int panels = ceil_div(kN8, 8)) {
    const uint32 row = lane % 16, address = box + row * kRowBytes;
    PackedFragment<Element, 2> packed;
#pragma unroll
    for (int n = 0; n < kN8; n += 2) {
        if (n / 8 < first || n / 8 >= first + panels) continue;
        packed.set(0, 0, x.value[n][0], x.value[n][1]);
        packed.set(1, 0, x.value[n][2], x.value[n][3]);
        packed.set(0, 1, x.value[n + 1][0], x.value[n + 1][1]);
        packed.set(1, 1, x.value[n + 1][2], x.value[n + 1][3]);
        stmatrix_x4(address + (n / 8 - first) * panel_bytes + chunk_in_box<kRowBytes>(n, lane) * 16, packed.k16(0));
    }
}

}  // namespace fa2::sm90
