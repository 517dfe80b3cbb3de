// Score modification: what features do to scores and to P between the two matrix products, in the order of
// fa2cupy/problem/features.py. Calls without features use nothing here, and their main loops contain no trace of it.
//
//   product x -> scale x -> the caller's score function                `ScoreMod::call`, and its slope
//   -> cap tanh(. / cap)                                               `Softcap::cap`, and its `derivative`
//   -> - slope |distance| -> + bias -> -inf where a mask hides         `ScoreMod::score`
//   P = 2^(score - lse)        O = (keep P) V        dS = P (keep dP - delta), times the derivatives of cap and
//                                                                         function
#pragma once
#include "common/distance_terms.cuh"
#include "common/dropout.cuh"
#include "common/functions.cuh.j2"
#include "common/mask_function.cuh"
#include "common/score_arrays.cuh"
#include "common/softcap.cuh"
#include "common/spec.cuh.j2"

namespace fa2::common {

// True if the caller's mask function is evaluated for every score.
template <class Spec>
inline constexpr bool kHidesByFunction = Spec::kMaskMod && !Spec::kBlockMask;
// True if a score is more than product times scale. `score` then also scales it, unless kScalesInExponent.
template <class Spec>
inline constexpr bool kModifiesScores = Spec::kSoftcap || Spec::kAlibi || Spec::kBias || Spec::kMask ||
                                        Spec::kKeyPadding || Spec::kScoreMod || kHidesByFunction<Spec>;
// True if the features need many registers: for addresses and loaded values, or for the generator of dropout.
template <class Spec>
inline constexpr bool kNeedsRegisters =
    Spec::kBias || Spec::kMask || Spec::kKeyPadding || Spec::kDropout || (Spec::kSoftcap && Spec::kAlibi);
// True if weights leave out the derivatives of cap and function, because the gradient of the scores is needed itself
// (dbias.cuh).
template <class Spec>
inline constexpr bool kDerivesLater = Spec::kDbias || Spec::kDscoreArgs;
// True if the backward computes P by `take_weights` (weights.cuh).
template <class Spec>
inline constexpr bool kTakesWeights = kModifiesScores<Spec> || Spec::kDropout;
// True if scores are natural up to the FMA in front of the exponential, which brings them to base 2 and subtracts at
// once: a bias or a function may have finite numbers, such as the lowest float, that have no float in base 2.
template <class Spec>
inline constexpr bool kNaturalInExponent = sizeof(typename Spec::Element) == 2 && (Spec::kBias || Spec::kScoreMod);
// True if scores stay unscaled (products, or capped products) up to that FMA. Row maxima, and the -inf that `score`
// writes, are right in unscaled scores only if the scale is positive; that of capped products always is.
template <class Spec>
inline constexpr bool kUnscaledScores = sizeof(typename Spec::Element) == 2 && !kNaturalInExponent<Spec> &&
                                        (Spec::kSoftcap || kPositiveScale<Spec> || !kModifiesScores<Spec>);
template <class Spec>
inline constexpr bool kScalesInExponent = kNaturalInExponent<Spec> || kUnscaledScores<Spec>;

// True if the backward may start the accumulators of Q K^T from -lse, which saves the subtraction. Scores must then be
// products plus added terms: a cap is not linear, nor are most score functions.
template <class Spec>
inline constexpr bool kProductsFromLse =
    !kTakesWeights<Spec> || (kScalesInExponent<Spec> && !Spec::kSoftcap && !Spec::kBias &&
                             (!Spec::kScoreMod || (score_args_arrays::kShifts && !Spec::kAlibi)));

// True if the accumulators of dO V^T may start from -delta. Dropout rules that out: it multiplies dP before delta is
// subtracted.
template <class Spec>
inline constexpr bool kProductsFromDelta = !Spec::kDropout;

// True if the cap is the only modification, so that the forward can apply it together with each element's exponential.
// If the cap came first, behind its branch between polynomial and tanh, no exponential could start before all elements
// are capped.
template <class Spec>
inline constexpr bool kCapsLate = kUnscaledScores<Spec> && Spec::kSoftcap && !Spec::kAlibi && !Spec::kMask &&
                                  !Spec::kKeyPadding && !kHidesByFunction<Spec>;

// True if steps of the forward on Hopper have no registers left beside such scores.
template <class Spec>
inline constexpr bool kFillsRegisters =
    kCapsLate<Spec> || Spec::kAlibi || Spec::kScoreMod || Spec::kMask || kHidesByFunction<Spec>;

// What scores of 1 are in the units of a kernel: scores are in base 2, or else natural.
template <class Spec>
inline constexpr double kScoreUnit = kNaturalScores<Spec> ? 1.0 : kLog2e;
// The same for the terms that `score` adds, unless they are unscaled.
template <class Spec>
inline constexpr double kTermUnit = kNaturalInExponent<Spec> ? 1.0 : kScoreUnit<Spec>;

// The factor from products to scores in these units. The caller's function returns natural scores.
template <class Spec, class Record>
__device__ __forceinline__ auto product_scale(const Record& params) {
    if constexpr (Spec::kScoreMod)
        return typename ElementTraits<typename Spec::Element>::Accum(kScoreUnit<Spec>);
    else if constexpr (kNaturalScores<Spec>)
        return params.softmax_scale;
    else
        return params.scale_log2;
}

// The factor from capped products to scores in these units.
template <class Spec, class Record>
__device__ __forceinline__ auto capped_scale(const Record& params) {
    if constexpr (!Spec::kSoftcap)
        return product_scale<Spec>(params);
    else if constexpr (sizeof(typename Spec::Element) == 2)
        return params.capped_log2;
    else
        return params.softcap_log2 * decltype(params.softcap_log2)(kLn2);
}

// softmax_scale, if the record has it: an operand in constant memory needs no register.
template <class Record>
__device__ __forceinline__ auto softmax_scale_of(const Record& params, int) -> decltype(params.softmax_scale + 0) {
    return params.softmax_scale;
}
template <class Record>
__device__ __forceinline__ float softmax_scale_of(const Record& params, long) {
    return params.scale_log2 * static_cast<float>(kLn2);
}

// The factor from products to natural scores, which the caller's function gets.
template <class Spec, class Record>
__device__ __forceinline__ auto natural_scale(const Record& params) {
    return softmax_scale_of(params, 0);
}

// The factor that brings the results of `score` to base 2; 1 if they are in base 2 already.
template <class Spec, class Record>
__device__ __forceinline__ auto score_scale(const Record& params) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    if constexpr (!kScalesInExponent<Spec>)
        return Real(1);
    else if constexpr (kNaturalInExponent<Spec>)
        return Real(kLog2e);
    else if constexpr (Spec::kSoftcap)
        return params.capped_log2;
    else
        return params.scale_log2;
}

