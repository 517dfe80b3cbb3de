// What features do to scores and to P, between the products, in the order of fa2cupy/features.py. Without any of them
// nothing here is used, and main loops are as they were.
//
//   raw score x -> scale x -> cap tanh(. / cap) -> - slope |distance| -> + bias -> -inf where a mask hides      `at`
//   P = 2^(score - lse)        O = (keep P) V        dS = P (keep dP - delta)        times the derivative of the cap
//
// A function of the user's own would take the place of the cap in `at`, which gives its derivative, too.
#pragma once
#include "common/dropout.cuh"
#include "common/mask.cuh"

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

template <class Spec, class Record>
class ScoreMod {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    static constexpr bool kFast = sizeof(typename Spec::Element) == 2;
    static constexpr Real kBase2 = kLog2e;

  public:
    struct Modified {
        Real score, slope;
    };
    // Where a lane's first element is. The distance of the others from the diagonal is this one's plus what is known when
    // the kernel is compiled, so that no element has an integer to convert, which takes as long as an exponential.
    struct Place {
        int32 query, key;
        Real distance;
    };

    __device__ __forceinline__ ScoreMod(const Record& params, int32 batch, int32 head)
        : params_(params), batch_(batch), head_(head) {
        if constexpr (Spec::kAlibi)
            slope_ = -kBase2 * params.alibi_slopes[params.alibi_slopes_strides.offset(batch, head, 0, 0)];
    }

    __device__ __forceinline__ Place place(int32 query, int32 key) const {
        return {query, key, Spec::kAlibi ? static_cast<Real>(query + params_.seqlen_k - params_.seqlen_q - key) : Real(0)};
    }

    // From a product of q and k, so many queries and keys past `first`, to a score in base 2, and the derivative of all
    // but the scale.
    __device__ __forceinline__ Modified at(Real raw, const Place& first, int32 queries, int32 keys) const {
        Modified x{raw, Real(1)};
        if constexpr (Spec::kSoftcap) {
            const Real tanh = kFast ? tanh_approx(raw * params_.scale_over_softcap)
                                    : tanh_accurate(raw * params_.scale_over_softcap);
            x = {params_.softcap_log2 * tanh, 1 - tanh * tanh};
        } else {
            x.score *= params_.scale_log2;
        }
        if constexpr (Spec::kAlibi) x.score += slope_ * magnitude(first.distance + static_cast<Real>(queries - keys));
        if constexpr (Spec::kBias || Spec::kMask || Spec::kKeyPadding) {
            // Rows and keys past the end take the last one's: what comes of them is not used.
            const int32 row = min_of(first.query + queries, params_.seqlen_q - 1);
            // A packed sequence may be without a key.
            const int32 last_key = Spec::kVarlen ? max_of(params_.seqlen_k - 1, 0) : params_.seqlen_k - 1;
            const int32 column = min_of(first.key + keys, last_key);
            if constexpr (Spec::kBias)
                x.score += kBase2 * to_accum(params_.bias[params_.bias_strides.offset(batch_, head_, row, column)]);
            if constexpr (Spec::kMask)
                if (!params_.mask[params_.mask_strides.offset(batch_, head_, row, column)]) x.score = -infinity<Real>();
            if constexpr (Spec::kKeyPadding)
                if (!params_.key_padding_mask[params_.key_padding_mask_strides.offset(batch_, 0, 0, column)])
                    x.score = -infinity<Real>();
        }
        return x;
    }

    __device__ __forceinline__ Dropout dropout() const {
        return {params_.seed, params_.dropout_threshold, head_, batch_};
    }

  private:
    const Record& params_;
    const int32 batch_, head_;
    Real slope_;
};

template <class Spec, class Record>
__device__ __forceinline__ ScoreMod<Spec, Record> score_mod(const Record& params, int32 batch, int32 head) {
    return {params, batch, head};
}

// ------------------------------------------------------------------------------------------------------------ forward

// Turns products into scores in base 2. first_query, first_key: position of the fragment's tile.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void modify_scores(Fragment& scores, const Record& params, int32 batch, int32 head,
                                              int32 first_query, int32 first_key, int32 lane) {
    if constexpr (kModifiesScores<Spec>) {
        const auto mod = score_mod<Spec>(params, batch, head);
        const auto first = mod.place(first_query + Fragment::row(0, lane), first_key + Fragment::col(0, lane));
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i)
                scores(i, j) = mod.at(scores(i, j), first, Fragment::row(i, 0), Fragment::col(j, 0)).score;
    }
}

// Drops elements of P. The others grow with the row's inverse sum, see `finish_rows`.
template <class Spec, class Element, int kN8, class Record>
__device__ __forceinline__ void drop(PackedFragment<Element, kN8>& p, const Record& params, int32 batch, int32 head,
                                     int32 first_query, int32 first_key, int32 lane) {
    if constexpr (Spec::kDropout) {
        using Fragment = QuadFragment<kN8>;
        const Dropout dropout = score_mod<Spec>(params, batch, head).dropout();
#pragma unroll
        for (int s = 0; s < kN8 / 2; ++s)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const uint32 kept = dropout.kept_of_four(first_query + Fragment::row(0, lane),
                                                         first_key + Fragment::col(4 * s + e, lane));
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    if (!(kept >> w & 1)) p.word[2 * s + w % 2][w / 2] &= e == 0 ? 0xffff0000u : 0x0000ffffu;
            }
    }
}
// The same before rounding, an element at a time.
template <class Spec, class Fragment, class Record>
__device__ __forceinline__ void drop(Fragment& p, const Record& params, int32 batch, int32 head, int32 first_query,
                                     int32 first_key, int32 lane) {
    if constexpr (Spec::kDropout) {
        const Dropout dropout = score_mod<Spec>(params, batch, head).dropout();
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
                if (!dropout.kept(first_query + Fragment::row(i, lane), first_key + Fragment::col(j, lane))) p(i, j) = 0;
    }
}

// The factor of what dropout keeps.
template <class Spec, class Record>
__device__ __forceinline__ auto kept_scale(const Record& params) {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    if constexpr (Spec::kDropout)
        return params.dropout_scale;
    else
        return Real(1);
}

// What remains of a row after its last key tile: the factor of O, and lse. `total` is the sum of each
// row where one warp does not have it.
template <class Spec, class Record, class Softmax, class Real, int kRows, class... Total>
__device__ __forceinline__ void finish_rows(const Softmax& softmax, const Record& params, int32 head,
                                            Real (&inverse)[kRows], Real (&lse)[kRows], const Total&... total) {
    if constexpr (Spec::kSink)
        softmax.finish(total..., params.sink[params.sink_strides.offset(0, head, 0, 0)] * Real(kLog2e), inverse, lse);
    else
        softmax.finish(total..., inverse, lse);
    if constexpr (Spec::kDropout)
#pragma unroll
        for (int i = 0; i < kRows; ++i) inverse[i] *= params.dropout_scale;
}

}  // namespace fa2::common
