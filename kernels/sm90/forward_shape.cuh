// Sizes and shared-memory map of the forward: what it adds to query_tile_shape.cuh.
#pragma once
#include "common/score_mod.cuh"
#include "common/start_from_bias.cuh"
#include "sm90/query_tile_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
struct ForwardShape : QueryTileShape<Spec, 1> {
    using Base = QueryTileShape<Spec, 1>;
    using Base::kBc, Base::kDv, Base::kGroups, Base::kStages;
    using Base::kFixedBytes, Base::kIsPair, Base::kKeepsArray, Base::kKeyBytes, Base::kPanelsV, Base::kQueryBytes,
        Base::kSequences, Base::kValueBytes;
    static constexpr int kPanelBytes = kSequences * Base::kQueryPanelBytes;

    static constexpr bool kKeysFirst = false;  // K of a query tile is loaded before its Q
    static constexpr int kValueStages = kStages;
    static constexpr int kScratchBytes = 4 * 32 * Spec::kWarps;
    static constexpr int kWithoutArray = kFixedBytes + kStages * kKeyBytes + kValueStages * kValueBytes + kScratchBytes;
    static constexpr int kMostBytes = most_shared_bytes(Spec::kBlocksPerSm);
    // True if S starts from the bias. What is done to it then is what kernels without a bias do. The producer loads it for
    // a group, unless the block keeps it.
    static constexpr bool kStarts = common::kStartsFromBias<Spec>;
    using AfterStart = common::AfterStart<Spec>;
    static constexpr int kHeldBytes = Base::kHeldBytes + (kStarts && !kKeepsArray ? 2 * 8 * Base::kGroups : 0);
    static constexpr bool kHasRoom =
        common::kMayHoldArray<Spec> && kWithoutArray + kQueryBytes + kHeldBytes <= kMostBytes;
    static_assert(kHasRoom || !kKeepsArray);
    static constexpr bool kLoadsStart = kHasRoom && kStarts && !kKeepsArray, kHoldsArray = kHasRoom && !kLoadsStart;
    using Start = common::BiasOfQueries<typename Spec::Element, kBc>;  // of a warp
    using GroupStart = common::BiasTile<kGroupRows, kBc>;
    static_assert(GroupStart::kBytes == 4 * Start::Tile::kBytes);
    static constexpr int kBesidesQueries = kWithoutArray + (kHasRoom ? kHeldBytes : 0);
    // O has its own buffer if that fits, or one of two panels, through which it passes two panels at a time: Q of the
    // next query tile is loaded meanwhile. Where V has a head_dim of its own, it is one of all panels that fit. Else O
    // is stored through Q's buffer. If a second Q buffer fits beside all of O, Q is loaded one query tile ahead.
    static constexpr int kOutputBytes = kPanelsV * kPanelBytes;
    static constexpr int kFreeBytes = kMostBytes - kBesidesQueries - kQueryBytes;
    static constexpr int kOutputPanels = kFreeBytes >= kOutputBytes ? kPanelsV
                                         : kIsPair                  ? common::max_of(kFreeBytes, 0) / kPanelBytes
                                         : kPanelsV > 2 && kFreeBytes >= 2 * kPanelBytes ? 2
                                                                                         : 0;
    static constexpr bool kOwnOutput = kOutputPanels > 0;
    static constexpr int kQueryBuffers = kFreeBytes >= kOutputBytes + kQueryBytes ? 2 : 1;
    static constexpr int kSharedBytes = kBesidesQueries + kQueryBuffers * kQueryBytes + kOutputPanels * kPanelBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    // As in query_tile_shape.cuh; the warps that load the bias need more.
    static constexpr int kProducerRegisters = common::kHasBoxes<Spec> && kGroups <= 2 ? 48
                                              : kLoadsStart                           ? 32
                                                                                      : Base::kProducerRegisters,
                         kConsumerRegisters = Base::consumer_registers(kProducerRegisters);
    static_assert(registers_suffice(Base::kAtEntry, kGroups, kProducerRegisters, kConsumerRegisters));

    // Two P tiles in registers: the exponentials of the next key tile then overlap with the product that reads P of the
    // present one. This needs registers for O, S, twice P, and kBesidesTiles more. Groups that keep the bias take turns
    // instead: a multiprocessor has no others, and in step they would leave it idle together.
    static constexpr int kBesidesTiles = common::kNeedsRegisters<Spec> ? 72 : 48;
    static constexpr bool kTwoP =
        (!kKeepsArray || kGroups == 1) && kDv / 2 + kBc / 2 + 2 * (kBc / 4) + kBesidesTiles <= kConsumerRegisters;
    static constexpr bool kTakeTurns = !kTwoP && kGroups > 1;
    // Skipping more could deadlock: this group would wait for a K whose stage other groups still hold, while they wait
    // for its turn or for a V whose stage it has not released.
    static constexpr int kMaxSkipped =
        common::kListsTiles<Spec> ? 0 : min_of(ceil_div(Base::kBr - kGroupRows, kBc), kTakeTurns ? 1 : 2);
};

template <class Shape>
struct ForwardMemory : QueryTileMemory<Shape> {
    using QueryTileMemory<Shape>::QueryTileMemory;

    __device__ uint32 scratch(uint32 thread) const { return this->tile_slot(kTileSlots) + 4 * thread; }
    // The bias of a group's rows, and its barriers.
    __device__ uint32 start(uint32 group) const { return this->held() + group * Shape::GroupStart::kBytes; }
    __device__ uint32 full_start(uint32 group) const { return start(Shape::kGroups) + 16 * group; }
    __device__ uint32 empty_start(uint32 group) const { return full_start(group) + 8; }

    __device__ void init_barriers() const {
        if constexpr (Shape::kLoadsStart)
            for (uint32 group = 0; group < Shape::kGroups; ++group) {
                mbarrier_init(full_start(group), 32);
                mbarrier_init(empty_start(group), 4);
            }
        QueryTileMemory<Shape>::init_barriers(Shape::kLoadsStart ? Shape::kGroups : 0);
    }
};

}  // namespace fa2::sm90
