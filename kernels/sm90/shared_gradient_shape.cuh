// Sizes, shared-memory map and barriers of the kernels whose two consumer groups share the 64 rows of a gradient
// (shared_gradient_consumer.cuh).
#pragma once
#include "sm90/query_tile.cuh"
#include "sm90/shared_rows_consumer.cuh"

namespace fa2::sm90 {

// The position in a ring of kSlots panels, some of which are used at a time. The mbarrier phase of the n-th use of a slot
// (from 0) has parity n % 2.
template <int kSlots>
struct PanelPosition {
    uint32 turn = 0;  // panels used so far, modulo 2 * kSlots

    __device__ uint32 after(uint32 panels) const { return (turn + panels) % (2 * kSlots); }
    __device__ uint32 slot(uint32 panel) const { return after(panel) % kSlots; }
    __device__ uint32 parity(uint32 panel) const { return after(panel) / kSlots; }
    __device__ void advance(uint32 panels) { turn = after(panels); }
};

// kByKeys: the rows of the block are keys, and it computes dV or, with kDerives, dK. Else they are queries, of dQ. Tiles
// of the other side have a kept operand, which is multiplied by P or dS, and a passing one, which only one group reads:
//
//   gradient   operands of the block's rows   kept   passing
//   dQ         Q, dO                          K      V
//   dK         K, V                           Q      dO
//   dV         K                              dO     Q
template <class Spec, bool kByKeys_, bool kDerives_>
struct SharedGradientShape {
    static constexpr bool kByKeys = kByKeys_, kDerives = kDerives_, kHasSoftmax = false, kMovesExchange = true;
    static constexpr int kBr = kGroupRows;                       // of the block
    static constexpr int kBc = kByKeys ? Spec::kBr : Spec::kBc;  // of a tile of the other side
    static constexpr int kStages = Spec::kStages;                // of the kept operand
    static constexpr int kD = round_up(Spec::kHeadDim, 16), kDv = round_up(Spec::kHeadDimV, 16);
    static constexpr int kPanels = ceil_div(kD, kPanelColumns), kPanelsV = ceil_div(kDv, kPanelColumns);
    static_assert((kByKeys ? Spec::kBc : Spec::kBr) == kGroupRows && kBc % 16 == 0 && kStages >= 2);
    static_assert(Spec::kWarps == 12 && Spec::kBlocksPerSm == 1 && Spec::kCluster == 1);

    static constexpr int kColumns = kDerives ? Spec::kHeadDim : Spec::kHeadDimV;  // of the gradient
    static constexpr int kOwnPanels = ceil_div(kColumns, 2 * kPanelColumns), kOwnDv = kOwnPanels * kPanelColumns;
    static constexpr int kPassingPanels = kDerives ? kPanelsV : kPanels;

    static constexpr int kRowPanelBytes = kGroupRows * kPanelRowBytes, kPanelBytes = kBc * kPanelRowBytes;
    // The gradient is stored through the memory of the first operand.
    static constexpr int kFirstBytes = max_of(kPanels, 2 * kOwnPanels) * kRowPanelBytes,
                         kSecondBytes = kDerives ? kPanelsV * kRowPanelBytes : 0;
    static constexpr int kPartBytes = kOwnPanels * kPanelBytes, kKeptBytes = 2 * kPartBytes;
    static constexpr int kStatisticBytes = kByKeys ? kBc * 4 : 0;
    static constexpr int kBesidesPassing =
        kFirstBytes + kSecondBytes + kStages * kKeptBytes + 2 * kStages * kStatisticBytes;

    // Barriers and tile slots of a kernel whose tiles have so many passing panels. Blocks that own keys have those of dK and
    // of dV, one behind the other.
    __device__ static constexpr int control_bytes(int passing_panels) {
        return 8 * (4 + 5 * kStages + 2 * 2 * passing_panels + (kByKeys ? 0 : 2 * kTileSlots) + 4) +
               (kByKeys ? 0 : sizeof(QueryTile) * kTileSlots);
    }
    static constexpr int kControlBytes = control_bytes(kPanelsV) + (kByKeys ? control_bytes(kPanels) : 0);
    static constexpr int kRoom = kMaxSharedBytes - kAlignment - kControlBytes - kBesidesPassing;
    static constexpr int kSlots = min_of(2 * kPassingPanels, kRoom / kPanelBytes);  // of passing panels
    static constexpr int kDataBytes = kBesidesPassing + kSlots * kPanelBytes;
    // P is handed over in the last panel of its tile. Before a group reads it there, it has awaited the scores of the next
    // tile, for which dV needs the next tile's passing panels.
    static_assert(kSlots >= (kDerives ? kPassingPanels : 2 * kPassingPanels));

    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(registers_suffice(registers_at_entry(Spec::kWarps), 2, kProducerRegisters, kConsumerRegisters));
};

// Shared-memory addresses, from an aligned `base` on and, of barriers and tile slots, from `control` on.
template <class Shape_>
struct SharedGradientMemory {
    using Shape = Shape_;
    static constexpr uint32 kGroupWarps = kGroupThreads / 32;

