// Tangents of scores and of dS: how they change along a direction of q, k, v and dO. It is written against the fragment
// contract.
//
//   X = scale Q K^T    X' = scale (Q' K^T + Q K'^T)    S = f(X)    T = f'(X) o X'
//   P = exp(S - lse)   dS = P o (dP - delta)           dS' = P o ((T - lse') o (dP - delta) + dP' - delta')
//   dX = f'(X) o dS    dX' = f'(X) o dS' + f''(X) o X' o dS
//
// f is the caller's function and the cap. Of what features add to scores, the bias may have a tangent, and T that of it
// besides; the sink is a score without a value, and adds P_sink sink' to lse'. Dropout multiplies P
// where it weighs V and dO, and dP and dP'.
#pragma once
#include "common/scores.cuh"

namespace fa2::common {

// f'(X) and f''(X) o X' of a fragment.
template <class Spec, class Fragment, bool kBends = Spec::kSoftcap || Spec::kScoreMod>
struct Slopes {
    Fragment slope, bend;

    template <class Real>
    __device__ void set(int i, int j, Real first, Real second) {
        slope(i, j) = first;
        bend(i, j) = second;
    }
    // Replaces dS and dS' by dX and dX'. Where both are 0, a key is hidden or far away, and slopes need not be finite.
    __device__ void apply(Fragment& ds, Fragment& tangents) const {
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) {
                if (ds(i, j) == 0 && tangents(i, j) == 0) continue;
                tangents(i, j) = slope(i, j) * tangents(i, j) + bend(i, j) * ds(i, j);
                ds(i, j) *= slope(i, j);
            }
    }
};
template <class Spec, class Fragment>
struct Slopes<Spec, Fragment, false> {
    template <class Real>
    __device__ void set(int, int, Real, Real) {}
    __device__ void apply(Fragment&, Fragment&) const {}
};

// Takes the place of slopes where they are not needed.
struct NoSlopes {
    template <class Real>
    __device__ void set(int, int, Real, Real) {}
};

// Turns products into natural scores, and the tangents of the products into those of the scores. kTransposed: the rows
// of the fragments are keys.
template <bool kTransposed, class Spec, class Fragment, class Record, class OfScores>
__device__ __forceinline__ void move_scores(Fragment& scores, Fragment& tangents, OfScores& slopes,
                                            const Record& params, const ScoreTile& tile) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    static_assert(kNaturalScores<Spec>);
    const auto [first_query, first_key, lane] = tile.position;
    const auto terms = head_terms<Spec>(params, tile.batch, tile.head);
    const auto mod = score_mod<Spec>(params, tile, terms);
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            tangents(i, j) *= natural_scale<Spec>(params);
            if constexpr (kModifiesScores<Spec>) {
                const int32 row = Fragment::row(i, lane), column = Fragment::col(j, lane);
                const auto at =
                    mod.position(first_query + (kTransposed ? column : row), first_key + (kTransposed ? row : column));
                const auto of_distance = mod.distance_terms_at(at, 0, 0);
                Real slope, curvature = 0;
                if constexpr (Spec::kScoreMod)
                    curvature = score_curvature<Real>(score_args_of(params), scores(i, j) * natural_scale<Spec>(params),
                                                      tile.batch, tile.head, at.query, at.key,
                                                      RealDistance<Real>{at.apart, 0}, terms, of_distance);
                const Real called = mod.called(scores(i, j), at, 0, 0, of_distance, slope);
                const Real capped = mod.capped(called);
                scores(i, j) = mod.template score<true>(capped, at, 0, 0, mod.at(at.query, at.key));
                const Real of_cap = mod.derivative(capped);
                const Real bend = mod.second_derivative(capped) * slope * slope + of_cap * curvature;
                slopes.set(i, j, of_cap * slope, bend * tangents(i, j));
                tangents(i, j) *= of_cap * slope;
                if constexpr (Spec::kBiasTangent) tangents(i, j) += mod.bias_tangent_at(at.query, at.key);
            } else {
                scores(i, j) = rounded_product(scores(i, j), params.softmax_scale);
            }
        }
}

// Replaces tangents of scores by P o T. Where P is 0, a key is hidden or far away, and T need not be finite.
template <class Fragment>
__device__ __forceinline__ void weigh_tangents(Fragment& tangents, const Fragment& p) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) tangents(i, j) = p(i, j) == 0 ? 0 : p(i, j) * tangents(i, j);
}

// The sink's part of lse', given lse.
template <class Spec, class Record, class Real>
__device__ __forceinline__ Real sink_tangent_of(const Record& params, int32 head, Real lse) {
    if constexpr (Spec::kSinkTangent) {
        const Real sink = sink_of<Real, Spec>(params, head, 0);
        if (sink == -infinity<Real>()) return 0;
        return exp_accurate(at_most_zero(sink - lse)) *
               params.sink_tangent[params.sink_tangent_strides.offset(0, head, 0, 0)];
    } else {
        return 0;
    }
}

// Replaces natural scores by P = exp(S - lse), with an lse for each row.
template <class Fragment, class Real>
__device__ __forceinline__ void take_exponentials(Fragment& scores, const Real (&lse)[Fragment::kRows]) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) scores(i, j) = exp_accurate(at_most_zero(scores(i, j) - lse[i]));
}

// The statistics of a query, all natural.
template <class Real>
struct MovedRow {
    Real lse, delta, lse_tangent, delta_tangent;
};

// From products, p = Q K^T and ds = dP, and their tangents: replaces p by P and `tangents` by P o (T - lse'), both
// after dropout without its factor, ds by dS and `ds_tangent` by dS'. statistics(i, j) is the MovedRow of the element's
// query, whose lse is +inf in rows past the end and in rows without a visible key. Returns what makes dX and dX' of them.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Statistics>
__device__ __forceinline__ Slopes<Spec, Fragment> differentiate_twice(Fragment& p, Fragment& tangents, Fragment& ds,
                                                                      Fragment& ds_tangent, const Mask& mask,
                                                                      OutsideFull outside, const Record& params,
                                                                      const ScoreTile& tile,
                                                                      const Statistics& statistics) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    Slopes<Spec, Fragment> slopes;
    move_scores<kTransposed, Spec>(p, tangents, slopes, params, tile);
    if (outside.behind || outside.before) hide_scores<kTransposed, Spec>(p, mask, params, tile, -infinity<Real>());
    const auto [first_query, first_key, lane] = tile.position;
    const auto mod = score_mod<Spec>(params, tile);
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            const MovedRow<Real> of_row = statistics(i, j);
            const Real probability = exp_accurate(at_most_zero(p(i, j) - of_row.lse));
            bool keep = true;
            if constexpr (Spec::kDropout) {
                const int32 row = Fragment::row(i, lane), column = Fragment::col(j, lane);
                keep = mod.dropout().keeps_element(first_query + (kTransposed ? column : row),
                                                   first_key + (kTransposed ? row : column));
            }
            const Real factor = keep ? kept_scale<Spec>(params) : Real(0);
            const Real change = probability == 0 ? Real(0) : probability * (tangents(i, j) - of_row.lse_tangent);
            const Real from_delta = factor * ds(i, j) - of_row.delta;
            const Real from_tangent = factor * ds_tangent(i, j) - of_row.delta_tangent;
            ds(i, j) = probability * from_delta;
            ds_tangent(i, j) = change * from_delta + probability * from_tangent;
            p(i, j) = keep ? probability : Real(0);
            tangents(i, j) = keep ? change : Real(0);
        }
    return slopes;
}

}  // namespace fa2::common
