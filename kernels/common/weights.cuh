// How the backward uses score_mod.cuh: it computes P from products, and the weights w of dS = w (dP - delta).
#pragma once
#include "common/held_array.cuh"
#include "common/key_padding.cuh"
#include "common/score_mod.cuh"

namespace fa2::common {

// P of a score, which `scale` brings to base 2 unless scores are natural.
template <class Spec>
__device__ __forceinline__ float exponential(float score, float scale, float lse) {
    if constexpr (kNaturalScores<Spec>)
        return exp_approx(at_most_zero(score - lse));
    else
        return exp2_approx(at_most_zero(fma(score, scale, -lse)));
}

// True if weights are multiplied by the derivative of the caller's function. One that only adds has the derivative 1.
template <class Spec>
inline constexpr bool kTakesSlope = Spec::kScoreMod && !score_args_arrays::kAdds && !kDerivesLater<Spec>;

// A weight with a mark where dropout drops its element: the sign bit. The caller's function may have a negative
// derivative; the mark is then the lowest bit, and a weight of zero, which dropout does not change, has none.
template <class Spec, class Real>
__device__ __forceinline__ Real marked(Real weight, bool keep) {
    if constexpr (Spec::kScoreMod && Spec::kDropout)
        return weight == 0 ? weight : with_lowest_bit(weight, !keep);
    else
        return keep ? weight : -weight;
}

// What a sparse map hides of a masked tile, element by element: nothing, or what its function or its intervals hide.
template <bool kTransposed, class Spec, class Fragment, bool kByMap = kMasksByMap<Spec>,
          bool kByIntervals = kByMap && Spec::kIntervals>
struct HiddenElements {
    template <class Mod>
    __device__ __forceinline__ static bool at(const Mod& mod, int32 query, int32 key, int, int) {
        if constexpr (kByMap)
            return mod.hides(query, key);
        else
            return false;
    }
};
template <bool kTransposed, class Spec, class Fragment>
struct HiddenElements<kTransposed, Spec, Fragment, true, true> {
    const VisibleBits<Fragment> visible;

