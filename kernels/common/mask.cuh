// Masks by position (causal, window, sequence end): which keys a query sees, and how a fragment is masked accordingly.
// tile_range.cuh has the same bounds rounded to tiles and determines which tiles need a mask.
#pragma once
#include "common/fragment.cuh"
#include "common/score_tile.cuh"
#include "common/tile_range.cuh"

namespace fa2::common {

// A query sees a contiguous range of keys [first_key, end_key), and a key is seen by a contiguous range of queries
// [first_query, end_query).
template <bool kCausal, bool kWindow>
struct Mask {
    static constexpr bool kLeftLimit = kWindow;

    int32 seqlen_k;
    int32 diagonal;  // seqlen_k - seqlen_q
    WindowLimits<kWindow> window;

    __device__ int32 end_key(int32 query) const {
        if constexpr (kWindow) return min_of(seqlen_k, query + diagonal + window.right + 1);
        return kCausal ? min_of(seqlen_k, query + diagonal + 1) : seqlen_k;
    }
    __device__ int32 first_query(int32 key) const {
        if (key >= seqlen_k) return 0x7fffffff;
        if constexpr (kWindow) return key - diagonal - window.right;
        return kCausal ? key - diagonal : 0;
    }
    __device__ bool hides(int32 query, int32 key) const {
        if (key >= end_key(query)) return true;
        if constexpr (kWindow) return key < first_key(query);
        return false;
    }
    // True if each of `queries` rows sees each of `keys` keys.
    __device__ bool shows_all(int32 first_query, int32 queries, int32 first_key, int32 keys) const {
        if (first_key + keys > end_key(first_query)) return false;
        if constexpr (kWindow) return first_key >= this->first_key(first_query + queries - 1);
        return true;
    }
    // Used only with a window, which alone limits keys on the left.
    __device__ int32 first_key(int32 query) const { return query + diagonal - window.left; }
    __device__ int32 end_query(int32 key) const { return key - diagonal + window.left + 1; }
};

template <class Spec, class Record>
__device__ __forceinline__ Mask<Spec::kCausal, Spec::kWindow> mask_of(const Record& params) {
    return {params.seqlen_k, params.seqlen_k - params.seqlen_q, window_of<Spec>(params)};
}

// Rows that see no key have an lse of -inf. The backward reads zeros in place of what Q and dO hold there: in sums over
// queries, P = 0 does not make up for NaN.

// Rows before this one see no key because of their position. It may be negative.
template <class Spec, class Record>
__device__ __forceinline__ int32 end_of_hidden_rows(const Record& params) {
    if constexpr (Spec::kWindow) return params.seqlen_q - params.seqlen_k - params.window_right;
    return Spec::kCausal ? params.seqlen_q - params.seqlen_k : 0;
}
// True if there may be rows without a key.
template <class Spec, class Record>
__device__ __forceinline__ bool may_hide_rows(const Record& params) {
    return Spec::kMayHideRows || end_of_hidden_rows<Spec>(params) > 0;
}

// Writes `value` over every element that is not visible. Bounds are taken relative to the lane's first column, so that
// each comparison is with a compile-time constant. RowMask is a Mask, or has its bounds for rows that are no queries.
template <class Fragment, class RowMask, class Real>
__device__ __forceinline__ void mask_scores(Fragment& scores, const RowMask& mask, const TilePosition& position,
                                            Real value) {
    const auto [first_query, first_key, lane] = position;
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i) {
        const int32 end = mask.end_key(first_query + Fragment::row(i, lane)) - first_key - Fragment::col(0, lane);
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (Fragment::col(j, 0) >= end) scores(i, j) = value;
    }
    if constexpr (RowMask::kLeftLimit)
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            const int32 begin =
                mask.first_key(first_query + Fragment::row(i, lane)) - first_key - Fragment::col(0, lane);
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
                if (Fragment::col(j, 0) < begin) scores(i, j) = value;
        }
}

// The same for a fragment of S^T, whose rows are keys.
template <class Fragment, bool kCausal, bool kWindow, class Real>
__device__ __forceinline__ void mask_transposed(Fragment& scores, const Mask<kCausal, kWindow>& mask,
                                                const TilePosition& position, Real value) {
    const auto [first_query, first_key, lane] = position;
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i) {
        const int32 begin = mask.first_query(first_key + Fragment::row(i, lane)) - first_query - Fragment::col(0, lane);
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (Fragment::col(j, 0) < begin) scores(i, j) = value;
    }
    if constexpr (kWindow)
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            const int32 end = mask.end_query(first_key + Fragment::row(i, lane)) - first_query - Fragment::col(0, lane);
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
                if (Fragment::col(j, 0) >= end) scores(i, j) = value;
        }
}

}  // namespace fa2::common
