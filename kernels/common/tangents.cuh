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
//
// Scores are in units of the kernel, as `modify_scores` leaves them; tangents are natural. Kernels of 16-bit elements leave
// both as products where no feature acts on scores (kMovesProducts): the FMA in front of the exponential scales one, and
// the FMA that subtracts lse' the other (`tangent_scale`).
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

// True if scores have tangents of their own, besides those of products.
template <class Spec>
inline constexpr bool kMovesTerms = Spec::kBiasTangent;
// True if scores and their tangents stay products.
template <class Spec>
inline constexpr bool kMovesProducts = sizeof(typename Spec::Element) == 2 && !kModifiesScores<Spec>;

// The factor from tangents, as `move_scores` leaves them, to natural ones.
template <class Spec, class Record>
__device__ __forceinline__ auto tangent_scale(const Record& params) {
    if constexpr (kMovesProducts<Spec>)
        return natural_scale<Spec>(params);
    else
        return typename ElementTraits<typename Spec::Element>::Accum(1);
}

// Turns products into scores, which `score_scale` must still bring to the base of the exponential, and the tangents of
// the products into those of the scores. kTransposed: the rows of the fragments are keys.
template <bool kTransposed, class Spec, class Fragment, class Record, class OfScores>
__device__ __forceinline__ void move_scores(Fragment& scores, Fragment& tangents, OfScores& slopes,
                                            const Record& params, const ScoreTile& tile) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    constexpr bool kRounded = sizeof(typename Spec::Element) > 2;
    if constexpr (kMovesProducts<Spec>) return;
    const auto [first_query, first_key, lane] = tile.position;
    const auto terms = head_terms<Spec>(params, tile.batch, tile.head);
    const auto mod = score_mod<Spec>(params, tile, terms);
    const auto first = mod.position(first_query + (kTransposed ? Fragment::col(0, lane) : Fragment::row(0, lane)),
                                    first_key + (kTransposed ? Fragment::row(0, lane) : Fragment::col(0, lane)));
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            tangents(i, j) *= natural_scale<Spec>(params);
            if constexpr (kModifiesScores<Spec>) {
                const int32 row = Fragment::row(i, 0), column = Fragment::col(j, 0);
                const int32 queries = kTransposed ? column : row, keys = kTransposed ? row : column;
                const int32 query = first.query + queries, key = first.key + keys;
                const auto of_distance = mod.distance_terms_at(first, queries, keys);
                Real slope, curvature = 0;
                if constexpr (Spec::kScoreMod)
                    curvature = score_curvature<Real>(
                        score_args_of(params), scores(i, j) * natural_scale<Spec>(params), tile.batch, tile.head, query,
                        key, RealDistance<Real>{first.apart, queries - keys}, terms, of_distance);
                const Real called = mod.called(scores(i, j), first, queries, keys, of_distance, slope);
                const Real capped = mod.capped(called);
                scores(i, j) = mod.template score<kRounded>(capped, first, queries, keys, mod.at(query, key));
                const Real of_cap = mod.derivative(capped);
                const Real bend = mod.second_derivative(capped) * slope * slope + of_cap * curvature;
                slopes.set(i, j, of_cap * slope, bend * tangents(i, j));
                tangents(i, j) *= of_cap * slope;
                if constexpr (Spec::kBiasTangent) tangents(i, j) += mod.bias_tangent_at(query, key);
            } else {
                scores(i, j) = rounded_product(scores(i, j), natural_scale<Spec>(params));
            }
        }
}

// Replaces tangents of scores by P o T. Where a feature makes P 0, a key is hidden or far away, and T need not be
// finite; the tangents of products of hidden keys must be 0.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void weigh_tangents(Fragment& tangents, const Fragment& p, const Record& params) {
    const auto scale = tangent_scale<Spec>(params);
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            const auto natural = kMovesProducts<Spec> ? scale * tangents(i, j) : tangents(i, j);
            tangents(i, j) = !kMovesProducts<Spec> && p(i, j) == 0 ? 0 : p(i, j) * natural;
        }
}

