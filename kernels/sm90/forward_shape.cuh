// What the forward's two roles agree on: sizes, the shared-memory map and the barriers.
#pragma once
#include "common/score_mod.cuh"
#include "sm90/query_tile.cuh"

namespace fa2::sm90 {

template <class Spec>
struct ForwardShape {
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kStages = Spec::kStages;
    static constexpr int kGroups = kBr / kGroupRows;  // consumer warp groups
    static constexpr int kD = round_up(Spec::kHeadDim, 16);
    static constexpr int kPanels = ceil_div(kD, kPanelColumns);
    static_assert(kBr % kGroupRows == 0 && Spec::kWarps == 4 * (kGroups + 1) && kBc % 16 == 0 && kStages >= 2);

    // -------------------------------------------------------------------------------------------------- shared memory
    static constexpr int kQueryPanelBytes = kBr * kPanelRowBytes, kQueryBytes = kPanels * kQueryPanelBytes;
    static constexpr int kKeyPanelBytes = kBc * kPanelRowBytes, kKeyBytes = kPanels * kKeyPanelBytes;
    static constexpr int kRingBytes = 2 * kStages * kKeyBytes;
    static constexpr int kBarrierBytes = 8 * (4 + 4 * kStages + 2 * kTileSlots) + sizeof(QueryTile) * kTileSlots;
    static constexpr int kScratchBytes = 4 * 32 * Spec::kWarps;
    static constexpr int kBesidesQueries = kAlignment + kRingBytes + kBarrierBytes + kScratchBytes;
    // O has a buffer of its own if it fits, else it leaves through Q's; with what is left Q is loaded a tile ahead.
    static constexpr bool kOwnOutput = kBesidesQueries + 2 * kQueryBytes <= kMaxSharedBytes;
    static constexpr int kQueryBuffers = kBesidesQueries + 3 * kQueryBytes <= kMaxSharedBytes ? 2 : 1;
    static constexpr int kSharedBytes = kBesidesQueries + (kQueryBuffers + kOwnOutput) * kQueryBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    // ------------------------------------------------------------------------------------------------------ registers
    // All warps start with the same number. The producer keeps few, and the rest goes to the consumers in eights.
    static constexpr int kAtEntry = registers_at_entry(Spec::kWarps * Spec::kBlocksPerSm);
    static constexpr int kProducerRegisters = kGroups > 2 ? 32 : 24;
    static constexpr int kConsumerRegisters =
        min_of(240, (kAtEntry * (kGroups + 1) - kProducerRegisters) / kGroups / 8 * 8);
    static_assert(registers_suffice(kAtEntry, kGroups, kProducerRegisters, kConsumerRegisters));
    // P of two tiles at a time: the next one's exponentials then run under the product that uses this one's.
    static constexpr int kBesidesTiles = common::kNeedsRegisters<Spec> ? 72 : 48;
    static constexpr bool kTwoP = kD / 2 + kBc / 2 + 2 * (kBc / 4) + kBesidesTiles <= kConsumerRegisters;
};

// Where everything is.
template <class Shape>
struct ForwardMemory {
    uint32 base;

    __device__ explicit ForwardMemory(const char* dynamic_smem)
        : base((shared_address(dynamic_smem) + kAlignment - 1) & ~(kAlignment - 1u)) {}

    __device__ uint32 query(uint32 buffer) const { return base + buffer * Shape::kQueryBytes; }
    __device__ uint32 key(uint32 stage) const { return query(Shape::kQueryBuffers) + stage * Shape::kKeyBytes; }
    __device__ uint32 value(uint32 stage) const { return key(Shape::kStages) + stage * Shape::kKeyBytes; }
    __device__ uint32 output() const { return value(Shape::kStages); }
    __device__ uint32 barrier(uint32 index) const {
        return output() + Shape::kOwnOutput * Shape::kQueryBytes + 8 * index;
    }
    // Full: the data are there. Empty: all consumer warps are through with them.
    __device__ uint32 full_query(uint32 buffer) const { return barrier(buffer); }
    __device__ uint32 empty_query(uint32 buffer) const { return barrier(2 + buffer); }
    __device__ uint32 full_key(uint32 stage) const { return barrier(4 + stage); }
    __device__ uint32 empty_key(uint32 stage) const { return barrier(4 + Shape::kStages + stage); }
    __device__ uint32 full_value(uint32 stage) const { return barrier(4 + 2 * Shape::kStages + stage); }
    __device__ uint32 empty_value(uint32 stage) const { return barrier(4 + 3 * Shape::kStages + stage); }
    __device__ uint32 full_tile(uint32 slot) const { return barrier(4 + 4 * Shape::kStages + slot); }
    __device__ uint32 empty_tile(uint32 slot) const { return barrier(4 + 4 * Shape::kStages + kTileSlots + slot); }
    __device__ uint32 tile_slot(uint32 slot) const {
        return barrier(4 + 4 * Shape::kStages + 2 * kTileSlots) + sizeof(QueryTile) * slot;
    }
    __device__ uint32 scratch(uint32 thread) const { return tile_slot(kTileSlots) + 4 * thread; }

    __device__ void init_barriers() const {
        constexpr uint32 kConsumerWarps = 4 * Shape::kGroups;
        for (uint32 i = 0; i < 2; ++i) {
            mbarrier_init(full_query(i), 1);
            mbarrier_init(empty_query(i), kConsumerWarps);
        }
        for (uint32 i = 0; i < Shape::kStages; ++i) {
            mbarrier_init(full_key(i), 1);
            mbarrier_init(full_value(i), 1);
            mbarrier_init(empty_key(i), kConsumerWarps);
            mbarrier_init(empty_value(i), kConsumerWarps);
        }
        for (uint32 i = 0; i < kTileSlots; ++i) {
            mbarrier_init(full_tile(i), 1);
            mbarrier_init(empty_tile(i), kConsumerWarps);
        }
        mbarrier_init_fence();
    }
};

}  // namespace fa2::sm90
