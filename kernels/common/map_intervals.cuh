// The intervals of a sparse map (fa2cupy/problem/block_mask.py): where a query sees at most two intervals of keys, their
// ends take the place of the caller's function in mixed tiles. Fragments of S^T have those of each key.
#pragma once
#include "common/fragment.cuh"
#include "common/ptx.cuh"
#include "common/score_tile.cuh"

namespace fa2::common {

// The columns of a lane that lie before `end`, which is counted from its first column: columns grow with j.
template <class Fragment>
struct LaneColumns {
    __device__ __forceinline__ static int32 before(int32 end) {
        int32 number = 0;
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) number += Fragment::col(j, 0) - Fragment::col(0, 0) < end;
        return number;
    }
};
template <int kN8, class Real>
struct LaneColumns<QuadFragment<kN8, Real>> {
    __device__ __forceinline__ static int32 before(int32 end) {
        const uint32 inside = min_of(max_of(end, 0), 8 * kN8);
        return inside / 8 * 2 + min_of(inside % 8, 2u);
    }
};

// Bits of a lane's elements, 1 where they are visible.
template <class Fragment>
struct VisibleBits {
    static constexpr int kRows = Fragment::kRows, kWords = ceil_div(Fragment::kCols, 32);

    uint32 word[kRows][kWords] = {};

    __device__ __forceinline__ bool at(int i, int j) const { return word[i][j / 32] & 1u << j % 32; }
    template <class Real>
    __device__ __forceinline__ void hide_others(Fragment& scores, Real value) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
                if (!at(i, j)) scores(i, j) = value;
    }

    // Shows the columns of row i from `begin` to `end`, counted from the lane's first column.
    __device__ __forceinline__ void show(int i, int32 begin, int32 end) {
        const int32 first = LaneColumns<Fragment>::before(begin), number = LaneColumns<Fragment>::before(end);
#pragma unroll
        for (int w = 0; w < kWords; ++w) word[i][w] |= ones(number - 32 * w) & ~ones(first - 32 * w);
    }

    // The lowest bits, for any number of them.
    __device__ __forceinline__ static uint32 ones(int32 number) {
        return __funnelshift_lc(~0u, 0, max_of(number, 0));  // bits that leave a word of ones; a shift of 32 at most
    }
};

// What a map's intervals show of a fragment.
template <bool kTransposed, class Fragment, class Record>
__device__ __forceinline__ VisibleBits<Fragment> visible_by_intervals(const Record& params, const ScoreTile& tile) {
    const auto [first_query, first_key, lane] = tile.position;
    // Opaque, because loops would keep addresses that are the same in each step, and spill them.
    const int32 first_row = as_if_new(kTransposed ? first_key : first_query);
    const int32 first_column = (kTransposed ? first_query : first_key) + Fragment::col(0, lane);
    const auto* ends = reinterpret_cast<const int4*>(kTransposed ? params.column_intervals : params.row_intervals) +
                       (static_cast<int64>(tile.batch) * params.interval_batch_stride +
                        static_cast<int64>(tile.head) * params.interval_head_stride);
    VisibleBits<Fragment> visible;
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i) {
        // Rows past the end are clamped to the last one; what is computed there is not used.
        const int4 own = ends[min_of(first_row + Fragment::row(i, lane), params.interval_rows - 1)];
        visible.show(i, own.x - first_column, own.y - first_column);
        visible.show(i, own.z - first_column, own.w - first_column);
    }
    return visible;
}

}  // namespace fa2::common
