// For the backward by key tiles (backward_dkdv.cuh): the sizes, how warps divide the work, and the shared-memory map.
//
//   shared memory                     written by          read by
//   K [kBc][kD]                       all warps           probability warps, for S^T; all warps, for dQ (`single_pass`)
//   V [kBc][kDv]                      all warps           derivative warps, for dP^T
//   (Q, dO) [kStages], [kBr][kD, kDv] all warps           all warps, as right operands of the four products
//   dS^T [2][kBc][kBr]                derivative warps    all warps, for dQ one iteration later (`single_pass`)
//   P^T [kBc][kBr]                    probability warps   the derivative warp of the same pair, which leaves its dS^T there
//                                                         for that of the other pair, if any
//   P^T [kBc][kBr]                    probability warps   the probability warp of the other pair of a group, if any
//   (lse, -delta) [2], [kBr]          first 2 kBr threads probability warps (lse), derivative warps (-delta)
//
// In `one_tile`, there is one buffer of dS^T, where a probability warp's bias lies before; O lies where P^T comes, if it
// does; and behind all this lie the sums of dS^T (one_tile_bias.cuh).
//
// At the end dV and dK are staged at the place of K and V, in this order.
#pragma once
#include "common/bias_owner.cuh"
#include "common/tile_lists.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

// What the kernel does about dQ: nothing; it adds to a workspace; or it stores all of dQ, and computes delta itself.
enum class DqSums { kNone, kAdded, kStored };

// The tiles of a role: the warp's keys, the query-side operands of its first and of its second product, and its gradient.
template <bool kProbability, class KTile, class VTile, class QTile, class DoTile>
struct RoleTiles {
    using Own = KTile;
    using Right = QTile;
    using Second = DoTile;
    using Result = VTile;
};
template <class KTile, class VTile, class QTile, class DoTile>
struct RoleTiles<false, KTile, VTile, QTile, DoTile> : RoleTiles<true, VTile, KTile, DoTile, QTile> {};

template <class Spec, DqSums kDqSums>
struct BackwardDkdvShape {
    static constexpr bool kWithDq = kDqSums != DqSums::kNone, kStoresDq = kDqSums == DqSums::kStored;
    static constexpr bool kSumsDbias = kStoresDq && common::kWritesDbias<Spec>;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kStages = Spec::kStages, kWarps = Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = kWarps * 32;
    // True if a warp has both roles for its keys.
    static constexpr bool kBothRoles = kStoresDq && kBc >= 16 * kWarps && kD <= 64 && kDv <= 64;
    static constexpr int kPairs = kBothRoles ? kWarps : kWarps / 2;
    static constexpr bool kInterleaved = kWithDq && kD > 64;
    static constexpr int kSharers = sharers_of_gradient(common::max_of(kD, kDv));  // pairs of a group
    static constexpr int kGroupKeys = kBc / (kPairs / kSharers), kM16 = kGroupKeys / 16;
    static constexpr int kPartRows = kBr / kSharers;
    static_assert(kSharers == 1 || (!kWithDq && kD % 32 == 0 && kDv % 32 == 0));
    static_assert(2 * kBr <= kThreads);
    static_assert(!kStoresDq || (kStages == 1 && !common::kListsTiles<Spec>));

    using KTile = SmemTile<kBc, kD>;
    using VTile = SmemTile<kBc, kDv>;
    using QTile = SmemTile<kBr, kD>;
    using DoTile = SmemTile<kBr, kDv>;
    using DsTile = SmemTile<kBc, kBr>;

    static constexpr int kK = 0;
    static constexpr int kV = kK + KTile::kBytes;
    static constexpr int kQ = kV + VTile::kBytes;
    static constexpr int kDo = kQ + QTile::kBytes;
    static constexpr int kStageBytes = QTile::kBytes + DoTile::kBytes;
    static constexpr int kDs = kQ + kStages * kStageBytes;
    static constexpr int kP = kDs + (kStoresDq ? 1 : kWithDq ? 2 : 0) * DsTile::kBytes;
    static constexpr int kO = kP;
    static constexpr int kShared = kP + common::max_of(kBothRoles ? 0 : kBc * kBr * 2, kStoresDq ? DoTile::kBytes : 0);
    static constexpr int kRowStats = kShared + (kSharers > 1 ? kBc * kBr * 2 : 0);
    static constexpr int kRowStatsBytes = 2 * kBr * 4;
    static constexpr int kDbias = kRowStats + 2 * kRowStatsBytes;
    static constexpr int kBias = kDbias + (kSumsDbias ? kBc * kBr * 4 : 0);
    static_assert(kBias + (kSumsDbias ? kBc * kBr * 2 : 0) == Spec::kSharedBytes);
};

}  // namespace fa2::sm80
