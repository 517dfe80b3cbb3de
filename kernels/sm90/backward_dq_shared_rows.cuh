// dQ beyond 256 columns, where two consumer warp groups have the same 64 rows. backward_dq.cuh introduces the kernel, and
// shared_rows_consumer.cuh has the order of the products. Each group has half of the columns of dQ.
//
// Shared memory, in panels of 64 columns:
//
//   Q [64][D], through which dQ is stored | dO [64][Dv] | K [kStages][kBc][D] | panels of V [kSlots][kBc][64] | next query
//   tiles [4] | barriers
//
// V is read once, by the group that computes dS, and its panels form a ring. In the last panel of a tile, that group hands
// dS over to the other one.
#pragma once
#include "sm90/shared_gradient_consumer.cuh"
#include "sm90/shared_gradient_producer.cuh"

namespace fa2::sm90 {

template <class Spec>
class SharedDqConsumer : SharedGradientConsumer<SharedDqConsumer<Spec>, Spec, SharedGradientShape<Spec, false, true>> {
    using Shape = SharedGradientShape<Spec, false, true>;
    using Base = SharedGradientConsumer<SharedDqConsumer, Spec, Shape>;
    using Base::derivatives_, Base::lane_, Base::memory_, Base::output_, Base::part_, Base::scores_, Base::warp_;
    using typename Base::Memory, typename Base::Probabilities, typename Base::Scores;
    friend Base;
    friend typename Base::Rows;
    static constexpr bool kLeftLimit = common::kLeftLimit<Spec>;

  public:
    __device__ SharedDqConsumer(const Params& params, const Memory& memory, int32 part)
        : Base(memory, part), params_(params) {}

    __device__ __forceinline__ void run() {
        tile_ = next_tile(memory_, tiles_);
        while (tile_.key_tiles() != 0) {
            keys_ = keys_of_group<Spec>(params_, tile_, 0, 0);
            load_statistics();
            Base::sum_over(keys_.end - (kLeftLimit ? keys_.begin : 0));
            store();
            tile_ = next_tile(memory_, tiles_);
            make_positions_uniform();
        }
        if (lane_ == 0) tma_store_wait();
    }

  private:
    __device__ __forceinline__ void exponentiate(int32 t) {
        const int32 block = keys_.end - 1 - t;
        if (block >= keys_.full_end || (kLeftLimit && block < (kLeftLimit ? keys_.full_begin : 0)))
            common::mask_scores(scores_, common::mask_of<Spec>(record_of<Spec>(params_, tile_)),
                                {tile_.first_row() + 16 * warp_, block * Shape::kBc, lane_},
                                -common::infinity<float>());
#pragma unroll
        for (int n = 0; n < Shape::kBc / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scores_.value[n][e] = common::exp2_approx(
                    common::at_most_zero(fma(scores_.value[n][e], params_.scale_log2, minus_lse_[e / 2])));
    }
    __device__ __forceinline__ void take_derivatives(int32, Probabilities& p) {
        Base::wait_for_derivatives();
#pragma unroll
        for (int n = 0; n < Shape::kBc / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                p.set(i, n, scores_.value[n][2 * i] * (derivatives_.value[n][2 * i] + minus_delta_[i]),
                      scores_.value[n][2 * i + 1] * (derivatives_.value[n][2 * i + 1] + minus_delta_[i]));
    }

    __device__ __forceinline__ void load_statistics() {
        const auto& own = record_of<Spec>(params_, tile_);
        const int64 first = common::first_statistic<Spec>(params_, tile_.batch(), tile_.head());
#pragma unroll
        for (int i = 0; i < 2; ++i)
            common::load_negated(own.lse + first, own.delta + first,
                                 tile_.first_row() + 16 * warp_ + Scores::row(i, lane_), own.seqlen_q, minus_lse_[i],
                                 minus_delta_[i]);
    }

    // Rows without a visible key may hold NaN, which P = 0 does not keep out of dQ.
    __device__ __forceinline__ void store() {
#pragma unroll
        for (int n = 0; n < Shape::kOwnDv / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (minus_lse_[e / 2] == -common::infinity<float>()) output_.value[n][e] = 0.0f;
        const float factor[2] = {params_.softmax_scale, params_.softmax_scale};
        const int32 batch = tile_.batch();
        Base::store(factor, params_.dq, query_tma_rows<Spec>(params_, batch), tile_.first_row(), tile_.head(), batch);
        if (lane_ == 0) {
            mbarrier_arrive(tile_.empty);
            mbarrier_arrive(memory_.empty_rows());
        }
    }

    // As in QueryTileConsumer.
    __device__ __forceinline__ void make_positions_uniform() {
        tiles_.turn = __shfl_sync(common::kFullWarp, tiles_.turn, 0);
        Base::make_positions_uniform();
    }

    const Params& params_;
    TileInSlot tile_;
    GroupKeys keys_;
    RingPosition<kTileSlots> tiles_;
    float minus_lse_[2], minus_delta_[2];  // of this lane's two rows; lse in base 2
};

template <class Spec>
struct BackwardDq {
    using Shape = SharedGradientShape<Spec, false, true>;
    using Memory = SharedGradientMemory<Shape>;
    static constexpr bool kFindsSequences = true, kLeftLimit = common::kLeftLimit<Spec>;
    static_assert(kAlignment + Shape::kDataBytes + Shape::kControlBytes == Spec::kSharedBytes);

    __device__ __forceinline__ static void run(const Params& params, const char* dynamic_smem) {
        const uint32 base = round_up(shared_address(dynamic_smem), static_cast<uint32>(kAlignment));
        const Memory memory{base, base + Shape::kDataBytes};
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);
        if (group == 0) {
            deallocate_registers<Shape::kProducerRegisters>();
            if (threadIdx.x == 0) load(params, memory);
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            SharedDqConsumer<Spec>(params, memory, group - 1).run();
        }
    }

  private:
    __device__ static void load(const Params& params, const Memory& memory) {
        SharedGradientProducer<Spec, Shape> producer(memory, {params.q, params.dout, params.k, params.v});
        RingPosition<kTileSlots> tiles;
        int32 index = first_index<Spec>();
        while (true) {
            const LoadedTile<Spec> tile = query_tile<Spec>(params, index);
            publish_tile<Spec>(memory, tiles, tile);
            if (tile.key_tiles == 0) break;
            producer.load_rows(tile.queries, tile.first_row, tile.head, tile.batch);
            const int32 first = kLeftLimit ? tile.first_key_tile : 0,
                        draws_at = min_of(tile.key_tiles - 1, first + kDrawnAhead);
#pragma unroll 1
            for (int32 block = tile.key_tiles - 1; block >= first; --block) {
                const int32 head = tile.head / params.heads_per_group;
                producer.load_kept(tile.keys, block, head, tile.batch, {});
                producer.load_passing(tile.keys, block, head, tile.batch, {});
                if (block == draws_at) index = next_index<Spec>(params, index);
            }
        }
        leave_counter(params);
    }
};

}  // namespace fa2::sm90
