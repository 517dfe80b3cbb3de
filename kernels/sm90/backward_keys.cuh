// A consumer warp group that computes dK and dV of its 64 keys; two of them share a key tile. The software pipeline of
// query tile j:
//
//   issue   S^T(j) = K Q^T - lse / scale
//   wait    S^T
//   issue   dP^T(j) = V dO^T - delta           P^T(j) = 2^S^T, rounded
//   issue   dV += P^T dO
//   wait    dP^T                               dS^T(j) = P^T o dP^T, rounded, written to shared memory
//   issue   dQ(j - 1) = dS K                   (previous query tile)
//   wait    dV                                 release dO(j)
//   issue   dK += dS^T Q
//   wait    dQ                                 release dS(j - 1); add dQ to the workspace
//   wait    dK                                 release Q(j)
//
// Reasons for this order, measured on an H100 with a prototype of this loop:
//
//   - A warp can issue only a few wgmmas ahead. S^T is waited for before dP^T is issued, because the compiler then
//     interleaves the wgmmas of dP^T with the exponentials. dV is issued before the wait for dP^T, because this keeps
//     all exponentials before that wait.
//   - dQ lags one tile behind, so that the groups can run out of phase: one computes exponentials while the other
//     multiplies. They start one product apart (kStartBarrier).
//   - No product is in flight across the loop's back edge: the compiler would serialise the wgmmas.
#pragma once
#include "sm90/backward_group.cuh"

namespace fa2::sm90 {

// The group index is a template parameter: with a copy of the code for each group, the offsets of its operands are
// constants, which gains 1 to 4 %.
template <class Spec, class Shape, int kGroup>
class BackwardKeys : BackwardGroup<Spec, Shape> {
    using Base = BackwardGroup<Spec, Shape>;
    using Memory = typename Base::Memory;
    using Scores = typename Base::Scores;
    using Rounded = typename Base::Rounded;
    using Base::arrive, Base::lane_, Base::memory_, Base::own_, Base::params_, Base::warp_;
    static constexpr int kBr = Shape::kBr, kD = Shape::kD, kDv = Shape::kDv;
    static constexpr bool kWithDq = Shape::kWithDq;
    friend KeyGroup<Spec, Shape, Memory>;

    // A group's part of dQ: 64 accumulator rows (queries; columns of dQ if it is transposed) by kDqWidth columns.
    static constexpr int kDqWidth = Shape::kDqTransposed ? kBr : Shape::kDqByRows ? kD : Shape::kFirstDqColumns;
    using Dq = QuadFragment<kDqWidth / 8>;
    // The leading dimension that turns a K-major descriptor of Q or dO into an MN-major one.
    static constexpr uint64 kQueryRows = static_cast<uint64>(Shape::kQueryPanelBytes / 16) << 16;

  public:
    __device__ BackwardKeys(const Params& params, const Params& maps, const Memory& memory)
        : Base(params, maps, memory, kGroup),
          key_operand_(descriptor(memory.key() + kGroup * kGroupRows * Shape::kPanelRowBytes)),
          value_operand_(descriptor(memory.value() + kGroup * kGroupRows * Shape::kPanelRowBytes)),
          query_operand_(descriptor(memory.query(0))),
          dout_operand_(descriptor(memory.dout(0))),
          key_columns_(Base::columns_of_k(Shape::kDqByRows ? 0 : kGroup * Shape::kFirstDqColumns)),
          ds_operand_(
              matrix_descriptor(memory.ds(0) + (Shape::kDqByRows ? kGroup : 0) * kGroupRows * kPanelRowBytes, 0)) {}

    __device__ __forceinline__ void run() {
        if constexpr (kIsPass<Spec>)
            OwnDelta<Spec>(params_, own_.batch, own_.head).put_from(own_.tiles.begin * kBr, memory_.held());
        dk_.fill(0.0f);
        dv_.fill(0.0f);
        if constexpr (kWithDq) Base::start_adding(params_, dq_row16(), kDqColumn8);
        Base::load_first_array(first_key());
        mbarrier_wait(memory_.full_key(), 0);
        Base::take_steps(*this);
        if constexpr (kWithDq) {
            Dq dq;
            Base::issue_dq(dq, key_columns_, ds_operand_);
            wgmma_wait<0>();
            pin(dq);
            add_dq(dq, own_.step_after_last(params_));
        }
        pin(dk_);
        pin(dv_);
        store_gradients(params_);
    }

  private:
    __device__ __forceinline__ static uint64 descriptor(uint32 rows) {
        return matrix_descriptor<Shape::kPanelRowBytes>(rows, 0);
    }

    template <class Record>
    __device__ __forceinline__ void store_gradients(const Record& params) {
        if constexpr (Spec::kSplit) {
            Base::template put_share<false>(dk_, params, kGroup * 4 + warp_);
            Base::template put_share<true>(dv_, params, kGroup * 4 + warp_);
        } else {
            store_results(Base::maps_);
        }
    }

    template <class Record>
    __device__ __forceinline__ void store_results(const Record& maps) {
        // The gradients overwrite K and V. With dQ, the other group, too, reads this group's rows of K.
        if constexpr (kWithDq)
            Base::wait_for_last_dq();
        else
            barrier_sync(Base::kStoreBarrier + kGroup, kGroupThreads);
        const int32 row = kGroup * kGroupRows + 16 * warp_;
        Base::store_gradient(dv_, common::kept_scale<Spec>(params_), maps.dv, memory_.value(), row);
        Base::store_gradient(dk_, params_.softmax_scale, maps.dk, memory_.key(), row);
        if (lane_ == 0) tma_store_wait();
    }

