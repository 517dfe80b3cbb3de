// The consumers of the kernel of the tangent of dQ: a warp group computes 64 query rows, a warp 16 of them. From dS and
// dS' of the present key tile to those of the next one:
//
//   issue   dQ' += dS'(present) K(present) + dS(present) K'(present)
//           S = Q K(next)^T
//           T = Q' K(next)^T + Q K'(next)^T
//   wait    dQ'           -> release K's stage
//   wait    S, T
//   issue   dP = dO V(next)^T
//           dP' = dO' V(next)^T + dO V'(next)^T
//           P = 2^(S - lse)
//   wait    dP, dP'       -> release V's stage
//           dS = P o (dP - delta), dS' = P o ((T - lse') o (dP - delta) + dP' - delta')
//
// As in the kernel of dQ, S is waited for before dP is issued, and no product is in flight across the loop's back edge.
//
// wgmmas of 64 columns read as many bytes of shared memory in a clock as there are. Those of S and Q K'^T are therefore
// one product of twice as many columns, which reads Q once, and Q' K^T has accumulators of its own: the compiler would
// serialise products whose accumulators are a part of another one's. dP and dO V'^T are one product unless dO has a
// tangent; with it, there are no registers for one sum more.
#pragma once
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "sm90/query_gradient_consumer.cuh"
#include "sm90/wgmma_dq_jvp.cuh.j2"

namespace fa2::sm90 {

template <class Spec>
class DqJvpConsumer : public QueryGradientConsumer<DqJvpConsumer<Spec>, Spec, BackwardDqShape<Spec, MovedBy<Spec>>> {
    using Base = QueryGradientConsumer<DqJvpConsumer, Spec, BackwardDqShape<Spec, MovedBy<Spec>>>;
    using Base::first_row, Base::is_last, Base::multiply_keys, Base::score_tile;
    using Base::kD;
    using Base::keys_, Base::queries_, Base::release_key, Base::release_query, Base::release_value, Base::values_;
    using Base::lane_, Base::memory_, Base::params_;
    using typename Base::Gradient, typename Base::KeyPosition, typename Base::Operand, typename Base::Scores,
        typename Base::Shape;
    using Moved = typename Shape::Moved;
    friend Base;
    friend typename Base::Loop;
    // Where tangents lie behind their operands.
    static constexpr uint32 kQueryTangent = Shape::Base::kQueryBytes, kDoutTangent = Shape::Base::kDoutBytes,
                            kKeyTangent = Shape::kKeyPanelBytes;

  public:
    using Base::Base;

  private:
    // ---------------------------------------------------------------------------------------------------------- steps

