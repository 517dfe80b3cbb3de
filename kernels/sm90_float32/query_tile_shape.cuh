// Sizes and shared-memory map of the kernels whose blocks own query tiles: parts of the operands, whose panels lie one
// after the other. kOperands: those with the query tile's rows, 1 (Q) or 2 (Q and dO).
#pragma once
#include "sm90/query_tile_shape.cuh"
#include "sm90_float32/load_rows.cuh"

namespace fa2::sm90_float32 {

template <class Spec, int kOperands>
struct PartsShape : QueryTileShape<Spec, kOperands, kParts> {
    using Base = QueryTileShape<Spec, kOperands, kParts>;
    using Base::kBc, Base::kFixedBytes, Base::kKeyBytes, Base::kQueryBytes, Base::kStages;

    // A producer that computes addresses of parts needs more than one that only passes coordinates to TMA.
    static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(registers_suffice(Base::kAtEntry, Base::kGroups, kProducerRegisters, kConsumerRegisters));

    static constexpr int kPanelsOfPart = Base::kPanels / kParts;
    static constexpr int kWithoutValues = kFixedBytes + kOperands * kQueryBytes + kStages * kKeyBytes;
    // V has one stage where shared memory does not hold as many as K has.
    static constexpr int kValueStages = kWithoutValues + kStages * kKeyBytes <= kMaxSharedBytes ? kStages : 1;
    static constexpr int kQueryBuffers = 1;
    static constexpr bool kOwnOutput = false;  // results are stored from registers
    static constexpr int kSharedBytes = kWithoutValues + kValueStages * kKeyBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes && kBc % kUnitRows == 0);
};

}  // namespace fa2::sm90_float32
