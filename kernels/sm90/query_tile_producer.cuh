// Base of the producers of the kernels whose blocks own query tiles: one thread publishes query tiles to the consumers
// and loads their operands by TMA. Each operand has a ring of stages; the producer waits until the consumers have
// released a stage before it fills it again.
#pragma once
#include "sm90/query_tile_shape.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape, class Memory>
class QueryTileProducer {
  protected:
    using Tile = LoadedTile<Spec>;
    static constexpr bool kLeftLimit = common::kLeftLimit<Spec>;

    __device__ QueryTileProducer(const Params& params, const Memory& memory) : params_(params), memory_(memory) {}

    __device__ void publish(const Tile& tile) { publish_tile<Spec>(memory_, tiles_, tile); }

    // Loads the query tile's rows of Q or dO, and those of its tangent if there is one, whose panels lie behind.
    template <int kPanels, class... Tangent>
    __device__ void load_rows(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile,
                              const Tangent&... tangent) const {
        constexpr int kBytes = kPanels * Shape::kQueryPanelBytes;
        mbarrier_arrive_expect(full, (kSequences<Spec> + sizeof...(tangent)) * kBytes);
#pragma unroll
        for (int i = 0; i < kSequences<Spec>; ++i)
            load_panels<kPanels>(map, smem + i * kBytes, full, tile, sequence(tile, i));
        (load_panels<kPanels>(tangent, smem + kBytes, full, tile, tile.batch), ...);
    }

    // Loads a key tile's rows of K, and those of its tangent if there is one.
    template <class... Tangent>
    __device__ void load_key(const Tile& tile, int32 block, const Tangent&... tangent) {
        const uint32 stage = keys_.slot();
        int32 key_tile = block;
        if constexpr (common::kListsTiles<Spec>) key_tile = tile.list.entries[block];  // ahead of the wait
        mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);
        load_keys<Shape::kPanels / Shape::kParts>(params_.k, memory_.key(stage), memory_.full_key(stage), tile,
                                                  key_tile, tangent...);
        keys_.advance();
    }

    template <class... Tangent>
    __device__ void load_value(const Tile& tile, int32 block, const Tangent&... tangent) {
        const uint32 stage = values_.slot();
        int32 key_tile = block;
        if constexpr (common::kListsTiles<Spec>) key_tile = tile.list.entries[block];  // ahead of the wait
        mbarrier_wait(memory_.empty_value(stage), values_.parity() ^ 1);
        load_keys<Shape::kPanelsV / Shape::kParts>(params_.v, memory_.value(stage), memory_.full_value(stage), tile,
                                                   key_tile, tangent...);
        values_.advance();
    }

    const Params& params_;
    const Memory memory_;
    RingPosition<Shape::kQueryBuffers> queries_;
    RingPosition<Shape::kStages> keys_;
    RingPosition<Shape::kValueStages> values_;
    RingPosition<kTileSlots> tiles_;

  private:
    // The sequences that are processed at a time. Copies of the last one fill up the end of a series.
    __device__ static int32 sequence(const Tile& tile, int i) {
        return tile.batch + (kSequences<Spec> > 1 ? min_of(i, tile.share) : 0);
    }

    template <int kPanels>
    __device__ void load_panels(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile, int32 batch) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            tile.queries.load(smem + panel * Shape::kQueryPanelBytes, map, full, panel * kPanelColumns,
                              tile.first_row + first_row_of_block<Spec>(), tile.head, batch);
    }

    template <int kPanels, class... Tangent>
    __device__ void load_keys(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile, int32 key_tile,
                              const Tangent&... tangent) const {
        constexpr int kMatrices = 1 + sizeof...(tangent);
        constexpr int kStride = Shape::kInterleaves ? kMatrices * Shape::kKeyPanelBytes : Shape::kKeyPanelBytes;
        constexpr int kTangent = Shape::kInterleaves ? Shape::kKeyPanelBytes : kPanels * Shape::kKeyPanelBytes;
        constexpr int kBytes = kPanels * Shape::kKeyPanelBytes;
        mbarrier_arrive_expect(full, kSequences<Spec> * kMatrices * kBytes);
#pragma unroll
        for (int i = 0; i < kSequences<Spec>; ++i)
            load_panels<kPanels, kStride>(map, smem + i * kBytes, full, tile, sequence(tile, i), key_tile);
        (load_panels<kPanels, kStride>(tangent, smem + kTangent, full, tile, tile.batch, key_tile), ...);
    }
    template <int kPanels, int kStride>
    __device__ void load_panels(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile, int32 batch,
                                int32 key_tile) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            tile.keys.load(smem + panel * kStride, map, full, panel * kPanelColumns, key_tile * Shape::kBc,
                           tile.head / params_.heads_per_group, batch);
    }
};

}  // namespace fa2::sm90
