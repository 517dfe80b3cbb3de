// The producer of the kernels whose blocks own query tiles: one thread publishes query tiles to the consumers, and copies
// the parts of Q, dO (if the kernel reads it), K and V in the order in which they use them.
#pragma once
#include "common/exceptions.cuh"
#include "sm90_float32/query_tile_shape.cuh"

namespace fa2::sm90_float32 {

// Copies key tiles: whole ones, or in pieces.
template <class Spec, class Shape, bool kInPieces = Shape::kInPieces>
class KeyLoader;

template <class Spec, class Shape>
class KeyLoader<Spec, Shape, false> {
    using Memory = QueryTileMemory<Shape>;

  public:
    __device__ KeyLoader(const Params& params, const Memory& memory) : params_(params), memory_(memory) {}

    // `row`, `row_v`: the first of the key tile, in the first panel of its head's high parts of K and of V.
    __device__ __forceinline__ void load(int32 row, int32 row_v, int32) {
        const uint32 key = keys_.slot(), value = values_.slot();
        mbarrier_wait(memory_.empty_key(key), keys_.parity() ^ 1);
        load_rows<Shape::kBc, Spec::kHeadDim, Shape::kShared>(params_.k_parts, row, params_.k_strips, memory_.key(key),
                                                              memory_.full_key(key));
        keys_.advance();
        mbarrier_wait(memory_.empty_value(value), values_.parity() ^ 1);
        load_rows<Shape::kBc, Spec::kHeadDimV, Shape::kShared>(params_.v_parts, row_v, params_.k_strips,
                                                               memory_.value(value), memory_.full_value(value));
        values_.advance();
    }

  private:
    const Params& params_;
    const Memory memory_;
    RingPosition<Shape::kStages> keys_;
    RingPosition<Shape::kValueStages> values_;
};

template <class Spec, class Shape>
class KeyLoader<Spec, Shape, true> {
    using Memory = QueryTileMemory<Shape>;

  public:
    __device__ KeyLoader(const Params& params, const Memory& memory)
        : params_(params), first_(key_ring(memory)), second_(value_ring(memory)) {}

    // K and V of a tile; or K, V and again K for each of the warp groups that take turns, of `num_tiles` tiles from this
    // one down.
    __device__ __forceinline__ void load(int32 row, int32 row_v, int32 num_tiles) {
        const PanelRows keys{row, Shape::kPanelsOfPart}, values{row_v, Shape::kPanelsOfPartV};
        if constexpr (Shape::kSharers == 1) {
            load(first_, params_.k_parts, keys);
            load(second_, params_.v_parts, values);
        } else {
#pragma unroll 1
            for (int32 product = 0; product < 3; ++product) {
                const float16* parts = product == 1 ? params_.v_parts : params_.k_parts;
                const PanelRows rows = product == 1 ? values : keys;
#pragma unroll 1
                for (int32 panel = 0; panel < rows.num_panels; ++panel) {
                    first_.load(parts, rows, params_.k_strips, panel);
                    if (num_tiles > 1)
                        second_.load(parts, {rows.first - Shape::kBc, rows.num_panels}, params_.k_strips, panel);
                }
            }
        }
    }

  private:
    using Writer = PieceWriter<Shape::kStages>;

    __device__ __forceinline__ void load(Writer& ring, const float16* parts, const PanelRows& rows) {
#pragma unroll 1
        for (int32 panel = 0; panel < rows.num_panels; ++panel) ring.load(parts, rows, params_.k_strips, panel);
    }

    const Params& params_;
    Writer first_, second_;
};

// Params is a template parameter because only the record of the backward has dO.
template <class Spec, class Shape, class Params = fa2::Params>
class QueryTileProducer {
    using Memory = QueryTileMemory<Shape>;
    using Tile = LoadedTile<Spec>;
    using Layout = PartsLayout<Spec::kHeadDim, Shape::kShared>;
    using LayoutV = PartsLayout<Spec::kHeadDimV, Shape::kShared>;

  public:
    __device__ QueryTileProducer(const Params& params, const Memory& memory)
        : params_(params), memory_(memory), keys_(params, memory) {}

    // The next tile is found after a tile's loads, because the producer has no registers for two.
    __device__ void run() {
        int32 index = blockIdx.x;
        for (Tile tile = next_own(index); tile.key_tiles > 0; tile = next_own(index)) {
            publish_tile<Spec>(memory_, tiles_, tile);
            load_queries(tile);
            const int32 num_heads_kv = params_.num_heads / params_.heads_per_group;
            const int32 head = head_with_parts<Spec>(tile.batch, num_heads_kv, tile.head / params_.heads_per_group);
            const int32 row = first_part_row<Spec, true>(params_, tile.batch);
            const int32 first = Layout::row_of(head, params_.k_strips, row);
            const int32 first_v = LayoutV::row_of(head, params_.k_strips, row);
            const int32 begin = kHasBegin<Spec> ? tile.first_key_tile : 0;
            int32 block = tile.key_tiles - 1;
            load_down_to(first, first_v, begin, block, begin + kDrawnAhead);
            index = next_index<Spec>(params_, index);
            load_down_to(first, first_v, begin, block, begin);
        }
        publish_tile<Spec>(memory_, tiles_, {});
        leave_counter(params_);
    }

  private:
    // The tile of this index or of the next one whose head is not an exception.
    __device__ Tile next_own(int32& index) const {
        Tile tile = query_tile<Spec>(params_, index);
        while (tile.key_tiles > 0 &&
               common::is_exception<Spec>(params_, tile.batch, tile.head / params_.heads_per_group)) {
            index = next_index<Spec>(params_, index);
            tile = query_tile<Spec>(params_, index);
        }
        return tile;
    }

    // Loads the key tiles from `block` to `end`, those of warp groups that take turns together. `first`, `first_v`: the
    // rows of the first key tile of all; `begin`: the last one of the query tile.
    __device__ void load_down_to(int32 first, int32 first_v, int32 begin, int32& block, int32 end) {
#pragma unroll 1
        for (; block >= end; block -= Shape::kSharers)
            keys_.load(first + block * Shape::kBc, first_v + block * Shape::kBc, block - begin + 1);
    }

    __device__ void load_queries(const Tile& tile) {
        const int32 head = head_with_parts<Spec>(tile.batch, params_.num_heads, tile.head);
        const int32 first = first_part_row<Spec, false>(params_, tile.batch) + tile.first_row;
        const int32 row = Layout::row_of(head, params_.q_strips, first);
        const int32 row_v = LayoutV::row_of(head, params_.q_strips, first);
        mbarrier_wait(memory_.empty_query(0), queries_.parity() ^ 1);
        load_rows<Shape::kBr, Spec::kHeadDim, Shape::kShared>(params_.q_parts, row, params_.q_strips, memory_.query(0),
                                                              memory_.full_query(0));
        if constexpr (Shape::kOperands == 2) {
            mbarrier_wait(memory_.empty_dout(0), queries_.parity() ^ 1);
            load_rows<Shape::kBr, Spec::kHeadDimV>(params_.dout_parts, row_v, params_.q_strips, memory_.dout(0),
                                                   memory_.full_dout(0));
        }
        queries_.advance();
    }

    const Params& params_;
    const Memory memory_;
    KeyLoader<Spec, Shape> keys_;
    RingPosition<1> queries_;
    RingPosition<kTileSlots> tiles_;
};

}  // namespace fa2::sm90_float32
