// The dQ kernel's producer: one thread that keeps Q, dO, K and V coming, in the order in which the consumers use them.
#pragma once
#include "sm90/backward_dq_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
class BackwardDqProducer {
    using Shape = BackwardDqShape<Spec>;
    using Memory = BackwardDqMemory<Shape>;
    using Tile = LoadedTile<Spec>;

  public:
    __device__ BackwardDqProducer(const Params& params, const Memory& memory) : params_(params), memory_(memory) {}

    __device__ void run() {
        int32 index = blockIdx.x;
        while (true) {
            const Tile tile = query_tile<Spec>(params_, index);
            publish(tile);
            if (tile.key_tiles == 0) break;
            index = next_index(params_, index);  // under way during this tile
            load_queries(params_.q, memory_.query(queries_.slot()), memory_.full_query(queries_.slot()),
                         memory_.empty_query(queries_.slot()), tile);
            load_key(tile, tile.key_tiles - 1);
            load_queries(params_.dout, memory_.dout(queries_.slot()), memory_.full_dout(queries_.slot()),
                         memory_.empty_dout(queries_.slot()), tile);
            load_value(tile, tile.key_tiles - 1);
            queries_.advance();
#pragma unroll 1
            for (int32 block = tile.key_tiles - 2; block >= (common::kLeftLimit<Spec> ? tile.first_key_tile : 0); --block) {
                load_key(tile, block);
                load_value(tile, block);
            }
        }
        leave_counter(params_);
    }

  private:
    __device__ void publish(const Tile& tile) {
        const uint32 slot = tiles_.slot(), address = memory_.tile_slot(slot);
        mbarrier_wait(memory_.empty_tile(slot), tiles_.parity() ^ 1);
        store_tile<Spec>(address, tile);
        mbarrier_arrive(memory_.full_tile(slot));
        tiles_.advance();
    }

    __device__ void load_queries(const TensorMap& map, uint32 smem, uint32 full, uint32 empty, const Tile& tile) {
        mbarrier_wait(empty, queries_.parity() ^ 1);
        mbarrier_arrive_expect(full, Shape::kQueryBytes);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel)
            tile.queries.load(smem + panel * Shape::kQueryPanelBytes, map, full, panel * kPanelColumns, tile.first_row,
                              tile.head, tile.batch);
    }

    __device__ void load_key(const Tile& tile, int32 block) {
        const uint32 stage = keys_.slot();
        mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);
        load_keys(params_.k, memory_.key(stage), memory_.full_key(stage), tile, block);
        keys_.advance();
    }

    __device__ void load_value(const Tile& tile, int32 block) {
        const uint32 stage = values_.slot();
        mbarrier_wait(memory_.empty_value(stage), values_.parity() ^ 1);
        load_keys(params_.v, memory_.value(stage), memory_.full_value(stage), tile, block);
        values_.advance();
    }

    __device__ void load_keys(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile,
                              int32 block) const {
        mbarrier_arrive_expect(full, Shape::kKeyBytes);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel)
            tile.keys.load(smem + panel * Shape::kKeyPanelBytes, map, full, panel * kPanelColumns, block * Shape::kBc,
                           tile.head / params_.heads_per_group, tile.batch);
    }

    const Params& params_;
    const Memory memory_;
    RingPosition<Shape::kQueryBuffers> queries_;  // of dO, too
    RingPosition<Shape::kStages> keys_;
    RingPosition<Shape::kValueStages> values_;
    RingPosition<kTileSlots> tiles_;
};

}  // namespace fa2::sm90
