// The score array that a warp holds in shared memory while it computes scores: the bias, the mask, or none.
//
// A warp that holds an array calls two functions of the class's Tile: `load` starts to copy the elements of a tile of
// scores, `wait` waits for them. An object of the class then reads them: `k16(s)` returns those of accumulators 2 s and
// 2 s + 1, and `set` puts the one of register r (see OperandA) and element e into an ArrayTerm.
#pragma once
#include "common/bias_tile.cuh"
#include "common/mask_tile.cuh"

namespace fa2::common {

// Arrays that ScoreArrays reads in global memory.
struct ArraysInMemory {
    struct Tile {
        static constexpr int kBytes = 0;
    };
    static constexpr bool kInMemory = true;
    struct Elements {};
    __device__ __forceinline__ static Elements k16(int) { return {}; }
    template <class Term>
    __device__ __forceinline__ static void set(Term&, const Elements&, int, int) {}
};

template <class Spec>
inline constexpr bool kMayHoldArray = kMayHoldBias<Spec> || kMayHoldMask<Spec>;

// The type of the array that a kernel holds: kBias is kMayHoldBias, and kMask is kMayHoldMask.
template <bool kBias, bool kMask, class OfBias, class OfMask>
struct HeldType {
    using Type = ArraysInMemory;
};
template <class OfBias, class OfMask>
struct HeldType<true, false, OfBias, OfMask> {
    using Type = OfBias;
};
template <class OfBias, class OfMask>
struct HeldType<false, true, OfBias, OfMask> {
    using Type = OfMask;
};

// In the layout of the accumulators of S, 16 queries by kKeys keys.
template <class Spec, int kKeys>
using HeldOfQueries = typename HeldType<kMayHoldBias<Spec>, kMayHoldMask<Spec>,
                                        BiasOfQueries<typename Spec::Element, kKeys>, MaskOfQueries<kKeys>>::Type;
// In the layout of the accumulators of S^T, 16 keys by kQueries queries. Products start from the bias (start_from_bias.cuh).
template <class Spec, int kQueries>
using HeldOfKeys = typename HeldType<false, kMayHoldMask<Spec>, ArraysInMemory, MaskOfKeys<kQueries>>::Type;

}  // namespace fa2::common