// Values that scores need from memory and that are the same for a whole head: the slope of ALiBi, and the terms of the
// caller's function that depend on no position. A main loop that waits for asynchronous products loads them before the
// wait. The compiler does not move loads above a wait, so after it the exponentials would be delayed by the address
// computation and the load.
template <class Spec, bool kAlibi = Spec::kAlibi>
struct Slope {};
template <class Spec>
struct Slope<Spec, true> {
    typename ElementTraits<typename Spec::Element>::Accum slope;  // in the kernel's units, or those of unscaled scores
};
template <class Spec>
struct HeadTerms : Slope<Spec>, ScoreHeadTerms<typename ElementTraits<typename Spec::Element>::Accum> {};

template <class Spec>
inline constexpr bool kHasHeadTerms = !__is_empty(HeadTerms<Spec>);

template <class Spec, class Record>
__device__ __forceinline__ HeadTerms<Spec> head_terms(const Record& params, int32 batch, int32 head) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    HeadTerms<Spec> terms;
    if constexpr (Spec::kAlibi) {
        const auto slope = params.alibi_slopes[params.alibi_slopes_strides.offset(batch, head, 0, 0)];
        if constexpr (kUnscaledScores<Spec>)
            terms.slope = slope * params.alibi_scale;
        else
            terms.slope = slope * Real(kTermUnit<Spec>);
    }
    if constexpr (Spec::kScoreMod)
        static_cast<ScoreHeadTerms<Real>&>(terms) = score_head_terms<Real>(score_args_of(params), batch, head);
    return terms;
}

