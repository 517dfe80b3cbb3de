// What features do to scores and to P, between the products, in the order of fa2cupy/problem/features.py. Without any
// of them nothing here is used, and main loops are as they were.
//
//   raw score x -> scale x -> cap tanh(. / cap)                                            `cap`, with its `derivative`
//   -> - slope |distance| -> + bias -> -inf where a mask hides                          `score`
//   P = 2^(score - lse)        O = (keep P) V        dS = P (keep dP - delta)        times the derivative of the cap
//
// A score function of the user's own would stand where the cap stands.
#pragma once
#include "common/dropout.cuh"
#include "common/mask.cuh"
#include "common/score_arrays.cuh"
#include "common/softcap.cuh"
#include "common/spec.cuh.j2"

namespace fa2::common {

// Whether scores are more than products times the scale: then `at` scales them, too, to base 2.
template <class Spec>
inline constexpr bool kModifiesScores =
    Spec::kSoftcap || Spec::kAlibi || Spec::kBias || Spec::kMask || Spec::kKeyPadding;
// Whether that takes registers for addresses and what is loaded, or for the generator of dropout.
template <class Spec>
inline constexpr bool kNeedsRegisters =
    Spec::kBias || Spec::kMask || Spec::kKeyPadding || Spec::kDropout || (Spec::kSoftcap && Spec::kAlibi);
// Whether the backward goes through `take_weights`: products then start from zero, not from statistics.
template <class Spec>
inline constexpr bool kTakesWeights = kModifiesScores<Spec> || Spec::kDropout;
// Whether scores stay unscaled, as products or capped products, until the exponential's FMA scales them to base 2 as it
// subtracts. Maxima and -inf allow that if the scale is positive.
template <class Spec>
inline constexpr bool kScalesInExponent = sizeof(typename Spec::Element) == 2 && !Spec::kBias &&
                                          (Spec::kSoftcap || kPositiveScale<Spec> || !kModifiesScores<Spec>);

// Whether the backward's products may start from -lse, so that no instruction subtracts it: as long as scores are
// products, and terms that are added to them.
template <class Spec>
inline constexpr bool kProductsFromLse = !kTakesWeights<Spec> || (kScalesInExponent<Spec> && !Spec::kSoftcap);

// Whether dO V^T may start from -delta: dropout multiplies dP before delta is subtracted.
template <class Spec>
inline constexpr bool kProductsFromDelta = !Spec::kDropout;

// Whether the cap is all that happens to products, so that the forward can take it with each element's exponential:
// behind a branch on how to cap, no exponential would begin before all elements are capped.
template <class Spec>
inline constexpr bool kCapsLate =
    kScalesInExponent<Spec> && Spec::kSoftcap && !Spec::kAlibi && !Spec::kMask && !Spec::kKeyPadding;

// What remains to be multiplied for base 2.
template <class Spec, class Record>
__device__ __forceinline__ auto score_scale(const Record& params) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    if constexpr (!kScalesInExponent<Spec>)
        return Real(1);
    else if constexpr (Spec::kSoftcap)
        return params.capped_log2;
    else
        return params.scale_log2;
}

// What scores need of memory, the same for a whole head. A main loop with products to wait for loads it before: what
// comes behind a wait is not moved above it, and exponentials would wait for the addresses and the load.
template <class Spec, bool kAlibi = Spec::kAlibi>
struct HeadTerms {};
template <class Spec>
struct HeadTerms<Spec, true> {
    typename ElementTraits<typename Spec::Element>::Accum slope;  // to base 2, or unscaled
};

template <class Spec>
inline constexpr bool kHasHeadTerms = Spec::kAlibi;

template <class Spec, class Record>
__device__ __forceinline__ HeadTerms<Spec> head_terms(const Record& params, int32 batch, int32 head) {
    if constexpr (Spec::kAlibi) {
        const auto slope = params.alibi_slopes[params.alibi_slopes_strides.offset(batch, head, 0, 0)];
        if constexpr (kScalesInExponent<Spec>)
            return {slope * params.alibi_scale};
        else
            return {slope * decltype(slope)(kLog2e)};
    } else {
        return {};
    }
}

template <class Spec, class Record>
class ScoreMod : public Softcap<Spec, Record>, public ScoreArrays<Spec, Record> {
    using Arrays = ScoreArrays<Spec, Record>;
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    static constexpr bool kFast = sizeof(typename Spec::Element) == 2;
    static constexpr Real kBase2 = kLog2e;

  public:
    // Where a lane's first element is. The distance of the others from the diagonal is this one's plus what is known
    // when the kernel is compiled, so that no element has an integer to convert, which takes as long as an exponential.
    struct Position {
        int32 query, key;
        Real distance;  // times the slope, if scores are unscaled
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
        if constexpr (Spec::kAlibi && kScalesInExponent<Spec>) distance *= terms_.slope;
        return {query, key, distance};
    }

    // From a capped product, so many queries and keys past `first`, to a score: to base 2, or unscaled. `term`
    // is what arrays say of it.
    __device__ __forceinline__ Real score(Real capped, const Position& first, int32 queries, int32 keys,
                                          const typename Arrays::Term& term) const {
        Real x = capped;
        if constexpr (!kScalesInExponent<Spec>) {
            if constexpr (!Spec::kSoftcap)
                x *= params_.scale_log2;
            else
                x *= kFast ? params_.capped_log2 : params_.softcap_log2;
        }
        if constexpr (Spec::kAlibi) {
            // Unscaled, one FMA for all elements as far from the diagonal, and an addition. Distances of keys that a
            // causal mask leaves are positive; of the others only the slope's sign is kept.
            const Real offset = static_cast<Real>(queries - keys);
            if constexpr (!kScalesInExponent<Spec>)
                x -= terms_.slope * magnitude(first.distance + offset);
            else if constexpr (Spec::kCausal)
                x -= fma(terms_.slope, offset, first.distance);
            else
                x -= with_sign_of(terms_.slope, fma(terms_.slope, offset, first.distance));
        }
        if constexpr (Spec::kBias) x += kBase2 * term.bias;
        if constexpr (Spec::kMask || Spec::kKeyPadding)
            if (!term.visible) x = -infinity<Real>();
        return x;
    }

    __device__ __forceinline__ Dropout dropout() const {
        return {params_.seed, params_.dropout_threshold, head_, batch_};
    }

  private:
    const Record& params_;
    const int32 batch_, head_;
    const HeadTerms<Spec> terms_;
};

template <class Spec, class Record>
__device__ __forceinline__ ScoreMod<Spec, Record> score_mod(const Record& params, const ScoreTile& tile) {
    return {params, tile, head_terms<Spec>(params, tile.batch, tile.head)};
}
template <class Spec, class Record>
__device__ __forceinline__ ScoreMod<Spec, Record> score_mod(const Record& params, const ScoreTile& tile,
                                                            const HeadTerms<Spec>& terms) {
    return {params, tile, terms};
}

// The factor of what dropout keeps, and whether there is one.
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
