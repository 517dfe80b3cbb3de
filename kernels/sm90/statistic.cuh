// Adds one number per query (a statistic) to a product K Q^T or V dO^T, as one additional k-step. The left operand of
// that k-step is all ones; the right operand holds the number split into three bfloat16 of 8 significant bits each.
//
//   S^T - lse / scale = [K 1 1 1] [Q hi mid low]^T
//
// The alternative, to initialise the accumulators with the number, sends it through shared memory to every lane that
// holds a part of the query's column: 32 bits for each of 80 queries, 32 lanes and 8 warps. This takes 7 % of the
// shared-memory bandwidth of a step, which wgmma needs for its operands, and the product has to wait for the numbers.
//
// Each query has a row of 16 bfloat16 (32 bytes). The 32-byte swizzle swaps the halves of some rows, which changes
// nothing, because every element is multiplied by one.
#pragma once
#include "sm90/layout.cuh"

namespace fa2::sm90 {

inline constexpr int kStatisticRowBytes = 32;
inline constexpr int kOnesBytes = kGroupRows * kStatisticRowBytes;

// Descriptor of the rows of queries or of the ones: K-major, 32-byte swizzle.
__device__ __forceinline__ uint64 statistic_descriptor(uint32 address) {
    constexpr uint64 kSwizzle32 = 3ull << 62, kEightRows = static_cast<uint64>(8 * kStatisticRowBytes >> 4) << 32;
    return kSwizzle32 | kEightRows | (address & 0x3ffff) >> 4;
}

// Writes the left operand; all threads of the block take part. It needs no async_proxy_fence: a __syncthreads follows,
// and then the fence after the first statistics covers both.
__device__ __forceinline__ void store_ones(uint32 smem) {
    constexpr int32 kTwoOnes = 0x3f803f80;
    for (uint32 i = threadIdx.x * 16; i < kOnesBytes; i += blockDim.x * 16)
        store_shared(smem + i, kTwoOnes, kTwoOnes, kTwoOnes, kTwoOnes);
}

// Rounds x to bfloat16 and returns the remainder; an infinity has remainder 0.
__device__ __forceinline__ float split(float& x) {
    const float whole = x;
    x = common::unpack_lo<bfloat16>(common::pack<bfloat16>(x, 0.0f));
    return whole == x ? 0.0f : whole - x;
}

// The caller must issue an async_proxy_fence afterwards.
__device__ __forceinline__ void store_statistic(uint32 smem, int32 query, float x) {
    float mid = split(x), low = split(mid);
    const uint32 row = smem + query * kStatisticRowBytes;
    store_shared(row, static_cast<int32>(common::pack<bfloat16>(x, mid)),
                 static_cast<int32>(common::pack<bfloat16>(low, 0.0f)), 0, 0);
    store_shared(row + 16, 0, 0, 0, 0);
}

}  // namespace fa2::sm90
