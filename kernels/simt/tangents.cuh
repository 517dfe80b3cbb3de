// Matrices with their tangents: copies to shared memory and products. A tangent that the call does not have is neither
// copied nor multiplied.
#pragma once
#include "simt/microtile.cuh"

namespace fa2::simt {

// Rows of a matrix and of its tangent, in global memory and in shared memory: a tile there, and behind it its tangent.
template <class Rows, class Real, int kRows, int kThreads>
struct MovedRows {
    static constexpr int kTile = kRows * Rows::kRowLength, kElements = 2 * kTile;

    Real* rows;
    const Real *gmem, *gmem_tangent;
    int64 row_stride, tangent_stride;

    __device__ bool moves() const { return gmem_tangent != nullptr; }
    __device__ Real* tangent() const { return rows + kTile; }
    __device__ Real* end() const { return rows + kElements; }
    // Starts the copies of tile number `tile`.
    __device__ __forceinline__ void copy(int32 tile, int32 num_rows) const {
        Rows::template copy<kThreads, kRows>(rows, gmem, row_stride, tile * kRows, num_rows);
        if (moves())
            Rows::template copy<kThreads, kRows>(tangent(), gmem_tangent, tangent_stride, tile * kRows, num_rows);
    }
};

// products = X Y^T and tangents = X' Y^T + X Y'^T, of the warp's rows of X, from element `own` on, and a tile Y.
template <class Tile, class Scores, class Own, class Other>
__device__ __forceinline__ void dot_moved(Scores& products, Scores& tangents, const Own& x, int32 own, const Other& y,
                                          int32 lane) {
    Tile::dot(products, x.rows + own, y.rows, lane);
    Tile::clear(tangents);
    if (x.moves()) Tile::add_dot(tangents, x.tangent() + own, y.rows, lane);
    if (y.moves()) Tile::add_dot(tangents, x.rows + own, y.tangent(), lane);
}

// sums += tangents Y + weights Y', by way of `posted`, which only this warp reads.
template <class Tile, class Sums, class Scores, class Real, class Other>
__device__ __forceinline__ void accumulate_moved(Sums& sums, const Scores& weights, const Scores& tangents,
                                                 Real* posted, const Other& y, int32 lane) {
    __syncwarp();  // what was posted before is used
    Tile::post(tangents, posted, lane);
    __syncwarp();
    Tile::accumulate(sums, posted, y.rows, lane);
    if (!y.moves()) return;
    __syncwarp();
    Tile::post(weights, posted, lane);
    __syncwarp();
    Tile::accumulate(sums, posted, y.tangent(), lane);
}

}  // namespace fa2::simt
