// The forward's producer: one thread loads Q, K and V in the order in which the consumers use them.
#pragma once
#include "sm90/forward_shape.cuh"
#include "sm90/query_tile_producer.cuh"

namespace fa2::sm90 {

template <class Spec>
class ForwardProducer : QueryTileProducer<Spec, ForwardShape<Spec>, ForwardMemory<ForwardShape<Spec>>> {
    using Shape = ForwardShape<Spec>;
    using Memory = ForwardMemory<Shape>;
    using Base = QueryTileProducer<Spec, Shape, Memory>;
    using Base::load_key, Base::load_rows, Base::load_value, Base::publish, Base::published;
    using Base::memory_, Base::params_, Base::queries_;
    using typename Base::Tile;
    static constexpr bool kHasBegin = sm90::kHasBegin<Spec>;

  public:
    __device__ ForwardProducer(const Params& params, const Memory& memory) : Base(params, memory) {}

    // K of the next query tile is loaded before the last V of this one, because the consumers overlap the next tile's
    // first scores with this tile's last P V. With a single buffer for Q they cannot, and the order is reversed.
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
            index = next_index(params_, index);  // the atomic's latency overlaps with this tile
#pragma unroll 1
            for (int32 block = tile.key_tiles - 1; block > (kHasBegin ? tile.first_key_tile : 0); --block) {
                load_key(tile, block - 1);
                load_value(tile, block);
            }
            if (Shape::kQueryBuffers == 2 && !is_last) start(next);
            load_value(tile, kHasBegin ? tile.first_key_tile : 0);
            if (Shape::kQueryBuffers == 1 && !is_last) start(next);
            if (is_last) break;
            if constexpr (Spec::kSplit)
                tile = published();
            else
                tile = next;
        }
        leave_counter(params_);
    }

  private:
    // With the begin of a share, the producer's registers do not hold a second tile while it loads the first, so that
    // the second is read back from its slot.
    __device__ void start(const Tile& next) {
        if constexpr (Spec::kSplit)
            start_loads(published());
        else
            start_loads(next);
    }

    __device__ void start_loads(const Tile& tile) {
        load_query(tile);
        load_key(tile, tile.key_tiles - 1);
    }

    __device__ void load_query(const Tile& tile) {
        const uint32 buffer = queries_.slot(), full = memory_.full_query(buffer);
        mbarrier_wait(memory_.empty_query(buffer), queries_.parity() ^ 1);
        load_rows(params_.q, memory_.query(buffer), full, tile);
        queries_.advance();
    }
};

}  // namespace fa2::sm90
