// The matrix products of a warp, from shared memory to registers. An SM does four times as many multiplications in a
// cycle as it loads numbers from shared memory, so each number loaded must serve several products. A lane computes a
// grid of results, and loads one vector for each row and each column of the grid. With 8 x 8 results, 16 loads of 128
// bits serve 256 multiplications of floats.
//
//   own rows   kOwn rows in shared memory that belong to the warp (of Q, say)
//   tile       kOther rows in shared memory that all warps of the block read (of K, say)
//   columns    kHeadDim columns of both, of Q and K or of dO and V. Scores and posted do not depend on them
//   scores     kOwn x kOther dot products of both: a lane holds every fourth row and every eighth column
//   posted     a copy of the warp's scores in shared memory, [kOwn][kPostedLength], which all lanes can read
//   sums       kOwn rows of `scores tile`: a lane holds every fourth row, and kVector columns out of every 8 * kVector
//
// The lanes form a grid of 4 x 8. The eight lanes of a row load the same address of the own rows, and the four of a
// column the same address of the tile. Shared memory reads 128 bits for a quarter of the warp at a time, or for half of
// it where either every two neighbours, or every two lanes at a distance of two, load the same address. Hence the
// numbers of lanes: the lowest bit is of the row, the next three are the column, and the highest is of the row again.
// Either load then takes two steps, and not four.
#pragma once
#include "simt/rows.cuh"

namespace fa2::simt {

// A lane's place in the grid.
__device__ inline int32 lane_row(int32 lane) { return lane % 2 + lane / 16 * 2; }
__device__ inline int32 lane_column(int32 lane) { return lane / 2 % 8; }

// A lane's scores.
template <class Real, int kOwn, int kOther>
struct MicroScores {
    static constexpr int kRows = kOwn / 4;
    static constexpr int kLanesPerRow = 8, kLaneStep = 2;
    static constexpr int kCols = kOther / kLanesPerRow;
    static_assert(kOwn % 4 == 0 && kOther % kLanesPerRow == 0);

    Real value[kRows][kCols];

    __device__ static int32 row(int i, int32 lane) { return lane_row(lane) + 4 * i; }
    __device__ static int32 col(int j, int32 lane) { return lane_column(lane) + 8 * j; }
    __device__ Real& operator()(int i, int j) { return value[i][j]; }
    __device__ Real operator()(int i, int j) const { return value[i][j]; }
};

// Registers in which a lane holds its part of a row of sums.
template <class Real>
__host__ __device__ constexpr int registers_of_row(int columns) {
    return common::round_up(columns, 32) / 8 * int(sizeof(Real) / 4);
}

// kColumnsBeside: the columns of further sums that a lane holds beside those of one of these tiles.
template <class Real, int kOwn_, int kOther_, int kHeadDim, int kColumnsBeside = 0>
struct Microtile {
    using Rows = SharedRows<Real, kHeadDim>;
    using Vec = typename Rows::Vec;
    using Scores = MicroScores<Real, kOwn_, kOther_>;
    static constexpr int kOwn = kOwn_;
    static constexpr int kOther = kOther_;
    static constexpr int kVector = Rows::kVector, kRowLength = Rows::kRowLength;
    static constexpr int kRows = kOwn / 4;  // of a lane
    // The padding moves the four rows that the warp writes at a time to different banks: an odd multiple of 8 does.
    static constexpr int kPostedLength = kOther + 8 + kOther % 16;
    static constexpr int kPostedElements = kOwn * kPostedLength;
    static_assert(kOwn % 4 == 0);

    // Sums of kChunks_ chunks, each of kVector columns of a lane.
    template <int kChunks_>
    struct SumsOf {
        static constexpr int kChunks = kChunks_;

        Real value[kRows][kChunks][kVector];

