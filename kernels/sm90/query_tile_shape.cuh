// For kernels whose blocks own query tiles: the sizes, shared-memory map and barriers that producer and consumers
// share. kOperands: the number of operands with the query tile's rows, 1 (Q) or 2 (Q and dO). kParts: the number of
// matrices that stand for one operand; their panels lie one after the other. kSharers: the number of consumer warp
// groups that have the same 64 rows, and take turns at their key tiles. kDividers: the number of those that have the same
// 64 rows and key tiles, and divide the columns of V.
#pragma once
#include "common/held_array.cuh"
#include "sm90/query_tile.cuh"

namespace fa2::sm90 {

template <class Spec, int kOperands_, int kParts_ = 1, int kSharers_ = 1, int kDividers_ = 1>
struct QueryTileShape {
    static constexpr int kOperands = kOperands_, kParts = kParts_;
    static constexpr int kBr = Spec::kBr / Spec::kCluster;  // of the block
    static constexpr int kBc = Spec::kBc, kStages = Spec::kStages;
    static constexpr int kCluster = Spec::kCluster;  // blocks that divide the rows of a tile
    static constexpr int kSharers = kSharers_, kDividers = kDividers_, kSequences = sm90::kSequences<Spec>;
    // Several sequences have few columns, which would leave half of a wide panel empty.
    static constexpr int kPanelColumns = kSequences > 1 ? 32 : sm90::kPanelColumns, kPanelRowBytes = 2 * kPanelColumns;
    static constexpr int kGroups = kBr / kGroupRows * kSharers * kDividers * kSequences;  // consumer warp groups
    static constexpr int kD = round_up(Spec::kHeadDim, 16);
    static constexpr int kDv =
        round_up(Spec::kHeadDimV, kDividers == 1 ? 16 : kDividers * kPanelColumns);  // columns of V, O and dO
    static constexpr bool kIsPair = Spec::kHeadDim != Spec::kHeadDimV;
    static constexpr int kPanels = kParts * ceil_div(kD, kPanelColumns),
                         kPanelsV = kParts * ceil_div(kDv, kPanelColumns);
    static_assert(kBr % kGroupRows == 0 && Spec::kWarps == 4 * (kGroups + 1) && kBc % 16 == 0);

    // False if groups may not start one after the other (query_tile_loop.cuh).
    static constexpr bool kMayStagger = true;

    // -------------------------------------------------------------------------------------------------- shared memory
    // True if a panel of K or V is followed by that of its tangent, false if all panels of an operand are.
    static constexpr bool kInterleaves = false;
    static constexpr int kQueryPanelBytes = kBr * kPanelRowBytes;
    static constexpr int kQueryBytes = kSequences * kPanels * kQueryPanelBytes,
                         kDoutBytes = kPanelsV * kQueryPanelBytes;
    static constexpr int kKeyPanelBytes = kBc * kPanelRowBytes;
    static constexpr int kKeyBytes = kSequences * kPanels * kKeyPanelBytes,
                         kValueBytes = kSequences * kPanelsV * kKeyPanelBytes;
    // From the rows of a group to those of the next one, in Q, K and V.
    static constexpr int kGroupBytes = kSequences > 1 ? kQueryBytes / kSequences : kGroupRows * kPanelRowBytes,
                         kGroupKeyBytes = kSequences > 1 ? kKeyBytes / kSequences : 0,
                         kGroupValueBytes = kSequences > 1 ? kValueBytes / kSequences : 0;
    static constexpr int kBarriers = 4 * kOperands + 4 * kStages + 2 * kTileSlots;
    static constexpr int kFixedBytes = kAlignment + 8 * kBarriers + sizeof(QueryTile) * kTileSlots;
    // A kernel that keeps the bias holds the tiles of all keys, else that of one key tile.
    static constexpr bool kKeepsArray = common::kHasSeries<Spec>;
    static constexpr int kHeldTiles = kKeepsArray ? ceil_div(Spec::kKeptKeys, kBc) : 1;
    static constexpr int kHeldBytes = kBr / 16 * kHeldTiles * common::HeldOfQueries<Spec, kBc>::Tile::kBytes;
    static constexpr int kScratchBytes = 0;

