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
        mbarrier_arrive_expect(full, (1 + sizeof...(tangent)) * kPanels * Shape::kQueryPanelBytes);
        load_panels<kPanels>(map, smem, full, tile);
        (load_panels<kPanels>(tangent, smem + kPanels * Shape::kQueryPanelBytes, full, tile), ...);
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
    template <int kPanels>
    __device__ void load_panels(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            tile.queries.load(smem + panel * Shape::kQueryPanelBytes, map, full, panel * kPanelColumns,
                              tile.first_row + first_row_of_block<Spec>(), tile.head, tile.batch);
    }

    template <int kPanels, class... Tangent>
    __device__ void load_keys(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile, int32 key_tile,
                              const Tangent&... tangent) const {
        constexpr int kMatrices = 1 + sizeof...(tangent);
        constexpr int kStride = Shape::kInterleaves ? kMatrices * Shape::kKeyPanelBytes : Shape::kKeyPanelBytes;
        constexpr int kTangent = Shape::kInterleaves ? Shape::kKeyPanelBytes : kPanels * Shape::kKeyPanelBytes;
        mbarrier_arrive_expect(full, kMatrices * kPanels * Shape::kKeyPanelBytes);
        load_panels<kPanels, kStride>(map, smem, full, tile, key_tile);
        (load_panels<kPanels, kStride>(tangent, smem + kTangent, full, tile, key_tile), ...);
    }
    template <int kPanels, int kStride>
    __device__ void load_panels(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile,
                                int32 key_tile) const {
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            tile.keys.load(smem + panel * kStride, map, full, panel * kPanelColumns, key_tile * Shape::kBc,
                           tile.head / params_.heads_per_group, tile.batch);
    }
};

}  // namespace fa2::sm90
