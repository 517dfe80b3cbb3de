// The measures of wgmma and of the shared-memory panels that TMA writes and wgmma reads.
#pragma once
#include "sm90/ptx.cuh"

namespace fa2::sm90 {

using common::ceil_div;
using common::max_of;
using common::min_of;
using common::round_up;

inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupRows = 64;     // of wgmma
inline constexpr int kPanelColumns = 64;  // of 16 bits: the 128 bytes that a swizzle spans
inline constexpr int kPanelRowBytes = 128;
inline constexpr int kAlignment = 1024;  // of a swizzled panel
inline constexpr int kMaxSharedBytes = 227 * 1024;

// k-steps in panels of 64 columns: four a panel, 32 bytes each (in units of descriptors).
template <int kPanelBytes>
__device__ __forceinline__ constexpr uint64 along_columns(int s) {
    return (s / 4 * kPanelBytes + s % 4 * 32) / 16;
}
// k-steps of 16 rows.
__device__ __forceinline__ constexpr uint64 along_rows(int s) { return s * (16 * kPanelRowBytes / 16); }

// Registers that all threads start with when `warps` warps share the multiprocessor's.
__host__ __device__ constexpr int registers_at_entry(int warps) { return min_of(255, 65536 / (32 * warps)) / 8 * 8; }

// Whether the shares of a producer and of `groups` consumers are legal for setmaxnreg and no more than all have at
// entry. The compiler does not look: a group that takes what the others do not give back waits forever.
__host__ __device__ constexpr bool registers_suffice(int at_entry, int groups, int producer, int consumer) {
    return producer % 8 == 0 && consumer % 8 == 0 && 24 <= producer && producer <= at_entry && at_entry <= consumer &&
           consumer <= 256 && producer + groups * consumer <= (groups + 1) * at_entry;
}

}  // namespace fa2::sm90
