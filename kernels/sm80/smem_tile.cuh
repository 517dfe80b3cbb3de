// A tile of 16-bit elements in shared memory: its XOR swizzle, ldmatrix addresses, and copies to and from global
// memory.
#pragma once
#include "common/math.cuh"
#include "sm80/ptx.cuh"

namespace fa2::sm80 {

using common::ceil_div;
using common::min_of;

__host__ __device__ constexpr int lowest_set_bit(int x) { return x & -x; }
__host__ __device__ constexpr int log2_of(int x) { return x <= 1 ? 0 : 1 + log2_of(x / 2); }

// The most warps of the forward that share rows of O with so many columns.
__host__ __device__ constexpr int sharers_of_columns(int columns) { return columns > 256 ? 4 : columns > 128 ? 2 : 1; }
// The same in tiles of so many keys, of which four warps have 16 each, or two.
__host__ __device__ constexpr int sharers_of_output(int columns, int keys) {
    return keys % 64 ? 2 : sharers_of_columns(columns);
}

// The same of the kernels of gradients that own rows of dQ, or of dK and dV.
__host__ __device__ constexpr int sharers_of_gradient(int columns) { return columns > 256 ? 2 : 1; }

// The number of columns on chip: a multiple of a k-step of 16 for each warp that shares them.
__host__ __device__ constexpr int padded_head_dim(int head_dim) {
    return common::round_up(head_dim, 16 * sharers_of_columns(head_dim));
}

// The order in which the four 8x8 matrices of an ldmatrix.x4 cover a 16 x 16 block. Each is 8 rows of one 16-byte
// chunk.
//   kRowsFirst    (row 0, chunk 0), (row 8, chunk 0), (row 0, chunk 1), (row 8, chunk 1)
//                 for left operands stored [m][k], and transposed for right operands stored [k][n]
//   kChunksFirst  (row 0, chunk 0), (row 0, chunk 1), (row 8, chunk 0), (row 8, chunk 1)
//                 for right operands stored [n][k], and transposed for left operands stored [k][m]
enum class MatrixOrder { kRowsFirst, kChunksFirst };

// kRows x kCols elements, without padding between rows. ldmatrix is free of bank conflicts if the eight rows of an 8x8
// matrix fall into eight different 16-byte bank groups. Without a swizzle row r starts in group r * kChunks mod 8. This
// takes only 8 / kPeriod different values, where kPeriod is the largest power of two that divides kChunks, at most 8.
// The swizzle XORs the chunk with log2(kPeriod) bits of the row, taken above those that already lead to different
// groups.
template <int kRows_, int kCols_>
struct SmemTile {
    static constexpr int kRows = kRows_;
    static constexpr int kCols = kCols_;
    static constexpr int kChunks = kCols / 8;
    static constexpr int kRowBytes = kCols * 2;
    static constexpr int kBytes = kRows * kRowBytes;
    static constexpr int kPeriod = min_of(lowest_set_bit(kChunks), 8);
    static constexpr int kSwizzleMask = kPeriod - 1;
    static constexpr int kSwizzleShift = 3 - log2_of(kPeriod);
    static_assert(kCols % 16 == 0 && kRows % 16 == 0);

    __device__ static uint32 swizzle(int32 row) { return row >> kSwizzleShift & kSwizzleMask; }
    __device__ static uint32 offset(int32 row, int32 chunk) { return row * kRowBytes + ((chunk ^ swizzle(row)) << 4); }
};

// This lane's ldmatrix addresses in a tile. The swizzle depends on row % 8 only, so a step of 16 rows or 16 columns
// adds a constant to one of at most four precomputed addresses.
template <class Tile, MatrixOrder kOrder>
class LaneAddress {
  public:
    __device__ LaneAddress(uint32 tile, int32 first_row, int32 lane) {
        const int32 row = kOrder == MatrixOrder::kRowsFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
        const int32 chunk = kOrder == MatrixOrder::kRowsFirst ? lane / 16 : lane / 8 % 2;
        row_ = tile + (first_row + row) * Tile::kRowBytes;
        chunk_ = (chunk ^ Tile::swizzle(row)) << 4;
    }
    // The 16 x 16 block at row 16 * r16, column 16 * c16.
    __device__ uint32 at(int r16, int c16) const {
        const uint32 swizzled = (2 * c16 & Tile::kSwizzleMask) << 4;
        const uint32 plain = (2 * c16 & ~Tile::kSwizzleMask) << 4;
        return row_ + (chunk_ ^ swizzled) + plain + r16 * 16 * Tile::kRowBytes;
    }

