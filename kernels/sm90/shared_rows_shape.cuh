// Sizes, shared-memory map and barriers of the forward whose two consumer groups share their rows
// (shared_rows_consumer.cuh).
#pragma once
#include "sm90/query_tile_shape.cuh"
#include "sm90/shared_rows_consumer.cuh"

namespace fa2::sm90 {

template <class Spec>
struct SharedRowsShape : QueryTileShape<Spec, 1, 1, 1, 2> {
    using Base = QueryTileShape<Spec, 1, 1, 1, 2>;
    using Base::kBc, Base::kDividers, Base::kDv, Base::kKeyBytes, Base::kPanels, Base::kPanelsV, Base::kQueryPanelBytes,
        Base::kStages, Base::kValueBytes;
    // A group waits for K of its own key tiles only. Before it waits for that of tile t, it has read P of t - 3, but not of
    // t - 1: with one stage, the barrier could still be in the phase of t - 1, whose predecessor has the parity of t.
    static_assert(kStages >= 2);
    static_assert(Base::kBr == kGroupRows && Spec::kCluster <= 2 && Spec::kBlocksPerSm == 1 && !Base::kKeepsArray);

    static constexpr int kColumns = Spec::kHeadDimV;                                   // of O
    static constexpr int kOwnPanels = kPanelsV / kDividers, kOwnDv = kDv / kDividers;  // of a group's part
    static constexpr bool kDerives = false, kHasSoftmax = true, kMovesExchange = false;
    static constexpr int kQueryBuffers = 1, kOutputPanels = 0;
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(registers_suffice(Base::kAtEntry, 2, kProducerRegisters, kConsumerRegisters));
    static constexpr bool kHoldsArray = false, kLoadsStart = false;
    using AfterStart = Spec;                  // S starts from nothing
    static constexpr bool kKeysFirst = true;  // Q has to wait until O of the last tile has left its buffer
    // Each group has its own part of V, with barriers of its own.
    static constexpr int kMostValueStages = 2;
    static constexpr int kBarriers = 2 + 2 * kStages + 2 * kDividers * kMostValueStages + 2 * kTileSlots + 4;
    // O is stored through Q's buffer, which has room for both.
    static constexpr int kQueryBytes = max_of(kPanels, kPanelsV) * kQueryPanelBytes;
    static constexpr int kBesidesValues = kAlignment + kQueryBytes + kStages * kKeyBytes + ExchangedTile<kBc>::kBytes +
                                          8 * kBarriers + sizeof(QueryTile) * kTileSlots;
    static constexpr int kValueStages =
        max_of(1, min_of(kMostValueStages, (kMaxSharedBytes - kBesidesValues) / kValueBytes));
    static constexpr int kSharedBytes = kBesidesValues + kValueStages * kValueBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);
};

// Shared-memory addresses of operands, barriers and tile slots. Barriers of V have the number of a stage and a part.
template <class Shape>
struct SharedRowsMemory {
    static constexpr int kStages = Shape::kStages, kValueStages = Shape::kValueStages;

    uint32 base;

    __device__ explicit SharedRowsMemory(const char* dynamic_smem)
        : base((shared_address(dynamic_smem) + kAlignment - 1) & ~(kAlignment - 1u)) {}

    __device__ uint32 query(uint32) const { return base; }
    __device__ uint32 key(uint32 stage) const { return base + Shape::kQueryBytes + stage * Shape::kKeyBytes; }
    __device__ uint32 value(uint32 stage) const { return key(kStages) + stage * Shape::kValueBytes; }
    __device__ uint32 exchange() const { return value(kValueStages); }
    __device__ uint32 tile_slot(uint32 slot) const {
        return exchange() + ExchangedTile<Shape::kBc>::kBytes + sizeof(QueryTile) * slot;
    }
    __device__ uint32 barrier(uint32 index) const { return tile_slot(kTileSlots) + 8 * index; }
    // Full: the data have arrived. Empty: all warps that read them have finished.
    __device__ uint32 full_query(uint32) const { return barrier(0); }
    __device__ uint32 empty_query(uint32) const { return barrier(1); }
    __device__ uint32 full_key(uint32 stage) const { return barrier(2 + stage); }
    __device__ uint32 empty_key(uint32 stage) const { return full_key(kStages + stage); }
    __device__ uint32 full_value(uint32 stage, uint32 part) const {
        return full_key(2 * kStages) + 8 * (Shape::kDividers * stage + part);
    }
    __device__ uint32 empty_value(uint32 stage, uint32 part) const { return full_value(kValueStages + stage, part); }
    __device__ uint32 full_tile(uint32 slot) const { return full_value(2 * kValueStages, 0) + 8 * slot; }
    __device__ uint32 empty_tile(uint32 slot) const { return full_tile(kTileSlots + slot); }
    __device__ uint32 handed_over() const { return full_tile(2 * kTileSlots); }

    __device__ void init_barriers() const {
        constexpr uint32 kGroupWarps = kGroupThreads / 32;
        mbarrier_init(full_query(0), 1);
        mbarrier_init(empty_query(0), 2 * kGroupWarps);
        for (uint32 stage = 0; stage < kStages; ++stage) {
            mbarrier_init(full_key(stage), 1);
            mbarrier_init(empty_key(stage), Shape::kCluster * kGroupWarps);
        }
        for (uint32 stage = 0; stage < kValueStages; ++stage)
            for (uint32 part = 0; part < Shape::kDividers; ++part) {
                mbarrier_init(full_value(stage, part), 1);
                mbarrier_init(empty_value(stage, part), Shape::kCluster * kGroupWarps);
            }
        for (uint32 i = 0; i < kTileSlots; ++i) {
            mbarrier_init(full_tile(i), 1);
            mbarrier_init(empty_tile(i), 2 * kGroupWarps);
        }
        for (uint32 i = 0; i < kGroupWarps; ++i) mbarrier_init(handed_over() + 8 * i, 1);
        mbarrier_init_fence();
    }
};

}  // namespace fa2::sm90
