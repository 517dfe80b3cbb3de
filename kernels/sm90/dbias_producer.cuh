// The producer of the kernel of dbias. Two warps walk over the tiles of scores that share the block's tile of the bias:
// one loads their operands by TMA, and the other prepares the statistics of their rows.
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
        if (threadIdx.x < 32)
            load();
        else
            prepare();
    }

  private:
    using Owner = common::BiasOwner<Spec, Params>;
    using Padding = common::KeyPadding<Spec, Shape::kBc / 8, false>;

    __device__ __forceinline__ void load() {
        for (Owner owner(params_); owner.has_step(); owner.advance()) {
            const common::BiasStep step = owner.step();
            await_stage();
            if (lane_ == 0) {
                publish(step);
                load_operands(step, memory_.stage(stages_.slot()), memory_.full(stages_.slot()));
            }
            stages_.advance();
        }
        await_stage();
        if (lane_ == 0) {
            publish({-1, 0, 0, 0, false});
            mbarrier_arrive(memory_.full(stages_.slot()));
        }
    }

    // The statistics of a step are read one step ahead, so that their latency is hidden.
    __device__ __forceinline__ void prepare() {
        Owner owner(params_);
        float lse[kLaneRows], delta[kLaneRows], next_lse[kLaneRows], next_delta[kLaneRows];
        Padding padding, next_padding;
        if (owner.has_step()) load_statistics(owner.step(), next_lse, next_delta, next_padding);
        while (owner.has_step()) {
            padding = next_padding;
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
                lse[i] = next_lse[i];
                delta[i] = next_delta[i];
            }
            owner.advance();
            if (owner.has_step()) load_statistics(owner.step(), next_lse, next_delta, next_padding);
            await_stage();
            padding.put(memory_.padding(stages_.slot()));
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
                const bool hidden = lse[i] == -common::infinity<float>();  // delta may be NaN then
                const uint32 to = memory_.row(stages_.slot(), lane_ + 32 * i);
                store_shared(to, hidden ? common::infinity<float>() : common::in_base2(lse[i]));
                store_shared(to + 4, hidden ? 0.0f : delta[i]);
            }
            __syncwarp();
            if (lane_ == 0) mbarrier_arrive(memory_.full(stages_.slot()));
            stages_.advance();
        }
        await_stage();
        if (lane_ == 0) mbarrier_arrive(memory_.full(stages_.slot()));
    }

    __device__ __forceinline__ void await_stage() const {
        mbarrier_wait(memory_.empty(stages_.slot()), stages_.parity() ^ 1);
    }
    // Stores a step for the consumers.
    __device__ __forceinline__ void publish(const common::BiasStep& step) const {
        const uint32 to = memory_.step(stages_.slot());
        store_shared(to, step.batch, step.head, step.query_tile, step.key_tile);
        store_shared(to + 16, static_cast<int32>(step.masked));
    }

    // An lse of +inf makes P zero in rows past the end and in rows without a visible key: they have -inf here.
    __device__ __forceinline__ void load_statistics(const common::BiasStep& step, float (&lse)[kLaneRows],
                                                    float (&delta)[kLaneRows], Padding& padding) const {
        const auto& own = common::record_of_sequence<Spec>(params_, step.batch);
        const common::ScoreTile tile{step.batch, step.head, {step.query_tile * kBr, step.key_tile * Shape::kBc, lane_}};
        padding = Padding(own, tile);
        const int64 first = common::first_statistic<Spec>(own, step.batch, step.head);
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const int32 row = step.query_tile * kBr + lane_ + 32 * i;
            const bool valid = row < own.seqlen_q;
            lse[i] = valid ? own.lse[first + row] : -common::infinity<float>();
            delta[i] = valid ? own.delta[first + row] : 0.0f;
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
            const int32 column = panel * Shape::kPanelColumns;
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