  private:
    uint32 row_, chunk_;
};

// This lane's addresses for 16 x 16 blocks that a warp stores from registers in the order of a left operand.
template <class Tile>
class StoreAddress {
  public:
    __device__ StoreAddress(uint32 tile, int32 first_row, int32 lane)
#if __CUDA_ARCH__ >= 900
        : block_(tile, first_row, lane) {
    }
    __device__ void store(int r16, int c16, const OperandA& x) const { stmatrix_x4(block_.at(r16, c16), x); }

  private:
    LaneAddress<Tile, MatrixOrder::kRowsFirst> block_;
#else
        : tile_(tile + lane % 4 * 4), row_(first_row + lane / 4) {
    }
    __device__ void store(int r16, int c16, const OperandA& x) const {
#pragma unroll
        for (int r = 0; r < 4; ++r)
            store_shared(tile_ + Tile::offset(row_ + 16 * r16 + r % 2 * 8, 2 * c16 + r / 2), x.reg[r]);
    }

  private:
    uint32 tile_;
    int32 row_;
#endif
};

// The assignment of 16-byte chunks to threads in a copy. Neighbouring threads copy neighbouring chunks of a row, at
// most eight, which are a 128-byte line and a write without bank conflicts. The rest of the row follows in further
// steps.
template <class Tile, int kThreads>
struct CopyMap {
    static constexpr int kChunksPerStep = Tile::kPeriod;
    static constexpr int kColSteps = Tile::kChunks / kChunksPerStep;
    static constexpr int kRowsPerStep = kThreads / kChunksPerStep;
    static constexpr int kRowSteps = ceil_div(Tile::kRows, kRowsPerStep);
    static constexpr bool kLastStepPartial = Tile::kRows % kRowsPerStep != 0;
};

// Starts the copy of rows [first_row, first_row + kRows) of a (row, column) matrix into the tile. Rows before `begin` or
// past `num_rows`, and columns past kHeadDim, become zeros, which add nothing to any product.
template <class Tile, int kThreads, int kHeadDim, class Element>
__device__ __forceinline__ void load_tile_async(uint32 tile, const Element* gmem, int64 row_stride, int32 first_row,
                                                int32 num_rows, int32 thread, int32 begin = 0) {
    using Map = CopyMap<Tile, kThreads>;
    constexpr int kElements = 16 / sizeof(Element);  // of a chunk
    const int32 col_chunk = thread % Map::kChunksPerStep;
    const int32 row0 = thread / Map::kChunksPerStep;
    const Element* source = gmem + (first_row + row0) * row_stride + col_chunk * kElements;
#pragma unroll
    for (int r = 0; r < Map::kRowSteps; ++r) {
        const int32 row = row0 + r * Map::kRowsPerStep;
        if (Map::kLastStepPartial && r == Map::kRowSteps - 1 && row >= Tile::kRows) break;
        const bool row_valid = first_row + row >= begin && first_row + row < num_rows;
#pragma unroll
        for (int c = 0; c < Map::kColSteps; ++c) {
            const int32 chunk = col_chunk + c * Map::kChunksPerStep;
            const bool valid = row_valid && (kHeadDim == Tile::kCols || chunk * kElements < kHeadDim);
            cp_async_16(tile + Tile::offset(row, chunk), source + c * Map::kChunksPerStep * kElements, valid);
        }
        source += Map::kRowsPerStep * row_stride;
    }
}

// The same for rows from anywhere: source_of(row) is where a row of the tile begins, or null for a row of zeros.
template <class Tile, int kThreads, int kHeadDim, class SourceOf>
__device__ __forceinline__ void load_rows_async(uint32 tile, const SourceOf& source_of, int32 thread) {
    using Map = CopyMap<Tile, kThreads>;
    const int32 col_chunk = thread % Map::kChunksPerStep;
    const int32 row0 = thread / Map::kChunksPerStep;
#pragma unroll
    for (int r = 0; r < Map::kRowSteps; ++r) {
        const int32 row = row0 + r * Map::kRowsPerStep;
        if (Map::kLastStepPartial && r == Map::kRowSteps - 1 && row >= Tile::kRows) break;
        const auto* source = source_of(row);
#pragma unroll
        for (int c = 0; c < Map::kColSteps; ++c) {
            const int32 chunk = col_chunk + c * Map::kChunksPerStep;
            const bool valid = source != nullptr && (kHeadDim == Tile::kCols || chunk * 8 < kHeadDim);
            cp_async_16(tile + Tile::offset(row, chunk), source + chunk * 8, valid);
        }
    }
}

// Stores zeros to chunks `first`, `first` + kStep and so on of a row of the tile.
template <class Tile, int kStep = 1>
__device__ __forceinline__ void clear_row(uint32 tile, int32 row, int32 first = 0) {
#pragma unroll 1
    for (int32 chunk = first; chunk < Tile::kChunks; chunk += kStep)
        store_shared(tile + Tile::offset(row, chunk), 0, 0, 0, 0);
}

// Rounds a warp's kRows16 * 16 rows of fp32 accumulators to 16 bits and writes them to global memory, from column
// 8 * first_chunk on. The rows are staged in the warp's own part of a tile and leave as 16 bytes per lane, so that the
// writes fill whole memory sectors.
template <class Tile, int kRows16, int kHeadDim, class Element, int kN8>
__device__ __forceinline__ void store_rows(uint32 tile, int32 tile_row, int32 first_chunk,
                                           common::QuadFragment<kN8> (&rows)[kRows16], Element* gmem, int64 row_stride,
                                           int32 first_row, int32 num_rows, int32 lane) {
    using Fragment = common::QuadFragment<kN8>;
#pragma unroll
    for (int m = 0; m < kRows16; ++m)
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 row = tile_row + 16 * m + Fragment::row(i, lane);
                store_shared(tile + Tile::offset(row, first_chunk + n) + lane % 4 * 4,
                             common::pack<Element>(rows[m].value[n][2 * i], rows[m].value[n][2 * i + 1]));
            }
    __syncwarp();
#pragma unroll 4
    for (int32 index = lane; index < kRows16 * 16 * kN8; index += 32) {
        const int32 row = index / kN8, chunk = first_chunk + index % kN8;
        if (first_row + row < num_rows && (kHeadDim == Tile::kCols || chunk * 8 < kHeadDim)) {
            float x[4];
            load_shared(tile + Tile::offset(tile_row + row, chunk), x);
            *reinterpret_cast<float4*>(gmem + (first_row + row) * row_stride + chunk * 8) =
                make_float4(x[0], x[1], x[2], x[3]);
        }
    }
}

