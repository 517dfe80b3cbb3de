// How the forward uses score_mod.cuh: it turns products into scores, applies dropout to P, and finishes rows.
#pragma once
#include "common/held_array.cuh"
#include "common/key_padding.cuh"
#include "common/score_mod.cuh"

namespace fa2::common {

// Turns capped products into scores. kRegular: see ScoreArrays::is_regular.
template <bool kRegular, int kN8, class Mod, class Held>
__device__ __forceinline__ void score_fragment(QuadFragment<kN8>& x, const Mod& mod,
                                               const typename Mod::Position& first, const Held& held) {
    typename Held::Elements elements;  // of accumulators n and n + 1
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            typename Mod::Term term[2];
            mod.template pair_at<kRegular>(first.query + 8 * i, first.key, 8 * n, term);
            if (n % 2 == 0 && i == 0) elements = held.k16(n / 2);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                held.set(term[e], elements, n % 2 * 2 + i, e);
                x.value[n][2 * i + e] = mod.score(x.value[n][2 * i + e], first, 8 * i, 8 * n + e, term[e]);
            }
        }
}

template <bool kRegular, int kN8, class Arrays>
__device__ __forceinline__ void hide_fragment(QuadFragment<kN8>& x, const Arrays& arrays, int32 query, int32 key) {
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            typename Arrays::Term term[2];
            arrays.template pair_at<kRegular>(query + 8 * i, key, 8 * n, term);
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (!term[e].visible) x.value[n][2 * i + e] = -infinity<float>();
        }
}
// Hides keys by the mask of a kernel that keeps the bias. It has a loop of its own, because loads are not moved across
// those of the kept bias, and would be waited for one after the other.
template <class Spec, int kN8, class Record>
__device__ __forceinline__ void hide_by_arrays(QuadFragment<kN8>& x, const Record& params, const ScoreTile& tile) {
    using Arrays = ScoreArrays<WithoutBias<Spec>, Record>;
    if constexpr (Spec::kKeepsBias && Arrays::kReadsPairs) {
        using Fragment = QuadFragment<kN8>;
        const auto [first_query, first_key, lane] = tile.position;
        const int32 query = first_query + Fragment::row(0, lane), key = first_key + Fragment::col(0, lane);
        const Arrays arrays(params, tile);
        if (arrays.template is_regular<8 * (kN8 - 1) + 1>(query, key))
            hide_fragment<true>(x, arrays, query, key);
        else
            hide_fragment<false>(x, arrays, query, key);
    }
}

// Hides keys by the key padding mask, and by the mask of a kernel that keeps the bias.
template <class Spec, int kN8, class Record>
__device__ __forceinline__ void hide_keys(QuadFragment<kN8>& scores, const Record& params, const ScoreTile& tile,
                                          const KeyPadding<Spec, kN8, false>& padding) {
    hide_by_arrays<Spec>(scores, params, tile);
    padding.hide(scores);
}

