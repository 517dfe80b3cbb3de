// Sizes, shared-memory map and barriers of the kernel of dbias, which producer and consumers share.
#pragma once
#include "common/held_array.cuh"
#include "common/key_padding.cuh"
#include "common/score_arrays.cuh"
#include "sm90/layout.cuh"

namespace fa2::sm90 {

template <class Spec>
struct DbiasShape {
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kStages = Spec::kStages;
    static constexpr int kGroups = kBr / kGroupRows, kConsumers = kGroups * kGroupThreads;
    static constexpr int kD = round_up(Spec::kHeadDim, 16), kDv = round_up(Spec::kHeadDimV, 16);
    // Few columns would leave half of a wide panel empty.
    static constexpr int kPanelColumns = max_of(kD, kDv) <= 32 ? 32 : sm90::kPanelColumns;
    static constexpr int kPanelRowBytes = 2 * kPanelColumns;
    static constexpr int kPanels = ceil_div(kD, kPanelColumns), kPanelsV = ceil_div(kDv, kPanelColumns);
    static_assert(kBr % kGroupRows == 0 && Spec::kWarps == 4 * (kGroups + 1) && kBc % 16 == 0);

    // The block keeps its tile of the bias in shared memory if that has room for it. Masks may hide keys beside it; with
    // other features of scores, the bias is read in global memory at each step.
    using Bias = common::BiasOfQueries<typename Spec::Element, kBc>;
    static constexpr int kQueryPanelBytes = kBr * kPanelRowBytes, kKeyPanelBytes = kBc * kPanelRowBytes;
    static constexpr int kDout = kPanels * kQueryPanelBytes, kKey = kDout + kPanelsV * kQueryPanelBytes,
                         kValue = kKey + kPanels * kKeyPanelBytes;
    static constexpr int kStageBytes = kValue + kPanelsV * kKeyPanelBytes;
    static constexpr int kRowBytes = 8 * kBr, kPaddingAt = 32, kStepBytes = kPaddingAt + 16 * ceil_div(kBc, 128);
    static constexpr int kWithoutBias = kAlignment + kStages * (kStageBytes + kRowBytes + kStepBytes + 2 * 8);
    static constexpr int kMostBytes = most_shared_bytes(Spec::kBlocksPerSm);
    static constexpr int kOwnBytes = kBr / 16 * Bias::Tile::kBytes;
    static constexpr bool kKeepsBias = common::kChangesOfScores<Spec> == 1 && kWithoutBias + kOwnBytes <= kMostBytes;
    static constexpr int kBiasBytes = kKeepsBias ? kOwnBytes : 0;
    static constexpr int kSharedBytes = kWithoutBias + kBiasBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes && kConsumers / 32 * kBc * 4 <= kStageBytes);

    // As in query_tile_shape.cuh.
    static constexpr int kAtEntry = registers_at_entry(Spec::kWarps * Spec::kResidentBlocks);
    static constexpr int kProducerRegisters = common::kPadsKeys<Spec> ? 56 : 40;
    static constexpr int kConsumerRegisters =
        min_of(240, (kAtEntry * (kGroups + 1) - kProducerRegisters) / kGroups / 8 * 8);
    static_assert(registers_suffice(kAtEntry, kGroups, kProducerRegisters, kConsumerRegisters));
};

// The specialisation as functions of scores see it: the key padding mask is applied to weights.
template <class Spec>
struct WithOwnedBias : common::WithoutKeyPadding<Spec> {
    static constexpr bool kKeepsBias = DbiasShape<Spec>::kKeepsBias;
};

template <class Shape>
struct DbiasMemory {
    uint32 base;

    __device__ explicit DbiasMemory(const char* dynamic_smem)
        : base((shared_address(dynamic_smem) + kAlignment - 1) & ~(kAlignment - 1u)) {}

    // Q, dO, K and V of a stage.
    __device__ uint32 stage(uint32 slot) const { return base + slot * Shape::kStageBytes; }
    // The tile of the bias of a warp's rows.
    __device__ uint32 bias(int32 warp) const { return stage(Shape::kStages) + warp * Shape::Bias::Tile::kBytes; }
    // lse and delta of a stage's row.
    __device__ uint32 row(uint32 slot, int32 row) const {
        return stage(Shape::kStages) + Shape::kBiasBytes + slot * Shape::kRowBytes + 8 * row;
    }
    // The BiasStep of a stage; a batch of -1 ends the work.
    __device__ uint32 step(uint32 slot) const { return row(Shape::kStages, 0) + slot * Shape::kStepBytes; }
    // The ballots of its keys that the padding leaves.
    __device__ uint32 padding(uint32 slot) const { return step(slot) + Shape::kPaddingAt; }
    // Full: the step, the statistics and the data are there. Empty: all consumer warps have finished reading them.
    __device__ uint32 full(uint32 slot) const { return step(Shape::kStages) + 8 * slot; }
    __device__ uint32 empty(uint32 slot) const { return full(Shape::kStages + slot); }

    __device__ void init_barriers() const {
        for (uint32 slot = 0; slot < Shape::kStages; ++slot) {
            mbarrier_init(full(slot), 2);  // both warps of the producer
            mbarrier_init(empty(slot), 4 * Shape::kGroups);
        }
        mbarrier_init_fence();
    }
};

}  // namespace fa2::sm90