// The sink's part of lse', given the natural lse.
template <class Spec, class Record, class Real>
__device__ __forceinline__ Real sink_tangent_of(const Record& params, int32 head, Real lse) {
    if constexpr (Spec::kSinkTangent) {
        const Real sink = params.sink[params.sink_strides.offset(0, head, 0, 0)];
        if (sink == -infinity<Real>()) return 0;
        return exp_accurate(at_most_zero(sink - lse)) *
               params.sink_tangent[params.sink_tangent_strides.offset(0, head, 0, 0)];
    } else {
        return 0;
    }
}

// Replaces scores of `move_scores` by P = exp(S - lse). lse(i, j) is that of the element's query, natural or in base 2 as
// the kernel's scores are.
template <class Spec, class Fragment, class Record, class Lse>
__device__ __forceinline__ void take_exponentials(Fragment& scores, const Record& params, const Lse& lse) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            if constexpr (sizeof(typename Spec::Element) == 2)
                scores(i, j) = exp2_approx(at_most_zero(fma(scores(i, j), score_scale<Spec>(params), -lse(i, j))));
            else
                scores(i, j) = exp_accurate(at_most_zero(scores(i, j) - lse(i, j)));
        }
}

// Which elements of a fragment dropout keeps.
template <class Spec, bool kTransposed, class Fragment, bool kDrops = Spec::kDropout>
struct Kept {
    const Dropout dropout;
    const TilePosition position;

    template <class Record>
    __device__ __forceinline__ Kept(const Record& params, const ScoreTile& tile)
        : dropout(score_mod<Spec>(params, tile).dropout()), position(tile.position) {}
    __device__ __forceinline__ bool operator()(int i, int j) const {
        const int32 row = Fragment::row(i, position.lane), column = Fragment::col(j, position.lane);
        return dropout.keeps_element(position.first_query + (kTransposed ? column : row),
                                     position.first_key + (kTransposed ? row : column));
    }
};
template <class Spec, bool kTransposed, int kN8>
struct Kept<Spec, kTransposed, QuadFragment<kN8>, true> {
    uint32 bits[kN8 / 2];  // of the elements of accumulators 2 s and 2 s + 1: those of even columns, then the others

    template <class Record>
    __device__ __forceinline__ Kept(const Record& params, const ScoreTile& tile) {
        using Fragment = QuadFragment<kN8>;
        const auto [first_query, first_key, lane] = tile.position;
        const Dropout dropout = score_mod<Spec>(params, tile).dropout();
#pragma unroll
        for (int s = 0; s < kN8 / 2; ++s) {
            const Words draws = dropout.template draws<kTransposed>(
                first_query + (kTransposed ? Fragment::col(0, lane) : Fragment::row(0, lane)),
                first_key + (kTransposed ? Fragment::row(0, lane) : Fragment::col(0, lane)), s);
            bits[s] = dropout.kept_of_four(draws, 0) | dropout.kept_of_four(draws, 1) << 4;
        }
    }
    __device__ __forceinline__ bool operator()(int i, int j) const {
        const int n8 = j / 2, word = kTransposed ? n8 % 2 * 2 + i : 2 * i + n8 % 2;
        return bits[n8 / 2] >> (j % 2 * 4 + word) & 1;
    }
};
template <class Spec, bool kTransposed, class Fragment>
struct Kept<Spec, kTransposed, Fragment, false> {
    template <class Record>
    __device__ __forceinline__ Kept(const Record&, const ScoreTile&) {}
    __device__ __forceinline__ bool operator()(int, int) const { return true; }
};

// The statistics of a query: lse as for `take_exponentials`, the others natural.
template <class Real>
struct MovedRow {
    Real lse, delta, lse_tangent, delta_tangent;
};

// The same for accumulators of dP and dP' that start from -delta and -delta' unless dropout rules that out.
template <class Spec, class Real>
__device__ __forceinline__ MovedRow<Real> without_delta(const MovedRow<Real>& row) {
    if constexpr (kProductsFromDelta<Spec>)
        return {row.lse, 0, row.lse_tangent, 0};
    else
        return row;
}

