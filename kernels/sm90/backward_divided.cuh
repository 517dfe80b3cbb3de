// Consumer warp groups of the backward where head_dim or head_dim_v is beyond 128. The registers of a group hold dK or
// dV of 64 keys, not both, so two groups divide the work on one key tile:
//
//   probability group                                     derivative group
//   S^T(j) = K Q^T - lse / scale          (release Q)     dP^T(j) = V dO^T - delta              (release dO)
//   P^T(j) = 2^S^T, to the other group
//                                                         dS^T(j) = P^T o dP^T, to shared memory
//   its columns of dQ(j - 1) = dS K                       its columns of dQ(j - 1) = dS K
//   dV += P^T dO                          (release dO)    dK += dS^T Q                          (release Q)
//
// Both groups multiply as much, if not for dQ: S and dK have head_dim columns, dP and dV head_dim_v. A stage of Q or dO
// is empty when both have released it. P^T passes from each warp to its counterpart in register order, without bank
// conflicts, and as float16 for any element type: P is in [0, 1], where float16 keeps eleven significant bits.
//
// Registers hold the gradient and the accumulators of one other product at a time: dQ is issued after S^T or dP^T has
// been rounded, and added to the workspace while dV or dK is in flight. The groups run out of phase by themselves,
// since one waits for P of the other.
#pragma once
#include "sm90/backward_group.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape, bool kProbability>
class BackwardDivided : BackwardGroup<Spec, Shape> {
    using Base = BackwardGroup<Spec, Shape>;
    using Memory = typename Base::Memory;
    using Scores = typename Base::Scores;
    using Rounded = typename Base::Rounded;
    using Gradient = QuadFragment<(kProbability ? Shape::kDv : Shape::kD) / 8>;
    using Exchanged = PackedFragment<float16, Shape::kBr / 8>;
    using Base::arrive, Base::lane_, Base::memory_, Base::own_, Base::params_, Base::warp_;
    static constexpr int kBr = Shape::kBr;
    static constexpr bool kWithDq = Shape::kWithDq;
    friend KeyGroup<Spec, Shape, Memory>;

    // The derivative group computes the first columns of dQ, and the probability group, which also has the
    // exponentials, the remaining ones.
    static constexpr int kDqColumn = kProbability ? Shape::kFirstDqColumns : 0, kDqColumn8 = kDqColumn / 8;
    static constexpr int kDqWidth = kProbability ? Shape::kD - Shape::kFirstDqColumns : Shape::kFirstDqColumns;
    using Dq = QuadFragment<kDqWidth / 8>;

  public:
    __device__ BackwardDivided(const Params& params, const Params& maps, const Memory& memory)
        : Base(params, maps, memory, 0),
          own_operand_(matrix_descriptor(kProbability ? memory.key() : memory.value(), 0)),
          scores_operand_(matrix_descriptor(kProbability ? memory.query(0) : memory.dout(0), 0)),
          gradient_operand_(
              matrix_descriptor(kProbability ? memory.dout(0) : memory.query(0), Shape::kQueryPanelBytes)),
          key_columns_(Base::columns_of_k(kDqColumn)),
          ds_operand_(matrix_descriptor(memory.ds(0), 0)) {}

    // Inlined, however large the kernel is: its members are registers only then.
    __device__ __forceinline__ void run() {
        gradient_.fill(0.0f);
        if constexpr (kWithDq) Base::start_adding(params_, warp_, kDqColumn8);
        if constexpr (kProbability) Base::load_first_array(own_.first_key);
        mbarrier_wait(memory_.full_key(), 0);
        mbarrier_wait(memory_.full_value(), 0);
        Base::take_steps(*this);
        if constexpr (kWithDq) {
            if (!Shape::kPair || !skips_dq_) {
                Dq dq;
                Base::issue_dq(dq, key_columns_, ds_operand_);
                wgmma_wait<0>();
                pin(dq);
                Base::add_dq(dq, warp_, kDqColumn8, {});
            }
        }
        pin(gradient_);
        store_gradient(params_, Base::maps_);
    }

  private:
    template <class Record>
    __device__ __forceinline__ void store_gradient(const Record& params, const Record& maps) {
        if constexpr (Spec::kSplit)
            Base::template put_share<kProbability>(gradient_, params, warp_);
        else
            store_result(maps);
    }

    template <class Record>
    __device__ __forceinline__ void store_result(const Record& maps) {
        // Each group stores its gradient over an operand of the other (dV over V, dK over K), so the other must have
        // finished reading. Without dQ, the last read of K precedes full_p, for which the derivative group has waited,
        // and the last read of V precedes empty_p, for which the probability group waits here.
        if constexpr (kWithDq && !(Shape::kPair && kProbability)) {
            Base::wait_for_last_dq();
        } else if constexpr (kProbability) {
            const auto last = exchanged_.previous();
            mbarrier_wait(memory_.empty_p(last.slot()), last.parity());
        }
        if constexpr (kProbability)
            Base::store_gradient(gradient_, common::kept_scale<Spec>(params_), maps.dv, memory_.value(), 16 * warp_);
        else
            Base::store_gradient(gradient_, params_.softmax_scale, maps.dk, memory_.key(), 16 * warp_);
        if (lane_ == 0) tma_store_wait();
    }

