// Tangents of scores: how they change along a direction of q and k. It is written against the fragment contract.
//
//   T = scale (Q' K^T + Q K'^T)        S = f(scale Q K^T)        S' = f'(scale Q K^T) o T
//
// f is the caller's function and the cap. What features add to scores does not depend on q and k.
#pragma once
#include "common/scores.cuh"

namespace fa2::common {

// Turns products into natural scores, and the tangents of the products into those of the scores. kTransposed: the rows
// of the fragments are keys.
template <bool kTransposed, class Spec, class Fragment, class Record>
__device__ __forceinline__ void move_scores(Fragment& scores, Fragment& tangents, const Record& params,
                                            const ScoreTile& tile) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    static_assert(kNaturalScores<Spec>);
    const auto [first_query, first_key, lane] = tile.position;
    const auto mod = score_mod<Spec>(params, tile);
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            tangents(i, j) *= natural_scale<Spec>(params);
            if constexpr (kModifiesScores<Spec>) {
                const int32 row = Fragment::row(i, lane), column = Fragment::col(j, lane);
                const auto at = mod.position(first_query + (kTransposed ? column : row),
                                             first_key + (kTransposed ? row : column));
                Real slope;
                const Real called = mod.called(scores(i, j), at, 0, 0, mod.distance_terms_at(at, 0, 0), slope);
                const Real capped = mod.capped(called);
                scores(i, j) = mod.template score<true>(capped, at, 0, 0, mod.at(at.query, at.key));
                tangents(i, j) *= slope * mod.derivative(capped);
            } else {
                scores(i, j) = rounded_product(scores(i, j), params.softmax_scale);
            }
        }
}

// Replaces tangents of scores by P o S'. Where P is 0, a key is hidden or far away, and S' need not be finite.
template <class Fragment>
__device__ __forceinline__ void weigh_tangents(Fragment& tangents, const Fragment& p) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) tangents(i, j) = p(i, j) == 0 ? 0 : p(i, j) * tangents(i, j);
}

}  // namespace fa2::common
