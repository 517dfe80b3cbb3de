// Rows of matrices across the lanes of a warp: the picture on which the family rests.
//
//   rows    kRows rows of a matrix; lane l holds columns l, l + 32, ... of each              rows[r][c]
//   tile    rows in shared memory, as long as the lanes reach, zeros past the head dimension  tile[j * kRowLength + ...]
//   scores  kRows x kCols dot products, one lane to an element: lane l holds row l / kLanesPerRow and every
//           kLanesPerRow-th column (the fragment contract of common/fragment.cuh)
//
// A dot product over the head dimension is a sum over the lanes. Reducing one at a time takes five shuffles each, and
// leaves the same number in 32 lanes. Reducing 32 at a time, halving the set in every step, takes 31 shuffles for all of
// them and leaves each lane one: exponentials are then taken once, not 32 times.
#pragma once
#include "common/mask.cuh"
#include "common/math.cuh"

namespace fa2::simt {

using common::ceil_div;
using common::kFullWarp;

template <class Real, int kRows_, int kTileRows_, int kHeadDim_>
struct WarpRows {
    static constexpr int kRows = kRows_;          // rows of this warp
    static constexpr int kTileRows = kTileRows_;  // rows of a tile in shared memory
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kCols = ceil_div(kHeadDim, 32);
    static constexpr int kRowLength = 32 * kCols;
    static constexpr int kTileElements = kTileRows * kRowLength;

    using Rows = Real[kRows][kCols];

    struct Scores {
        static constexpr int kRows = 1;
        static constexpr int kLanesPerRow = 32 / WarpRows::kRows;
        static constexpr int kCols = kTileRows / kLanesPerRow;
        static_assert(kTileRows % kLanesPerRow == 0);

        Real value[kCols];

        __device__ static int32 row(int, int32 lane) { return lane / kLanesPerRow; }
        __device__ static int32 col(int j, int32 lane) { return j * kLanesPerRow + lane % kLanesPerRow; }
        __device__ Real& operator()(int, int j) { return value[j]; }
        __device__ Real operator()(int, int j) const { return value[j]; }
    };

    __device__ static void load_rows(Rows& rows, const Real* gmem, int64 row_stride, int32 first_row, int32 num_rows,
                                     int32 lane) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int c = 0; c < kCols; ++c) {
                const bool valid = first_row + r < num_rows && lane + 32 * c < kHeadDim;
                rows[r][c] = valid ? gmem[(first_row + r) * row_stride + lane + 32 * c] : Real(0);
            }
    }

    __device__ static void store_rows(const Rows& rows, Real scale, Real* gmem, int64 row_stride, int32 first_row,
                                      int32 num_rows, int32 lane) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int c = 0; c < kCols; ++c)
                if (first_row + r < num_rows && lane + 32 * c < kHeadDim)
                    gmem[(first_row + r) * row_stride + lane + 32 * c] = scale * rows[r][c];
    }

    __device__ static void clear(Rows& rows) {
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int c = 0; c < kCols; ++c) rows[r][c] = 0;
    }

    // The whole block copies a tile.
    template <int kThreads>
    __device__ static void load_tile(Real* tile, const Real* gmem, int64 row_stride, int32 first_row, int32 num_rows) {
        for (int32 index = threadIdx.x; index < kTileElements; index += kThreads) {
            const int32 row = first_row + index / kRowLength, column = index % kRowLength;
            tile[index] = row < num_rows && column < kHeadDim ? gmem[row * row_stride + column] : Real(0);
        }
    }

    // Sums value[i] over the lanes; lane i gets the i-th sum in value[0].
    __device__ static Real reduce_scatter(Real (&value)[32], int32 lane) {
#pragma unroll
        for (int half = 16; half >= 1; half /= 2) {
            const bool upper = lane & half;
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const Real kept = upper ? value[i + half] : value[i];
                const Real sent = upper ? value[i] : value[i + half];
                value[i] = kept + __shfl_xor_sync(kFullWarp, sent, half);
            }
        }
        return value[0];
    }

    // scores = rows tile^T
    __device__ static void dot(Scores& scores, const Rows& rows, const Real* tile, int32 lane) {
        constexpr int kGroup = Scores::kLanesPerRow;  // tile rows whose products with all rows make 32
#pragma unroll
        for (int j = 0; j < Scores::kCols; ++j) {
            Real partial[32] = {};
#pragma unroll
            for (int g = 0; g < kGroup; ++g)
#pragma unroll
                for (int c = 0; c < kCols; ++c) {
                    const Real x = tile[(j * kGroup + g) * kRowLength + lane + 32 * c];
#pragma unroll
                    for (int r = 0; r < kRows; ++r) partial[r * kGroup + g] += rows[r][c] * x;
                }
            scores.value[j] = reduce_scatter(partial, lane);
        }
    }

    // rows += scores tile: every score is broadcast from its lane.
    __device__ static void accumulate(Rows& rows, const Scores& scores, const Real* tile, int32 lane) {
        constexpr int kGroup = Scores::kLanesPerRow;
#pragma unroll
        for (int j = 0; j < Scores::kCols; ++j)
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                Real x[kCols];
#pragma unroll
                for (int c = 0; c < kCols; ++c) x[c] = tile[(j * kGroup + g) * kRowLength + lane + 32 * c];
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const Real score = __shfl_sync(kFullWarp, scores.value[j], r * kGroup + g);
#pragma unroll
                    for (int c = 0; c < kCols; ++c) rows[r][c] += score * x[c];
                }
            }
    }

    // tile += scores^T rows, several warps at once: summed over this warp's rows first, then added atomically.
    __device__ static void scatter_add(Real* tile, const Scores& scores, const Rows& rows, int32 lane) {
        constexpr int kGroup = Scores::kLanesPerRow;
#pragma unroll
        for (int j = 0; j < Scores::kCols; ++j)
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                Real sum[kCols] = {};
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const Real score = __shfl_sync(kFullWarp, scores.value[j], r * kGroup + g);
#pragma unroll
                    for (int c = 0; c < kCols; ++c) sum[c] += score * rows[r][c];
                }
#pragma unroll
                for (int c = 0; c < kCols; ++c) atomicAdd(&tile[(j * kGroup + g) * kRowLength + lane + 32 * c], sum[c]);
            }
    }

    // The number that row r's lanes hold, for every lane.
    __device__ static Real of_row(Real x, int r) { return __shfl_sync(kFullWarp, x, r * Scores::kLanesPerRow); }
};

}  // namespace fa2::simt
