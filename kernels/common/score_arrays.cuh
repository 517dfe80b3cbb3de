// Arrays that modify scores: the bias that is added, and the masks that hide keys. Calls without them use nothing here.
//
// Usually neighbouring keys are neighbours in memory, rows start at even elements, and no key of a warp's tile of
// scores lies past the end. Such a tile is called regular: its rows are read two keys at a time, at compile-time
// offsets from one address. Otherwise the address of each element is computed, which costs more than all other work on
// a score.
#pragma once
#include "common/math.cuh"
#include "common/score_tile.cuh"

namespace fa2::common {

template <class Real>
struct ArrayTerm {
    Real bias = 0;
    bool visible = true;
};

// Keys past the end are clamped to this one; the results there are not used. A packed sequence may have no key.
template <class Spec, class Record>
__device__ __forceinline__ int32 last_key_of(const Record& params) {
    return Spec::kVarlen ? max_of(params.seqlen_k - 1, 0) : params.seqlen_k - 1;
}

// Features of scores that do more than hide keys by an array.
template <class Spec>
inline constexpr int kChangesOfScores = Spec::kScoreFeatures - Spec::kMask;

// kInMemory: whether the arrays are read here, in global memory. Otherwise the warp holds one in shared memory
// (held_array.cuh), and `hide_by_arrays` (scores.cuh) reads the others of a kernel that keeps the bias.
template <class Spec, class Record, bool kInMemory = true>
class ScoreArrays {
    static constexpr bool kReadsBias = kInMemory && Spec::kBias, kReadsMask = kInMemory && Spec::kMask;

  public:
    static constexpr bool kReadsPairs = kReadsBias || kReadsMask;
    using Term = ArrayTerm<typename ElementTraits<typename Spec::Element>::Accum>;

    __device__ __forceinline__ ScoreArrays(const Record& params, const ScoreTile& tile)
        : params_(params), batch_(tile.batch), head_(tile.head) {}

    // Rows past the end are clamped to the last one. kPadding: whether the key padding mask counts, too. Accumulators of
    // tensor cores read it as a whole (key_padding.cuh).
    template <bool kPadding = Spec::kKeyPadding>
    __device__ __forceinline__ Term at(int32 query, int32 key) const {
        Term term;
        constexpr bool kReadsPadding = kInMemory && kPadding;
        if constexpr (kReadsPairs || kReadsPadding) {
            const int32 row = existing(query), column = min_of(key, last_key_of<Spec>(params_));
            if constexpr (kReadsBias) term.bias = of_existing(query, to_accum(*bias(row, column)));
            if constexpr (kReadsMask) term.visible = *mask(row, column);
            if constexpr (kReadsPadding) term.visible = term.visible && *padding(column);
        }
        return term;
    }

    // The tangent of the bias, in the same way.
    __device__ __forceinline__ auto bias_tangent_at(int32 query, int32 key) const {
        const int32 row = existing(query), column = min_of(key, last_key_of<Spec>(params_));
        return to_accum(params_.bias_tangent[params_.bias_tangent_strides.offset(batch_, head_, row, column)]);
    }

    // True if every lane can load its keys in aligned pairs: unit stride, even row starts, and the last of a lane's
    // keys (key + kLastKey) inside the sequence. It is enough to test the first of a lane's two rows: the lanes' first
    // rows are eight consecutive ones, whose starts are all even only if the row stride is even or all are clamped to
    // the same row.
    template <int kLastKey>
    __device__ __forceinline__ bool is_regular(int32 query, int32 key) const {
        if constexpr (!kReadsPairs) return false;
        bool yes = key + kLastKey < params_.seqlen_k;
        const int32 row = existing(query);
        if constexpr (kReadsBias) yes = yes && params_.bias_strides.column == 1 && is_even(bias(row, key));
        if constexpr (kReadsMask) yes = yes && params_.mask_strides.column == 1 && is_even(mask(row, key));
        return __all_sync(kFullWarp, yes);
    }

    // The terms of keys key + keys and key + keys + 1, without the key padding mask.
    template <bool kRegular>
    __device__ __forceinline__ void pair_at(int32 query, int32 key, int32 keys, Term (&terms)[2]) const {
        if constexpr (!kRegular) {
#pragma unroll
            for (int e = 0; e < 2; ++e) terms[e] = at<false>(query, key + keys + e);
        } else {
            terms[0] = terms[1] = {};  // NVRTC 12.9 omits the member initialisers in arrays of arrays
            const int32 row = existing(query);
            if constexpr (kReadsBias) {
                const auto two = read_two(bias(row, key) + keys);
#pragma unroll
                for (int e = 0; e < 2; ++e) terms[e].bias = of_existing(query, to_accum(two.item[e]));
            }
            if constexpr (kReadsMask) hide(terms, read_two(mask(row, key) + keys));
        }
    }

  private:
    __device__ __forceinline__ int32 existing(int32 query) const { return min_of(query, params_.seqlen_q - 1); }
    // A mask function may show a row past the end what it hides from the last row, where a bias may be NaN.
    template <class Real>
    __device__ __forceinline__ Real of_existing(int32 query, Real bias) const {
        return Spec::kMaskMod && query >= params_.seqlen_q ? 0 : bias;
    }
    __device__ __forceinline__ auto bias(int32 row, int32 column) const {
        return params_.bias + params_.bias_strides.offset(batch_, head_, row, column);
    }
    __device__ __forceinline__ auto mask(int32 row, int32 column) const {
        return params_.mask + params_.mask_strides.offset(batch_, head_, row, column);
    }
    __device__ __forceinline__ auto padding(int32 column) const {
        return params_.key_padding_mask + params_.key_padding_mask_strides.offset(batch_, 0, 0, column);
    }

    template <class T>
    __device__ __forceinline__ static bool is_even(const T* address) {
        return reinterpret_cast<uint64>(address) % (2 * sizeof(T)) == 0;
    }
    template <class T>
    __device__ __forceinline__ static Vector<T, 2> read_two(const T* address) {
        return *reinterpret_cast<const Vector<T, 2>*>(address);
    }
    __device__ __forceinline__ static void hide(Term (&terms)[2], const Vector<bool, 2>& visible) {
#pragma unroll
        for (int e = 0; e < 2; ++e) terms[e].visible = terms[e].visible && visible.item[e];
    }

    const Record& params_;
    const int32 batch_, head_;
};

}  // namespace fa2::common
