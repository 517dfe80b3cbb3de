// A consumer warp group of the tangents of dK and dV: it computes those of its 64 keys; two of them share a key tile.
// The software pipeline of a query tile:
//
//   issue   S^T = K Q^T, T^T = K' Q^T + K Q'^T
//   wait    S^T, T^T
//   issue   dP^T = V dO^T, dP'^T = V' dO^T + V dO'^T      P^T and P'^T = P^T o (T^T - lse'), rounded
//   issue   dV' += P'^T dO + P^T dO'
//   wait    dP^T, dP'^T                                   dS^T and dS'^T, rounded
//   issue   dK' += dS'^T Q + dS^T Q'
//   wait    dV'                                           release dO
//   wait    dK'                                           release Q
//
// As in the backward, S^T is waited for before dP^T is issued, dV' is issued before the wait for dP^T, and no product is
// in flight across the loop's back edge.
//
// The rows of Q' lie behind those of Q, so that one wgmma can multiply K by both: S^T and K Q'^T have the accumulators of
// one product of twice as many columns. K is then read once, and wgmmas of few columns are bound by the reads of their
// left operand. But K' Q^T has accumulators of its own then, and is added afterwards: with many queries, and for dP^T,
// there are no registers for them, and K Q'^T is added to K' Q^T by wgmma.
#pragma once
#include "common/mask_function.cuh"
#include "common/tangents.cuh"
#include "sm90/dkdv_jvp_shape.cuh"
#include "sm90/key_group.cuh"
#include "sm90/wgmma_dkdv_jvp.cuh.j2"

namespace fa2::sm90 {

// X Y^T and its tangent X' Y^T + X Y'^T, of 64 rows X of a group and a tile Y of kColumns columns, whose tangent lies
// behind it. kOwnMoves, kOtherMoves: X', Y' exist. kJoins: X Y^T and X Y'^T are one product.
template <class Shape, int kColumns, int kPanelBytes, bool kOwnMoves, bool kOtherMoves, bool kJoins>
class MovedProduct {
    using Scores = QuadFragment<Shape::kBr / 8>;
    static constexpr bool kBoth = kOtherMoves && kJoins, kHasRest = kOwnMoves || (kOtherMoves && !kBoth);
    static constexpr int kN8 = Shape::kBr / 8;

  public:
    // The operands are descriptors of X, X' and Y.
    __device__ __forceinline__ void issue(uint64 own, uint64 own_tangent, uint64 other) {
        const uint64 other_tangent = other + Shape::kTileRowsBytes / 16;
        wgmma_fence();
        multiply<true>(first_, own, other);
        if constexpr (kOwnMoves) multiply<true>(rest_, own_tangent, other);
        if constexpr (kOtherMoves && !kBoth) multiply<!kOwnMoves>(rest_, own, other_tangent);
        wgmma_commit();
        pin();
    }
    __device__ __forceinline__ void pin() {
        sm90::pin(first_);
        if constexpr (kHasRest) sm90::pin(rest_);
    }
    // The columns of k-step s of the second product.
    __device__ __forceinline__ void take(int s, QuadFragment<2>& product, QuadFragment<2>& tangent) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float moved = 0.0f;
                if constexpr (kBoth) moved = first_.value[kN8 + 2 * s + n][e];
                if constexpr (kHasRest) moved = kBoth ? moved + rest_.value[2 * s + n][e] : rest_.value[2 * s + n][e];
                product.value[n][e] = first_.value[2 * s + n][e];
                tangent.value[n][e] = moved;
            }
    }

  private:
    template <bool kOverwrites, int kWidth8>
    __device__ __forceinline__ static void multiply(QuadFragment<kWidth8>& x, uint64 own, uint64 other) {
#pragma unroll
        for (int s = 0; s < kColumns / 16; ++s) {
            const uint64 a = own + along_columns<Shape::kKeyPanelBytes>(s), b = other + along_columns<kPanelBytes>(s);
            if (kOverwrites && s == 0)
                wgmma_first_product(x, a, b);
            else
                wgmma_product(x, a, b);
        }
    }

    QuadFragment<(1 + kBoth) * kN8> first_;
    Scores rest_;
};

