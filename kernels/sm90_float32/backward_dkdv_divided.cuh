// The consumers of the dK and dV kernel where one of them has more than 128 columns, so that the registers of a warp group hold dK or dV of 64 keys,
// not both. Two groups divide the work on a key tile, and read the same pieces of Q and dO:
//
//   the group of dV                                  the group of dK
//   S^T = K Q^T     -> P^T, in parts                 S^T = K Q^T       -> P^T
//   for each piece of dO:  T = P^T dO                dP^T = V dO^T     -> dS^T = P^T o (dP^T - delta), in parts
//                   -> dV += unit T
//   passes over Q                                    for each piece of Q:  T = dS^T Q     -> dK += unit T
//
// S^T is computed twice: the shared memory that its exchange would take holds pieces that are on their way, and neither
// group ever waits for the other but through the rings.
#pragma once
#include "sm90_float32/backward_dkdv_group.cuh"
#include "sm90_float32/pieces.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape, bool kDerivative>
class DkdvDivided : DkdvGroup<Spec, Shape> {
    using Base = DkdvGroup<Spec, Shape>;
    using Base::kBc, Base::kBr, Base::kPanels, Base::kPanelsV;
    using Base::key_operand_, Base::lane_, Base::memory_, Base::params_, Base::statistics_at, Base::value_operand_;
    using typename Base::Memory, typename Base::Parts, typename Base::Scores;
    using Reader = PieceReader<Shape::kStages>;

  public:
    __device__ DkdvDivided(const Params& params, const Memory& memory, const common::TileCoordinates& where)
        : Base(params, memory, where, 0), queries_(query_ring(memory), lane_), douts_(dout_ring(memory), lane_) {}

    template <class Tiles>
    __device__ void run(const Tiles& tiles) {
        gradient_.fill(0.0f);
        Base::for_each_tile(tiles, [&](int32 head, int32 tile, bool masked) { step(head, tile, masked); });
        if constexpr (kDerivative)
            Base::template store<Spec::kHeadDim>(gradient_, params_.softmax_scale, params_.dk, params_.dk_strides);
        else
            Base::template store<Spec::kHeadDimV>(gradient_, common::kept_scale<Spec>(params_), params_.dv,
                                                  params_.dv_strides);
    }

  private:
    __device__ __forceinline__ void step(int32 head, int32 tile, bool masked) {
        auto units = Base::units_of(head, tile);
        Scores scores;
        queries_.template multiply_columns<Spec::kHeadDim, true, kBc>(scores, key_operand_, never());
        scale_products<!common::kTakesWeights<Spec>>(scores, units.score, params_);
        const uint32 lse = memory_.statistics(statistics_.slot()), delta = lse + Shape::kStatisticBytes;
        mbarrier_wait(memory_.full_statistics(statistics_.slot()), statistics_.parity());
        const common::ScoreTile position = Base::score_tile(head, tile);
        Parts parts;
        if constexpr (kDerivative) {
            take_probabilities<true, Spec>(scores, common::Unused{}, masked, params_, position, statistics_at(lse));
            Scores dp;
            Base::start_dp(dp, delta, units.dp);
            const auto start_next = [&](Scores& x) { Base::start_next_chain(x, delta, units.dp); };
            douts_.template add_columns<Spec::kHeadDimV, true, kBc>(dp, value_operand_, start_next);
            Base::take_gradients(scores, dp, delta, units.dp);
            release_statistics();
            float scale[2], inverse[2];
            row_scales(scores, scale, inverse);
            parts.set_scaled(scores, scale);
            const float factor[2] = {inverse[0] * units.query[0], inverse[1] * units.query[0]};
            queries_.add_product(gradient_, parts, factor, never());
        } else {
            Scores p;
            take_probabilities<true, Spec>(scores, FloatProbabilities<kBr / 8>{p}, masked, params_, position,
                                           statistics_at(lse));
            release_statistics();
            const float scale[2] = {kProbabilityScale, kProbabilityScale};
            parts.set_scaled(p, scale);
            const float unit = units.dout[0] / kProbabilityScale, factor[2] = {unit, unit};
            douts_.add_product(gradient_, parts, factor, never());
            queries_.template skip<Spec::kHeadDim>();
        }
    }

    __device__ __forceinline__ void release_statistics() {
        __syncwarp();  // all lanes have read them
        if (lane_ == 0) mbarrier_arrive(memory_.empty_statistics(statistics_.slot()));
        statistics_.advance();
    }
    // False, as for `multiply_panel`.
    __device__ __forceinline__ bool never() const { return params_.num_heads < 0; }

    Reader queries_, douts_;
    RingPosition<Shape::kStatisticStages> statistics_;
    PanelFragment<kDerivative ? kPanels : kPanelsV> gradient_;
};

}  // namespace fa2::sm90_float32
