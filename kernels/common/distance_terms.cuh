// The terms of the caller's score function that depend on q - k alone, such as learned relative positions, for the
// elements of a fragment. A function without such terms compiles to nothing.
#pragma once
#include "common/fragment.cuh"
#include "common/functions.cuh.j2"
#include "common/score_tile.cuh"

namespace fa2::common {

// True if the function has such terms. A main loop that waits for asynchronous products evaluates them before the wait.
inline constexpr bool kHasDistanceTerms = !__is_empty(DistanceTerms<float>);

// In the quad layout a warp's 16 rows and 8 kN8 columns have 8 kN8 + 15 distances, and a lane has about half of them.
// It evaluates every 32nd, and receives the others. Distances are numbered by column - row + 15. Rows are queries, or
// keys with kTransposed.
template <int kN8, bool kTransposed, class Real>
class QuadDistances {
    static constexpr int kOwn = ceil_div(8 * kN8 + 15, 32);

  public:
    QuadDistances() = default;
    __device__ __forceinline__ QuadDistances(const score_args_arrays& args, const ScoreTile& tile)
        : lane_(tile.position.lane), first_(15 - lane_ / 4 + lane_ % 4 * 2) {
        const int32 distance = tile.position.first_query - tile.position.first_key;
#pragma unroll
        for (int m = 0; m < kOwn; ++m) {
            const int32 further = lane_ + 32 * m - 15;
            own_[m] = distance_terms<Real>(args, tile.batch, tile.head, distance + (kTransposed ? further : -further));
        }
    }

    // The terms of the element `columns` farther from the diagonal than the lane's first one; a compile-time number from
    // -8 on. The lanes' numbers lie between columns + 8 and columns + 21, so that a lane has at most one of them.
    __device__ __forceinline__ DistanceTerms<Real> at(int columns) const {
        const int lowest = columns + 8, own = lowest / 32, begin = lowest % 32;
        const bool crosses = begin + 13 >= 32;
        const DistanceTerms<Real> terms = crosses && lane_ < begin ? own_[own + crosses] : own_[own];
        return terms.of_lane(first_ + (columns & 31));
    }

  private:
    int32 lane_, first_;
    DistanceTerms<Real> own_[kOwn];
};

// Those of the tile whose scores a main loop computes next; empty if there are no terms.
template <int kN8, bool kHasTerms = kHasDistanceTerms>
struct NextDistances {
    __device__ __forceinline__ QuadDistances<kN8, false, float> distances() const { return {}; }
};
template <int kN8>
struct NextDistances<kN8, true> {
    QuadDistances<kN8, false, float> terms;

    __device__ __forceinline__ const QuadDistances<kN8, false, float>& distances() const { return terms; }
};

// The terms of a fragment's elements, from left to right: those of elements 8 rows apart are used twice.
template <int kN8, bool kTransposed, class Real>
class DistanceWalk {
  public:
    __device__ __forceinline__ explicit DistanceWalk(const QuadDistances<kN8, kTransposed, Real>& distances)
        : distances_(distances), before_{distances_.at(-8), distances_.at(-7)} {}

    // The terms of column j, in the lane's first row and in its second.
    struct Pair {
        DistanceTerms<Real> row[2];
    };
    __device__ __forceinline__ Pair next(int j) {
        const Pair pair = {distances_.at(QuadFragment<kN8>::col(j, 0)), before_[j % 2]};
        before_[j % 2] = pair.row[0];
        return pair;
    }

  private:
    const QuadDistances<kN8, kTransposed, Real> distances_;
    DistanceTerms<Real> before_[2];
};

}  // namespace fa2::common