// The same in straight-line code, for rows whose chunks divide the lanes of a warp.
template <class Tile, int kRows16, int kHeadDim, class Element, int kN8>
__device__ __forceinline__ void store_few_rows(uint32 tile, int32 tile_row, common::QuadFragment<kN8> (&rows)[kRows16],
                                               Element* gmem, int64 row_stride, int32 first_row, int32 num_rows,
                                               int32 lane) {
    constexpr int kRowsPerStep = 32 / kN8;
    static_assert(32 % kN8 == 0 && Tile::kChunks == kN8);
    const StoreAddress<Tile> to(tile, tile_row, lane);
#pragma unroll
    for (int m = 0; m < kRows16; ++m) {
        common::PackedFragment<Element, kN8> packed;
        packed.set(rows[m]);
#pragma unroll
        for (int s = 0; s < kN8 / 2; ++s) to.store(m, s, packed.k16(s));
    }
    __syncwarp();
    const int32 first = lane / kN8, chunk = lane % kN8;
    const bool has_column = kHeadDim == Tile::kCols || chunk * 8 < kHeadDim;
    Element* destination = gmem + (first_row + first) * row_stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < kRows16 * 16 / kRowsPerStep; ++i) {
        const int32 row = first + i * kRowsPerStep;
        const OperandA x = load_shared_operand(tile + Tile::offset(tile_row + row, chunk));
        if (has_column && first_row + row < num_rows) common::store_global(destination, x.reg);
        destination += kRowsPerStep * row_stride;
    }
}

}  // namespace fa2::sm80
