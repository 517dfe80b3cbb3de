// For kernels whose blocks own query tiles: sizes and the shared-memory map. The panels of an operand's parts lie one
// after the other. kOperands: those with the query tile's rows, 1 (Q) or 2 (Q and dO).
//
// Where K and V pass through shared memory in pieces, a stage holds one piece. With Q alone, one ring has those of K, and
// one those of V. With Q and dO, a block has 64 rows, which two warp groups share: each has one of the rings.
#pragma once
#include "sm90/query_tile_shape.cuh"
#include "sm90_float32/load_rows.cuh"

namespace fa2::sm90_float32 {

template <class Spec, int kOperands>
inline constexpr int kSharersOfRows = kNeedsPieces<Spec> ? kOperands : 1;

// True if the parts of an operand share a panel.
template <class Spec, int kOperands>
inline constexpr bool kSharesPanels = kOperands == 1 && kPartsMayShare<Spec>;

template <class Spec, int kOperands>
using TileShape =
    QueryTileShape<Spec, kOperands, kSharesPanels<Spec, kOperands> ? 1 : kParts, kSharersOfRows<Spec, kOperands>>;

template <class Spec, int kOperands>
struct PartsShape : TileShape<Spec, kOperands> {
    using Base = TileShape<Spec, kOperands>;
    using Base::kBc, Base::kDoutBytes, Base::kFixedBytes, Base::kQueryBytes, Base::kStages;

    // A producer that computes addresses of parts needs more than one that only passes coordinates to TMA.
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(registers_suffice(Base::kAtEntry, Base::kGroups, kProducerRegisters, kConsumerRegisters));

    static constexpr bool kShared = kSharesPanels<Spec, kOperands>;
    // 0 if the parts share a panel.
    static constexpr int kPanelsOfPart = Base::kPanels / kParts, kPanelsOfPartV = Base::kPanelsV / kParts;
    static constexpr bool kInPieces = kNeedsPieces<Spec>;
    static constexpr int kKeyBytes = kInPieces ? kPieceBytes : Base::kKeyBytes;  // of a stage
    static constexpr int kValueBytes = kInPieces ? kPieceBytes : Base::kValueBytes;
    static constexpr int kWithoutValues =
        kFixedBytes + kQueryBytes + (kOperands - 1) * kDoutBytes + kStages * kKeyBytes;
    // V has one stage where shared memory does not hold as many as K has.
    static constexpr int kValueStages = kWithoutValues + kStages * kValueBytes <= kMaxSharedBytes ? kStages : 1;
    static constexpr int kQueryBuffers = 1;
    static constexpr int kOutputPanels = 0;  // results are stored from registers
    static constexpr int kSharedBytes = kWithoutValues + kValueStages * kValueBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes && kBc % kUnitRows == 0);
    static_assert(!kInPieces || (kBc == kUnitRows && kValueStages == kStages));
};

template <class Shape>
__device__ __forceinline__ PieceRing<Shape::kStages> key_ring(const QueryTileMemory<Shape>& memory) {
    return {memory.key(0), memory.full_key(0)};
}
template <class Shape>
__device__ __forceinline__ PieceRing<Shape::kStages> value_ring(const QueryTileMemory<Shape>& memory) {
    return {memory.value(0), memory.full_value(0)};
}

}  // namespace fa2::sm90_float32
