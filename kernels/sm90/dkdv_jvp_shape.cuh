// For the tangents of dK and dV: the sizes, shared-memory map and barriers that producer and consumers share.
#pragma once
#include "sm90/backward_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
struct DkdvJvpShape {
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kStages = Spec::kStages;
    static constexpr int kD = round_up(Spec::kHeadDim, 16), kDv = round_up(Spec::kHeadDimV, 16);
    static constexpr int kPanelRowBytes = sm90::kPanelRowBytes;
    static constexpr int kPanels = ceil_div(kD, kPanelColumns), kPanelsV = ceil_div(kDv, kPanelColumns);
    static constexpr int kGroups = 2;  // consumer warp groups
    static_assert(Spec::kWarps == 4 * (kGroups + 1) && Spec::kBlocksPerSm == 1 && kStages >= 2);
    static_assert(kBc == kGroups * kGroupRows && kBr % 16 == 0 && kBr <= 64);

    // -------------------------------------------------------------------------------------------------- shared memory
    static constexpr int kKeyPanelBytes = kBc * kPanelRowBytes;
    static constexpr int kKeyBytes = kPanels * kKeyPanelBytes, kValueBytes = kPanelsV * kKeyPanelBytes;
    // In each panel of Q and of dO, the rows of the tangent follow those of the tile.
    static constexpr int kTileRowsBytes = kBr * kPanelRowBytes;
    static constexpr int kQueryPanelBytes = (1 + Spec::kQueryTangent) * kTileRowsBytes;
    static constexpr int kDoutPanelBytes = (1 + Spec::kDoutTangent) * kTileRowsBytes;
    static constexpr int kQueryBytes = kPanels * kQueryPanelBytes, kDoutBytes = kPanelsV * kDoutPanelBytes;
    static constexpr int kStatisticBytes = kBr * 8;  // a statistic and its tangent for each query
    // Where parts begin.
    static constexpr int kKeyTangentAt = kKeyBytes, kValueAt = (1 + Spec::kKeyTangent) * kKeyBytes;
    static constexpr int kValueTangentAt = kValueAt + kValueBytes;
    static constexpr int kQueryAt = kValueAt + (1 + Spec::kValueTangent) * kValueBytes;
    static constexpr int kDoutAt = kQueryAt + kStages * kQueryBytes, kLseAt = kDoutAt + kStages * kDoutBytes;
    static constexpr int kDeltaAt = kLseAt + kStages * kStatisticBytes;
    static constexpr int kBarriersAt = kDeltaAt + kStages * kStatisticBytes;
    static constexpr int kSharedBytes = kAlignment + kBarriersAt + 8 * (4 + 4 * kStages);
    static_assert(kSharedBytes == Spec::kSharedBytes);

    // ------------------------------------------------------------------------------------------------------ registers
    // True if S^T and K Q'^T are one product: registers suffice for accumulators of K' Q^T besides.
    static constexpr bool kJoinsScores = kBr <= 32 || 2 * kBr + (kD + kDv) / 2 <= 160;
    // A producer has the statistics of a query, or of two, in each lane.
    static constexpr int kProducerRegisters = kBr > 32 ? 40 : 24, kConsumerRegisters = kBr > 32 ? 232 : 240;
    static_assert(registers_suffice(registers_at_entry(Spec::kWarps), kGroups, kProducerRegisters, kConsumerRegisters));
};

// Shared-memory addresses of operands, statistics and barriers.
template <class Shape>
struct DkdvJvpMemory {
    uint32 base;

    __device__ explicit DkdvJvpMemory(const char* dynamic_smem)
        : base((shared_address(dynamic_smem) + kAlignment - 1) & ~(kAlignment - 1u)) {}

    __device__ uint32 key() const { return base; }
    __device__ uint32 key_tangent() const { return base + Shape::kKeyTangentAt; }
    __device__ uint32 value() const { return base + Shape::kValueAt; }
    __device__ uint32 value_tangent() const { return base + Shape::kValueTangentAt; }
    __device__ uint32 query(uint32 stage) const { return base + Shape::kQueryAt + stage * Shape::kQueryBytes; }
    __device__ uint32 dout(uint32 stage) const { return base + Shape::kDoutAt + stage * Shape::kDoutBytes; }
    __device__ uint32 lse(uint32 stage) const { return base + Shape::kLseAt + stage * Shape::kStatisticBytes; }
    __device__ uint32 delta(uint32 stage) const { return base + Shape::kDeltaAt + stage * Shape::kStatisticBytes; }
    __device__ uint32 barrier(uint32 index) const { return base + Shape::kBarriersAt + 8 * index; }
    // As in the backward, with their tangents; lse comes with Q, delta with dO.
    __device__ uint32 full_key() const { return barrier(0); }
    __device__ uint32 full_value() const { return barrier(1); }
    __device__ uint32 landed_query() const { return barrier(2); }
    __device__ uint32 landed_dout() const { return barrier(3); }
    __device__ uint32 full_query(uint32 stage) const { return barrier(4 + stage); }
    __device__ uint32 empty_query(uint32 stage) const { return barrier(4 + Shape::kStages + stage); }
    __device__ uint32 full_dout(uint32 stage) const { return barrier(4 + 2 * Shape::kStages + stage); }
    __device__ uint32 empty_dout(uint32 stage) const { return barrier(4 + 3 * Shape::kStages + stage); }

    __device__ void init_barriers() const {
        constexpr uint32 kWarpSize = 32, kConsumerWarps = 4 * Shape::kGroups;
        for (uint32 i = 0; i < 4; ++i) mbarrier_init(barrier(i), 1);
        for (uint32 i = 0; i < Shape::kStages; ++i) {
            mbarrier_init(full_query(i), 1 + kWarpSize);  // the thread that issues TMA, and the lanes of the statistics
            mbarrier_init(full_dout(i), 1 + kWarpSize);
            mbarrier_init(empty_query(i), kConsumerWarps);
            mbarrier_init(empty_dout(i), kConsumerWarps);
        }
        mbarrier_init_fence();
    }
};

}  // namespace fa2::sm90
