// Sizes of the tangent of the forward: what it adds to query_tile_shape.cuh. kGiven: O and lse are given, and O' and lse'
// are the results.
#pragma once
#include "common/tangents.cuh"
#include "sm90/moved.cuh"
#include "sm90/query_tile_shape.cuh"

namespace fa2::sm90 {

// Consumer warp groups for each 64 rows: two divide the columns of V, and of O and O', and both compute all scores.
template <class Spec>
inline constexpr int kDividersOfRows = (Spec::kWarps / 4 - 1) / (Spec::kBr / kGroupRows);

template <class Spec, bool kGiven_>
struct JvpShape : QueryTileShape<Spec, 1, 1, 1, kDividersOfRows<Spec>> {
    using Base = QueryTileShape<Spec, 1, 1, 1, kDividersOfRows<Spec>>;
    using Base::kDividers, Base::kDv, Base::kFixedBytes, Base::kPanels, Base::kPanelsV, Base::kQueryPanelBytes,
        Base::kStages;
    using Moved = MovedBy<Spec>;
    static constexpr bool kGiven = kGiven_;
    static constexpr int kOwnDv = kDv / kDividers, kOwnPanels = kPanelsV / kDividers;  // of O, of a group
    // Groups that divide columns wait for each other where they clear rows.
    static constexpr bool kClearsRows = kGiven && Spec::kMayHideRows, kMayStagger = !kClearsRows || kDividers == 1;
    // Rows of 256 columns have so many panels that the producer would spill.
    static constexpr int kProducerRegisters = kDividers > 1 ? 40 : Base::kProducerRegisters;
    static constexpr int kConsumerRegisters = kDividers > 1 ? 232 : Base::kConsumerRegisters;

    // The bytes of operands with their tangents.
    static constexpr int kQueryBytes = (1 + Moved::kQuery) * Base::kQueryBytes,
                         kKeyBytes = (1 + Moved::kKey) * Base::kKeyBytes,
                         kValueBytes = (1 + Moved::kValue) * Base::kValueBytes;
    static constexpr int kMostBytes = most_shared_bytes(Spec::kBlocksPerSm);
    static constexpr int kValueStages = kStages;
    static constexpr bool kHoldsArray = false;  // formulas of tangents read arrays in global memory
    static constexpr int kScratchBytes = 4 * 32 * Spec::kWarps;
    static constexpr int kBesidesQueries = kFixedBytes + kStages * (kKeyBytes + kValueBytes) + kScratchBytes;
    // O and O' pass through a buffer of as many panels as fit, or through that of Q and Q'. If a second buffer of these
    // fits beside both, they are loaded one query tile ahead.
    static constexpr int kResultPanels = (kGiven ? 1 : 2) * kPanelsV;
    static constexpr int kFreeBytes = kMostBytes - kBesidesQueries - kQueryBytes;
    static constexpr int kOutputPanels =
        min_of(kResultPanels, max_of(kFreeBytes, 0) / kQueryPanelBytes / kDividers * kDividers);
    static constexpr bool kOwnOutput = kOutputPanels > 0;
    static_assert(kOwnOutput || kDividers == 1, "a group would overwrite what the others still read");
    static constexpr int kQueryBuffers = kFreeBytes >= kResultPanels * kQueryPanelBytes + kQueryBytes ? 2 : 1;
    static constexpr int kSharedBytes =
        kBesidesQueries + kQueryBuffers * kQueryBytes + kOutputPanels * kQueryPanelBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);
};

}  // namespace fa2::sm90
