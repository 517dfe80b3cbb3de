// dK and dV beyond 256 columns, where two consumer warp groups have the same 64 keys. backward_dkdv.cuh introduces the
// kernel, and shared_rows_consumer.cuh has the order of the products.
//
// A block owns 64 keys and computes first dV, then dK, for which it multiplies K Q^T once more: registers hold one of the
// two. Each group has half of its columns. lse and delta belong to the columns of scores.
//
// Shared memory, in panels of 64 columns; `gradient` is dV or dK:
//
//   dV    K [64][D or Dv], through which it is stored | dO [kStages][kBr][Dv] | panels of Q [kSlots][kBr][64] | lse, delta
//   dK    K [64][D] | V [64][Dv] | Q [kStages][kBr][D] | panels of dO [kSlots][kBr][64] | lse, delta
//   barriers of dK | barriers of dV
#pragma once
#include "sm90/backward_shape.cuh"
#include "sm90/shared_gradient_consumer.cuh"
#include "sm90/shared_gradient_producer.cuh"

namespace fa2::sm90 {

// The step that follows another one.
template <class Spec>
__device__ __forceinline__ void advance(QueryStep& step, const KeyTile<Spec>& own) {
    const bool is_last = step.tile + 1 == own.tiles.end;
    step = {step.head + is_last, is_last ? own.tiles.begin : step.tile + 1};
}

template <class Spec, bool kDerives>
class SharedKeyConsumer
    : SharedGradientConsumer<SharedKeyConsumer<Spec, kDerives>, Spec, SharedGradientShape<Spec, true, kDerives>> {
    using Shape = SharedGradientShape<Spec, true, kDerives>;
    using Base = SharedGradientConsumer<SharedKeyConsumer, Spec, Shape>;
    using Base::derivatives_, Base::lane_, Base::memory_, Base::output_, Base::part_, Base::scored_, Base::scores_,
        Base::warp_;
    using typename Base::Memory, typename Base::Probabilities, typename Base::Scores;
    friend Base;
    friend typename Base::Rows;

  public:
    __device__ SharedKeyConsumer(const Params& params, const KeyTile<Spec>& own, const Memory& memory, int32 part)
        : Base(memory, part), params_(params), own_(own), step_(own.first_step()) {
        if (part > 0) advance(step_, own_);
    }

    __device__ __forceinline__ void run(const TensorMap& map, int32 steps) {
        if (steps > 0)
            Base::sum_over(steps);
        else
            output_.fill(0.0f);
        if constexpr (Spec::kSplit) {
            put_share(params_);
        } else {
            const float scale = kDerives ? params_.softmax_scale : 1.0f, factor[2] = {scale, scale};
            Base::store(factor, map, own_.keys, own_.first_key, own_.head, own_.batch);
        }
    }

  private:
    __device__ __forceinline__ bool take_probabilities(int32, Probabilities& p, float (&)[2]) {
        exponentiate(0);
        p.set(scores_);
        advance_to_own();
        return true;
    }
    __device__ __forceinline__ void exponentiate(int32) {
        if (step_.tile < own_.tiles.full_begin || (common::kLeftLimit<Spec> && step_.tile >= own_.tiles.full_end))
            common::mask_transposed(scores_, common::mask_of<Spec>(params_),
                                    {step_.tile * Shape::kBc, own_.first_key + 16 * warp_, lane_},
                                    -common::infinity<float>());
        mbarrier_wait(memory_.full_statistics(scored_.slot()), scored_.parity());
#pragma unroll
        for (int n = 0; n < Shape::kBc / 8; ++n) {
            float minus_lse[2];
            load_shared(memory_.lse(scored_.slot()) + (8 * n + lane_ % 4 * 2) * 4, minus_lse);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scores_.value[n][e] = common::exp2_approx(
                    common::at_most_zero(fma(scores_.value[n][e], params_.scale_log2, minus_lse[e % 2])));
        }
    }
    __device__ __forceinline__ void take_derivatives(int32, Probabilities& p) {
        Base::wait_for_derivatives();
#pragma unroll
        for (int n = 0; n < Shape::kBc / 8; ++n) {
            float minus_delta[2];
            load_shared(memory_.delta(scored_.slot()) + (8 * n + lane_ % 4 * 2) * 4, minus_delta);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                p.set(i, n, scores_.value[n][2 * i] * (derivatives_.value[n][2 * i] + minus_delta[0]),
                      scores_.value[n][2 * i + 1] * (derivatives_.value[n][2 * i + 1] + minus_delta[1]));
        }
        advance_to_own();
    }
    __device__ __forceinline__ void advance_to_own() {
        advance(step_, own_);
        advance(step_, own_);
    }

    template <class Record>
    __device__ __forceinline__ void put_share(const Record& params) const {
        using Shares = common::ShareWorkspace<Spec::kBc, Spec::kHeadDim, Spec::kHeadDimV, false>;
        using Gradient = common::AccumulatorTile<Spec::kBc, Shape::kColumns>;
        float* share = Shares::template of_block<Spec>(params) + (kDerives ? 0 : Shares::Dk::kElements);
        Shares::template put<Gradient>(share, output_, warp_, part_ * (Shape::kOwnDv / 8), lane_);
    }

    const Params& params_;
    const KeyTile<Spec>& own_;
    QueryStep step_;  // of this group's next tile
};

template <class Spec>
struct BackwardDkdv {
    template <bool kDerives>
    using Shape = SharedGradientShape<Spec, true, kDerives>;
    template <bool kDerives>
    using Memory = SharedGradientMemory<Shape<kDerives>>;
    using Shares = common::ShareWorkspace<Spec::kBc, Spec::kHeadDim, Spec::kHeadDimV, false>;
    static constexpr bool kFindsSequences = true;
    static constexpr int kDataBytes = max_of(Shape<false>::kDataBytes, Shape<true>::kDataBytes);
    static_assert(kAlignment + kDataBytes + Shape<true>::kControlBytes == Spec::kSharedBytes);

