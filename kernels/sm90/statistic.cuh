// A number for each query that a product K Q^T or V dO^T begins with, as one k-step more of it: its left operand is
// ones, and its right one has the number in three parts of 8 bits.
//
//   S^T - lse / scale = [K 1 1 1] [Q hi mid low]^T
//
// Accumulators could be loaded with the number instead. But then it goes through shared memory to every lane that has a
// part of the query's column, 32 bits for each of 80 queries, 32 lanes and 8 warps: 7 % of what shared memory can
// deliver in a step, which wgmma needs for its operands, and the product waits for the numbers.
//
// A query has 16 bfloat16, a row of 32 bytes. The 32-byte swizzle swaps halves of rows: ones do not tell them apart.
#pragma once
#include "sm90/layout.cuh"

namespace fa2::sm90 {

inline constexpr int kStatisticRowBytes = 32;
inline constexpr int kOnesBytes = kGroupRows * kStatisticRowBytes;

// Of rows of queries, or of ones.
__device__ __forceinline__ uint64 statistic_descriptor(uint32 address) {
    constexpr uint64 kSwizzle32 = 3ull << 62, kEightRows = static_cast<uint64>(8 * kStatisticRowBytes >> 4) << 32;
    return kSwizzle32 | kEightRows | (address & 0x3ffff) >> 4;
}

// The left operand, by all threads of the block. The fence behind the first statistics is behind this, too.
__device__ __forceinline__ void store_ones(uint32 smem) {
    constexpr int32 kTwoOnes = 0x3f803f80;
    for (uint32 i = threadIdx.x * 16; i < kOnesBytes; i += blockDim.x * 16)
        store_shared(smem + i, kTwoOnes, kTwoOnes, kTwoOnes, kTwoOnes);
}

// Rounds x to bfloat16 and gives what that leaves of it: of an infinity nothing.
__device__ __forceinline__ float split(float& x) {
    const float whole = x;
    x = common::unpack_lo<bfloat16>(common::pack<bfloat16>(x, 0.0f));
    return whole == x ? 0.0f : whole - x;
}

// The writer's async_proxy_fence is up to the caller.
__device__ __forceinline__ void store_statistic(uint32 smem, int32 query, float x) {
    float mid = split(x), low = split(mid);
    const uint32 row = smem + query * kStatisticRowBytes;
    store_shared(row, static_cast<int32>(common::pack<bfloat16>(x, mid)),
                 static_cast<int32>(common::pack<bfloat16>(low, 0.0f)), 0, 0);
    store_shared(row + 16, 0, 0, 0, 0);
}

}  // namespace fa2::sm90
