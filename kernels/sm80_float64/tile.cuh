// Tiles of doubles in shared memory, and how lanes read operands from them.
//
// Operands of float64 have no ldmatrix: a lane loads each of its elements, 8 bytes, into the registers where the
// instruction wants them. Loads of 16 bytes would save instructions, but bring elements of one row, of which the operands
// of most products need columns apart: moves of registers, and the registers themselves, cost more. A product may sum
// over its columns in any order. The order here is such that accumulators are left operands as they are
// (g = lane / 4, t = lane % 4):
//
//   columns of accumulators     index t of a step of 8 is column 2t, index t + 4 is column 2t + 1
//   rows of their right operand (AcrossRows: V)      rows 2t and 2t + 1, column g
//   operands along the sum      (AlongRows: Q, K)    row g, columns t and t + 4
#pragma once
#include "sm80/smem_tile.cuh"

namespace fa2::sm80_float64 {

using namespace fa2::sm80;

// kRows x kCols doubles, without padding. Rows are multiples of 128 bytes. The swizzle XORs bits 1 and 2 of the number of
// a chunk with bits of the row: 16 lanes load 32 bytes of each of four rows, of 0 to 3 or 4 to 7 along a sum, of the even
// or the odd ones across it, and eight lanes store 64 bytes of each of two neighbouring rows.
template <int kRows_, int kCols_>
struct Tile {
    static constexpr int kRows = kRows_, kCols = kCols_;
    static constexpr int kChunks = kCols / 2, kRowBytes = kCols * 8, kBytes = kRows * kRowBytes;
    static constexpr int kPeriod = 8;  // neighbouring threads copy 128 bytes
    static_assert(kCols % 16 == 0 && kRows % 8 == 0);

    __device__ static uint32 swizzle(int32 row) { return ((row ^ row >> 2) & 1) << 2 ^ (row >> 1 & 1) << 1; }
    __device__ static uint32 offset(int32 row, int32 chunk) {
        if constexpr (kCols <= 128) {
            return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
        } else {
            // Written so that a step of 8 chunks or rows adds a constant also for the compiler: for the many steps of a
            // copy of wide rows, it would otherwise keep an address each in registers.
            const uint32 low = chunk & 7, swizzled = low ^ swizzle(row & 7);
            return row * kRowBytes + chunk * 16 + (swizzled - low) * 16;
        }
    }
};

// This lane's loads of an operand whose rows lie along the sum. The swizzle depends on row % 8 only, so that a step of 8
// rows or of 16 columns adds a constant.
template <class Tile>
class AlongRows {
  public:
    __device__ __forceinline__ AlongRows(uint32 tile, int32 first_row, int32 lane)
        : row_(tile + (first_row + lane / 4) * Tile::kRowBytes),
          column_((lane % 4 / 2 ^ Tile::swizzle(lane / 4)) << 4 | lane % 2 * 8) {}
    // The elements of row 8 * r8 + g in step `k8` of 8 columns.
    __device__ __forceinline__ void load(int r8, int k8, double& first, double& second) const {
        const int at = k8 / 2 * 128 + r8 * 8 * Tile::kRowBytes;
        first = load_shared<double>(row_ + (column_ ^ k8 % 2 * 64) + at);
        second = load_shared<double>(row_ + (column_ ^ (k8 % 2 * 64 | 32)) + at);
    }

  private:
    const uint32 row_, column_;
};

// The same of an operand whose columns are those of the result.
template <class Tile>
class AcrossRows {
  public:
    __device__ __forceinline__ AcrossRows(uint32 tile, int32 lane)
        : even_(tile + Tile::offset(lane % 4 * 2, lane / 8) + lane / 4 % 2 * 8),
          odd_(tile + Tile::offset(lane % 4 * 2, lane / 8 ^ 4) + lane / 4 % 2 * 8) {}
    // The elements of column 8 * n8 + g in step `k8` of 8 rows.
    __device__ __forceinline__ void load(int n8, int k8, double& first, double& second) const {
        const int at = n8 / 2 * 128 + k8 * 8 * Tile::kRowBytes;
        first = load_shared<double>((n8 % 2 == 0 ? even_ : odd_) + at);
        second = load_shared<double>((n8 % 2 == 0 ? odd_ : even_) + Tile::kRowBytes + at);
    }

  private:
    const uint32 even_, odd_;
};

}  // namespace fa2::sm80_float64
