// The producer of the kernels of query_tile_loop.cuh: one thread loads Q, dO (if the kernel reads it), K and V in the
// order in which the consumers use them, each together with its tangent.
#pragma once
#include "sm90/query_tile_producer.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape>
class QueryLoopProducer : QueryTileProducer<Spec, Shape, QueryTileMemory<Shape>> {
    using Memory = QueryTileMemory<Shape>;
    using Base = QueryTileProducer<Spec, Shape, Memory>;
    using Base::kLeftLimit, Base::memory_, Base::params_, Base::queries_;
    using Base::publish;
    using Moved = typename Shape::Moved;
    using typename Base::Tile;
    // Where Q has one buffer, it is released later than a stage of K.
    static constexpr bool kKeyFirst = Shape::kOperands == 1 && Shape::kQueryBuffers == 1;

  public:
    __device__ QueryLoopProducer(const Params& params, const Memory& memory) : Base(params, memory) {}

    // `queries_` is the ring position of Q and dO, which advance together.
    __device__ void run(int32 index) {
        while (true) {
            const Tile tile = query_tile<Spec>(params_, index);
            publish(tile);
            if (tile.key_tiles == 0) break;
            if constexpr (!kKeyFirst) load_query(tile);
            load_key(tile, tile.key_tiles - 1);
            if constexpr (kKeyFirst) load_query(tile);
            if constexpr (Shape::kOperands == 2) load_dout(tile);
            load_value(tile, tile.key_tiles - 1);
            queries_.advance();
            const int32 first = kLeftLimit ? tile.first_key_tile : 0;
            int32 block = tile.key_tiles - 2;
            load_down_to(tile, block, first + kDrawnAhead);
            index = next_index<Spec>(params_, index);
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

    // Each operand with its tangent, if it has one.
    __device__ void load_query(const Tile& tile) {
        const uint32 smem = memory_.query(queries_.slot()), full = memory_.full_query(queries_.slot());
        mbarrier_wait(memory_.empty_query(queries_.slot()), queries_.parity() ^ 1);
        if constexpr (Moved::kQuery)
            Base::template load_rows<Shape::kPanels>(params_.q, smem, full, tile, params_.qt);
        else
            Base::template load_rows<Shape::kPanels>(params_.q, smem, full, tile);
    }

    __device__ void load_dout(const Tile& tile) {
        const uint32 smem = memory_.dout(queries_.slot()), full = memory_.full_dout(queries_.slot());
        mbarrier_wait(memory_.empty_dout(queries_.slot()), queries_.parity() ^ 1);
        if constexpr (Moved::kDout)
            Base::template load_rows<Shape::kPanelsV>(params_.dout, smem, full, tile, params_.dot);
        else
            Base::template load_rows<Shape::kPanelsV>(params_.dout, smem, full, tile);
    }

    __device__ void load_key(const Tile& tile, int32 block) {
        if constexpr (Moved::kKey)
            Base::load_key(tile, block, params_.kt);
        else
            Base::load_key(tile, block);
    }

    __device__ void load_value(const Tile& tile, int32 block) {
        if constexpr (Moved::kValue)
            Base::load_value(tile, block, params_.vt);
        else
            Base::load_value(tile, block);
    }
};

}  // namespace fa2::sm90