// Turns products into scores, which `score_scale` must still multiply. `distances`: the terms of the caller's function
// that depend on the distance. `padding`: the KeyPadding of the tile. `terms`: the HeadTerms, if already loaded. `held`:
// the score array that the warp holds, or ArraysInMemory (held_array.cuh).
template <class Spec, int kN8, class Record, class Held, class... Terms>
__device__ __forceinline__ void modify_scores_with(const Held& held, QuadFragment<kN8>& scores, const Record& params,
                                                   const ScoreTile& tile,
                                                   const QuadDistances<kN8, false, float>& distances,
                                                   const KeyPadding<Spec, kN8, false>& padding, const Terms&... terms) {
    if constexpr (kModifiesScores<Spec>) {
        using Fragment = QuadFragment<kN8>;
        const auto [first_query, first_key, lane] = tile.position;
        const auto mod = score_mod<Spec, Held::kInMemory>(params, tile, terms...);
        const auto first = mod.position(first_query + Fragment::row(0, lane), first_key + Fragment::col(0, lane));
        mod.call(scores, first, distances);
        mod.cap(scores);
        if (mod.template is_regular<8 * (kN8 - 1) + 1>(first.query, first.key))
            score_fragment<true>(scores, mod, first, held);
        else
            score_fragment<false>(scores, mod, first, held);
        hide_keys<Spec>(scores, params, tile, padding);
    }
}
template <class Spec, int kN8, class Record, class... Terms>
__device__ __forceinline__ void modify_scores(QuadFragment<kN8>& scores, const Record& params, const ScoreTile& tile,
                                              const Terms&... terms) {
    modify_scores_with<Spec>(ArraysInMemory{}, scores, params, tile, {score_args_of(params), tile}, {params, tile},
                             terms...);
}
// The same for other fragments, one element at a time.
template <class Spec, class Fragment, class Record, class... Terms>
__device__ __forceinline__ void modify_scores(Fragment& scores, const Record& params, const ScoreTile& tile,
                                              const Terms&... terms) {
    if constexpr (kModifiesScores<Spec>) {
        const auto [first_query, first_key, lane] = tile.position;
        const auto mod = score_mod<Spec>(params, tile, terms...);
        const auto first = mod.position(first_query + Fragment::row(0, lane), first_key + Fragment::col(0, lane));
        mod.call(scores, first);
        mod.cap(scores);
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i)
                scores(i, j) = mod.template score<true>(
                    scores(i, j), first, Fragment::row(i, 0), Fragment::col(j, 0),
                    mod.at(first.query + Fragment::row(i, 0), first.key + Fragment::col(j, 0)));
    }
}

// Brings scores to base 2 that `modify_scores` has left to the exponent. Row maxima can then be taken of them.
template <class Spec, int kN8, class Record>
__device__ __forceinline__ void scale_scores(QuadFragment<kN8>& scores, const Record& params) {
    if constexpr (kScalesInExponent<Spec>) {
        const float scale = score_scale<Spec>(params);
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& x = scores.value[n][e];
                x = kNaturalInExponent<Spec> ? in_base2(x) : x * scale;
            }
    }
}

// Turns products into natural scores, for element types whose scores are not scaled in the exponent.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void natural_scores(Fragment& scores, const Record& params, const ScoreTile& tile) {
    static_assert(kNaturalScores<Spec> && !kScalesInExponent<Spec>);
    if constexpr (kModifiesScores<Spec>) {
        modify_scores<Spec>(scores, params, tile);
    } else {
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i)
                scores(i, j) = rounded_product(scores(i, j), params.softmax_scale);
    }
}

// `try_row_shift` for unmasked products whose cap is applied late (kCapsLate). If P does not fit, the result is false
// and the products have been replaced by scores. That fallback caps by tanh even if all products are small: with the
// polynomial, the compiler would keep the first attempt's results, for which there are no registers.
template <class Spec, int kChains, class Softmax, class Fragment, class P, class Record>
__device__ __forceinline__ bool try_capped(Softmax& softmax, Fragment& products, const Record& params, P& p) {
    const Softcap<Spec, Record> mod(params);
    const auto scale = score_scale<Spec>(params);
    const bool small = mod.are_small(products);
    if (small) {
        const auto to_base2 = [&](float product, float minus_row_shift) {
            return fma(mod.small_capped(product), scale, minus_row_shift);
        };
        if (__builtin_expect(softmax.template try_row_shift<kChains>(products, to_base2, p), 1)) return true;
    }
    mod.cap_any(products);
    return !small && softmax.template try_row_shift<kChains>(products, scale, p);
}

// True if `drop` changes P; it then needs the tile's head and batch.
template <class Spec>
inline constexpr bool kDrops = Spec::kDropout;