    // ------------------------------------------------------------------------------------------------------ registers
    // All warps start with the same number. The producer keeps few; the consumers share the rest, in multiples of 8.
    static constexpr int kAtEntry = registers_at_entry(Spec::kWarps * Spec::kResidentBlocks);
    static constexpr int kProducerRegisters = kGroups > 2 ? 32 : 24;
    __device__ static constexpr int consumer_registers(int producer) {
        return min_of(240, (kAtEntry * (kGroups + 1) - producer) / kGroups / 8 * 8);
    }
    static constexpr int kConsumerRegisters = consumer_registers(kProducerRegisters);
    static_assert(registers_suffice(kAtEntry, kGroups, kProducerRegisters, kConsumerRegisters));
};

// Shared-memory addresses of operands, barriers and tile slots.
template <class Shape>
struct QueryTileMemory {
    static constexpr int kStages = Shape::kStages, kFirstKeyBarrier = 4 * Shape::kOperands;

    uint32 base;

    __device__ explicit QueryTileMemory(const char* dynamic_smem)
        : base((shared_address(dynamic_smem) + kAlignment - 1) & ~(kAlignment - 1u)) {}

    __device__ uint32 query(uint32 buffer) const { return base + buffer * Shape::kQueryBytes; }
    __device__ uint32 dout(uint32 buffer) const { return query(Shape::kQueryBuffers) + buffer * Shape::kDoutBytes; }
    __device__ uint32 key(uint32 stage) const {
        return dout((Shape::kOperands - 1) * Shape::kQueryBuffers) + stage * Shape::kKeyBytes;
    }
    __device__ uint32 value(uint32 stage) const { return key(kStages) + stage * Shape::kValueBytes; }
    __device__ uint32 output() const { return value(Shape::kValueStages); }
    __device__ uint32 barrier(uint32 index) const {
        return output() + Shape::kSequences * Shape::kOutputPanels * Shape::kQueryPanelBytes + 8 * index;
    }
    // Full: the data have arrived. Empty: all consumer warps have finished reading them.
    __device__ uint32 full_query(uint32 buffer) const { return barrier(buffer); }
    __device__ uint32 empty_query(uint32 buffer) const { return barrier(2 + buffer); }
    __device__ uint32 full_dout(uint32 buffer) const { return barrier(4 + buffer); }
    __device__ uint32 empty_dout(uint32 buffer) const { return barrier(6 + buffer); }
    __device__ uint32 full_key(uint32 stage) const { return barrier(kFirstKeyBarrier + stage); }
    __device__ uint32 empty_key(uint32 stage) const { return barrier(kFirstKeyBarrier + kStages + stage); }
    __device__ uint32 full_value(uint32 stage) const { return barrier(kFirstKeyBarrier + 2 * kStages + stage); }
    __device__ uint32 empty_value(uint32 stage) const { return barrier(kFirstKeyBarrier + 3 * kStages + stage); }
    __device__ uint32 full_tile(uint32 slot) const { return barrier(kFirstKeyBarrier + 4 * kStages + slot); }
    __device__ uint32 empty_tile(uint32 slot) const { return full_tile(kTileSlots + slot); }
    __device__ uint32 tile_slot(uint32 slot) const { return barrier(Shape::kBarriers) + sizeof(QueryTile) * slot; }

    __device__ uint32 held() const { return tile_slot(kTileSlots) + Shape::kScratchBytes; }

    // `slot_readers`: the warps that read slots besides those of consumers.
    __device__ void init_barriers(uint32 slot_readers = 0) const {
        constexpr uint32 kConsumerWarps = 4 * Shape::kGroups, kStageReaders = kConsumerWarps / Shape::kSharers;
        for (uint32 i = 0; i < 2; ++i) {
            mbarrier_init(full_query(i), 1);
            if constexpr (Shape::kOperands == 2) mbarrier_init(full_dout(i), 1);
            mbarrier_init(empty_query(i), kConsumerWarps);
            if constexpr (Shape::kOperands == 2) mbarrier_init(empty_dout(i), kConsumerWarps);
        }
        for (uint32 i = 0; i < kStages; ++i) {
            mbarrier_init(full_key(i), 1);
            mbarrier_init(full_value(i), 1);
            mbarrier_init(empty_key(i), kStageReaders);
            mbarrier_init(empty_value(i), kStageReaders);
        }
        for (uint32 i = 0; i < kTileSlots; ++i) {
            mbarrier_init(full_tile(i), 1);
            mbarrier_init(empty_tile(i), kConsumerWarps + slot_readers);
        }
        mbarrier_init_fence();
    }
};

}  // namespace fa2::sm90
