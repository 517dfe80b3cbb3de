// The consumers of the dQ kernel:
//
//   S = Q K^T, dP = dO V^T     -> P while dP is in flight; release V's stage; dS, in parts
//   for each chunk of 64 keys:  T = dS K   -> dQ += unit T
//                              -> release K's stage
#pragma once
#include "float32_parts/softmax_gradient.cuh"
#include "sm90_float32/query_tile_consumer.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
class BackwardDqConsumer : QueryTileConsumer<Spec, PartsShape<Spec, 2>> {
    using Shape = PartsShape<Spec, 2>;
    using Base = QueryTileConsumer<Spec, Shape>;
    using Base::first_key_block, Base::first_row, Base::group_, Base::issue_scores, Base::key_stage, Base::query_block,
        Base::release_key, Base::release_value, Base::score_tile, Base::store_rows, Base::value_stage;
    using Base::kBc, Base::kBr, Base::kChunks, Base::kD, Base::kPanels;
    using Base::lane_, Base::memory_, Base::params_, Base::queries_, Base::values_;
    using typename Base::Memory, typename Base::Output, typename Base::Products, typename Base::Scores;
    friend Base;

  public:
    __device__ BackwardDqConsumer(const Params& params, const Memory& memory, int32 group)
        : Base(params, memory, group),
          dout_operand_(matrix_descriptor(memory.dout(0) + group * kGroupRows * kPanelRowBytes, 0)) {}

    __device__ void run() { Base::run(*this); }

  private:
    __device__ __forceinline__ void begin(const TileInSlot& tile) {
        const auto& own = record_of<Spec>(params_, tile);
        const int64 first = common::first_statistic<Spec>(own, tile.batch(), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto row = row_statistics(own, first, first_row(tile) + Output::row(i, lane_));
            lse_[i] = row.lse;
            delta_[i] = row.delta;
        }
        output_.fill(0.0f);
        const int32 block = query_block(tile);
        query_unit_ = params_.q_units[block];
        dout_unit_ = params_.dout_units[block];
        first_key_block_ = first_key_block(tile);
        mbarrier_wait(memory_.full_query(0), queries_.parity());
        mbarrier_wait(memory_.full_dout(0), queries_.parity());
    }

    __device__ __forceinline__ void step(const TileInSlot& tile, int32 block, bool masked, bool is_last) {
        float key_unit[kChunks], score_unit[kChunks], dp_unit[kChunks];
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int32 key_block = first_key_block_ + block * kChunks + c;
            key_unit[c] = params_.k_units[key_block];
            score_unit[c] = query_unit_ * key_unit[c];
            dp_unit[c] = dout_unit_ * params_.v_units[key_block];
        }
        Products products;
        issue_scores(products);
        Scores dp;
        start_dp<false>(dp, [&](int i, int c) { return Comparand(delta_[i], dp_unit[c]).start; });
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        Products::issue_from(dp, dout_operand_, value_stage());
        wgmma_wait<1>();
        Scores& scores = products.sum();
        scale_products<!common::kTakesWeights<Spec>>(scores, score_unit, params_);
        const auto& own = record_of<Spec>(params_, tile);
        take_probabilities<false, Spec>(scores, common::Unused{}, masked, own, score_tile(tile, block),
                                        [&](int i) { return lse_[i]; });
        wgmma_wait<0>();
        pin(dp);
        release_value();
        if (is_last && lane_ == 0) {
            mbarrier_arrive(memory_.empty_query(0));
            mbarrier_arrive(memory_.empty_dout(0));
        }
        take_gradients<false, Spec>(
            scores, dp, dp_unit, params_, [&](int i, int c) { return Comparand(delta_[i], dp_unit[c]).rest; },
            [&](int i) { return delta_[i]; });

        float scale[2], inverse[2];
        row_scales(scores, scale, inverse);
        FragmentParts<kBc / 8> ds;
        ds.set_scaled(scores, scale);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            Output part;
            multiply_chunk<kPanels, kBc>(part, ds, key_stage(), c);
            wgmma_wait<0>();
            pin(part);
            if (c == kChunks - 1) release_key();
            const float unit[2] = {inverse[0] * key_unit[c], inverse[1] * key_unit[c]};
            add_rows(output_, part, unit);
        }
    }

    __device__ __forceinline__ void end(const TileInSlot& tile) {
        const auto& own = record_of<Spec>(params_, tile);
        const float scale[2] = {params_.softmax_scale, params_.softmax_scale};
        multiply_rows(output_, scale);
        store_rows(output_, own.dq, own.dq_strides, tile, own);
    }

    const uint64 dout_operand_;
    Output output_;
    float lse_[2], delta_[2], query_unit_, dout_unit_;
    int32 first_key_block_;
};

}  // namespace fa2::sm90_float32
