// Sizes, shared-memory map and barriers of the dK and dV kernel, and of the kernel that computes dQ as well.
//
// Where Q and dO pass through shared memory in pieces, a stage holds one piece, and statistics have stages and barriers of
// their own. Two warp groups then have the same 64 keys, one for dK and one for dV.
#pragma once
#include "common/tile_lists.cuh"
#include "sm90/dq_workspace.cuh"
#include "sm90_float32/load_rows.cuh"

namespace fa2::sm90_float32 {

template <class Spec, bool kDq>
struct DkdvShape {
    static constexpr bool kWithDq = kDq;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kStages = Spec::kStages;
    static constexpr bool kInPieces = kNeedsPieces<Spec>;
    static constexpr int kGroups = (kInPieces ? 2 : 1) * kBc / kGroupRows;  // consumer warp groups
    static constexpr int kD = round_up(Spec::kHeadDim, 16), kPanels = ceil_div(kD, kPanelColumns);
    static constexpr int kDv = round_up(Spec::kHeadDimV, 16), kPanelsV = ceil_div(kDv, kPanelColumns);
    static_assert(kBr % kUnitRows == 0 && kBc % kGroupRows == 0 && Spec::kWarps == 4 * (kGroups + 1));
    static_assert(!kInPieces || (kBr == kUnitRows && kBc == kGroupRows && !kDq));

    static constexpr int kKeyBytes = kParts * kPanels * kBc * kPanelRowBytes;
    static constexpr int kValueBytes = kParts * kPanelsV * kBc * kPanelRowBytes;
    static constexpr int kQueryBytes = kInPieces ? kPieceBytes : kParts * kPanels * kBr * kPanelRowBytes;  // of a stage
    static constexpr int kDoutBytes = kInPieces ? kPieceBytes : kParts * kPanelsV * kBr * kPanelRowBytes;
    // dS of a warp group's 64 keys, as the left operand of dQ: a panel of queries by keys for each part.
    static constexpr int kDsPanelBytes = kBr * kPanelRowBytes, kDsBytes = kDq ? kParts * kDsPanelBytes : 0;
    static constexpr int kStatisticBytes = 4 * kBr, kStatisticStages = kInPieces ? 2 : kStages;
    static constexpr int kBarriersOfStatistics = kInPieces ? 2 * kStatisticStages : 0;
    static constexpr int kBarrierBytes = 8 * (2 + 4 * kStages + (kDq ? 2 * kGroups : 0) + kBarriersOfStatistics);
    static constexpr int kUnitBytes = kDq ? 4 * 4 : 0;  // of a warp group's dS, one for each warp
    static constexpr int kWithoutDout = kAlignment + kKeyBytes + kValueBytes + kStages * kQueryBytes +
                                        kStatisticStages * 2 * kStatisticBytes + kGroups * (kDsBytes + kUnitBytes) +
                                        kBarrierBytes;
    // dO has one stage where shared memory does not hold as many as Q has.
    static constexpr int kDoutStages = kWithoutDout + kStages * kDoutBytes <= kMaxSharedBytes ? kStages : 1;
    static constexpr int kSharedBytes = kWithoutDout + kDoutStages * kDoutBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes && (!kInPieces || kDoutStages == kStages));

    static constexpr int kProducerRegisters = kInPieces ? 40 : 24, kConsumerRegisters = kInPieces ? 232 : 240;
    static_assert(registers_suffice(registers_at_entry(Spec::kWarps), kGroups, kProducerRegisters, kConsumerRegisters));
};

template <class Shape>
struct DkdvMemory {
    static constexpr int kStages = Shape::kStages;

    uint32 base;

    __device__ explicit DkdvMemory(const char* dynamic_smem)
        : base((shared_address(dynamic_smem) + kAlignment - 1) & ~(kAlignment - 1u)) {}

