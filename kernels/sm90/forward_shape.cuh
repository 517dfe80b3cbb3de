// Sizes and shared-memory map of the forward: what it adds to query_tile_shape.cuh.
#pragma once
#include "common/score_mod.cuh"
#include "sm90/query_tile_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
struct ForwardShape : QueryTileShape<Spec, 1> {
    using Base = QueryTileShape<Spec, 1>;
    using Base::kBc, Base::kConsumerRegisters, Base::kDv, Base::kStages;
    using Base::kHeldBytes, Base::kFixedBytes, Base::kIsPair, Base::kKeepsArray, Base::kKeyBytes, Base::kPanelsV,
        Base::kQueryBytes, Base::kQueryPanelBytes, Base::kValueBytes;

    static constexpr bool kKeysFirst = false;  // K of a query tile is loaded before its Q
    static constexpr int kValueStages = kStages;
    static constexpr int kScratchBytes = 4 * 32 * Spec::kWarps;
    static constexpr int kWithoutArray = kFixedBytes + kStages * kKeyBytes + kValueStages * kValueBytes + kScratchBytes;
    // Shared memory available to a block; the system reserves 1024 bytes for each block.
    static constexpr int kMostBytes = (kMaxSharedBytes + 1024) / Spec::kBlocksPerSm - 1024;
    static constexpr bool kHoldsArray =
        common::kMayHoldArray<Spec> && kWithoutArray + kQueryBytes + kHeldBytes <= kMostBytes;
    static_assert(kHoldsArray || !kKeepsArray);
    static constexpr int kBesidesQueries = kWithoutArray + (kHoldsArray ? kHeldBytes : 0);
    // O has its own buffer if that fits, or one of two panels, through which it passes two panels at a time: Q of the
    // next query tile is loaded meanwhile. Where V has a head_dim of its own, it is one of all panels that fit. Else O
    // is stored through Q's buffer. If a second Q buffer fits beside all of O, Q is loaded one query tile ahead.
    static constexpr int kOutputBytes = kPanelsV * kQueryPanelBytes;
    static constexpr int kFreeBytes = kMostBytes - kBesidesQueries - kQueryBytes;
    static constexpr int kOutputPanels = kFreeBytes >= kOutputBytes ? kPanelsV
                                         : kIsPair                  ? common::max_of(kFreeBytes, 0) / kQueryPanelBytes
                                         : kPanelsV > 2 && kFreeBytes >= 2 * kQueryPanelBytes ? 2
                                                                                              : 0;
    static constexpr bool kOwnOutput = kOutputPanels > 0;
    static constexpr int kQueryBuffers = kFreeBytes >= kOutputBytes + kQueryBytes ? 2 : 1;
    static constexpr int kSharedBytes =
        kBesidesQueries + kQueryBuffers * kQueryBytes + kOutputPanels * kQueryPanelBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    // Two P tiles in registers: the exponentials of the next key tile then overlap with the product that reads P of the
    // present one. This needs registers for O, S, twice P, and kBesidesTiles more.
    static constexpr int kBesidesTiles = common::kNeedsRegisters<Spec> ? 72 : 48;
    static constexpr bool kTwoP = kDv / 2 + kBc / 2 + 2 * (kBc / 4) + kBesidesTiles <= kConsumerRegisters;
};

template <class Shape>
struct ForwardMemory : QueryTileMemory<Shape> {
    using QueryTileMemory<Shape>::QueryTileMemory;

    __device__ uint32 scratch(uint32 thread) const { return this->tile_slot(kTileSlots) + 4 * thread; }
};

}  // namespace fa2::sm90
