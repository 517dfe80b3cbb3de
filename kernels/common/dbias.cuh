// The gradient of the bias: the gradient of each score is added to the element of the bias that the score was read
// from. Along axes on which the bias is broadcast, many scores share one element; a warp then sums its own scores first
// and adds the sum with one atomic.
//
// dbias needs the gradient of the scores, dQ that of the products Q K^T. With a cap the two differ by the cap's
// derivative. The weights (weights.cuh) leave that factor out if there is a dbias; `take_derivative` multiplies by it
// once dbias has been added.
#pragma once
#include "common/ptx.cuh"
#include "common/score_mod.cuh"

namespace fa2::common {

// A copy of the products Q K^T, made before `take_weights` overwrites them. Empty unless the cap's derivative is still
// to be taken.
template <class Spec, class Fragment, bool kSaved = Spec::kDbias && Spec::kSoftcap>
class SavedScores {
  public:
    __device__ __forceinline__ void save(const Fragment&) {}
    template <class Record>
    __device__ __forceinline__ void take_derivative(Fragment&, const Record&) {}
};
template <class Spec, class Fragment>
class SavedScores<Spec, Fragment, true> {
  public:
    __device__ __forceinline__ void save(const Fragment& products) { scores_ = products; }
    // Multiplies `ds` by the cap's derivative. The saved products are capped in place.
    template <class Record>
    __device__ __forceinline__ void take_derivative(Fragment& ds, const Record& params) {
        const Softcap<Spec, Record> mod(params);
        mod.cap(scores_);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) ds(i, j) *= mod.derivative(scores_(i, j));
    }

  private:
    Fragment scores_;
};

// Adds each element with its own atomic.
template <class Spec, class Fragment, class Real>
__device__ __forceinline__ void add_elements(const Fragment& ds, Real* sums, const ScoreStrides& strides, int32 queries,
                                             int32 keys, int32 lane) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (Fragment::row(i, lane) < queries && Fragment::col(j, lane) < keys)
                atomicAdd(sums + strides.offset(0, 0, Fragment::row(i, lane), Fragment::col(j, lane)), ds(i, j));
}
// Adds neighbouring elements in pairs if the rows of `sums` are contiguous and all start at 8-byte boundaries.
template <class Spec, int kN8>
__device__ __forceinline__ void add_elements(const QuadFragment<kN8>& ds, float* sums, const ScoreStrides& strides,
                                             int32 queries, int32 keys, int32 lane) {
    using Fragment = QuadFragment<kN8>;
    const bool in_pairs =
        strides.column == 1 && (strides.row | reinterpret_cast<uint64>(sums) / sizeof(float)) % 2 == 0;
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i) {
        float* row = sums + strides.offset(0, 0, Fragment::row(i, lane), Fragment::col(0, lane));
        if (Fragment::row(i, lane) >= queries) continue;
        const int32 left = keys - Fragment::col(0, lane);
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
            if (in_pairs && 8 * n + 1 < left) {
                add_global(row + 8 * n, ds.value[n][2 * i], ds.value[n][2 * i + 1]);
            } else {
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < left) atomicAdd(row + (8 * n + e) * strides.column, ds.value[n][2 * i + e]);
            }
        }
    }
}

// True if the call asks for the gradient of the bias.
template <class Spec>
inline constexpr bool kAddsDbias = Spec::kDbias;

// Adds the gradient of the scores to that of the bias. Sums over a broadcast axis use the fragment layout: lanes that
// share a row are neighbours, lanes that share a column are kLanesPerRow apart.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void add_dbias_of(const Fragment& ds, const Record& params, const ScoreTile& tile) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    const int32 first_query = tile.position.first_query, first_key = tile.position.first_key, lane = tile.position.lane;
    const ScoreStrides& strides = params.dbias_accum_strides;
    Real* sums = params.dbias_accum + strides.offset(tile.batch, tile.head, first_query, first_key);
    const int32 queries = params.seqlen_q - first_query, keys = params.seqlen_k - first_key;
    if (strides.row != 0 && strides.column != 0) {
        add_elements<Spec>(ds, sums, strides, queries, keys, lane);
        return;
    }
    const auto element = [&](int i, int j) {
        return Fragment::row(i, lane) < queries && Fragment::col(j, lane) < keys ? ds(i, j) : Real(0);
    };
    if (strides.column == 0) {
        Real all = 0;
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            Real sum = 0;
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) sum += element(i, j);
            sum = row_sum<Fragment::kLanesPerRow>(sum);
            all += sum;
            if (strides.row != 0 && lane % Fragment::kLanesPerRow == 0 && Fragment::row(i, lane) < queries)
                atomicAdd(sums + Fragment::row(i, lane) * strides.row, sum);
        }
        all = column_sum<Fragment::kLanesPerRow>(all);
        if (strides.row == 0 && lane == 0) atomicAdd(sums, all);
        return;
    }
#pragma unroll
    for (int j = 0; j < Fragment::kCols; ++j) {
        Real sum = 0;
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) sum += element(i, j);
        sum = column_sum<Fragment::kLanesPerRow>(sum);
        if (lane < Fragment::kLanesPerRow && Fragment::col(j, lane) < keys)
            atomicAdd(sums + Fragment::col(j, lane) * strides.column, sum);
    }
}
// Does nothing unless the call asks for the gradient of the bias.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void add_dbias(const Fragment& ds, const Record& params, const ScoreTile& tile) {
    if constexpr (kAddsDbias<Spec>) add_dbias_of<Spec>(ds, params, tile);
}

}  // namespace fa2::common