// The first half of `differentiate_twice`, which reads neither dP nor dP': replaces p = Q K^T by P, before dropout, and
// the tangents of these products by those of the scores. lse(i, j) is that of the element's query, as for
// `take_exponentials`: +inf in rows past the end and in rows without a visible key, whose products must be finite.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Lse>
__device__ __forceinline__ Slopes<Spec, Fragment> move_softmax(Fragment& p, Fragment& tangents, const Mask& mask,
                                                               OutsideFull outside, const Record& params,
                                                               const ScoreTile& tile, const Lse& lse) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    Slopes<Spec, Fragment> slopes;
    move_scores<kTransposed, Spec>(p, tangents, slopes, params, tile);
    take_exponentials<Spec>(p, params, lse);
    if (outside.behind || outside.before) {
        hide_scores<kTransposed, Spec>(p, mask, params, tile, Real(0));
        if constexpr (kMovesProducts<Spec>) hide_scores<kTransposed, Spec>(tangents, mask, params, tile, Real(0));
    }
    return slopes;
}

// Replaces tangents of scores by P', those of P = exp(S - lse), before dropout. lse_tangent(i, j) is that of the element's
// query.
template <class Spec, class Fragment, class Record, class LseTangent>
__device__ __forceinline__ void take_changes(const Fragment& p, Fragment& tangents, const Record& params,
                                             const LseTangent& lse_tangent) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    const auto scale = tangent_scale<Spec>(params);
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            const Real change = kMovesProducts<Spec> ? fma(tangents(i, j), scale, -lse_tangent(i, j))
                                                     : tangents(i, j) - lse_tangent(i, j);
            tangents(i, j) = !kMovesProducts<Spec> && p(i, j) == 0 ? Real(0) : p(i, j) * change;
        }
}

// From P and P' before dropout: replaces ds = dP by dS and ds_tangent = dP' by dS', and drops of p and `changes` what
// dropout drops, without its factor. statistics(i, j) is the MovedRow of the element's query. Accumulators of dP and dP'
// that start from -delta and -delta' come with a delta and delta' of 0.
template <class Spec, class Fragment, class Kept, class Record, class Statistics>
__device__ __forceinline__ void differentiate_changed(Fragment& p, Fragment& changes, Fragment& ds,
                                                      Fragment& ds_tangent, const Kept& kept, const Record& params,
                                                      const Statistics& statistics) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            const MovedRow<Real> of_row = statistics(i, j);
            const bool keep = kept(i, j);
            const Real probability = p(i, j), change = changes(i, j),
                       factor = keep ? kept_scale<Spec>(params) : Real(0);
            const Real from_delta = factor * ds(i, j) - of_row.delta;
            const Real from_tangent = factor * ds_tangent(i, j) - of_row.delta_tangent;
            ds(i, j) = probability * from_delta;
            ds_tangent(i, j) = change * from_delta + probability * from_tangent;
            p(i, j) = keep ? probability : Real(0);
            changes(i, j) = keep ? change : Real(0);
        }
}

// The second half: replaces `tangents` by P o (T - lse') and drops of it and of p what dropout drops, without its factor;
// ds = dP by dS and ds_tangent = dP' by dS'.
template <bool kTransposed, class Spec, class Fragment, class Record, class Statistics>
__device__ __forceinline__ void differentiate_moved(Fragment& p, Fragment& tangents, Fragment& ds, Fragment& ds_tangent,
                                                    const Record& params, const ScoreTile& tile,
                                                    const Statistics& statistics) {
    const Kept<Spec, kTransposed, Fragment> kept(params, tile);
    take_changes<Spec>(p, tangents, params, [&](int i, int j) { return statistics(i, j).lse_tangent; });
    differentiate_changed<Spec>(p, tangents, ds, ds_tangent, kept, params, statistics);
}

// From products, p = Q K^T and ds = dP, and their tangents: both halves. Returns what makes dX and dX' of dS and dS'.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Statistics>
__device__ __forceinline__ Slopes<Spec, Fragment> differentiate_twice(Fragment& p, Fragment& tangents, Fragment& ds,
                                                                      Fragment& ds_tangent, const Mask& mask,
                                                                      OutsideFull outside, const Record& params,
                                                                      const ScoreTile& tile,
                                                                      const Statistics& statistics) {
    const auto slopes = move_softmax<kTransposed, Spec>(p, tangents, mask, outside, params, tile,
                                                        [&](int i, int j) { return statistics(i, j).lse; });
    differentiate_moved<kTransposed, Spec>(p, tangents, ds, ds_tangent, params, tile, statistics);
    return slopes;
}

}  // namespace fa2::common
