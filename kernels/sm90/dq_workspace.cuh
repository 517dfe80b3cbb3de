// The fp32 workspace in which `single_pass` adds up dQ: [head][query tile][block of 16 rows][block of 8 columns]
// [32 lanes][4], the order of wgmma's accumulators in registers. A lane thus adds four elements with one instruction,
// and a warp adds whole cache lines. If the rows of a query tile are no multiple of 64, dQ is computed transposed, and
// the workspace's rows are dQ's columns.
//
// If tiles are boxes of tokens, which begin anywhere, its rows are those of dQ, in tiles of rows that follow each other in
// memory: [head][tile][row][16 columns][4 lanes][4]. The four elements of a lane are those of one row in two blocks of 8
// columns.
#pragma once
#include "sm90/layout.cuh"

namespace fa2::sm90 {

template <int kBr, int kD>
struct DqWorkspace {
    static constexpr bool kTransposed = kBr % kGroupRows != 0;
    static constexpr int kRows = kTransposed ? kD : kBr, kColumns = kTransposed ? kBr : kD;
    static constexpr int kTileElements = kBr * kD;

    // Offset in a query tile of the four accumulators of `lane` in a block of 16 rows by 8 columns.
    __device__ static int32 offset(int32 row16, int32 column8, int32 lane) {
        return (row16 * (kColumns / 8) + column8) * 128 + lane * 4;
    }
    // Offset in a row of the four elements of `lane` in the blocks `column8`, an even number, and column8 + 1.
    __device__ static int32 offset_in_row(int32 column8, int32 lane) { return column8 * 8 + lane % 4 * 4; }
};

}  // namespace fa2::sm90