        // The first of the kVector columns of a chunk.
        __device__ static int32 col(int chunk, int32 lane) { return (8 * chunk + lane_column(lane)) * kVector; }
        __device__ void clear() {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
#pragma unroll
                    for (int v = 0; v < kVector; ++v) value[i][c][v] = 0;
        }
        __device__ void scale(const Real (&factor)[kRows]) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
#pragma unroll
                    for (int v = 0; v < kVector; ++v) value[i][c][v] *= factor[i];
        }
        // row i -= factor[i] * row i of other sums
        __device__ void subtract(const Real (&factor)[kRows], const SumsOf& other) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
#pragma unroll
                    for (int v = 0; v < kVector; ++v) value[i][c][v] -= factor[i] * other.value[i][c][v];
        }
        __device__ Vec scaled(int i, int chunk, Real scale) const {
            Vec x;
#pragma unroll
            for (int v = 0; v < kVector; ++v) x.item[v] = scale * value[i][chunk][v];
            return x;
        }
        // row i += x * (these columns of a row of a tile)
        __device__ __forceinline__ void add_row(int i, Real x, const Vec (&row)[kChunks]) {
#pragma unroll
            for (int c = 0; c < kChunks; ++c)
#pragma unroll
                for (int v = 0; v < kVector; ++v) value[i][c][v] += x * row[c].item[v];
        }
    };
    using Sums = SumsOf<Rows::kColumns / (8 * kVector)>;

    // The chunks of further sums that a lane adds up at a time, beside sums of so many bytes: all in one pass over a
    // tile if 64 registers suffice. Beside sums of more than 64 registers there are only 32.
    __host__ __device__ static constexpr int chunks_beside(int bytes) {
        const int available = 4 * (bytes <= 4 * 64 ? 64 : 32);
        int chunks = 1;
        while (2 * chunks * int(sizeof(SumsOf<1>)) <= available && Sums::kChunks % (2 * chunks) == 0) chunks *= 2;
        return chunks;
    }

    __device__ __forceinline__ static void clear(Scores& scores) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < Scores::kCols; ++j) scores(i, j) = 0;
    }
    // scores = own tile^T
    __device__ __forceinline__ static void dot(Scores& scores, const Real* own, const Real* tile, int32 lane) {
        clear(scores);
        add_dot(scores, own, tile, lane);
    }
    // scores += own tile^T. The products of kChain columns are summed on their own.
    __device__ __forceinline__ static void add_dot(Scores& scores, const Real* own, const Real* tile, int32 lane) {
        own += Scores::row(0, lane) * kRowLength;
        tile += Scores::col(0, lane) * kRowLength;
        constexpr int kUnroll = kSumsInLevels || kRows < 8 ? 2 : 1;  // more doubles leave no registers for two steps
        constexpr int kUnrollChains = kSumsInLevels && kRows < 4 ? 2 : 1;
#pragma unroll kUnrollChains
        for (int32 first = 0; first < Rows::kColumns; first += kChain) {
            Scores chain;
            clear(chain);
#pragma unroll kUnroll
            for (int32 column = first; column < first + kChain; column += kVector) {
                Vec x[kRows];
#pragma unroll
                for (int i = 0; i < kRows; ++i) x[i] = Rows::load(own + 4 * i * kRowLength + column);
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) {
                    const Vec y = Rows::load(tile + 8 * j * kRowLength + column);
#pragma unroll
                    for (int i = 0; i < kRows; ++i) chain(i, j) = plus_products(chain(i, j), x[i], y);
                }
            }
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) scores(i, j) += chain(i, j);
        }
    }

    // Copies scores to shared memory, where `accumulate` reads them after a barrier.
    __device__ __forceinline__ static void post(const Scores& scores, Real* posted, int32 lane) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < Scores::kCols; ++j)
                posted[Scores::row(i, lane) * kPostedLength + Scores::col(j, lane)] = scores(i, j);
    }

    // sums += posted tile
    __device__ __forceinline__ static void accumulate(Sums& sums, const Real* posted, const Real* tile, int32 lane) {
        join_products(sums, posted, tile, lane, [](Real sum, int, Real of_tile) { return sum + of_tile; });
    }
    // sums = factor sums + posted tile, with a factor for each row.
    __device__ __forceinline__ static void accumulate(Sums& sums, const Real (&factor)[kRows], const Real* posted,
                                                      const Real* tile, int32 lane) {
        join_products(sums, posted, tile, lane,
                      [&](Real sum, int i, Real of_tile) { return fma(sum, factor[i], of_tile); });
    }

    // sums += posted^T tile, of scores that other warps have posted with rows of kLength elements, in some chunks of
    // columns from `tile` on. Here a lane has kRows adjacent rows from `adjacent_row` on, whose scores are one load.
    template <int kLength, int kChunks>
    __device__ __forceinline__ static void accumulate_transposed(SumsOf<kChunks>& sums, const Real* posted,
                                                                 const Real* tile, int32 lane) {
        posted += adjacent_row(lane);
#pragma unroll 2
        for (int32 other = 0; other < kOther; ++other) {
            const auto x = *reinterpret_cast<const Vector<Real, kRows>*>(posted + other * kLength);
            Vec row[kChunks];
            load_row(row, tile + other * kRowLength + Sums::col(0, lane));
#pragma unroll
            for (int i = 0; i < kRows; ++i) sums.add_row(i, x.item[i], row);
        }
    }
    __device__ static int32 adjacent_row(int32 lane) { return lane_row(lane) * kRows; }

    // Stores scale * sums to the rows of global memory from `first_row` on.
    __device__ __forceinline__ static void store(const Sums& sums, Real scale, Real* gmem, int64 row_stride,
                                                 int32 first_row, int32 num_rows, int32 lane) {
        const bool in_vectors = Rows::in_vectors(gmem, row_stride);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int32 row = first_row + Scores::row(i, lane);
            if (row >= num_rows) break;
#pragma unroll
            for (int c = 0; c < Sums::kChunks; ++c) {
                const int32 column = Sums::col(c, lane);
                Real* first = gmem + row * row_stride + column;
                const Vec x = sums.scaled(i, c, scale);
                if (in_vectors) {
                    if (column < kHeadDim) *reinterpret_cast<Vec*>(first) = x;
                } else {
#pragma unroll
                    for (int v = 0; v < kVector; ++v)
                        if (column + v < kHeadDim) first[v] = x.item[v];
                }
            }
        }
    }

    // Loads rows of global memory from `first_row` on as sums, and zeros in place of those that do not exist(i).
    template <class Exists>
    __device__ __forceinline__ static void load(Sums& sums, const Real* gmem, int64 row_stride, int32 first_row,
                                                int32 lane, const Exists& exists) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int c = 0; c < Sums::kChunks; ++c)
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    const int32 column = Sums::col(c, lane) + v;
                    sums.value[i][c][v] = exists(i) && column < kHeadDim
                                              ? gmem[(first_row + Scores::row(i, lane)) * row_stride + column]
                                              : Real(0);
                }
    }

  private:
    // A sum rounds large scores once for each addition to it. In float, the digits of a large score are kept by fewer
    // additions: those of the products of kChain columns on their own, then of these sums.
    static constexpr bool kSumsInLevels = sizeof(Real) == 4;
    static constexpr int kChain = kSumsInLevels ? 8 : Rows::kColumns;

    __device__ __forceinline__ static Real plus_products(Real sum, const Vec& x, const Vec& y) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) sum = fma(x.item[v], y.item[v], sum);
        return sum;
    }
    // Some chunks of a row of a tile, from this lane's part of the first one on.
    template <int kChunks>
    __device__ __forceinline__ static void load_row(Vec (&row)[kChunks], const Real* first) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) row[c] = Rows::load(first + Sums::col(c, 0));
    }
    // sums = join(sums, row, posted tile). The products of a tile are summed on their own, so that a long sequence does
    // not make one long chain of additions, each of which rounds the sum of all products before it. There are registers
    // for kAtOnce chunks of these sums at a time.
    template <class Join>
    __device__ __forceinline__ static void join_products(Sums& sums, const Real* posted, const Real* tile, int32 lane,
                                                         const Join& join) {
        constexpr int kBeside = kRows * SharedRows<Real, kColumnsBeside>::kColumns / 8 * int(sizeof(Real));
        constexpr int kAtOnce = chunks_beside(sizeof(Sums) + kBeside);
        posted += lane_row(lane) * kPostedLength;
        tile += Sums::col(0, lane);
#pragma unroll
        for (int chunk = 0; chunk < Sums::kChunks; chunk += kAtOnce) {
            SumsOf<kAtOnce> products;
            products.clear();
#pragma unroll 2
            for (int32 first = 0; first < kOther; first += kVector) {
                Vec x[kRows];
#pragma unroll
                for (int i = 0; i < kRows; ++i) x[i] = Rows::load(posted + 4 * i * kPostedLength + first);
#pragma unroll
                for (int v = 0; v < kVector; ++v) {
                    Vec row[kAtOnce];
                    load_row(row, tile + (first + v) * kRowLength + Sums::col(chunk, 0));
#pragma unroll
                    for (int i = 0; i < kRows; ++i) products.add_row(i, x[i].item[v], row);
                }
            }
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
                    for (int v = 0; v < kVector; ++v) {
                        Real& sum = sums.value[i][chunk + c][v];
                        sum = join(sum, i, products.value[i][c][v]);
                    }
        }
    }
};

}  // namespace fa2::simt
