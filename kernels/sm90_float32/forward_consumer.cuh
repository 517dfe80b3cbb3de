// The forward's consumers. A step issues a product, waits for it, and works on it: nothing overlaps within a warp group.
// Three products of parts take so much longer than the softmax that the other warp group's products fill the gaps.
//
//   S = Q K^T         -> release K's stage; P = exp(S - row_max), in parts
//   for each strip of 64 keys, or for each piece of V:  T = P V   -> O += unit T
//                     -> release V's stage
#pragma once
#include "common/online_softmax.cuh"
#include "common/scores.cuh"
#include "sm90_float32/query_tile_products.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
class ForwardConsumer : QueryTileProducts<Spec, PartsShape<Spec, 1>> {
    using Shape = PartsShape<Spec, 1>;
    using Base = QueryTileProducts<Spec, Shape>;
    using Base::add_values, Base::first_key_strip, Base::first_row, Base::query_strip, Base::score_tile,
        Base::take_scores;
    using Base::kBc, Base::kStrips;
    using Base::lane_, Base::memory_, Base::params_, Base::queries_;
    using typename Base::Memory, typename Base::Output, typename Base::Scores;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp_approx, true>;
    friend QueryTileConsumer<Spec, Shape>;

  public:
    __device__ ForwardConsumer(const Params& params, const Memory& memory, int32 group) : Base(params, memory, group) {}

    __device__ void run() { Base::run(*this); }

  private:
    __device__ __forceinline__ void begin(const TileInSlot& tile, const GroupKeys&) {
        softmax_.reset();
        output_.fill(0.0f);
        query_unit_ = params_.q_units[query_strip(tile)];
        first_key_strip_ = first_key_strip(tile);
        mbarrier_wait(memory_.full_query(0), queries_.parity());
    }

    __device__ __forceinline__ void step(const TileInSlot& tile, int32 block, bool masked, bool is_last) {
        float key_unit[kStrips], value_unit[kStrips];
#pragma unroll
        for (int c = 0; c < kStrips; ++c) {
            const int32 key_strip = first_key_strip_ + block * kStrips + c;
            key_unit[c] = query_unit_ * params_.k_units[key_strip];
            value_unit[c] = params_.v_units[key_strip] / kProbabilityScale;
        }
        Scores scores;
        take_scores(scores);
        if (is_last && lane_ == 0) mbarrier_arrive(memory_.empty_query(0));

        const common::ScoreTile position = score_tile(tile, block);
        const auto& own = record_of<Spec>(params_, tile);
        scale_products<!common::kModifiesScores<Spec>>(scores, key_unit, params_);
        common::modify_scores<Spec>(scores, own, position);
        if (masked)
            common::mask_scores(scores, common::mask_of<Spec>(own), position.position, -common::infinity<float>());
        float rescale[2];
        softmax_.update(scores, rescale);
        common::drop<Spec>(scores, params_, position);
        FragmentParts<kBc / 8> p;
        const float scale[2] = {kProbabilityScale, kProbabilityScale};
        p.set_scaled(scores, scale);
        multiply_rows(output_, rescale);

        add_values(output_, p, [&](int c, int) { return value_unit[c]; });
    }

    __device__ __forceinline__ void end(const TileInSlot& tile) {
        const auto& own = record_of<Spec>(params_, tile);
        float inverse_sum[2], row_lse[2];
        common::finish_rows<Spec>(softmax_, params_, tile.head(), 0, inverse_sum, row_lse);
        multiply_rows(output_, inverse_sum);
        float* lse = own.lse + common::first_statistic<Spec>(params_, tile.batch(), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = first_row(tile) + Scores::row(i, lane_);
            if (lane_ % 4 == 0 && row < own.seqlen_q) lse[row] = row_lse[i];
        }
        Base::template store_rows<Spec::kHeadDimV>(output_, own.o, own.o_strides, tile, own);
    }

    Output output_;
    Softmax softmax_;
    float query_unit_;
    int32 first_key_strip_;
};

}  // namespace fa2::sm90_float32
