// How the simt kernels distribute matrices over the lanes of a warp, and the three products on that layout.
//
//   rows         kRows rows of a matrix in registers; element [r][c] of lane l is column l + 32 c of row r
//   tile         kTileRows rows in shared memory, each padded with zeros from kHeadDim to kRowLength, a multiple of 32;
//                row j starts at tile[j * kRowLength]
//   scores       kRows x kTileRows dot products in registers, each in one lane: lane l holds row l / kLanesPerRow and
//                every kLanesPerRow-th column (the fragment contract of common/fragment.cuh)
//   smem_scores  a copy of the warp's scores in shared memory, readable by all its lanes; row r, column j lies at
//                smem_scores[j * kRows + r]
//
// A dot product over the head dimension is a sum over the 32 lanes. Reducing the dot products one by one takes five
// shuffles each and leaves the same number in all 32 lanes. Reducing 32 of them together, with half as many left after
// each step (a reduce-scatter), takes 31 shuffles for all and leaves one result per lane, so that each exponential is
// computed once and not 32 times.
//
// The loops over the rows of a tile are not fully unrolled: they would need more registers than there are.
#pragma once
#include "common/mask.cuh"
#include "common/math.cuh"

namespace fa2::simt {

using common::ceil_div;
using common::kFullWarp;

// The first element of one head's matrix (Q, K, V, O or a gradient).
template <class Real>
__device__ __forceinline__ Real* head_of(Real* x, const Strides& strides, int32 batch, int32 head) {
    return x + strides.offset(batch, 0, head);
}

template <class Real, int kRows_, int kTileRows_, int kHeadDim_>
struct WarpRows {
    static constexpr int kRows = kRows_;          // rows of this warp
    static constexpr int kTileRows = kTileRows_;  // rows of a tile in shared memory
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kCols = ceil_div(kHeadDim, 32);
    static constexpr int kRowLength = 32 * kCols;
    static constexpr int kTileElements = kTileRows * kRowLength;
    static constexpr int kScoreElements = kTileRows * kRows;  // of one warp

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

    // Multiplies each row by its factor. A lane passes the factor of the row whose scores it holds.
    __device__ static void scale_rows(Rows& rows, Real factor) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const Real of_this_row = of_row(factor, r);
#pragma unroll
            for (int c = 0; c < kCols; ++c) rows[r][c] *= of_this_row;
        }
    }

    // Copies a tile to shared memory with all threads of the block; rows and columns outside the matrix become zeros.
    template <int kThreads>
    __device__ static void load_tile(Real* tile, const Real* gmem, int64 row_stride, int32 first_row, int32 num_rows) {
#pragma unroll 8
        for (int step = 0; step < ceil_div(kTileElements, kThreads); ++step) {
            const int32 index = step * kThreads + static_cast<int32>(threadIdx.x);
            const int32 row = first_row + index / kRowLength, column = index % kRowLength;
            if (kTileElements % kThreads == 0 || index < kTileElements)
                tile[index] = row < num_rows && column < kHeadDim ? gmem[row * row_stride + column] : Real(0);
        }
    }

    // Sums each value[i] over the lanes and returns the i-th sum to lane i. Each step halves the number of values per
    // lane: a lane whose bit kHalf is set keeps the upper half and sends the lower half to its partner; other lanes do
    // the opposite. This is a recursive template because a loop over kHalf would index the array at run time, which
    // would move it from registers to local memory.
    template <int kHalf = 16>
    __device__ static Real reduce_scatter(Real (&value)[32], int32 lane) {
        const bool upper = lane & kHalf;
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const Real kept = upper ? value[i + kHalf] : value[i];
            const Real sent = upper ? value[i] : value[i + kHalf];
            value[i] = kept + __shfl_xor_sync(kFullWarp, sent, kHalf);
        }
        if constexpr (kHalf > 1) return reduce_scatter<kHalf / 2>(value, lane);
        return value[0];
    }

    // scores = rows tile^T
    __device__ static void dot(Scores& scores, const Rows& rows, const Real* tile, Real* smem_scores, int32 lane) {
        constexpr int kGroup = Scores::kLanesPerRow;  // tile rows per step: kGroup * kRows = 32 dot products
        const int32 own = lane % kGroup * kRows + lane / kGroup;
        __syncwarp();
#pragma unroll 1
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
            smem_scores[j * 32 + own] = reduce_scatter(partial, lane);
        }
        // No __syncwarp is needed: a lane reads only what it wrote. The scores pass through shared memory because the
        // loop above, which is not unrolled, cannot index registers.
#pragma unroll
        for (int j = 0; j < Scores::kCols; ++j) scores.value[j] = smem_scores[j * 32 + own];
    }

    // Copies scores to shared memory, where `accumulate` and `scatter_add` read them.
    __device__ static void post(const Scores& scores, Real* smem_scores, int32 lane) {
        constexpr int kGroup = Scores::kLanesPerRow;
        __syncwarp();
#pragma unroll
        for (int j = 0; j < Scores::kCols; ++j)
            smem_scores[j * 32 + lane % kGroup * kRows + lane / kGroup] = scores.value[j];
        __syncwarp();
    }

    // rows += scores tile
    __device__ static void accumulate(Rows& rows, const Real* smem_scores, const Real* tile, int32 lane) {
#pragma unroll 2
        for (int j = 0; j < kTileRows; ++j) {
            const auto score = *reinterpret_cast<const Vector<Real, kRows>*>(smem_scores + j * kRows);
#pragma unroll
            for (int c = 0; c < kCols; ++c) {
                const Real x = tile[j * kRowLength + lane + 32 * c];
#pragma unroll
                for (int r = 0; r < kRows; ++r) rows[r][c] += score.item[r] * x;
            }
        }
    }

    // tile += scores^T rows. All warps add to the same tile, so each sums over its own rows first and then adds the sum
    // atomically.
    __device__ static void scatter_add(Real* tile, const Real* smem_scores, const Rows& rows, int32 lane) {
#pragma unroll 2
        for (int j = 0; j < kTileRows; ++j) {
            const auto score = *reinterpret_cast<const Vector<Real, kRows>*>(smem_scores + j * kRows);
#pragma unroll
            for (int c = 0; c < kCols; ++c) {
                Real sum = 0;
#pragma unroll
                for (int r = 0; r < kRows; ++r) sum += score.item[r] * rows[r][c];
                atomicAdd(&tile[j * kRowLength + lane + 32 * c], sum);
            }
        }
    }

    // Broadcasts to all lanes the value held by the lanes of row r.
    __device__ static Real of_row(Real x, int r) { return __shfl_sync(kFullWarp, x, r * Scores::kLanesPerRow); }
};

}  // namespace fa2::simt