    __device__ __forceinline__ static void run(const Params& launch, const char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, true>(launch, tile_index<Spec>());
        const auto& params = common::record_of_sequence<Spec>(launch, where.batch);
        if (has_no_step<Spec, Shares>(params, where.tile)) return;
        const uint32 base = round_up(shared_address(dynamic_smem), static_cast<uint32>(kAlignment));
        const Memory<true> of_dk{base, base + kDataBytes};
        const Memory<false> of_dv{base, base + kDataBytes + Shape<true>::control_bytes(Shape<true>::kPassingPanels)};
        if (threadIdx.x == 0) {
            of_dk.init_barriers();
            of_dv.init_barriers();
        }
        __syncthreads();
        const KeyTile<Spec> own = key_tile<Spec>(params);
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0),
                    steps = steps_of(own, params);
        if (group == 0) {
            deallocate_registers<Shape<true>::kProducerRegisters>();
            if (threadIdx.x < 32) {
                load<false>(params, own, of_dv, {launch.k, launch.v, launch.dout, launch.q}, steps);
                // TMA writes next where this warp has written statistics: their readers have passed hand_over's fence.
                mbarrier_wait(of_dv.empty_rows(), 0);
                load<true>(params, own, of_dk, {launch.k, launch.v, launch.q, launch.dout}, steps);
            }
        } else {
            allocate_registers<Shape<true>::kConsumerRegisters>();
            compute<false>(params, launch, own, of_dv, group - 1, steps);
            if (threadIdx.x % 32 == 0) mbarrier_arrive(of_dv.empty_rows());  // its memory is that of dK
            compute<true>(params, launch, own, of_dk, group - 1, steps);
            if (threadIdx.x % 32 == 0) tma_store_wait();
        }
    }

  private:
    __device__ static int32 steps_of(const KeyTile<Spec>& own, const Params& params) {
        const int32 of_head = own.tiles.end - own.tiles.begin;
        if constexpr (Spec::kSplit)
            return (own.limits.end.head - own.limits.first.head) * of_head + own.limits.end.tile -
                   own.limits.first.tile;
        else
            return of_head * own.tiles.num_heads(params.heads_per_group);
    }

    template <bool kDerives>
    __device__ static void load(const Params& params, const KeyTile<Spec>& own, const Memory<kDerives>& memory,
                                const SharedGradientMaps& maps, int32 steps) {
        using Producer = SharedGradientProducer<Spec, Shape<kDerives>>;
        using Statistics = typename Producer::Statistics;
        Producer producer(memory, maps);
        if (steps == 0) return;
        producer.load_rows(own.keys, own.first_key, own.head, own.batch);
        const auto statistics_of = [&](const QueryStep& step) {
            return producer.statistics_of(params, step.tile, step.head, own.batch);
        };
        QueryStep step = own.first_step(), before = step;
        Statistics statistics = statistics_of(step), of_before = statistics;
        const auto load_kept = [&](const QueryStep& at, const Statistics& its) {
            producer.load_kept(own.queries, at.tile, at.head, own.batch, its);
        };
        // dV needs the passing operand of a tile, for its scores, before the kept one of the tile before.
#pragma unroll 1
        for (int32 i = 0; i < steps; ++i) {
            const QueryStep present = step;
            const Statistics of_present = statistics;
            advance(step, own);
            if (i + 1 < steps) statistics = statistics_of(step);  // they arrive while this tile is loaded
            if constexpr (kDerives) {
                load_kept(present, of_present);
                producer.put(of_present);
            }
            producer.load_passing(own.queries, present.tile, present.head, own.batch, of_present);
            if constexpr (!kDerives) {
                producer.put(of_present);
                if (i > 0) load_kept(before, of_before);
                before = present;
                of_before = of_present;
            }
        }
        if constexpr (!kDerives) load_kept(before, of_before);
    }

    template <bool kDerives, class Record>
    __device__ __forceinline__ static void compute(const Params& params, const Record& launch, const KeyTile<Spec>& own,
                                                   const Memory<kDerives>& memory, int32 part, int32 steps) {
        SharedKeyConsumer<Spec, kDerives> consumer(params, own, memory, part);
        if constexpr (Spec::kSplit)
            consumer.run(launch.k, steps);
        else if constexpr (kDerives)
            consumer.run(launch.dk, steps);
        else
            consumer.run(launch.dv, steps);
        __syncwarp();
    }
};

}  // namespace fa2::sm90
