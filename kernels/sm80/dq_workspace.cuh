// The fp32 workspace in which `single_pass` accumulates dQ. It keeps the accumulators in the order in which mma.sync
// leaves them in registers, so that a warp's additions are contiguous: [head][query tile][16 rows][8 columns][32 lanes
// x 4 accumulators]. On sm_90 and newer a lane adds its four accumulators in one instruction. Older GPUs need four
// instructions; there the four accumulators of a lane lie 32 elements apart, so that each instruction of the warp
// covers a full 128-byte line.
#pragma once
#include "common/ptx.cuh"

namespace fa2::sm80 {

#if __CUDA_ARCH__ >= 900
inline constexpr int kLaneStride = 4, kElementStride = 1;
#else
inline constexpr int kLaneStride = 1, kElementStride = 32;
#endif

template <int kBr, int kD>
struct DqWorkspace {
    static constexpr int64 kTileElements = kBr * kD;

    // Accumulator `element` of `lane` in the m16n8 tile (m16, n8) of a query tile.
    __device__ static int32 offset(int32 m16, int32 n8, int32 lane, int32 element) {
        return (m16 * (kD / 8) + n8) * 128 + lane * kLaneStride + element * kElementStride;
    }
};

__device__ __forceinline__ void add_accumulators(float* address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    common::add_global(address, x);
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) common::add_global(address + e * kElementStride, x[e]);
#endif
}

}  // namespace fa2::sm80
