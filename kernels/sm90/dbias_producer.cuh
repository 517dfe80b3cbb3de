// The producer of the kernel of dbias: one warp walks over the tiles of scores that share the block's tile of the bias. It
// loads their operands by TMA, and the statistics of their rows, which all lanes prepare.
#pragma once
#include "common/bias_owner.cuh"
#include "common/statistics.cuh"
#include "sm90/dbias_shape.cuh"
#include "sm90/tma_rows.cuh"

namespace fa2::sm90 {

template <class Spec>
class DbiasProducer {
    using Shape = DbiasShape<Spec>;
    static constexpr int kBr = Shape::kBr, kLaneRows = kBr / 32;

  public:
    __device__ DbiasProducer(const Params& params, const DbiasMemory<Shape>& memory)
        : params_(params), memory_(memory), lane_(threadIdx.x % 32) {}

    __device__ __forceinline__ void run() {
        for (common::BiasOwner<Spec, Params> owner(params_); owner.has_step(); owner.advance()) load(owner.step());
        await_stage();
        publish({-1, 0, 0, 0, false});
        if (lane_ == 0) mbarrier_arrive(memory_.full(stages_.slot()));
    }

  private:
    // Statistics are read ahead of the wait for the stage, which hides their latency.
    __device__ __forceinline__ void load(const common::BiasStep& step) {
        float lse[kLaneRows], delta[kLaneRows];
        load_statistics(step, lse, delta);
        await_stage();
        const uint32 slot = stages_.slot();
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            store_shared(memory_.row(slot, lane_ + 32 * i), lse[i]);
            store_shared(memory_.row(slot, lane_ + 32 * i) + 4, delta[i]);
        }
        publish(step);
        if (lane_ == 0) load_operands(step, memory_.stage(slot), memory_.full(slot));
        stages_.advance();
    }

    __device__ __forceinline__ void await_stage() const {
        mbarrier_wait(memory_.empty(stages_.slot()), stages_.parity() ^ 1);
    }
    // Stores a step for the consumers. What all lanes have stored comes before what lane 0 does next.
    __device__ __forceinline__ void publish(const common::BiasStep& step) const {
        if (lane_ == 0) {
            const uint32 to = memory_.step(stages_.slot());
            store_shared(to, step.batch, step.head, step.query_tile, step.key_tile);
            store_shared(to + 16, static_cast<int32>(step.masked));
        }
        __syncwarp();
    }

    // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
    __device__ __forceinline__ void load_statistics(const common::BiasStep& step, float (&lse)[kLaneRows],
                                                    float (&delta)[kLaneRows]) const {
        const auto& own = common::record_of_sequence<Spec>(params_, step.batch);
        const int64 first = common::first_statistic<Spec>(own, step.batch, step.head);
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const int32 row = step.query_tile * kBr + lane_ + 32 * i;
            const bool valid = row < own.seqlen_q;
            const float natural = valid ? own.lse[first + row] : -common::infinity<float>();
            const bool hidden = natural == -common::infinity<float>();  // delta may be NaN then
            lse[i] = hidden ? -natural : common::in_base2(natural);
            delta[i] = hidden ? 0.0f : own.delta[first + row];
        }
    }

    __device__ __forceinline__ void load_operands(const common::BiasStep& step, uint32 stage, uint32 full) const {
        const int32 head_kv = step.head / params_.heads_per_group;
        const int32 query = step.query_tile * kBr, key = step.key_tile * Shape::kBc;
        const auto queries = query_tma_rows<Spec>(params_, step.batch);
        const auto keys = key_tma_rows<Spec>(params_, step.batch);
        mbarrier_arrive_expect(full, Shape::kStageBytes);
#pragma unroll
        for (int panel = 0; panel < max_of(Shape::kPanels, Shape::kPanelsV); ++panel) {
            const int32 column = panel * kPanelColumns;
            const uint32 of_queries = stage + panel * Shape::kQueryPanelBytes,
                         of_keys = stage + panel * Shape::kKeyPanelBytes;
            if (panel < Shape::kPanels) {
                queries.load(of_queries, params_.q, full, column, query, step.head, step.batch);
                keys.load(of_keys + Shape::kKey, params_.k, full, column, key, head_kv, step.batch);
            }
            if (panel < Shape::kPanelsV) {
                queries.load(of_queries + Shape::kDout, params_.dout, full, column, query, step.head, step.batch);
                keys.load(of_keys + Shape::kValue, params_.v, full, column, key, head_kv, step.batch);
            }
        }
    }

    const Params& params_;
    const DbiasMemory<Shape> memory_;
    const int32 lane_;
    RingPosition<Shape::kStages> stages_;
};

}  // namespace fa2::sm90
