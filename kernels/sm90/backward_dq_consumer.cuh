// The dQ kernel's consumers: a warp group computes 64 query rows, a warp 16 of them, from the scores to dQ in memory.
//
// The software pipeline keeps the tensor cores busy while the group computes exponentials. There are two orders from
// dS of the present key tile to dS of the next one:
//
//   kScoresFirst                                    !kScoresFirst
//
//   issue   S = Q K(next)^T                         issue   dQ += dS(present) K(present)
//           dQ += dS(present) K(present)                    S = Q K(next)^T
//   wait    S                                       wait    dQ            -> release K's stage
//                                                   wait    S
//   issue   dP = dO V(next)^T                       issue   dP = dO V(next)^T
//           P = 2^(S - lse)                                 P = 2^(S - lse)
//   wait    dQ            -> release K's stage
//   wait    dP            -> release V's stage      wait    dP            -> release V's stage
//           dS = P o (dP - delta)                           dS = P o (dP - delta)
//
// kScoresFirst leaves no gap between dQ and dP, but needs separate registers for dS and dP, which are live at the same
// time, and a third stage of K: it releases K late and needs the next K at once. The other order works with two stages.
//
// S is waited for before dP is issued because a warp can be only a few wgmmas ahead of the tensor cores: the compiler
// interleaves the exponentials with the wgmmas of dP. No product is in flight across the loop's back edge: the compiler
// would serialise products that are waited for in the next iteration.
#pragma once
#include "common/statistics.cuh"
#include "common/weights.cuh"
#include "sm90/query_gradient_consumer.cuh"

namespace fa2::sm90 {

// HeadTerms and SavedScores are base classes so that they take no space when empty (empty-base optimisation).
template <class Spec>
class BackwardDqConsumer : common::HeadTerms<Spec>,
                           common::SavedScores<Spec, QuadFragment<Spec::kBc / 8>>,
                           public QueryGradientConsumer<BackwardDqConsumer<Spec>, Spec, BackwardDqShape<Spec>> {
    using Terms = common::HeadTerms<Spec>;
    using Base = QueryGradientConsumer<BackwardDqConsumer, Spec, BackwardDqShape<Spec>>;
    using Base::first_row, Base::is_last, Base::mask, Base::multiply_keys, Base::multiply_rows, Base::score_tile;
    using Base::kBc, Base::kD;
    using Base::keys_, Base::queries_, Base::release_key, Base::release_query, Base::release_value, Base::values_;
    using Base::lane_, Base::memory_, Base::params_;
    using typename Base::Gradient, typename Base::KeyPosition, typename Base::Operand, typename Base::Scores,
        typename Base::Shape;
    friend Base;
    friend typename Base::Loop;
    friend typename Base::Tiles;
    // Bounding P by 1 takes an instruction for each score, up to 7 % of the time. P only needs it where lse is so large
    // that it has lost the bits that count: below this bound, in base 2, P exceeds 1 by less than 2^-10. With 64 columns
    // or fewer a branch costs more than it saves.
    static constexpr bool kChoosesBound = kD > 64;
    static constexpr float kLargestExactLse = 1024.0f;

  public:
    using Base::Base;

  private:
    // ---------------------------------------------------------------------------------------------------------- steps

    // Computes dS of the query tile's first key tile.
    __device__ __forceinline__ void first_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                               bool masked) {
        Base::wait_for_query(tile);
        issue_scores_of(keys_);
        wgmma_wait<0>();
        pin(scores_);
        if (is_last(keys, block)) release_query();
        mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());
        issue_dp();
        exponentiate(tile, keys, block, masked);
        finish_ds(tile, keys, block);
    }

    // From dS of the present key tile to dS of the next one, `block`.
    template <bool kMasked>
    __device__ __forceinline__ void step(const TileInSlot& tile, const GroupKeys& keys, int32 block) {
        if constexpr (Shape::kScoresFirst) {
            issue_scores_of(keys_.next());
            issue_sums();
            wgmma_wait<1>();
            pin(scores_);
        } else {
            issue_sums();
            issue_scores_of(keys_.next());
            wait_for_sums<1>();
            wgmma_wait<0>();
            pin(scores_);
        }
        if (is_last(keys, block)) release_query();
        issue_dp();
        exponentiate(tile, keys, block, kMasked);
        if constexpr (Shape::kScoresFirst) wait_for_sums<1>();
        finish_ds(tile, keys, block);
    }

    // Replaces S by P, or by the factor of dP - delta (common/weights.cuh).
    __device__ __forceinline__ void exponentiate(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                                 bool masked) {
        if constexpr (common::kTakesWeights<Spec>) {
            this->save(scores_);
            Base::with_array(*this, tile, block, masked, is_last(keys, block));
            return;
        }
        if (masked) mask(scores_, tile, block);
        if (!kChoosesBound || lse_is_large_)
            take_exponentials<true>();
        else
            take_exponentials<false>();
    }
    template <bool kBounded>
    __device__ __forceinline__ void take_exponentials() {
#pragma unroll
        for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float x = fma(scores_.value[n][e], params_.scale_log2, minus_lse_[e / 2]);
                scores_.value[n][e] = common::exp2_approx(kBounded ? common::at_most_zero(x) : x);
            }
    }

    template <class Held>
    __device__ __forceinline__ void use_array(const Held& held, const TileInSlot& tile, int32 block, bool masked) {
        common::Unused unused;
        common::take_weights_with<false, Spec>(
            held, scores_, unused, masked, record_of<Spec>(params_, tile), score_tile(tile, block),
            [&](int i, int) { return -minus_lse_[i]; }, Base::distances_of(tile, block),
            static_cast<const Terms&>(*this));
    }

    __device__ __forceinline__ void finish_ds(const TileInSlot& tile, const GroupKeys& keys, int32 block) {
        wgmma_wait<0>();
        pin(dp_);
        release_value();
        if (Shape::kOwnOutput && is_last(keys, block) && lane_ == 0)
            mbarrier_arrive(memory_.empty_dout(queries_.slot()));
        if constexpr (common::kDerivesLater<Spec>) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) scores_(i, j) = derivative(j / 2, i, j % 2);
            const common::ScoreTile where = score_tile(tile, block);
            const auto& own = record_of<Spec>(params_, tile);
            common::write_dbias<Spec>(scores_, own, where);
            this->take_derivative(scores_, own, where);
            ds_.set(scores_);
            return;
        }