// The group index is a template parameter as in the backward.
template <class Spec, int kGroup>
class DkdvJvpConsumer : KeyGroup<Spec, DkdvJvpShape<Spec>, DkdvJvpMemory<DkdvJvpShape<Spec>>> {
    using Shape = DkdvJvpShape<Spec>;
    using Memory = DkdvJvpMemory<Shape>;
    using Base = KeyGroup<Spec, Shape, Memory>;
    using Base::arrive, Base::lane_, Base::memory_, Base::own_, Base::params_, Base::warp_;
    static constexpr int kBr = Shape::kBr, kD = Shape::kD, kDv = Shape::kDv;
    // Scores are processed by k-steps of the second product, with the statistics of 16 queries in registers at a time.
    static constexpr int kSteps = kBr / 16;
    using Scores = QuadFragment<2>;
    using Rounded = PackedFragment<typename Spec::Element, 2>;
    using OfScores =
        MovedProduct<Shape, kD, Shape::kQueryPanelBytes, Spec::kKeyTangent, Spec::kQueryTangent, Shape::kJoinsScores>;
    using OfDerivatives =
        MovedProduct<Shape, kDv, Shape::kDoutPanelBytes, Spec::kValueTangent, Spec::kDoutTangent, !Spec::kValueTangent>;
    friend Base;

  public:
    __device__ DkdvJvpConsumer(const Params& params, const Params& maps, const Memory& memory)
        : Base(params, maps, memory),
          key_operand_(own_rows(memory.key())),
          key_tangent_operand_(own_rows(memory.key_tangent())),
          value_operand_(own_rows(memory.value())),
          value_tangent_operand_(own_rows(memory.value_tangent())),
          query_operand_(matrix_descriptor(memory.query(0), 0)),
          dout_operand_(matrix_descriptor(memory.dout(0), 0)) {}

    __device__ __forceinline__ void run() {
        dk_.fill(0.0f);
        dv_.fill(0.0f);
        mbarrier_wait(memory_.full_key(), 0);
        Base::take_steps(*this);
        pin(dk_);
        pin(dv_);
        barrier_sync(Base::kStoreBarrier + kGroup, kGroupThreads);  // the results overwrite K and V
        const int32 row = kGroup * kGroupRows + 16 * warp_;
        Base::store_gradient(dv_, common::kept_scale<Spec>(params_), Base::maps_.dvt, memory_.value(), row);
        Base::store_gradient(dk_, params_.softmax_scale, Base::maps_.dkt, memory_.key(), row);
        if (lane_ == 0) tma_store_wait();
    }

  private:
    // A statistic of the queries of this lane's columns, and its tangent.
    struct Statistics {
        float value[Scores::kCols], tangent[Scores::kCols];
    };

    __device__ static uint64 own_rows(uint32 smem) {
        return matrix_descriptor(smem + kGroup * kGroupRows * kPanelRowBytes, 0);
    }

