// Instructions that only the simt family uses.
#pragma once
#include "common/types.cuh"

namespace fa2::simt {

// Starts a copy of 4, 8 or 16 bytes from global to shared memory that bypasses registers, and of 16 bytes L1, too. If
// the source does not exist, it is not read and zeros are written.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32 smem, const void* gmem, bool exists) {
    const int32 existing = exists ? kBytes : 0;
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(existing) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem), "l"(gmem), "n"(kBytes), "r"(existing)
                     : "memory");
}

}  // namespace fa2::simt