    template <class Mod>
    __device__ __forceinline__ bool at(const Mod&, int32, int32, int i, int j) const {
        return !visible.at(i, j);
    }
};
template <bool kTransposed, class Spec, class Fragment, class Record>
__device__ __forceinline__ auto hidden_elements(const Record& params, const ScoreTile& tile) {
    if constexpr (kMasksByMap<Spec> && Spec::kIntervals)
        return HiddenElements<kTransposed, Spec, Fragment>{visible_by_intervals<kTransposed, Fragment>(params, tile)};
    else
        return HiddenElements<kTransposed, Spec, Fragment>{};
}

// Computes P and weights from capped products, for `take_weights`. `by_map`: HiddenElements. `visible`: the keys that the
// padding leaves (key_padding.cuh).
template <bool kTransposed, bool kRegular, class Spec, int kN8, class P, class Mod, class Mask, class Lse, class Held,
          class Walk, class Visible, class ByMap>
__device__ __forceinline__ void weigh(QuadFragment<kN8>& x, P& p, bool masked, const Mod& mod, const Mask& mask,
                                      const typename Mod::Position& first, float scale, Lse lse, const Held& held,
                                      Walk walk, const Visible& visible, const ByMap& by_map) {
    // True if weights are P with a sign. P after dropout is then their positive part, which costs rounding nothing.
    constexpr bool kWeightIsP = Spec::kDropout && !Spec::kScoreMod && (Spec::kDbias || !Spec::kSoftcap);
#pragma unroll
    for (int s = 0; s < kN8 / 2; ++s) {
        typename Mod::Term terms[2][2][2];
        if constexpr (!kTransposed)
#pragma unroll
            for (int w = 0; w < 4; ++w)
                mod.template pair_at<kRegular>(first.query + w / 2 * 8, first.key, 16 * s + w % 2 * 8,
                                               terms[w / 2][w % 2]);
        Words draws;
        if constexpr (Spec::kDropout) draws = mod.dropout().template draws<kTransposed>(first.query, first.key, s);
        const typename Held::Elements elements = held.k16(s);
        float even[2][2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int32 column = QuadFragment<kN8>::col(4 * s + e, 0);
            const int32 queries = kTransposed ? column : 0, keys = kTransposed ? 0 : column;
            const typename Walk::Pair of_distance[2] = {walk.next(4 * s + e), walk.next(4 * s + 2 + e)};
            uint32 kept = 0xf;
            if constexpr (Spec::kDropout) kept = mod.dropout().kept_of_four(draws, e);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int a = w / 2, b = w % 2;  // element w of the four is 8 a queries and 8 b keys further on
                const int i = kTransposed ? b : a, n8 = 2 * s + (kTransposed ? a : b), j = 2 * n8 + e;
                auto term = terms[a][b][e];
                if constexpr (kTransposed)
                    term = mod.template at<false>(first.query + queries + 8 * a, first.key + 8 * b);
                held.set(term, elements, n8 % 2 * 2 + i, e);
                float slope = 1;
                if constexpr (Spec::kScoreMod)
                    x(i, j) = mod.capped(
                        mod.called(x(i, j), first, queries + 8 * a, keys + 8 * b, of_distance[n8 % 2].row[i], slope));
                const float score = mod.score(x(i, j), first, queries + 8 * a, keys + 8 * b, term);
                bool hidden = masked && mask.hides(first.query + queries + 8 * a, first.key + keys + 8 * b);
                hidden = hidden || !visible.at(n8, i, e);
                hidden = hidden || by_map.at(mod, first.query + queries + 8 * a, first.key + keys + 8 * b, i, j);
                const float probability = hidden ? 0.0f : exponential<Spec>(score, scale, lse(i, j));
                const bool keep = kept >> w & 1;
                float weight = kDerivesLater<Spec> ? probability : probability * mod.derivative(x(i, j));
                if constexpr (kTakesSlope<Spec>) weight = probability == 0 ? 0.0f : weight * slope;
                x(i, j) = marked<Spec>(weight, keep);
                const float own = kWeightIsP ? x(i, j) : keep ? probability : 0.0f;
                if (e == 0)
                    even[a][b] = own;
                else if constexpr (kWeightIsP)
                    p.set_positive(i, n8, even[a][b], own);
                else
                    p.set(i, n8, even[a][b], own);
            }
        }
    }
}

