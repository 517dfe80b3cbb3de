// The workspace in which `single_pass` adds up dQ: [head][query tile][16 rows][8 columns][4 accumulators][32 lanes]. One
// instruction adds one double of each lane, so that a warp's additions cover 256 contiguous bytes: an H200
// does 3.1e11 of them in a second, and half as many to rows of accumulators.
#pragma once
#include "sm80_float64/multiply.cuh"

namespace fa2::sm80_float64 {

template <int kBr, int kD>
struct DqWorkspace {
    static constexpr int kTileElements = kBr * kD;

    // Accumulator `element` of `lane` in the m16n8 tile (m16, n8) of a query tile.
    __device__ static int32 offset(int32 m16, int32 n8, int32 element, int32 lane) {
        return (m16 * (kD / 8) + n8) * 128 + element * 32 + lane;
    }
};

}  // namespace fa2::sm80_float64
