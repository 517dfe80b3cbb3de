// The forward's producer: one thread that keeps Q, K and V coming, in the order in which the consumers use them.
#pragma once
#include "sm90/forward_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
class ForwardProducer {
    using Shape = ForwardShape<Spec>;
    using Memory = ForwardMemory<Shape>;
    using Tile = LoadedTile<Spec>;

  public:
    __device__ ForwardProducer(const Params& params, const Memory& memory) : params_(params), memory_(memory) {}

    // K of the next tile comes before the last V of this one, because the consumers compute the next tile's first
    // scores under this tile's last output; with a single buffer for Q, they cannot.
    __device__ void run() {
        int32 index = blockIdx.x;
        Tile tile = query_tile<Spec>(params_, index);
        publish(tile);
        if (Spec::kVarlen && tile.key_tiles == 0) return leave_counter(params_);
        start(tile);
        index = next_index(params_, index);
        while (true) {
            const Tile next = query_tile<Spec>(params_, index);
            publish(next);
            const bool is_last = next.key_tiles == 0;
            index = next_index(params_, index);  // under way during this tile
#pragma unroll 1
            for (int32 block = tile.key_tiles - 1; block > (common::kLeftLimit<Spec> ? tile.first_key_tile : 0); --block) {
                load_key(tile, block - 1);
                load_value(tile, block);
            }
            if (Shape::kQueryBuffers == 2 && !is_last) start(next);
            load_value(tile, (common::kLeftLimit<Spec> ? tile.first_key_tile : 0));
            if (Shape::kQueryBuffers == 1 && !is_last) start(next);
            if (is_last) break;
            tile = next;
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

    __device__ void start(const Tile& tile) {
        load_query(tile);
        load_key(tile, tile.key_tiles - 1);
    }

    __device__ void load_query(const Tile& tile) {
        const uint32 buffer = queries_.slot(), full = memory_.full_query(buffer);
        mbarrier_wait(memory_.empty_query(buffer), queries_.parity() ^ 1);
        mbarrier_arrive_expect(full, Shape::kQueryBytes);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel)
            tile.queries.load(memory_.query(buffer) + panel * Shape::kQueryPanelBytes, params_.q, full,
                              panel * kPanelColumns, tile.first_row, tile.head, tile.batch);
        queries_.advance();
    }

    __device__ void load_key(const Tile& tile, int32 block) {
        const uint32 stage = keys_.slot();
        mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);
        load(params_.k, memory_.key(stage), memory_.full_key(stage), tile, block);
        keys_.advance();
    }

    __device__ void load_value(const Tile& tile, int32 block) {
        const uint32 stage = values_.slot();
        mbarrier_wait(memory_.empty_value(stage), values_.parity() ^ 1);
        load(params_.v, memory_.value(stage), memory_.full_value(stage), tile, block);
        values_.advance();
    }

    __device__ void load(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile, int32 block) const {
        mbarrier_arrive_expect(full, Shape::kKeyBytes);
#pragma unroll
        for (int panel = 0; panel < Shape::kPanels; ++panel)
            tile.keys.load(smem + panel * Shape::kKeyPanelBytes, map, full, panel * kPanelColumns, block * Shape::kBc,
                           tile.head / params_.heads_per_group, tile.batch);
    }

    const Params& params_;
    const Memory memory_;
    RingPosition<Shape::kQueryBuffers> queries_;
    RingPosition<Shape::kStages> keys_, values_;
    RingPosition<kTileSlots> tiles_;
};

}  // namespace fa2::sm90
