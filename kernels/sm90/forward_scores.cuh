// Base of the forward's consumers: what happens to scores and to P, whatever the order of the products.
#pragma once
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "common/scores.cuh"
#include "common/statistics.cuh"
#include "sm90/query_tile_consumer.cuh"

namespace fa2::sm90 {

// The terms of heads, distances and keys are base classes so that they take no space when empty (empty-base
// optimisation).
template <class Spec, class Shape, class Memory>
class ForwardScores : protected common::HeadTerms<Spec>,
                      protected common::NextDistances<Spec::kBc / 8>,
                      protected common::KeyPadding<Spec, Spec::kBc / 8, false>,
                      protected QueryTileConsumer<Spec, Shape, Memory> {
  protected:
    using Terms = common::HeadTerms<Spec>;
    using Padding = common::KeyPadding<Spec, Spec::kBc / 8, false>;
    using Base = QueryTileConsumer<Spec, Shape, Memory>;
    using Base::Base, Base::group_, Base::kBc, Base::kLeftLimit, Base::lane_, Base::params_, Base::score_tile;
    friend Base;

    using Scores = QuadFragment<kBc / 8>;
    using Probabilities = PackedFragment<typename Spec::Element, kBc / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp2_approx, false, 1, common::kNaturalInExponent<Spec>>;

    __device__ __forceinline__ float score_scale() const {
        return common::score_scale<typename Shape::AfterStart>(params_);
    }
    // True if the row shift was kept; else O must be multiplied by `rescale`.
    __device__ __forceinline__ bool exponentials(Probabilities& p, bool masked, float (&rescale)[2]) {
        if (__builtin_expect(!masked, 1)) {
            bool kept;
            if constexpr (common::kCapsLate<Spec>)
                kept = common::try_capped<Spec, 2>(softmax_, scores_, params_, p);
            else
                kept = softmax_.template try_row_shift<2>(scores_, score_scale(), p);
            if (__builtin_expect(kept, 1)) return true;
        }
        softmax_.update_raw(scores_, score_scale(), rescale);
        p.set(scores_);
        return false;
    }

    __device__ __forceinline__ static bool needs_mask(const GroupKeys& keys, int32 block) {
        return block >= keys.full_end || (kLeftLimit && block < (kLeftLimit ? keys.full_begin : 0));
    }
    __device__ __forceinline__ void modify(const TileInSlot& tile, int32 block, bool is_last) {
        if constexpr (common::kModifiesScores<Spec>) Base::with_array(*this, tile, block, false, is_last);
    }
    // Evaluates the terms of the caller's function that depend on the distance, while the scores are in flight.
    __device__ __forceinline__ void take_distances(const TileInSlot& tile, int32 block) {
        if constexpr (common::kHasDistanceTerms) this->terms = Base::distances_of(tile, block);
    }
    // Loads the key padding mask of a key tile.
    __device__ __forceinline__ void load_padding(const TileInSlot& tile, int32 block) {
        if constexpr (!__is_empty(Padding))
            static_cast<Padding&>(*this) = {record_of<Spec>(params_, tile), score_tile(tile, block)};
    }
    template <class Held>
    __device__ __forceinline__ void use_array(const Held& held, const TileInSlot& tile, int32 block, bool) {
        common::modify_scores_with<Spec>(held, scores_, record_of<Spec>(params_, tile), score_tile(tile, block),
                                         this->distances(), static_cast<const Padding&>(*this),
                                         static_cast<const Terms&>(*this));
    }
    __device__ __forceinline__ void drop(const TileInSlot& tile, int32 block, Probabilities& p) const {
        if constexpr (common::kDrops<Spec>) common::drop<Spec>(p, params_, score_tile(tile, block));
    }

    // The group's own key tiles. Also loads the terms of the tile's head: its scores are computed next.
    __device__ __forceinline__ GroupKeys keys_of(const TileInSlot& tile, int32 most_skipped) {
        if constexpr (common::kHasHeadTerms<Spec>)
            static_cast<Terms&>(*this) = common::head_terms<Spec>(params_, Base::batch(tile), tile.head());
        return keys_of_group<Spec>(params_, tile, Base::row_group(), most_skipped);
    }

    // Stores lse of this warp's 16 rows from `row` on.
    template <class Record, class TmaRows>
    __device__ __forceinline__ void store_lse(const Record& own, const TmaRows& rows, int32 row, int32 head,
                                              int32 batch, const float (&row_lse)[2]) const {
        float* lse = own.lse + common::first_statistic<Spec>(params_, batch, head);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 at = rows.position(params_, row + Scores::row(i, lane_));
            if (lane_ % 4 == 0 && at < own.seqlen_q) lse[at] = row_lse[i];
        }
    }

    Scores scores_;
    Softmax softmax_;
};

}  // namespace fa2::sm90