    __device__ __forceinline__ void first_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                               bool masked) {
        Base::wait_for_query(tile);
        issue_scores_of(keys_);
        wait_for_scores(keys, block);
        mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());
        differentiate(tile, keys, block, masked);
    }

    template <bool kMasked>
    __device__ __forceinline__ void step(const TileInSlot& tile, const GroupKeys& keys, int32 block) {
        issue_sums();
        issue_scores_of(keys_.next());
        wait_for_sums<1>();
        wait_for_scores(keys, block);
        differentiate(tile, keys, block, kMasked);
    }

    // Computes dS and dS' from S and T.
    __device__ __forceinline__ void differentiate(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                                  bool masked) {
        issue_dp();
        const auto& record = record_of<Spec>(params_, tile);
        const common::ScoreTile where = score_tile(tile, block);
        const auto slopes =
            common::move_softmax<false, Spec>(scores_, tangents_, common::mask_of<Spec>(record), {masked, false},
                                              record, where, [&](int i, int) { return lse_[i]; });
        wgmma_wait<0>();
        pin(dp_);
        pin(dp_tangent_);
        release_value();
        if (Shape::kOwnOutput && is_last(keys, block) && lane_ == 0)
            mbarrier_arrive(memory_.empty_dout(queries_.slot()));
        common::differentiate_moved<false, Spec>(scores_, tangents_, dp_, dp_tangent_, record, where, [&](int i, int) {
            return common::MovedRow<float>{lse_[i], delta_[i], lse_tangent_[i], delta_tangent_[i]};
        });
        common::write_dbias<Spec>(dp_tangent_, record, where);
        slopes.apply(dp_, dp_tangent_);
        if constexpr (Moved::kKey) ds_.set(dp_);
        ds_tangent_.set(dp_tangent_);
    }

    // ------------------------------------------------------------------------------------------------------- products

    // Issues S and T of the key tile whose K is at a ring position.
    __device__ __forceinline__ void issue_scores_of(const KeyPosition& at) {
        mbarrier_wait(memory_.full_key(at.slot()), at.parity());
        multiply_rows<kD, Moved::kQuery, Moved::kKey, Moved::kKey>(
            scores_, tangents_, rest_, memory_.query(queries_.slot()), kQueryTangent, memory_.key(at.slot()));
    }
    __device__ __forceinline__ void wait_for_scores(const GroupKeys& keys, int32 block) {
        wgmma_wait<0>();
        pin(scores_);
        pin(tangents_);
        if constexpr (Moved::kQuery && Moved::kKey) {
            pin(rest_);
#pragma unroll
            for (int n = 0; n < Base::kBc / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) tangents_.value[n][e] += rest_.value[n][e];
        }
        if (is_last(keys, block)) release_query();
    }
    __device__ __forceinline__ void issue_dp() {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        multiply_rows<Shape::kDv, Moved::kDout, Moved::kValue, Moved::kValue && !Moved::kDout>(
            dp_, dp_tangent_, dp_tangent_, memory_.dout(queries_.slot()), kDoutTangent, memory_.value(values_.slot()));
    }

    // Issues x = X Y^T and y = X' Y^T + X Y'^T, without the products of absent tangents. X are the group's rows of Q or
    // dO, X' those `tangent` bytes further on, Y the key tile's rows of K or V, and Y' those that follow in each panel.
    // kJoins: X Y^T and X Y'^T are one product, and X' Y^T is `rest`, which is to be added to y.
    template <int kColumns, bool kMovesRows, bool kMovesKeys, bool kJoins>
    __device__ __forceinline__ void multiply_rows(Scores& x, Scores& y, Scores& rest, uint32 rows, uint32 tangent,
                                                  uint32 keys) const {
        constexpr int kPanelBytes = Shape::kQueryPanelBytes, kStride = (1 + kMovesKeys) * Shape::kKeyPanelBytes;
        // Else the compiler keeps the descriptors of all k-steps in registers.
        const uint64 own = as_if_new(matrix_descriptor(rows + Base::group_ * kGroupRows * kPanelRowBytes, 0));
        const uint64 others = as_if_new(matrix_descriptor(keys, 0));
        if constexpr (!kMovesRows && !kMovesKeys) y.fill(0.0f);
        wgmma_fence();
        if constexpr (kJoins) {
#pragma unroll
            for (int s = 0; s < kColumns / 16; ++s) {
                const uint64 a = own + along_columns<kPanelBytes>(s), b = others + along_columns<kStride>(s);
                s == 0 ? wgmma_first_both(x, y, a, b) : wgmma_both(x, y, a, b);
            }
        } else {
            multiply<kColumns, kStride, false>(x, own, others);
            if constexpr (kMovesKeys) multiply<kColumns, kStride, false>(y, own, others + kKeyTangent / 16);
        }
        if constexpr (kMovesRows)
            multiply<kColumns, kStride, kMovesKeys && !kJoins>(kJoins ? rest : y, own + tangent / 16, others);
        wgmma_commit();
        pin(x);
        pin(y);
        if constexpr (kMovesRows && kJoins) pin(rest);
    }
    // Issues x = X Y^T, or (kAdds) x += X Y^T, of operands given by descriptors.
    template <int kColumns, int kStride, bool kAdds>
    __device__ __forceinline__ static void multiply(Scores& x, uint64 own, uint64 others) {
#pragma unroll
        for (int s = 0; s < kColumns / 16; ++s) {
            const uint64 a = own + along_columns<Shape::kQueryPanelBytes>(s), b = others + along_columns<kStride>(s);
            s == 0 && !kAdds ? wgmma_first_scores(x, a, b) : wgmma_scores(x, a, b, true);
        }
    }

    __device__ __forceinline__ void issue_sums() {
        const uint64 k = matrix_descriptor(memory_.key(keys_.slot()), Shape::kKeyStride);
        pin(dq_);
        pin(ds_tangent_);
        if constexpr (Moved::kKey) pin(ds_);
        wgmma_fence();
        if constexpr (Moved::kKey) Base::add_keys(dq_, ds_, k + kKeyTangent / 16);
        multiply_keys(dq_, ds_tangent_, k);
    }
    template <int kPending>
    __device__ __forceinline__ void wait_for_sums() {
        wgmma_wait<kPending>();
        pin(dq_);
        pin(ds_tangent_);
        if constexpr (Moved::kKey) pin(ds_);
        release_key();
    }

    // ----------------------------------------------------------------------------------------------------------- rows

    __device__ __forceinline__ bool hides(int i) const { return lse_[i] == common::infinity<float>(); }
    __device__ __forceinline__ const TensorMap& result() const { return params_.dqt; }

    // A row beyond the sequence or without a visible key gets lse = +inf, so that its P is zero.
    __device__ __forceinline__ void load_rows(const TileInSlot& tile) {
        const int32 row = first_row(tile);
        const auto& record = record_of<Spec>(params_, tile);
        const int64 first = common::first_statistic<Spec>(params_, tile.batch(), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int64 at = first + row + Scores::row(i, lane_);
            const bool exists = row + Scores::row(i, lane_) < record.seqlen_q;
            const bool valid = exists && record.lse[at] != -common::infinity<float>();
            lse_[i] = valid ? common::in_base2(record.lse[at]) : common::infinity<float>();
            delta_[i] = valid ? record.delta[at] : 0.0f;
            lse_tangent_[i] = valid ? record.lset[at] : 0.0f;
            delta_tangent_[i] = valid ? record.deltat[at] : 0.0f;
        }
    }

    float lse_[2], delta_[2], lse_tangent_[2], delta_tangent_[2];  // of this lane's two rows; lse in base 2
    Scores scores_, tangents_, rest_, dp_, dp_tangent_;
    Operand ds_, ds_tangent_;
    Gradient dq_;
};

}  // namespace fa2::sm90
