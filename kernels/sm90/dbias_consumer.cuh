// The consumers of the kernel of dbias: a warp group owns 64 rows of the block's tile of the bias, a warp 16 of them.
//
// A step issues S = Q K^T and dP = dO V^T together. The exponentials of S overlap with dP, and with the products of the
// other groups of the multiprocessor; nothing synchronises groups but the stages that both release.
#pragma once
#include "common/bias_owner.cuh"
#include "common/scores.cuh"
#include "common/weights.cuh"
#include "sm90/dbias_shape.cuh"
#include "sm90/multiply_panels.cuh"

namespace fa2::sm90 {

template <class Spec>
class DbiasConsumer {
    using Shape = DbiasShape<Spec>;
    using OfScores = WithOwnedBias<Spec>;
    using Bias = typename Shape::Bias;
    using Scores = QuadFragment<Shape::kBc / 8>;
    static constexpr bool kKeepsBias = OfScores::kKeepsBias;

    // Those that have sums, without the producer's.
    struct Threads {
        static constexpr int kWarps = Shape::kConsumers / 32;
        __device__ __forceinline__ static int32 index() { return threadIdx.x - kGroupThreads; }
        __device__ __forceinline__ static int32 number() { return Shape::kConsumers; }
        __device__ __forceinline__ static void sync() { barrier_sync(1, Shape::kConsumers); }
    };

  public:
    __device__ DbiasConsumer(const Params& params, const DbiasMemory<Shape>& memory)
        : params_(params),
          memory_(memory),
          group_(__shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0) - 1),
          warp_(threadIdx.x / 32 - 4),
          lane_(threadIdx.x % 32) {}

    // `scratch`: the first of the stages.
    __device__ __forceinline__ void run(float* scratch) {
        const common::OwnedTile<Spec, Params> owned(params_);
        if constexpr (kKeepsBias) owned.template load_bias<typename Bias::Tile>(memory_.bias(warp_), 16 * warp_, lane_);
        Scores sums[1];
        sums[0].fill(0.0f);
        while (true) {
            const uint32 slot = stages_.slot();
            mbarrier_wait(memory_.full(slot), stages_.parity());
            const uint32 at = memory_.step(slot);
            const int32 batch = load_shared<int32>(at);
            if (batch < 0) break;
            const int32 query = load_shared<int32>(at + 8) * Shape::kBr + 16 * warp_;
            const int32 key = load_shared<int32>(at + 12) * Shape::kBc;
            const common::ScoreTile tile{batch, load_shared<int32>(at + 4), {query, key, lane_}};
            add(sums[0], slot, tile, load_shared<int32>(at + 16));
            stages_.advance();
        }
        owned.template store<Threads>(sums, scratch, 16 * warp_, warp_, lane_);
    }

  private:
    // Adds dS of a tile of scores.
    __device__ __forceinline__ void add(Scores& sums, uint32 slot, const common::ScoreTile& tile, bool masked) {
        Scores scores, dp;
        const uint32 stage = memory_.stage(slot), rows = stage + group_ * kGroupRows * Shape::kPanelRowBytes;
        wgmma_fence();
        issue<Shape::kD>(scores, rows, stage + Shape::kKey);
        issue<Shape::kDv>(dp, rows + Shape::kDout, stage + Shape::kValue);
        float lse[2], delta[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float row[2];
            load_shared(memory_.row(slot, 16 * warp_ + Scores::row(i, lane_)), row);
            lse[i] = row[0];
            delta[i] = row[1];
        }
        const common::SharedKeyPadding<Spec, Shape::kBc / 8> padding(memory_.padding(slot), lane_);
        wgmma_wait<1>();
        pin(scores);
        const auto& own = common::record_of_sequence<Spec>(params_, tile.batch);
        if (masked)
            take_weights<true>(scores, own, tile, lse);
        else
            take_weights<false>(scores, own, tile, lse);
        padding.clear(scores);
        wgmma_wait<0>();
        pin(dp);
        __syncwarp();  // all lanes have read the statistics
        if (lane_ == 0) mbarrier_arrive(memory_.empty(slot));
        // Rows that see no key may have NaN in Q and dO.
        if (__all_sync(common::kFullWarp, max_of(lse[0], lse[1]) < common::infinity<float>()))
            add_rows<false>(sums, scores, dp, lse, delta);
        else
            add_rows<true>(sums, scores, dp, lse, delta);
    }

    template <bool kHides>
    __device__ __forceinline__ void add_rows(Scores& sums, const Scores& weights, const Scores& dp,
                                             const float (&lse)[2], const float (&delta)[2]) const {
#pragma unroll
        for (int n = 0; n < Shape::kBc / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float ds =
                    common::weighted_from_zero<OfScores>(weights.value[n][e], dp.value[n][e], delta[e / 2], params_);
                if (!kHides || lse[e / 2] != common::infinity<float>()) sums.value[n][e] += ds;
            }
    }

    template <int kColumns>
    __device__ __forceinline__ static void issue(Scores& x, uint32 rows, uint32 keys) {
        const uint64 of_rows = matrix_descriptor<Shape::kPanelRowBytes>(rows, 0),
                     of_keys = matrix_descriptor<Shape::kPanelRowBytes>(keys, 0);
        multiply_panels<kColumns, Shape::kQueryPanelBytes, Shape::kKeyPanelBytes>(x, of_rows, of_keys);
        wgmma_commit();
        pin(x);
    }

    // Replaces the products by the weights of dP - delta. A kept bias has been added when masks in global memory hide keys.
    template <bool kMasked, class Record>
    __device__ __forceinline__ void take_weights(Scores& scores, const Record& own, const common::ScoreTile& tile,
                                                 const float (&lse)[2]) const {
        common::Unused unused;
        const auto of_row = [&](int i, int) { return lse[i]; };
        if constexpr (kKeepsBias) {
            common::hide_by_arrays<OfScores>(scores, own, tile);
            common::take_weights_with<false, OfScores>(Bias(memory_.bias(warp_), lane_), scores, unused, kMasked, own,
                                                       tile, of_row, {common::score_args_of(own), tile});
        } else {
            common::take_weights<false, OfScores>(scores, unused, kMasked, own, tile, of_row);
        }
    }

    const Params& params_;
    const DbiasMemory<Shape> memory_;
    const int32 group_, warp_, lane_;
    RingPosition<Shape::kStages> stages_;
};

}  // namespace fa2::sm90
