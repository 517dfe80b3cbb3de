// The consumers of the dQ kernel:
//
//   S = Q K^T, dP = dO V^T     -> P while dP is in flight; release V's stage; dS -> dbias; dS, in parts
//   for each strip of 64 keys:  T = dS K   -> dQ += unit T
//                              -> release K's stage
//
// With K and V in pieces, dP follows P, and K is read again for dQ. Two warp groups take turns at the key tiles of the
// same rows, and their sums of dQ are added at the end.
#pragma once
#include "common/dbias.cuh"
#include "float32_parts/softmax_gradient.cuh"
#include "sm90_float32/query_tile_products.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
class BackwardDqConsumer : QueryTileProducts<Spec, PartsShape<Spec, 2>> {
    using Shape = PartsShape<Spec, 2>;
    using Base = QueryTileProducts<Spec, Shape>;
    using Base::add_keys, Base::first_key_strip, Base::first_row, Base::query_strip, Base::score_tile;
    using Base::group_, Base::lane_, Base::memory_, Base::params_, Base::queries_, Base::turn_;
    using Base::kBc, Base::kStrips, Base::kPanels, Base::kPanelsV;
    using typename Base::Memory, typename Base::Output, typename Base::Scores;
    static constexpr bool kInPieces = Shape::kInPieces;
    using Compared = Comparand<kInPieces ? kPanelsV : 1>;
    static constexpr int kSharersBarrier = 1;  // the named barrier of warp groups that share rows
    friend QueryTileConsumer<Spec, Shape>;

  public:
    __device__ BackwardDqConsumer(const Params& params, const Memory& memory, int32 group)
        : Base(params, memory, group),
          dout_operand_(matrix_descriptor(memory.dout(0) + group_ * kGroupRows * kPanelRowBytes, 0)) {}

    __device__ void run() { Base::run(*this); }

  private:
    __device__ __forceinline__ void begin(const TileInSlot& tile, const GroupKeys& keys) {
        if (common::kClearsSkippedDbias<Spec> && turn_ == 0)
            common::clear_skipped_dbias<Spec>(params_, score_tile(tile, 0), 16, keys.begin * kBc, keys.end * kBc);
        const auto& own = record_of<Spec>(params_, tile);
        const int64 first = common::first_statistic<Spec>(own, tile.batch(), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto row = row_statistics(own, first, first_row(tile) + Scores::row(i, lane_));
            lse_[i] = row.lse;
            delta_[i] = row.delta;
        }
        output_.fill(0.0f);
        const int32 block = query_strip(tile);
        query_unit_ = params_.q_units[block];
        dout_unit_ = params_.dout_units[block];
        first_key_strip_ = first_key_strip(tile);
        mbarrier_wait(memory_.full_query(0), queries_.parity());
        mbarrier_wait(memory_.full_dout(0), queries_.parity());
    }

    __device__ __forceinline__ void step(const TileInSlot& tile, int32 block, bool masked, bool is_last) {
        float key_unit[kStrips], score_unit[kStrips], dp_unit[kStrips];
#pragma unroll
        for (int c = 0; c < kStrips; ++c) {
            const int32 key_strip = first_key_strip_ + block * kStrips + c;
            key_unit[c] = params_.k_units[key_strip];
            score_unit[c] = query_unit_ * key_unit[c];
            dp_unit[c] = dout_unit_ * params_.v_units[key_strip];
        }
        Scores scores, dp;
        const auto start = [&](int i, int c) { return Compared(delta_[i], dp_unit[c]).start; };
        if constexpr (kInPieces) {
            Base::take_scores(scores);
        } else {
            typename Base::Products products;
            Base::issue_scores(products);
            start_dp<false>(dp, start);
            Base::issue_derivatives(dp, dout_operand_);
            wgmma_wait<1>();
            scores = products.sum();
        }
        scale_products<!common::kTakesWeights<Spec>>(scores, score_unit, params_);
        const auto& own = record_of<Spec>(params_, tile);
        const common::ScoreTile position = score_tile(tile, block);
        common::SavedScores<Spec, Scores> saved;
        saved.save(scores);
        take_probabilities<false, Spec>(scores, common::Unused{}, masked, own, position,
                                        [&](int i) { return lse_[i]; });
        if constexpr (kInPieces) {
            start_dp<false>(dp, start);
            Base::add_derivatives(dp, dout_operand_, [&](Scores& x) { start_next_chain<false>(x, start); });
        } else {
            wgmma_wait<0>();
            pin(dp);
            Base::release_value();
            if (is_last) release_queries();
        }
        take_gradients<false, Spec>(
            scores, dp, dp_unit, params_, [&](int i, int c) { return Compared(delta_[i], dp_unit[c]).rest; },
            [&](int i) { return delta_[i]; });
        common::write_dbias<Spec>(scores, own, position);
        saved.take_derivative(scores, own, position);

        float scale[2], inverse[2];
        row_scales(scores, scale, inverse);
        FragmentParts<kBc / 8> ds;
        ds.set_scaled(scores, scale);
        add_keys(output_, ds, [&](int c, int i) { return inverse[i] * key_unit[c]; });
    }

    __device__ __forceinline__ void end(const TileInSlot& tile) {
        if constexpr (kInPieces) {
            add_shares();
            if (turn_ > 0) return;
        }
        const auto& own = record_of<Spec>(params_, tile);
        const float scale[2] = {params_.softmax_scale, params_.softmax_scale};
        multiply_rows(output_, scale);
        Base::template store_rows<Spec::kHeadDim>(output_, own.dq, own.dq_strides, tile, own);
    }

    __device__ __forceinline__ void release_queries() const {
        if (lane_ != 0) return;
        mbarrier_arrive(memory_.empty_query(0));
        mbarrier_arrive(memory_.empty_dout(0));
    }

    // Adds the second warp group's dQ to that of the first. It passes through the memory of Q, in the order of registers.
    __device__ __forceinline__ void add_shares() {
        const uint32 own = memory_.query(0) + threadIdx.x % kGroupThreads * 16;
        constexpr uint32 kQuadBytes = 16 * kGroupThreads;
        static_assert(Shape::kQueryBytes == kPanels * (kPanelColumns / 8) * kQuadBytes);
        barrier_sync(kSharersBarrier, 2 * kGroupThreads);  // both have completed the last product that reads Q
        if (turn_ > 0) for_each_quad([&](int quad, float (&x)[4]) { store_shared(own + quad * kQuadBytes, x); });
        barrier_sync(kSharersBarrier, 2 * kGroupThreads);
        if (turn_ == 0)
            for_each_quad([&](int quad, float (&x)[4]) {
                float other[4];
                load_shared(own + quad * kQuadBytes, other);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] += other[e];
            });
        async_proxy_fence();
        __syncwarp();
        release_queries();
    }
    // Calls f(n, x) for the n-th four accumulators of dQ.
    template <class Function>
    __device__ __forceinline__ void for_each_quad(const Function& f) {
        constexpr int kQuads = kPanelColumns / 8;
#pragma unroll
        for (int n = 0; n < kPanels * kQuads; ++n) f(n, output_.panel[n / kQuads].value[n % kQuads]);
    }

    const uint64 dout_operand_;
    Output output_;
    float lse_[2], delta_[2], query_unit_, dout_unit_;
    int32 first_key_strip_;
};

}  // namespace fa2::sm90_float32