    template <bool kMasked>
    __device__ __forceinline__ void step(const QueryStep& step) {
        const uint32 stage = stages_.slot(), parity = stages_.parity();
        const uint64 query = query_operand_ + stage * (Shape::kQueryBytes / 16);
        const uint64 dout = dout_operand_ + stage * (Shape::kDoutBytes / 16);
        const auto tile = Base::score_tile(step, own_.first_key + kGroup * kGroupRows);
        const common::Kept<Spec, true, QuadFragment<kBr / 8>> kept(params_, tile);

        mbarrier_wait(memory_.full_query(stage), parity);
        OfScores of_scores;
        of_scores.issue(key_operand_, key_tangent_operand_, query);
        if (is_first_) mbarrier_wait(memory_.full_value(), 0);
        mbarrier_wait(memory_.full_dout(stage), parity);
        wgmma_wait<0>();
        of_scores.pin();
        Scores p[kSteps], changes[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) of_scores.take(s, p[s], changes[s]);
        OfDerivatives of_derivatives;
        of_derivatives.issue(value_operand_, value_tangent_operand_, dout);
        common::Slopes<Spec, Scores> slopes[kSteps];
        Rounded rounded[kSteps], rounded_changes[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const auto kept_of_step = [&](int i, int j) { return kept(i, 4 * s + j); };
            const Statistics lse = statistics(memory_.lse(stage), s);
            slopes[s] = common::move_softmax<true, Spec>(
                p[s], changes[s], common::mask_of<Spec>(params_), {Base::template needs_mask<kMasked>(step), false},
                params_, tile.shifted(16 * s, 0), [&](int, int j) { return lse.value[j]; });
            common::take_changes<Spec>(p[s], changes[s], params_, [&](int, int j) { return lse.tangent[j]; });
            round_kept(rounded_changes[s], changes[s], kept_of_step);
            if constexpr (Spec::kDoutTangent) round_kept(rounded[s], p[s], kept_of_step);
        }
        issue_gradient<Spec::kDoutTangent>(dv_, rounded_changes, rounded, dout + kDoutAlongRows);

        wgmma_wait<1>();
        of_derivatives.pin();
        Rounded rounded_ds[kSteps], rounded_tangent[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            Scores ds, ds_tangent;
            const auto kept_of_step = [&](int i, int j) { return kept(i, 4 * s + j); };
            const Statistics delta = statistics(memory_.delta(stage), s);
            of_derivatives.take(s, ds, ds_tangent);
            common::differentiate_changed<Spec>(
                p[s], changes[s], ds, ds_tangent, kept_of_step, params_,
                [&](int, int j) { return common::MovedRow<float>{0.0f, delta.value[j], 0.0f, delta.tangent[j]}; });
            slopes[s].apply(ds, ds_tangent);
            rounded_tangent[s].set(ds_tangent);
            if constexpr (Spec::kQueryTangent) rounded_ds[s].set(ds);
        }
        issue_gradient<Spec::kQueryTangent>(dk_, rounded_tangent, rounded_ds, query + kQueryAlongRows);
        wgmma_wait<1>();
        pin(dv_);
        arrive(memory_.empty_dout(stage));
        wgmma_wait<0>();
        pin(dk_);
        arrive(memory_.empty_query(stage));
        stages_.advance();
        is_first_ = false;
    }

    __device__ __forceinline__ Statistics statistics(uint32 smem, int s) const {
        Statistics found;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float pairs[4];  // of columns 2t and 2t + 1
            load_shared(smem + (2 * s + n) * 64 + lane_ % 4 * 16, pairs);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                found.value[2 * n + e] = pairs[2 * e];
                found.tangent[2 * n + e] = pairs[2 * e + 1];
            }
        }
        return found;
    }

    // Rounds what dropout keeps.
    template <class Kept>
    __device__ __forceinline__ static void round_kept(Rounded& rounded, const Scores& x, const Kept& kept) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                rounded.set(i, n, kept(i, 2 * n) ? x.value[n][2 * i] : 0.0f,
                            kept(i, 2 * n + 1) ? x.value[n][2 * i + 1] : 0.0f);
    }

    // Issues x += tangents Y + weights Y'. `rows`: descriptor of Y, MN-major; kMoves: Y' lies behind it.
    template <bool kMoves, int kN8>
    __device__ __forceinline__ static void issue_gradient(QuadFragment<kN8>& x, Rounded (&tangents)[kSteps],
                                                          Rounded (&weights)[kSteps], uint64 rows) {
        pin(x);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            pin(tangents[s]);
            if constexpr (kMoves) pin(weights[s]);
        }
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) wgmma_gradient(x, tangents[s].k16(0), rows + along_rows(s));
        if constexpr (kMoves)
#pragma unroll
            for (int s = 0; s < kSteps; ++s) wgmma_gradient(x, weights[s].k16(0), rows + along_rows(kSteps + s));
        wgmma_commit();
        pin(x);
    }
    // The leading dimensions that turn K-major descriptors of Q and dO into MN-major ones.
    static constexpr uint64 kQueryAlongRows = static_cast<uint64>(Shape::kQueryPanelBytes / 16) << 16;
    static constexpr uint64 kDoutAlongRows = static_cast<uint64>(Shape::kDoutPanelBytes / 16) << 16;

    const uint64 key_operand_, key_tangent_operand_, value_operand_, value_tangent_operand_;
    const uint64 query_operand_, dout_operand_;
    RingPosition<Shape::kStages> stages_;
    bool is_first_ = true;
    QuadFragment<kD / 8> dk_;
    QuadFragment<kDv / 8> dv_;
};

}  // namespace fa2::sm90
