// What the two roles of the dQ kernel agree on, besides what all kernels by query tiles do.
#pragma once
#include "sm90/query_tile_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
struct BackwardDqShape : QueryTileShape<Spec, 2> {
    using Base = QueryTileShape<Spec, 2>;
    using Base::kBc, Base::kConsumerRegisters, Base::kD, Base::kStages;
    using Base::kFixedBytes, Base::kKeyBytes, Base::kQueryBytes;

    // What a block can have; the system takes 1024 bytes for each.
    static constexpr int kMostBytes = (kMaxSharedBytes + 1024) / Spec::kBlocksPerSm - 1024;
    // One stage of V instead of two only where two do not fit.
    static constexpr bool kTwoAndTwo = kStages == 2 && kFixedBytes + 4 * kKeyBytes + 2 * kQueryBytes <= kMostBytes;
    static constexpr int kValueStages = kTwoAndTwo ? 2 : kStages - 1;
    static constexpr int kBesidesQueries = kFixedBytes + (kStages + kValueStages) * kKeyBytes;
    // dQ has a buffer of its own if it fits, else it leaves through dO's; with what is left Q and dO are loaded a tile
    // ahead.
    static constexpr bool kOwnOutput = kBesidesQueries + 3 * kQueryBytes <= kMostBytes;
    static constexpr int kQueryBuffers = kBesidesQueries + 5 * kQueryBytes <= kMostBytes ? 2 : 1;
    static constexpr int kSharedBytes = kBesidesQueries + (2 * kQueryBuffers + kOwnOutput) * kQueryBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    // The order of the products, see the consumer. The first one's dP is computed while dQ still takes in the dS of the
    // key tile before: registers hold all four at a time, and what else the loop needs, which is the most where it has
    // a masked copy and many k-steps.
    static constexpr int kBesidesTiles = common::kRightLimit<Spec> && kD > 128 ? 60 : 28;
    static constexpr bool kScoresFirst =
        kStages > 2 && kD / 2 + 2 * (kBc / 2) + kBc / 4 + kBesidesTiles <= kConsumerRegisters;
};

}  // namespace fa2::sm90
