// The gradient of the bias: that of the scores, added to where each element of the bias came from. Where the bias
// repeats, several elements are added to one, and a warp adds up what it has of it before.
//
// With a cap, dQ wants the gradient of the products instead, of which the cap's derivative is a factor. It is left out
// of the weights (weights.cuh) and taken here, when dbias has had its part.
#pragma once
#include "common/ptx.cuh"
#include "common/score_mod.cuh"

namespace fa2::common {

// The scores as products of q and k, from before weights took their registers, if the cap's derivative is wanted.
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
    // Caps the saved scores in their registers.
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

// Row by row of a lane, and every element on its own.
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
// Neighbours together, if the sums of all rows begin where two may be written at once.
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

// Whether a call asks for the gradient of the bias.
template <class Spec>
inline constexpr bool kAddsDbias = Spec::kDbias;

// Adds the gradient of scores to that of the bias. A warp's lanes with the same column are kLanesPerRow apart.
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
// The same, if the gradient is asked for.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void add_dbias(const Fragment& ds, const Record& params, const ScoreTile& tile) {
    if constexpr (kAddsDbias<Spec>) add_dbias_of<Spec>(ds, params, tile);
}

}  // namespace fa2::common
