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
#pragma once
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "sm90/query_gradient_consumer.cuh"

namespace fa2::sm90 {

template <class Spec>
class DqJvpConsumer
    : public QueryGradientConsumer<DqJvpConsumer<Spec>, Spec, BackwardDqShape<Spec, MovedBy<Spec>>> {
    using Base = QueryGradientConsumer<DqJvpConsumer, Spec, BackwardDqShape<Spec, MovedBy<Spec>>>;
    using Base::first_row, Base::is_last, Base::multiply_keys, Base::score_tile;
    using Base::kD;
    using Base::lane_, Base::memory_, Base::params_;
    using Base::keys_, Base::queries_, Base::release_key, Base::release_query, Base::release_value, Base::values_;
    using typename Base::Gradient, typename Base::KeyPosition, typename Base::Operand, typename Base::Scores, typename Base::Shape;
    using Moved = typename Shape::Moved;
    friend Base;
    // Where tangents lie behind their operands.
    static constexpr uint32 kQueryTangent = Shape::Base::kQueryBytes, kDoutTangent = Shape::Base::kDoutBytes,
                            kKeyTangent = Shape::Base::kKeyBytes, kValueTangent = Shape::Base::kValueBytes;

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
        issue_dq();
        issue_scores_of(keys_.next());
        wait_for_dq<2>();
        wait_for_scores(keys, block);
        differentiate(tile, keys, block, kMasked);
    }

    // Computes dS and dS' from S and T.
    __device__ __forceinline__ void differentiate(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                                  bool masked) {
        issue_dp();
        const auto& record = record_of<Spec>(params_, tile);
        const common::ScoreTile where = score_tile(tile, block);
        const auto slopes = common::move_softmax<false, Spec>(scores_, tangents_, common::mask_of<Spec>(record),
                                                              {masked, false}, record, where,
                                                              [&](int i, int) { return lse_[i]; });
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

    // Issues S, and then T, of the key tile whose K is at a ring position.
    __device__ __forceinline__ void issue_scores_of(const KeyPosition& at) {
        mbarrier_wait(memory_.full_key(at.slot()), at.parity());
        const uint32 query = memory_.query(queries_.slot()), key = memory_.key(at.slot());
        Base::template multiply_rows<kD>(scores_, query, key);
        multiply_moved<kD, Moved::kQuery, Moved::kKey>(tangents_, query, kQueryTangent, key, kKeyTangent);
    }
    __device__ __forceinline__ void wait_for_scores(const GroupKeys& keys, int32 block) {
        wgmma_wait<0>();
        pin(scores_);
        pin(tangents_);
        if (is_last(keys, block)) release_query();
    }
    __device__ __forceinline__ void issue_dp() {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        const uint32 dout = memory_.dout(queries_.slot()), value = memory_.value(values_.slot());
        Base::template multiply_rows<Shape::kDv>(dp_, dout, value);
        multiply_moved<Shape::kDv, Moved::kDout, Moved::kValue>(dp_tangent_, dout, kDoutTangent, value, kValueTangent);
    }

    // Issues x = X' Y^T + X Y'^T, without the products of absent tangents.
    template <int kColumns, bool kMovesRows, bool kMovesKeys>
    __device__ __forceinline__ void multiply_moved(Scores& x, uint32 rows, uint32 rows_tangent, uint32 keys,
                                                   uint32 keys_tangent) {
        if constexpr (!kMovesRows && !kMovesKeys) x.fill(0.0f);
        wgmma_fence();
        if constexpr (kMovesRows) Base::template issue_rows<kColumns, false>(x, rows + rows_tangent, keys);
        if constexpr (kMovesKeys) Base::template issue_rows<kColumns, kMovesRows>(x, rows, keys + keys_tangent);
        wgmma_commit();
        pin(x);
    }

    __device__ __forceinline__ void issue_dq() {
        const uint64 k = matrix_descriptor(memory_.key(keys_.slot()), Shape::kKeyPanelBytes);
        pin(dq_);
        pin(ds_tangent_);
        if constexpr (Moved::kKey) pin(ds_);
        wgmma_fence();
        if constexpr (Moved::kKey) Base::add_keys(dq_, ds_, k + kKeyTangent / 16);
        multiply_keys(dq_, ds_tangent_, k);
    }
    template <int kPending>
    __device__ __forceinline__ void wait_for_dq() {
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
    Scores scores_, tangents_, dp_, dp_tangent_;
    Operand ds_, ds_tangent_;
    Gradient dq_;
};

}  // namespace fa2::sm90