    uint32 base, control;

    __device__ uint32 first() const { return base; }
    __device__ uint32 second() const { return base + Shape::kFirstBytes; }
    __device__ uint32 kept(uint32 stage, uint32 panel = 0) const {
        return second() + Shape::kSecondBytes + stage * Shape::kKeptBytes + panel * Shape::kPanelBytes;
    }
    __device__ uint32 passing(uint32 slot) const { return kept(Shape::kStages) + slot * Shape::kPanelBytes; }
    // Of blocks that own keys: -lse in base 2 and -delta of the queries of a tile.
    __device__ uint32 lse(uint32 stage) const { return passing(Shape::kSlots) + stage * Shape::kStatisticBytes; }
    __device__ uint32 delta(uint32 stage) const { return lse(Shape::kStages) + stage * Shape::kStatisticBytes; }

    __device__ uint32 tile_slot(uint32 slot) const { return control + sizeof(QueryTile) * slot; }
    __device__ uint32 barrier(uint32 index) const { return tile_slot(Shape::kByKeys ? 0 : kTileSlots) + 8 * index; }
    // Full: the data have arrived. Empty: all warps that read them have finished. Landed: TMA has written rows that are to
    // be cleared.
    __device__ uint32 full_first() const { return barrier(0); }
    __device__ uint32 full_second() const { return barrier(1); }
    __device__ uint32 empty_rows() const { return barrier(2); }
    __device__ uint32 landed() const { return barrier(3); }
    // Each group releases its own part of the columns of the kept operand.
    __device__ uint32 full_kept(uint32 stage, uint32 part) const { return barrier(4 + 2 * stage + part); }
    __device__ uint32 empty_kept(uint32 stage, uint32 part) const { return full_kept(Shape::kStages + stage, part); }
    __device__ uint32 full_statistics(uint32 stage) const { return full_kept(2 * Shape::kStages, 0) + 8 * stage; }
    __device__ uint32 full_passing(uint32 slot) const { return full_statistics(Shape::kStages) + 8 * slot; }
    __device__ uint32 empty_passing(uint32 slot) const { return full_passing(Shape::kSlots + slot); }
    __device__ uint32 handed_over() const { return full_passing(2 * Shape::kSlots); }
    __device__ uint32 full_tile(uint32 slot) const { return handed_over() + 8 * (kGroupWarps + slot); }
    __device__ uint32 empty_tile(uint32 slot) const { return full_tile(kTileSlots + slot); }

    __device__ void init_barriers() const {
        mbarrier_init(full_first(), 1);
        mbarrier_init(full_second(), 1);
        mbarrier_init(empty_rows(), 2 * kGroupWarps);
        mbarrier_init(landed(), 1);
        for (uint32 stage = 0; stage < Shape::kStages; ++stage) {
            for (uint32 part = 0; part < 2; ++part) {
                mbarrier_init(full_kept(stage, part), 1);
                mbarrier_init(empty_kept(stage, part), kGroupWarps);
            }
            mbarrier_init(full_statistics(stage), 1);
        }
        for (uint32 slot = 0; slot < Shape::kSlots; ++slot) {
            mbarrier_init(full_passing(slot), 1);
            mbarrier_init(empty_passing(slot), kGroupWarps);
        }
        for (uint32 i = 0; i < kGroupWarps; ++i) mbarrier_init(handed_over() + 8 * i, 1);
        if constexpr (!Shape::kByKeys)
            for (uint32 i = 0; i < kTileSlots; ++i) {
                mbarrier_init(full_tile(i), 1);
                mbarrier_init(empty_tile(i), 2 * kGroupWarps);
            }
        mbarrier_init_fence();
    }
};

}  // namespace fa2::sm90