template <class Spec, class Record, bool kInMemory>
class ScoreMod : public Softcap<Spec, Record>, public ScoreArrays<Spec, Record, kInMemory> {
    using Arrays = ScoreArrays<Spec, Record, kInMemory>;
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    static constexpr bool kFast = sizeof(typename Spec::Element) == 2;
    static constexpr Real kUnit = kTermUnit<Spec>;

  public:
    // The position of a lane's first element. The other elements' distances from the diagonal differ from `distance` by
    // compile-time constants, so that no element needs an integer conversion, which takes as long as an exponential.
    struct Position {
        int32 query, key;
        Real distance;  // from the diagonal, for ALiBi
        Real apart;     // query - key, for the caller's function
    };

    __device__ __forceinline__ ScoreMod(const Record& params, const ScoreTile& tile, const HeadTerms<Spec>& terms)
        : Softcap<Spec, Record>(params),
          Arrays(params, tile),
          params_(params),
          batch_(tile.batch),
          head_(tile.head),
          terms_(terms) {}

    __device__ __forceinline__ Position position(int32 query, int32 key) const {
        Real distance = 0;
        if constexpr (Spec::kAlibi) distance = static_cast<Real>(query + params_.seqlen_k - params_.seqlen_q - key);
        return {query, key, distance, Spec::kScoreMod ? static_cast<Real>(query - key) : Real(0)};
    }

    // Calls the caller's function on products, in place: they become natural scores, ahead of the cap.
    template <class Fragment>
    __device__ __forceinline__ void call(Fragment& x, const Position& first) const {
        if constexpr (Spec::kScoreMod)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
                for (int i = 0; i < Fragment::kRows; ++i) {
                    const int32 queries = Fragment::row(i, 0), keys = Fragment::col(j, 0);
                    x(i, j) = called(x(i, j), first, queries, keys, distance_terms_at(first, queries, keys));
                }
    }
    template <int kN8>
    __device__ __forceinline__ void call(QuadFragment<kN8>& x, const Position& first,
                                         const QuadDistances<kN8, false, Real>& distances) const {
        if constexpr (Spec::kScoreMod) {
            DistanceWalk<kN8, false, Real> walk(distances);
#pragma unroll
            for (int j = 0; j < 2 * kN8; ++j) {
                const auto terms = walk.next(j);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    x(i, j) = called(x(i, j), first, 8 * i, QuadFragment<kN8>::col(j, 0), terms.row[i]);
            }
        }
    }
    // The same for one product, `queries` rows and `keys` columns from `first`. The second also gives the derivative by
    // the scaled product, `slope`.
    template <class Terms>
    __device__ __forceinline__ Real called(Real product, const Position& first, int32 queries, int32 keys,
                                           const Terms& of_distance) const {
        const Real score = product * natural_scale<Spec>(params_);
        return score_value<Real>(score_args_of(params_), score, batch_, head_, first.query + queries, first.key + keys,
                                 RealDistance<Real>{first.apart, queries - keys}, terms_, of_distance);
    }
    template <class Terms>
    __device__ __forceinline__ Real called(Real product, const Position& first, int32 queries, int32 keys,
                                           const Terms& of_distance, Real& slope) const {
        if constexpr (Spec::kScoreMod) {
            const Real score = product * natural_scale<Spec>(params_);
            return score_value_and_slope<Real>(score_args_of(params_), score, batch_, head_, first.query + queries,
                                               first.key + keys, RealDistance<Real>{first.apart, queries - keys},
                                               terms_, of_distance, slope);
        } else {
            slope = 1;
            return product;
        }
    }
    // The terms of the function that depend on q - k alone, for one element.
    __device__ __forceinline__ DistanceTerms<Real> distance_terms_at(const Position& first, int32 queries,
                                                                     int32 keys) const {
        return distance_terms<Real>(score_args_of(params_), batch_, head_, first.query + queries - first.key - keys);
    }

