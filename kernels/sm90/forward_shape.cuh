// What the forward's two roles agree on, besides what all kernels by query tiles do.
#pragma once
#include "common/score_mod.cuh"
#include "sm90/query_tile_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
struct ForwardShape : QueryTileShape<Spec, 1> {
    using Base = QueryTileShape<Spec, 1>;
    using Base::kBc, Base::kConsumerRegisters, Base::kD, Base::kStages;
    using Base::kFixedBytes, Base::kKeyBytes, Base::kQueryBytes;

    static constexpr int kValueStages = kStages;
    static constexpr int kScratchBytes = 4 * 32 * Spec::kWarps;
    static constexpr int kBesidesQueries = kFixedBytes + (kStages + kValueStages) * kKeyBytes + kScratchBytes;
    // O has a buffer of its own if it fits, else it leaves through Q's; with what is left Q is loaded a tile ahead.
    static constexpr bool kOwnOutput = kBesidesQueries + 2 * kQueryBytes <= kMaxSharedBytes;
    static constexpr int kQueryBuffers = kBesidesQueries + 3 * kQueryBytes <= kMaxSharedBytes ? 2 : 1;
    static constexpr int kSharedBytes = kBesidesQueries + (kQueryBuffers + kOwnOutput) * kQueryBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    // P of two tiles at a time: the next one's exponentials then run under the product that uses this one's.
    static constexpr int kBesidesTiles = common::kNeedsRegisters<Spec> ? 72 : 48;
    static constexpr bool kTwoP = kD / 2 + kBc / 2 + 2 * (kBc / 4) + kBesidesTiles <= kConsumerRegisters;
};

template <class Shape>
struct ForwardMemory : QueryTileMemory<Shape> {
    using QueryTileMemory<Shape>::QueryTileMemory;

    __device__ uint32 scratch(uint32 thread) const { return this->tile_slot(kTileSlots) + 4 * thread; }
};

}  // namespace fa2::sm90
