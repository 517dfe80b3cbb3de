// Products Q K^T whose accumulators start from the bias.
//
//   P = 2^(scale log2(e) (bias / scale - lse / scale + Q K^T))
//
// in the backward; in the forward, the row shift takes the place of lse and is subtracted in the exponent.
//
// What is left to do then is what a call without a bias does, and the work on the bias is done before the product, not
// between the product and the exponentials that wait for it. It takes a bias that nothing follows but masks and dropout.
//
// Quotients of finite numbers may have no float. They are rounded towards zero, so that they become the largest float at
// most: only -inf hides a key. In the forward, a row of nothing but such numbers sees its keys, and its lse is the
// largest float (`in_base2`). In the backward such a bias makes P zero, or one: -lse / scale is smaller
// (`finite_product`).
#pragma once
#include "common/held_array.cuh"
#include "common/key_padding.cuh"

namespace fa2::common {

template <class Spec>
inline constexpr bool kStartsFromBias = kMayHoldBias<Spec> && kChangesOfScores<Spec> == 1;

// The features of what is left to do to products that have started, besides the key padding mask.
template <class Spec>
using WithoutArrays = WithoutKeyPadding<WithoutBias<Spec>>;
template <class Spec, bool kStarts = kStartsFromBias<Spec>>
struct AfterStartOf {
    using Type = Spec;
};
template <class Spec>
struct AfterStartOf<Spec, true> {
    using Type = WithoutArrays<Spec>;
};
template <class Spec>
using AfterStart = typename AfterStartOf<Spec>::Type;
// The keys that such products hide.
template <class Spec, int kN8>
using HiddenKeys = KeyPaddingIf<Spec, kN8, kStartsFromBias<Spec>>;

// The product, but of finite numbers a finite one, which a bfloat16 holds.
__device__ __forceinline__ float finite_product(float x, float y) {
    constexpr float kLargestProduct = 0x1p127f;
    const float product = x * y;
    return fabsf(product) > kLargestProduct && fabsf(x) <= kLargestFloat ? copysignf(kLargestProduct, product)
                                                                         : product;
}

// Reads the bias in global memory, in the layout of the accumulators of S^T.
template <class Spec, class Record>
class BiasOfKeysInMemory {
    using Fragment = QuadFragment<2>;

  public:
    struct Elements {
        float value[4][2];
    };
    __device__ __forceinline__ BiasOfKeysInMemory(const Record& params, const ScoreTile& tile)
        : arrays_(params, tile),
          query_(tile.position.first_query + Fragment::col(0, tile.position.lane)),
          key_(tile.position.first_key + Fragment::row(0, tile.position.lane)) {}

    __device__ __forceinline__ Elements k16(int s) const {
        Elements elements;
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                elements.value[r][e] =
                    arrays_.template at<false>(query_ + 16 * s + r / 2 * 8 + e, key_ + r % 2 * 8).bias;
        return elements;
    }
    template <class Term>
    __device__ __forceinline__ static void set(Term& term, const Elements& elements, int r, int e) {
        term.bias = elements.value[r][e];
    }

  private:
    const ScoreArrays<Spec, Record> arrays_;
    const int32 query_, key_;
};

// The same in the layout of those of S, 16 queries by 8 kN8 keys. kRegular: see ScoreArrays::is_regular.
template <class Spec, class Record, int kN8, bool kRegular>
class BiasOfQueriesInMemory {
    using Fragment = QuadFragment<kN8>;
    using Arrays = ScoreArrays<Spec, Record>;

  public:
    struct Elements {
        typename Arrays::Term term[4][2];
    };
    __device__ __forceinline__ BiasOfQueriesInMemory(const Record& params, const ScoreTile& tile)
        : arrays_(params, tile),
          query_(tile.position.first_query + Fragment::row(0, tile.position.lane)),
          key_(tile.position.first_key + Fragment::col(0, tile.position.lane)) {}

    __device__ __forceinline__ bool is_regular() const {
        return arrays_.template is_regular<8 * (kN8 - 1) + 1>(query_, key_);
    }
    __device__ __forceinline__ Elements k16(int s) const {
        Elements elements;
#pragma unroll
        for (int r = 0; r < 4; ++r)
            arrays_.template pair_at<kRegular>(query_ + r % 2 * 8, key_, 16 * s + r / 2 * 8, elements.term[r]);
        return elements;
    }
    template <class Term>
    __device__ __forceinline__ static void set(Term& term, const Elements& elements, int r, int e) {
        term.bias = elements.term[r][e].bias;
    }

  private:
    const Arrays arrays_;
    const int32 query_, key_;
};

// x = factor bias. `bias` reads it as those of held_array.cuh do.
template <int kN8, class Bias>
__device__ __forceinline__ void start_from(QuadFragment<kN8>& x, const Bias& bias, float factor) {
#pragma unroll
    for (int s = 0; s < kN8 / 2; ++s) {
        const typename Bias::Elements elements = bias.k16(s);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                ArrayTerm<float> term;
                bias.set(term, elements, r, e);
                x.value[2 * s + r / 2][r % 2 * 2 + e] = __fmul_rz(term.bias, factor);
            }
    }
}

}  // namespace fa2::common