    // The score of the element `queries` rows and `keys` columns from `first`, given its capped product: natural or
    // unscaled if kScalesInExponent, otherwise in the kernel's units. `term` holds the element's bias and visibility from the
    // arrays. kRounded: every kernel computes the same bits, wherever the compiler would make an FMA.
    template <bool kRounded = false>
    __device__ __forceinline__ Real score(Real capped, const Position& first, int32 queries, int32 keys,
                                          const typename Arrays::Term& term) const {
        Real x = capped;
        if constexpr (kNaturalInExponent<Spec>) {
            if constexpr (Spec::kSoftcap)
                x *= capped_scale<Spec>(params_) * Real(kLn2);
            else if constexpr (!Spec::kScoreMod)
                x *= natural_scale<Spec>(params_);
        } else if constexpr (!kUnscaledScores<Spec>)
            x = kRounded ? rounded_product(x, capped_scale<Spec>(params_)) : x * capped_scale<Spec>(params_);
        if constexpr (Spec::kAlibi) {
            // Distances are exact, and all elements at the same one share it, so that each element costs an FMA. Keys that
            // a causal mask leaves visible have distances of zero or more.
            const Real distance = first.distance + static_cast<Real>(queries - keys);
            x = fma(-terms_.slope, Spec::kCausal && !kRounded ? distance : magnitude(distance), x);
        }
        if constexpr (Spec::kBias) x += kUnit * term.bias;
        if constexpr (Spec::kMask || Spec::kKeyPadding)
            if (!term.visible) x = -infinity<Real>();
        if constexpr (kHidesByFunction<Spec>)
            if (hides(first.query + queries, first.key + keys)) x = -infinity<Real>();
        return x;
    }
    // True if the caller's mask function hides the key.
    __device__ __forceinline__ bool hides(int32 query, int32 key) const {
        return !is_visible<Real>(mask_args_of(params_), batch_, head_, query, key);
    }

    __device__ __forceinline__ Dropout dropout() const {
        return {params_.seed, params_.dropout_threshold, params_.dropout_query_word, params_.dropout_head + head_,
                batch_};
    }

  private:
    const Record& params_;
    const int32 batch_, head_;
    const HeadTerms<Spec> terms_;
};

template <class Spec, bool kInMemory = true, class Record>
__device__ __forceinline__ ScoreMod<Spec, Record, kInMemory> score_mod(const Record& params, const ScoreTile& tile) {
    return {params, tile, head_terms<Spec>(params, tile.batch, tile.head)};
}
template <class Spec, bool kInMemory = true, class Record>
__device__ __forceinline__ ScoreMod<Spec, Record, kInMemory> score_mod(const Record& params, const ScoreTile& tile,
                                                                       const HeadTerms<Spec>& terms) {
    return {params, tile, terms};
}

// The factor by which dropout scales the elements that it keeps; 1 without dropout.
template <class Spec>
inline constexpr bool kHasKeptScale = Spec::kDropout;
template <class Spec, class Record>
__device__ __forceinline__ auto kept_scale(const Record& params) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    if constexpr (Spec::kDropout)
        return params.dropout_scale;
    else
        return Real(1);
}

}  // namespace fa2::common
