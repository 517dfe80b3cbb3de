// Sizes of the kernels of dQ and of its tangent: what they add to query_tile_shape.cuh.
#pragma once
#include "sm90/moved.cuh"
#include "sm90/own_delta.cuh"
#include "sm90/query_tile_shape.cuh"

namespace fa2::sm90 {

template <class Spec, class Moved_ = Unmoved>
struct BackwardDqShape : QueryTileShape<Spec, 2> {
    using Base = QueryTileShape<Spec, 2>;
    using Base::kBc, Base::kConsumerRegisters, Base::kD, Base::kIsPair, Base::kStages;
    using Base::kFixedBytes, Base::kHeldBytes, Base::kPanels, Base::kQueryPanelBytes;
    using Moved = Moved_;

    // One wgmma multiplies rows of Q by those of K and of its tangent, which therefore follow each other in each panel.
    static constexpr bool kInterleaves = Moved::kMoves;
    static constexpr int kKeyStride = (1 + Moved::kKey) * Base::kKeyPanelBytes,
                         kValueStride = (1 + Moved::kValue) * Base::kKeyPanelBytes;
    // The bytes of operands with their tangents.
    static constexpr int kQueryBytes = (1 + Moved::kQuery) * Base::kQueryBytes,
                         kDoutBytes = (1 + Moved::kDout) * Base::kDoutBytes,
                         kKeyBytes = (1 + Moved::kKey) * Base::kKeyBytes,
                         kValueBytes = (1 + Moved::kValue) * Base::kValueBytes;

    static constexpr int kMostBytes = most_shared_bytes(Spec::kBlocksPerSm);
    // V is released earlier than K and has one stage less; with two stages of K, V gets two as well if they fit.
    static constexpr int kOperandBytes = kQueryBytes + kDoutBytes;
    static constexpr bool kTwoAndTwo =
        kStages == 2 && kFixedBytes + 2 * (kKeyBytes + kValueBytes) + kOperandBytes <= kMostBytes;
    static constexpr int kValueStages = kTwoAndTwo ? 2 : kStages - 1;
    static constexpr int kWithoutArray = kFixedBytes + kStages * kKeyBytes + kValueStages * kValueBytes;
    // Formulas of tangents read arrays in global memory.
    static constexpr bool kHoldsArray =
        !Moved::kMoves && common::kMayHoldArray<Spec> && kWithoutArray + kOperandBytes + kHeldBytes <= kMostBytes;
    static constexpr int kBesidesQueries = kWithoutArray + (kHoldsArray ? kHeldBytes : 0);
    // dQ has its own buffer if that fits or, where V has a head_dim of its own, one of all panels that fit. Else it is
    // stored through dO's buffer. If second buffers of Q and dO fit beside all of dQ, they are loaded one query tile
    // ahead.
    static constexpr int kFreeBytes = kMostBytes - kBesidesQueries - kOperandBytes;
    static constexpr int kOutputBytes = kPanels * kQueryPanelBytes;
    static constexpr int kOutputPanels = kFreeBytes >= kOutputBytes ? kPanels
                                         : kIsPair                  ? common::max_of(kFreeBytes, 0) / kQueryPanelBytes
                                                                    : 0;
    static constexpr bool kOwnOutput = kOutputPanels > 0;
    static constexpr int kQueryBuffers = kFreeBytes >= kOutputBytes + kOperandBytes ? 2 : 1;
    static constexpr int kSharedBytes =
        kBesidesQueries + kQueryBuffers * kOperandBytes + kOutputPanels * kQueryPanelBytes;
    static_assert(kIsPass<Spec> || kSharedBytes == Spec::kSharedBytes);

    // The order of the products (backward_dq_consumer.cuh). With kScoresFirst, dP is computed while dS K of the
    // previous key tile is in flight: registers hold dQ, S, dP and dS at the same time. The rest of the loop takes
    // kBesidesTiles registers, the most where the loop has a masked copy and many k-steps.
    static constexpr int kBesidesTiles = common::kRightLimit<Spec> && kD > 128 ? 60 : 28;
    static constexpr bool kScoresFirst =
        !Moved::kMoves && kStages > 2 && kD / 2 + 2 * (kBc / 2) + kBc / 4 + kBesidesTiles <= kConsumerRegisters;
};

}  // namespace fa2::sm90