    template <bool kMasked>
    __device__ __forceinline__ void step(const QueryStep& step) {
        const uint32 stage = stages_.slot(), parity = stages_.parity();
        const uint32 query = stage * (Shape::kQueryBytes / 16), dout = stage * (Shape::kDoutBytes / 16);
        const uint32 of_scores = kProbability ? query : dout, of_gradient = kProbability ? dout : query;
        const uint32 full_query = memory_.full_query(stage), full_dout = memory_.full_dout(stage);
        const uint32 empty_query = memory_.empty_query(stage), empty_dout = memory_.empty_dout(stage);
        Scores scores;
        const auto terms = Base::head_terms(step);
        if constexpr (kProbability) Base::template start_from_array<0>(scores, step, stages_.turn);
        mbarrier_wait(kProbability ? full_query : full_dout, parity);
        constexpr bool kFromStatistic = kProbability ? Base::kFromLse : Base::kFromDelta;
        constexpr bool kStarted = kProbability && Shape::kStarts;
        const uint32 statistic = kProbability ? memory_.lse(stage) : memory_.delta(stage);
        Base::template start_scores<kFromStatistic, kStarted>(scores, statistic);
        constexpr int kColumns = kProbability ? Shape::kD : Shape::kDv;
        Base::template issue_scores<kFromStatistic, kColumns, kStarted>(scores, own_operand_,
                                                                        scores_operand_ + of_scores, statistic);
        constexpr bool kMasksScores = kProbability && kMasked;
        const auto mask = Base::template mask_ahead<kMasksScores>(step, own_.first_key);
        const auto distances = Base::distances_ahead(step, own_.first_key);
        wgmma_wait<0>();
        pin(scores);
        // If the product does not start from the statistic, it is read later, with P or dS: the stage is released then.
        constexpr bool kReadsStatistic = !(kProbability ? Base::kFromLse : Base::kFromDelta);
        if constexpr (!kReadsStatistic) Base::template release<kProbability>(kProbability ? empty_query : empty_dout);
        Rounded rounded;
        if constexpr (kProbability && Base::kTakesWeights) {
            Base::template take_weights<kMasked>(scores, rounded, step, own_.first_key, memory_.lse(stage), terms,
                                                 distances);
            give_p(scores);
        } else {
            if constexpr (kProbability) {
                Base::template exponentiate<kMasked>(scores, step, own_.first_key, mask);
                give_p(scores);
            } else {
                take_p(scores, step, memory_.delta(stage));
            }
            rounded.set(scores);
        }
        if constexpr (kReadsStatistic) {
            __syncwarp();
            Base::template release<kProbability>(kProbability ? empty_query : empty_dout);
        }
        if constexpr (kWithDq && !kProbability) Base::store_ds(rounded, 0);

        mbarrier_wait(kProbability ? full_dout : full_query, parity);
        if constexpr (kWithDq) {
            if (!skips_dq_) {
                Dq dq;
                Base::issue_dq(dq, key_columns_, ds_operand_);
                Base::issue_gradient(gradient_, rounded, gradient_operand_ + of_gradient);
                wgmma_wait<1>();
                pin(dq);
                Base::add_dq(dq, warp_, kDqColumn8, step);
            }
            if constexpr (Shape::kPair) Base::walk_to(step);
        }
        if (!kWithDq || skips_dq_) Base::issue_gradient(gradient_, rounded, gradient_operand_ + of_gradient);
        wgmma_wait<0>();
        pin(gradient_);
        Base::template release<!kProbability>(kProbability ? empty_dout : empty_query);
        if constexpr (kProbability) Base::load_next_array(step, own_.first_key);
        skips_dq_ = Shape::kPair && stages_.turn % 2 != Base::rank_;
        stages_.advance();
    }

    __device__ __forceinline__ uint32 lane_of_p(int s) const {
        return memory_.p(exchanged_.slot()) + ((warp_ * (kBr / 16) + s) * 32 + lane_) * 16;
    }

    __device__ __forceinline__ void give_p(const Scores& scores) {
        Exchanged p;
        p.set(scores);
        mbarrier_wait(memory_.empty_p(exchanged_.slot()), exchanged_.parity() ^ 1);
#pragma unroll
        for (int s = 0; s < kBr / 16; ++s) store_shared(lane_of_p(s), p.k16(s));
        __syncwarp();
        arrive(memory_.full_p(exchanged_.slot()));
        exchanged_.advance();
    }

    __device__ __forceinline__ void take_p(Scores& derivatives, const QueryStep& step, uint32 delta) {
        mbarrier_wait(memory_.full_p(exchanged_.slot()), exchanged_.parity());
#pragma unroll
        for (int s = 0; s < kBr / 16; ++s)
            common::weigh_k16<Spec>(derivatives, s, load_shared_operand(lane_of_p(s)), params_,
                                    Base::score_tile(step, own_.first_key), [&](int n, float (&minus_delta)[2]) {
#pragma unroll
                                        for (int e = 0; e < 2; ++e)
                                            minus_delta[e] = Base::statistic_of(delta, 2 * n + e);
                                    });
        __syncwarp();
        arrive(memory_.empty_p(exchanged_.slot()));
        exchanged_.advance();
    }

    const uint64 own_operand_, scores_operand_, gradient_operand_, key_columns_, ds_operand_;
    RingPosition<Shape::kStages> stages_;
    RingPosition<2> exchanged_;
    bool skips_dq_ = true;  // no dS of the step before is here: it is the first, or the other block's
    Gradient gradient_;
};

}  // namespace fa2::sm90
