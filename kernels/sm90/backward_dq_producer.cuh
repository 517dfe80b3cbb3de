// The dQ kernel's producer: one thread loads Q, dO, K and V in the order in which the consumers use them.
#pragma once
#include "sm90/backward_dq_shape.cuh"
#include "sm90/query_tile_producer.cuh"

namespace fa2::sm90 {

template <class Spec>
class BackwardDqProducer : QueryTileProducer<Spec, BackwardDqShape<Spec>, QueryTileMemory<BackwardDqShape<Spec>>> {
    using Shape = BackwardDqShape<Spec>;
    using Memory = QueryTileMemory<Shape>;
    using Base = QueryTileProducer<Spec, Shape, Memory>;
    using Base::kLeftLimit, Base::memory_, Base::params_, Base::queries_;
    using Base::load_key, Base::load_value, Base::publish;
    using typename Base::Tile;

  public:
    __device__ BackwardDqProducer(const Params& params, const Memory& memory) : Base(params, memory) {}

    // `queries_` is the ring position of both Q and dO, which advance together.
    __device__ void run() {
        int32 index = blockIdx.x;
        while (true) {
            const Tile tile = query_tile<Spec>(params_, index);
            publish(tile);
            if (tile.key_tiles == 0) break;
            load_queries<Shape::kPanels>(params_.q, memory_.query(queries_.slot()), memory_.full_query(queries_.slot()),
                                         memory_.empty_query(queries_.slot()), tile);
            load_key(tile, tile.key_tiles - 1);
            load_queries<Shape::kPanelsV>(params_.dout, memory_.dout(queries_.slot()),
                                          memory_.full_dout(queries_.slot()), memory_.empty_dout(queries_.slot()),
                                          tile);
            load_value(tile, tile.key_tiles - 1);
            queries_.advance();
            const int32 first = kLeftLimit ? tile.first_key_tile : 0;
            int32 block = tile.key_tiles - 2;
            load_down_to(tile, block, first + kDrawnAhead);
            index = next_index(params_, index);
            load_down_to(tile, block, first);
        }
        leave_counter(params_);
    }

  private:
    // Loads K and V of the key tiles from `block` to `first`.
    __device__ void load_down_to(const Tile& tile, int32& block, int32 first) {
#pragma unroll 1
        for (; block >= first; --block) {
            load_key(tile, block);
            load_value(tile, block);
        }
    }

    template <int kPanels>
    __device__ void load_queries(const TensorMap& map, uint32 smem, uint32 full, uint32 empty, const Tile& tile) {
        mbarrier_wait(empty, queries_.parity() ^ 1);
        Base::template load_rows<kPanels>(map, smem, full, tile);
    }
};

}  // namespace fa2::sm90
