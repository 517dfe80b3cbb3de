// The forward's producer: one thread loads Q, K and V in the order in which the consumers use them.
#pragma once
#include "sm90/query_tile_producer.cuh"

namespace fa2::sm90 {

// `Base` loads operands; a QueryTileProducer.
template <class Spec, class Shape, class Memory, class Base = QueryTileProducer<Spec, Shape, Memory>>
class ForwardProducer : Base {
    using Base::load_key, Base::load_rows, Base::load_value, Base::publish;
    using Base::memory_, Base::params_, Base::queries_;
    using typename Base::Tile;
    static constexpr bool kHasBegin = sm90::kHasBegin<Spec>;

  public:
    __device__ ForwardProducer(const Params& params, const Memory& memory) : Base(params, memory) {}

    // K of the next query tile is loaded before the last V of this one, because the consumers overlap the next tile's
    // first scores with this tile's last P V. With a single buffer for Q they cannot, and the order is reversed.
    __device__ void run() {
        int32 index = first_index<Spec>();
        Tile tile = query_tile<Spec>(params_, index);
        publish(tile);
        if (Spec::kVarlen && tile.key_tiles == 0) return leave_counter(params_);
        start(tile);
        while (true) {
            const int32 last = kHasBegin ? tile.first_key_tile : 0;
            int32 block = tile.key_tiles - 1;
            load_down_to(tile, block, last + kDrawnAhead);
            const bool has_more = goes_on<Spec>(tile);
            if (!has_more) index = next_index<Spec>(params_, index);
            load_down_to(tile, block, last);
            const Tile next = has_more ? tile_of_next_sequence<Spec>(params_, tile) : query_tile<Spec>(params_, index);
            publish(next);
            const bool is_last = next.key_tiles == 0;
            if (Shape::kQueryBuffers == 2 && !is_last) start(next);
            load_value(tile, last);
            if (Shape::kQueryBuffers == 1 && !is_last) start(next);
            if (is_last) break;
            tile = next;
        }
        leave_counter(params_);
    }

  private:
    __device__ void start(const Tile& tile) {
        if constexpr (!Shape::kKeysFirst) load_query(tile);
        load_key(tile, tile.key_tiles - 1);
        if constexpr (Shape::kKeysFirst) load_query(tile);
    }

    // Loads K of the key tiles from `block` - 1 to `end`, and V of those before them.
    __device__ void load_down_to(const Tile& tile, int32& block, int32 end) {
#pragma unroll 1
        for (; block > end; --block) {
            load_key(tile, block - 1);
            load_value(tile, block);
        }
    }

    __device__ void load_query(const Tile& tile) {
        const uint32 buffer = queries_.slot(), full = memory_.full_query(buffer);
        mbarrier_wait(memory_.empty_query(buffer), queries_.parity() ^ 1);
        load_rows<Shape::kPanels>(params_.q, memory_.query(buffer), full, tile);
        queries_.advance();
    }
};

// Copies the bias from which S of one consumer group starts: a warp, one key tile ahead of the group.
template <class Spec, class Shape, class Memory>
class ForwardBiasProducer {
    using Tile = typename Shape::GroupStart;

  public:
    __device__ ForwardBiasProducer(const Params& params, const Memory& memory, int32 group)
        : params_(params), memory_(memory), group_(group) {}

    __device__ void run() {
        const bool takes = Tile::takes(params_);
        const int32 lane = threadIdx.x % 32;
        while (true) {
            const TileInSlot tile = next_tile(memory_, tiles_);
            if (tile.key_tiles() == 0) break;
            const GroupKeys keys = keys_of_group<Spec>(params_, tile, group_, Shape::kMaxSkipped);
            const int32 end = common::kLeftLimit<Spec> ? keys.begin : 0;
#pragma unroll 1
            for (int32 block = keys.end - 1; takes && block >= end; --block) {
                mbarrier_wait(memory_.empty_start(group_), starts_.parity() ^ 1);
                Tile::template load<4, true>(
                    memory_.start(group_), record_of<Spec>(params_, tile),
                    score_tile_of<Spec>(params_, tile, tile.batch(), group_ * kGroupRows, block, lane));
                mbarrier_arrive_with_copies(memory_.full_start(group_));
                starts_.advance();
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(tile.empty);
        }
    }

  private:
    const Params& params_;
    const Memory memory_;
    const int32 group_;
    RingPosition<1> starts_;
    RingPosition<kTileSlots> tiles_;
};

}  // namespace fa2::sm90