#pragma unroll
        for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) ds_.set(i, n, derivative(n, i, 0), derivative(n, i, 1));
    }
    __device__ __forceinline__ float derivative(int n, int i, int column) const {
        const float p = scores_.value[n][2 * i + column], dp = dp_.value[n][2 * i + column];
        return common::weighted_from_zero<Spec>(p, dp, -minus_delta_[i], params_);
    }

    // ------------------------------------------------------------------------------------------------------- products

    __device__ __forceinline__ void issue_scores_of(const KeyPosition& at) {
        mbarrier_wait(memory_.full_key(at.slot()), at.parity());
        multiply_rows<kD>(scores_, memory_.query(queries_.slot()), memory_.key(at.slot()));
    }
    __device__ __forceinline__ void issue_dp() {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        multiply_rows<Shape::kDv>(dp_, memory_.dout(queries_.slot()), memory_.value(values_.slot()));
    }

    __device__ __forceinline__ void issue_sums() {
        const uint64 k = matrix_descriptor(memory_.key(keys_.slot()), Shape::kKeyPanelBytes);
        pin(dq_);
        pin(ds_);
        wgmma_fence();
        multiply_keys(dq_, ds_, k);
    }
    template <int kPending>
    __device__ __forceinline__ void wait_for_sums() {
        wgmma_wait<kPending>();
        pin(dq_);
        pin(ds_);
        release_key();
    }

    // ----------------------------------------------------------------------------------------------------------- rows

    __device__ __forceinline__ bool hides(int i) const { return minus_lse_[i] == -common::infinity<float>(); }
    __device__ __forceinline__ const TensorMap& result() const { return params_.dq; }

    __device__ __forceinline__ void load_rows(const TileInSlot& tile) {
        const int32 row = first_row(tile);
        const auto& own = record_of<Spec>(params_, tile);
        const int64 first = common::first_statistic<Spec>(params_, tile.batch(), tile.head());
        const float *lse = own.lse + first, *delta = own.delta + first;
        if constexpr (common::kHasHeadTerms<Spec>)
            static_cast<Terms&>(*this) = common::head_terms<Spec>(params_, tile.batch(), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i)
            common::load_negated<!kIsPass<Spec>>(lse, delta, row + Scores::row(i, lane_), own.seqlen_q, minus_lse_[i],
                                                 minus_delta_[i]);
        if constexpr (kIsPass<Spec>) {
            const OwnDelta<Spec> deltas(params_, tile.batch(), tile.head());
            typename OwnDelta<Spec>::Row rows[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) rows[i] = deltas.load(row + Scores::row(i, lane_));
#pragma unroll
            for (int i = 0; i < 2; ++i)
                minus_delta_[i] = -deltas.finished(rows[i], row + Scores::row(i, lane_), !hides(i));
        }
        if constexpr (kChoosesBound)
            lse_is_large_ =
                __any_sync(common::kFullWarp, max_of(fabsf(minus_lse_[0]), fabsf(minus_lse_[1])) > kLargestExactLse);
    }

    bool lse_is_large_;                    // in one of the warp's rows, which makes it bound P
    float minus_lse_[2], minus_delta_[2];  // of this lane's two rows; lse in base 2
    Scores scores_, dp_;
    Operand ds_;
    Gradient dq_;
};

}  // namespace fa2::sm90