    __device__ __forceinline__ int32 first_key() const { return own_.first_key + kGroup * kGroupRows; }
    // The statistics of a part. Addresses are computed where they are used: ahead, they change the order of the loop.
    template <int kPart>
    __device__ __forceinline__ uint32 lse(uint32 stage) const {
        return Base::template statistics_of<Base::kFromLse>(kPart, memory_.lse(stage));
    }
    template <int kPart>
    __device__ __forceinline__ uint32 delta(uint32 stage) const {
        return Base::template statistics_of<Base::kFromDelta>(kPart, memory_.delta(stage));
    }

    template <bool kMasked>
    __device__ __forceinline__ void step(const QueryStep& step) {
        take_part<kMasked, 0>(step);
        if constexpr (Shape::kParts == 2) take_part<kMasked, 1>(step);
        arrive(memory_.empty_query(stages_.slot()));
        Base::load_next_array(step, first_key());
        stages_.advance();
        is_first_ = false;
    }

    template <bool kMasked, int kPart>
    __device__ __forceinline__ void take_part(const QueryStep& step) {
        constexpr bool kIsFirstPart = kPart == 0, kIsLastPart = kPart + 1 == Shape::kParts;
        constexpr uint32 kFirstRow = kPart * Shape::kPartQueries * Shape::kPanelRowBytes / 16;
        const uint32 stage = stages_.slot(), parity = stages_.parity();
        const uint32 query = stage * (Shape::kQueryBytes / 16) + kFirstRow,
                     dout = stage * (Shape::kDoutBytes / 16) + kFirstRow;
        Scores scores, derivatives;
        Rounded p, ds;
        const auto terms = Base::head_terms(step);

        Base::template start_from_array<kGroup, kPart>(scores, step, stages_.turn);
        if constexpr (kIsFirstPart) mbarrier_wait(memory_.full_query(stage), parity);
        Base::template start_scores<Base::kFromLse, Shape::kStarts>(scores, lse<kPart>(stage));
        if (kWithDq && is_first_ && kIsFirstPart && kGroup == 1) barrier_sync(Base::kStartBarrier, 2 * kGroupThreads);
        Base::template issue_scores<Base::kFromLse, kD, Shape::kStarts>(scores, key_operand_, query_operand_ + query,
                                                                        lse<kPart>(stage));
        if (is_first_ && kIsFirstPart) mbarrier_wait(memory_.full_value(), 0);
        if constexpr (kIsFirstPart) mbarrier_wait(memory_.full_dout(stage), parity);
        Base::template start_scores<Base::kFromDelta>(derivatives, delta<kPart>(stage));
        const auto mask = Base::template mask_ahead<kMasked>(step, first_key(), kPart);
        const auto distances = Base::distances_ahead(step, first_key(), kPart);
        wgmma_wait<0>();
        pin(scores);
        Base::template issue_scores<Base::kFromDelta, kDv>(derivatives, value_operand_, dout_operand_ + dout,
                                                           delta<kPart>(stage));
        if (kWithDq && is_first_ && kIsFirstPart && kGroup == 0) barrier_arrive(Base::kStartBarrier, 2 * kGroupThreads);
        if constexpr (Base::kTakesWeights) {
            Base::template take_weights<kMasked>(scores, p, step, first_key(), lse<kPart>(stage), terms, distances,
                                                 kPart);
        } else {
            Base::template exponentiate<kMasked>(scores, step, first_key(), mask, kPart);
            p.set(scores);
        }
        Base::issue_gradient(dv_, p, dout_operand_ + dout + kQueryRows);
        wgmma_wait<1>();
        pin(derivatives);
#pragma unroll
        for (int n = 0; n < Shape::kPartQueries / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if constexpr (!Base::kFromDelta)
                    derivatives.value[n][e] =
                        common::weighted<Spec>(scores.value[n][e], derivatives.value[n][e],
                                               Base::statistic_of(delta<kPart>(stage), 2 * n + e % 2), params_);
                else
                    derivatives.value[n][e] *= scores.value[n][e];
        ds.set(derivatives);

        Dq dq;
        if constexpr (kWithDq) {
            Base::template store_ds<kPart>(ds, kGroup);
            if (kIsLastPart && !is_first_) {
                Base::issue_dq(dq, key_columns_, ds_operand_);
                wgmma_wait<1>();
                pin(dv_);
                arrive(memory_.empty_dout(stage));
                Base::issue_gradient(dk_, ds, query_operand_ + query + kQueryRows);
                wgmma_wait<1>();
                pin(dq);
                add_dq(dq, step);
            }
        }
        if (!kWithDq || !kIsLastPart || is_first_) {
            Base::issue_gradient(dk_, ds, query_operand_ + query + kQueryRows);
            wgmma_wait<1>();
            pin(dv_);
            if constexpr (kIsLastPart) arrive(memory_.empty_dout(stage));
        }
        wgmma_wait<0>();
        pin(dk_);
    }

    __device__ __forceinline__ void add_dq(const Dq& dq, const QueryStep& next) {
        Base::add_dq(dq, dq_row16(), kDqColumn8, next);
    }
    // The groups split dQ by accumulator rows (queries; columns of dQ if it is transposed), or else (kDqAcross) by
    // columns.
    static constexpr bool kDqAcross = !Shape::kDqByRows && !Shape::kDqTransposed;
    static constexpr int kDqColumn8 = kDqAcross ? kGroup * Shape::kFirstDqColumns / 8 : 0;
    __device__ __forceinline__ int32 dq_row16() const { return (kDqAcross ? 0 : kGroup * 4) + warp_; }

    const uint64 key_operand_, value_operand_, query_operand_, dout_operand_, key_columns_, ds_operand_;
    RingPosition<Shape::kStages> stages_;
    bool is_first_ = true;
    QuadFragment<kD / 8> dk_;
    QuadFragment<kDv / 8> dv_;
};

}  // namespace fa2::sm90