// Replaces the products Q K^T by the weights w of dS = w * (dP - delta): P times the cap's derivative, with the sign
// bit set where dropout drops. With dbias the derivative is left out, to be multiplied later (dbias.cuh). `p` receives
// P after dropout, for dV. lse(i, j) is in the units of scores, or zero if the products have started from -lse; an lse of +inf makes
// P zero in rows past the end and in rows without a visible key. `terms`: the HeadTerms, if already loaded. `held`: the
// score array that the warp holds, or ArraysInMemory (held_array.cuh).
template <bool kTransposed, class Spec, int kN8, class P, class Record, class Lse, class Held, class... Terms>
__device__ __forceinline__ void take_weights_with(const Held& held, QuadFragment<kN8>& x, P& p, bool masked,
                                                  const Record& params, const ScoreTile& tile, Lse lse,
                                                  const QuadDistances<kN8, kTransposed, float>& distances,
                                                  const Terms&... terms) {
    using Fragment = QuadFragment<kN8>;
    const auto [first_query, first_key, lane] = tile.position;
    const auto mod = score_mod<Spec, Held::kInMemory>(params, tile, terms...);
    const auto mask = mask_of<Spec>(params);
    const auto first = mod.position(first_query + (kTransposed ? Fragment::col(0, lane) : Fragment::row(0, lane)),
                                    first_key + (kTransposed ? Fragment::row(0, lane) : Fragment::col(0, lane)));
    const float scale = score_scale<Spec>(params);
    const DistanceWalk<kN8, kTransposed, float> walk(distances);
    const KeyPadding<Spec, kN8, kTransposed> padding(params, tile);
    const auto visible = padding.visible();
    if constexpr (!Spec::kScoreMod) mod.cap(x);  // otherwise the function comes first
    const HiddenElements<kTransposed, Spec, Fragment, false> nothing{};
    if (kMasksByMap<Spec> && masked)
        weigh<kTransposed, false, Spec>(x, p, true, mod, mask, first, scale, lse, held, walk, visible,
                                        hidden_elements<kTransposed, Spec, Fragment>(params, tile));
    else if (!kTransposed && mod.template is_regular<8 * (kN8 - 1) + 1>(first.query, first.key))
        weigh<kTransposed, true, Spec>(x, p, masked, mod, mask, first, scale, lse, held, walk, visible, nothing);
    else
        weigh<kTransposed, false, Spec>(x, p, masked, mod, mask, first, scale, lse, held, walk, visible, nothing);
}
template <bool kTransposed, class Spec, int kN8, class P, class Record, class Lse, class... Terms>
__device__ __forceinline__ void take_weights(QuadFragment<kN8>& x, P& p, bool masked, const Record& params,
                                             const ScoreTile& tile, Lse lse, const Terms&... terms) {
    take_weights_with<kTransposed, Spec>(ArraysInMemory{}, x, p, masked, params, tile, lse,
                                         {score_args_of(params), tile}, terms...);
}
// The same for other fragments, one element at a time.
template <bool kTransposed, class Spec, class Fragment, class P, class Record, class Lse>
__device__ __forceinline__ void take_weights(Fragment& x, P& p, bool masked, const Record& params,
                                             const ScoreTile& tile, Lse lse) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    const auto [first_query, first_key, lane] = tile.position;
    const auto mod = score_mod<Spec>(params, tile);
    const auto mask = mask_of<Spec>(params);
    const auto by_map = hidden_elements<kTransposed, Spec, Fragment>(params, tile);
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            const int32 row = Fragment::row(i, lane), column = Fragment::col(j, lane);
            const int32 query = first_query + (kTransposed ? column : row);
            const int32 key = first_key + (kTransposed ? row : column);
            const auto position = mod.position(query, key);
            Real slope;
            const auto of_distance = mod.distance_terms_at(position, 0, 0);
            const Real capped = mod.capped(mod.called(x(i, j), position, 0, 0, of_distance, slope));
            const Real score = mod.template score<true>(capped, position, 0, 0, mod.at(query, key));
            bool hidden = masked && mask.hides(query, key);
            if constexpr (kMasksByMap<Spec>) hidden = hidden || (masked && by_map.at(mod, query, key, i, j));
            const Real probability = hidden ? Real(0) : exp_accurate(at_most_zero(score - lse(i, j)));
            bool keep = true;
            if constexpr (Spec::kDropout) keep = mod.dropout().keeps_element(query, key);
            Real weight = kDerivesLater<Spec> ? probability : probability * mod.derivative(capped);
            // A function may have no finite derivative for keys that are hidden.
            if constexpr (kTakesSlope<Spec>) weight = probability == 0 ? Real(0) : weight * slope;
            x(i, j) = marked<Spec>(weight, keep);
            p(i, j) = keep ? probability : Real(0);
        }
}

// Takes the place of `p` in kernels that do not compute dV.
struct Unused {
    template <class Real>
    __device__ void set(int, int, Real, Real) {}
    template <class Real>
    __device__ void set_positive(int, int, Real, Real) {}
};

// The gradient of a product from an unmarked weight, with dropout.
template <class Real, class Record>
__device__ __forceinline__ Real weighted(Real weight, bool dropped, Real dp, Real minus_delta, const Record& params) {
    const Real kept = fma(params.dropout_scale, dp, minus_delta);
    return weight * (dropped ? minus_delta : kept);
}

// The gradient of a product from its weight, dP and -delta. Without dropout, the accumulators of dP started from
// -delta, so that `dp` is dP - delta; with dropout, they started from zero.
template <class Spec, class Real, class Record>
__device__ __forceinline__ Real weighted(Real weight, Real dp, Real minus_delta, const Record& params) {
    if constexpr (!Spec::kDropout)
        return weight * dp;
    else if constexpr (Spec::kScoreMod)
        return weighted(weight, lowest_bit(weight), dp, minus_delta, params);
    else
        return weighted(magnitude(weight), sign_bit(weight), dp, minus_delta, params);
}
// The same for accumulators of dP that always start from zero.
template <class Spec, class Real, class Record>
__device__ __forceinline__ Real weighted_from_zero(Real weight, Real dp, Real delta, const Record& params) {
    return weighted<Spec>(weight, kProductsFromDelta<Spec> ? dp - delta : dp, -delta, params);
}

