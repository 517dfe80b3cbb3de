// Sizes that wgmma and setmaxnreg prescribe, and the descriptors of operands in panels.
#pragma once
#include "common/panel.cuh"
#include "sm90/ptx.cuh"

namespace fa2::sm90 {

using common::ceil_div;
using common::kPanelColumns;
using common::kPanelRowBytes;
using common::max_of;
using common::min_of;
using common::round_up;

inline constexpr int kGroupThreads = 128;
inline constexpr int kGroupRows = 64;    // M of wgmma
inline constexpr int kAlignment = 1024;  // of a panel with the 128-byte swizzle
inline constexpr int kMaxSharedBytes = 227 * 1024;
// Shared memory available to each of so many blocks; the system reserves 1024 bytes for a block.
__host__ __device__ constexpr int most_shared_bytes(int blocks) { return (kMaxSharedBytes + 1024) / blocks - 1024; }

// Descriptor offset (in 16-byte units) of k-step s of a K-major operand: a panel holds four k-steps of 32 bytes.
template <int kPanelBytes>
__device__ __forceinline__ constexpr uint64 along_columns(int s) {
    return (s / 4 * kPanelBytes + s % 4 * 32) / 16;
}
// Descriptor offset of k-step s of an MN-major operand: a k-step is 16 rows.
template <int kRowBytes = kPanelRowBytes>
__device__ __forceinline__ constexpr uint64 along_rows(int s) {
    return s * (16 * kRowBytes / 16);
}

// Registers of each thread at kernel entry if `warps` warps share the multiprocessor's register file.
__host__ __device__ constexpr int registers_at_entry(int warps) { return min_of(255, 65536 / (32 * warps)) / 8 * 8; }

// True if setmaxnreg accepts the register counts of a producer group and `groups` consumer groups, and their sum does
// not exceed what all groups have at entry. The compiler does not check this, and a group that asks for more registers
// than the others release waits forever.
__host__ __device__ constexpr bool registers_suffice(int at_entry, int groups, int producer, int consumer) {
    return producer % 8 == 0 && consumer % 8 == 0 && 24 <= producer && producer <= at_entry && at_entry <= consumer &&
           consumer <= 256 && producer + groups * consumer <= (groups + 1) * at_entry;
}

}  // namespace fa2::sm90