    __device__ uint32 key() const { return base; }
    __device__ uint32 value() const { return base + Shape::kKeyBytes; }
    __device__ uint32 query(uint32 stage) const { return value() + Shape::kValueBytes + stage * Shape::kQueryBytes; }
    __device__ uint32 dout(uint32 stage) const { return query(kStages) + stage * Shape::kDoutBytes; }
    __device__ uint32 ds(uint32 group) const { return dout(Shape::kDoutStages) + group * Shape::kDsBytes; }
    __device__ uint32 barrier(uint32 index) const { return ds(Shape::kGroups) + 8 * index; }
    // Statistics of the queries in a stage: lse of all, then delta.
    __device__ uint32 statistics(uint32 stage) const {
        return barrier(0) + Shape::kBarrierBytes + stage * (2 * Shape::kStatisticBytes);
    }
    __device__ uint32 ds_unit(uint32 group) const {
        return statistics(Shape::kStatisticStages) + group * Shape::kUnitBytes;
    }
    // Full: the data have arrived. Empty: all consumer warps have finished reading them. Written: the consumers have
    // written dS, but it has not been fenced yet.
    __device__ uint32 full_key() const { return barrier(0); }
    __device__ uint32 full_value() const { return barrier(1); }
    __device__ uint32 full_query(uint32 stage) const { return barrier(2 + stage); }
    __device__ uint32 empty_query(uint32 stage) const { return barrier(2 + kStages + stage); }
    __device__ uint32 full_dout(uint32 stage) const { return barrier(2 + 2 * kStages + stage); }
    __device__ uint32 empty_dout(uint32 stage) const { return barrier(2 + 3 * kStages + stage); }
    __device__ uint32 written_ds(uint32 group) const { return barrier(2 + 4 * kStages + group); }
    __device__ uint32 full_ds(uint32 group) const { return barrier(2 + 4 * kStages + Shape::kGroups + group); }
    __device__ uint32 full_statistics(uint32 stage) const { return barrier(2 + 4 * kStages + stage); }
    __device__ uint32 empty_statistics(uint32 stage) const { return full_statistics(Shape::kStatisticStages + stage); }

    __device__ void init_barriers() const {
        constexpr uint32 kWarpSize = 32, kWarpsOfGroup = 4;
        mbarrier_init(full_key(), 1);
        mbarrier_init(full_value(), 1);
        for (uint32 i = 0; i < kStages; ++i) {
            // The thread that copies, and the lanes of the statistics.
            mbarrier_init(full_query(i), 1 + (Shape::kInPieces ? 0 : kWarpSize));
            mbarrier_init(full_dout(i), 1);
            mbarrier_init(empty_query(i), kWarpsOfGroup * Shape::kGroups);
            mbarrier_init(empty_dout(i), kWarpsOfGroup * Shape::kGroups);
        }
        for (uint32 group = 0; Shape::kWithDq && group < Shape::kGroups; ++group) {
            mbarrier_init(written_ds(group), kWarpsOfGroup);
            mbarrier_init(full_ds(group), 1);
        }
        for (uint32 i = 0; Shape::kInPieces && i < Shape::kStatisticStages; ++i) {
            mbarrier_init(full_statistics(i), kWarpSize);
            mbarrier_init(empty_statistics(i), kWarpsOfGroup * Shape::kGroups);
        }
        mbarrier_init_fence();
    }
};

template <class Shape>
__device__ __forceinline__ PieceRing<Shape::kStages> query_ring(const DkdvMemory<Shape>& memory) {
    return {memory.query(0), memory.full_query(0)};
}
template <class Shape>
__device__ __forceinline__ PieceRing<Shape::kStages> dout_ring(const DkdvMemory<Shape>& memory) {
    return {memory.dout(0), memory.full_dout(0)};
}

// Calls step(head, tile) for each query tile that sees the key tile, in every query head of the group.
template <class Record, class Tiles, class Step>
__device__ __forceinline__ void for_each_step(const Record& params, int32 head_kv, const Tiles& tiles,
                                              const Step& step) {
#pragma unroll 1
    for (int32 member = 0; member < params.heads_per_group; ++member)
#pragma unroll 1
        for (int32 tile = tiles.begin; tile < tiles.end; ++tile) step(head_kv * params.heads_per_group + member, tile);
}

}  // namespace fa2::sm90_float32