// Turns dP^T into dS^T in accumulators 2 s and 2 s + 1, by weights that another warp has rounded to float16. A mark in
// the lowest bit (`marked`) does not survive the rounding: dropout is then drawn once more. minus_delta(n8, x) reads
// -delta of the two columns of accumulator n8.
template <class Spec, int kN8, class Record, class MinusDelta>
__device__ __forceinline__ void weigh_k16(QuadFragment<kN8>& x, int s, const OperandA& weights, const Record& params,
                                          const ScoreTile& tile, const MinusDelta& minus_delta) {
    if constexpr (!Spec::kDropout) {
        multiply_k16<float16>(x, s, weights);
    } else {
        using Fragment = QuadFragment<kN8>;
        Words draws;
        const Dropout dropout = score_mod<Spec>(params, tile).dropout();
        const auto [first_query, first_key, lane] = tile.position;
        if constexpr (Spec::kScoreMod)
            draws = dropout.template draws<true>(first_query + Fragment::col(0, lane),
                                                 first_key + Fragment::row(0, lane), s);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float minus[2];
            minus_delta(2 * s + h, minus);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int word = 2 * h + i;
                    float& y = x.value[2 * s + h][2 * i + e];
                    const float weight =
                        e == 0 ? unpack_lo<float16>(weights.reg[word]) : unpack_hi<float16>(weights.reg[word]);
                    if constexpr (Spec::kScoreMod)
                        y = weighted(weight, !dropout.keeps(draws.item[word], e), y, minus[e], params);
                    else
                        y = weighted<Spec>(weight, y, minus[e], params);
                }
        }
    }
}

// P = exp(S - lse), one element at a time. `p` holds the products Q K^T and is replaced by P after dropout; `weights`
// receives the weights of dS. lse(i, j), which is natural, is that of the element's query; an lse of +inf makes P zero in
// rows past the end and in rows without a visible key. The operator that joins the two sides of `outside`, `|` or `||`,
// decides which the compiler compares first: both are as measured.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Lse>
__device__ __forceinline__ void take_probabilities(Fragment& p, Fragment& weights, const Mask& mask,
                                                   OutsideFull outside, const Record& params, const ScoreTile& tile,
                                                   const Lse& lse) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    if constexpr (kTakesWeights<Spec>) {
        weights = p;
        take_weights<kTransposed, Spec>(weights, p, outside.behind || outside.before, params, tile, lse);
    } else {
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
                p(i, j) = exp_accurate(at_most_zero(rounded_product(p(i, j), params.softmax_scale) - lse(i, j)));
        if (outside.behind | outside.before) hide_scores<kTransposed, Spec>(p, mask, params, tile, Real(0));
        weights = p;
    }
}

// `take_probabilities` and dS = P o (dP - delta). `ds` holds dP and is replaced by dS; delta(i, j) is that of the
// element's query.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Lse, class Delta>
__device__ __forceinline__ void differentiate_softmax(Fragment& p, Fragment& ds, const Mask& mask, OutsideFull outside,
                                                      const Record& params, const ScoreTile& tile, const Lse& lse,
                                                      const Delta& delta) {
    if constexpr (kTakesWeights<Spec>) {
        Fragment weights;
        take_probabilities<kTransposed, Spec>(p, weights, mask, outside, params, tile, lse);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
                ds(i, j) = weighted_from_zero<Spec>(weights(i, j), ds(i, j), delta(i, j), params);
    } else {
        take_probabilities<kTransposed, Spec>(p, p, mask, outside, params, tile, lse);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) ds(i, j) = p(i, j) * (ds(i, j) - delta(i, j));
    }
}

}  // namespace fa2::common