// Sets the elements of P that dropout drops to zero, and those of what P weighs. `finish_rows` scales the others, by way
// of the inverse row sum.
template <class Spec, class Element, int kN8, class Record, class... Weighted>
__device__ __forceinline__ void drop(PackedFragment<Element, kN8>& p, const Record& params, const ScoreTile& tile,
                                     Weighted&... weighted) {
    if constexpr (Spec::kDropout) {
        static_assert(kN8 % 2 == 0);
        using Fragment = QuadFragment<kN8>;
        const auto [first_query, first_key, lane] = tile.position;
        const Dropout dropout = score_mod<Spec>(params, tile).dropout();
#pragma unroll
        for (int s = 0; s < kN8 / 2; ++s) {
            const Words draws = dropout.template draws<false>(first_query + Fragment::row(0, lane),
                                                              first_key + Fragment::col(0, lane), s);
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint32 kept = ~dropout.dropped(draws.item[2 * i + n]);
                    p.word[2 * s + n][i] &= kept;
                    ((weighted.word[2 * s + n][i] &= kept), ...);
                }
        }
    }
}
// The same before rounding.
template <class Spec, int kN8, class Record>
__device__ __forceinline__ void drop(QuadFragment<kN8>& p, const Record& params, const ScoreTile& tile) {
    if constexpr (Spec::kDropout) {
        using Fragment = QuadFragment<kN8>;
        const auto [first_query, first_key, lane] = tile.position;
        const Dropout dropout = score_mod<Spec>(params, tile).dropout();
#pragma unroll
        for (int s = 0; s < kN8 / 2; ++s) {
            const Words draws = dropout.template draws<false>(first_query + Fragment::row(0, lane),
                                                              first_key + Fragment::col(0, lane), s);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32 kept = dropout.kept_of_four(draws, e);
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    if (!(kept >> w & 1)) p.value[2 * s + w % 2][w / 2 * 2 + e] = 0.0f;
            }
        }
    }
}
// The same for other fragments, one element at a time.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void drop(Fragment& p, const Record& params, const ScoreTile& tile) {
    if constexpr (Spec::kDropout) {
        const auto [first_query, first_key, lane] = tile.position;
        const Dropout dropout = score_mod<Spec>(params, tile).dropout();
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
                if (!dropout.keeps_element(first_query + Fragment::row(i, lane), first_key + Fragment::col(j, lane)))
                    p(i, j) = 0;
    }
}

// True if `finish_rows` reads a value of the head.
template <class Spec>
inline constexpr bool kFinishReadsHead = Spec::kSink;

// The head's sink in the units of scores. The first share has it; in the others it would be counted again.
template <class Real, class Spec, class Record>
__device__ __forceinline__ Real sink_of(const Record& params, int32 head, int32 share) {
    if (Spec::kSplit && share > 0) return -infinity<Real>();
    const Real sink = params.sink[params.sink_strides.offset(0, head, 0, 0)];
    if constexpr (kNaturalScores<Spec>)
        return sink;
    else
        return in_base2(sink);
}

// Finishes row sums after the last key tile: computes their inverse and lse. `share`: the block's share of the key
// tiles, 0 without a split. `total`: the row sums, if a row is shared by several warps.
template <class Spec, class Record, class Softmax, class Real, int kRows, class... Total>
__device__ __forceinline__ void finish_sums(const Softmax& softmax, const Record& params, int32 head, int32 share,
                                            Real (&inverse)[kRows], Real (&lse)[kRows], const Total&... total) {
    if constexpr (Spec::kSink)
        softmax.finish(total..., sink_of<Real, Spec>(params, head, share), inverse, lse);
    else
        softmax.finish(total..., inverse, lse);
}

// The same with the factor of O in place of the inverse.
template <class Spec, class Record, class Softmax, class Real, int kRows, class... Total>
__device__ __forceinline__ void finish_rows(const Softmax& softmax, const Record& params, int32 head, int32 share,
                                            Real (&inverse)[kRows], Real (&lse)[kRows], const Total&... total) {
    finish_sums<Spec>(softmax, params, head, share, inverse, lse, total...);
    if constexpr (Spec::kDropout)
#pragma unroll
        for (int i = 0; i < kRows; ++i) inverse[i] *= params.dropout_scale;
}

}  // namespace fa2::common
