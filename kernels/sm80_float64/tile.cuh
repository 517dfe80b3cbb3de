// Tiles of doubles in shared memory, and how lanes read operands from them.
//
// Operands of float64 have no ldmatrix: a lane loads 16 bytes, which are two of its elements. A product may sum over its
// columns in any order. The order here is such that accumulators are left operands as they are, and a load brings two
// elements of an operand (g = lane / 4, t = lane % 4):
//
//   step of 8 columns           index t of the instruction is column 2t, index t + 4 is column 2t + 1
//   operand along the columns   (AlongRows: Q, K)    chunk t of row g: elements t and t + 4 of a row
//   operand across them         (AcrossRows: V)      chunk g of rows 2t and 2t + 1: elements t and t + 4 of two tiles of
//                                                    8 result columns, of which one has the even, the other the odd
//                                                    columns of 16
#pragma once
#include "sm80/smem_tile.cuh"

namespace fa2::sm80_float64 {

using namespace fa2::sm80;

// kRows x kCols doubles, without padding. Rows are multiples of 128 bytes. The swizzle XORs bits 1 and 2 of the chunk with
// bits of the row: eight lanes of a load have four chunks of two rows, or eight chunks of one row, and two rows of these
// four differ in bit 2 of the swizzle.
template <int kRows_, int kCols_>
struct Tile {
    static constexpr int kRows = kRows_, kCols = kCols_;
    static constexpr int kChunks = kCols / 2, kRowBytes = kCols * 8, kBytes = kRows * kRowBytes;
    static constexpr int kPeriod = 8;  // neighbouring threads copy 128 bytes
    static_assert(kCols % 16 == 0 && kRows % 8 == 0);

    __device__ static uint32 swizzle(int32 row) { return ((row ^ row >> 1) & 1) << 2 ^ (row >> 2 & 1) << 1; }
    __device__ static uint32 offset(int32 row, int32 chunk) { return row * kRowBytes + ((chunk ^ swizzle(row)) << 4); }
};

// This lane's loads of an operand whose rows lie along the sum. The swizzle depends on row % 8 only, so that a step of 8
// rows or of 16 columns adds a constant.
template <class Tile>
class AlongRows {
  public:
    __device__ __forceinline__ AlongRows(uint32 tile, int32 first_row, int32 lane)
        : row_(tile + (first_row + lane / 4) * Tile::kRowBytes), chunk_((lane % 4 ^ Tile::swizzle(lane / 4)) << 4) {}
    // The elements of row 8 * r8 + g in step `k8` of 8 columns.
    __device__ __forceinline__ void load(int r8, int k8, double (&x)[2]) const {
        load_shared(row_ + (chunk_ ^ k8 % 2 * 64) + k8 / 2 * 128 + r8 * 8 * Tile::kRowBytes, x);
    }

  private:
    const uint32 row_, chunk_;
};

// The same of an operand whose columns are those of the result.
template <class Tile>
class AcrossRows {
  public:
    __device__ __forceinline__ AcrossRows(uint32 tile, int32 lane)
        : even_(tile + Tile::offset(lane % 4 * 2, lane / 4)), odd_(tile + Tile::offset(lane % 4 * 2 + 1, lane / 4)) {}
    // The elements of step `k8` of 8 rows in 16 columns: those of the even and those of the odd columns.
    __device__ __forceinline__ void load(int n16, int k8, double (&even)[2], double (&odd)[2]) const {
        const int at = n16 * 128 + k8 * 8 * Tile::kRowBytes;
        double x[2], y[2];
        load_shared(even_ + at, x);
        load_shared(odd_ + at, y);
        even[0] = x[0], odd[0] = x[1], even[1] = y[0], odd[1] = y[1];
    }

  private:
    const uint32 even_, odd_;
};

}  // namespace fa2::sm80_float64
