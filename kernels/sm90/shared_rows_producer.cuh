// Loads of the forward whose two consumer groups share their rows.
#pragma once
#include "sm90/query_tile_producer.cuh"
#include "sm90/shared_rows_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
class SharedRowsLoads
    : protected QueryTileProducer<Spec, SharedRowsShape<Spec>, SharedRowsMemory<SharedRowsShape<Spec>>> {
  protected:
    using Shape = SharedRowsShape<Spec>;
    using Memory = SharedRowsMemory<Shape>;
    using Base = QueryTileProducer<Spec, Shape, Memory>;
    using Base::Base, Base::keys_, Base::memory_, Base::params_, Base::values_;
    using typename Base::Tile;

    __device__ void load_key(const Tile& tile, int32 block) {
        const uint32 stage = keys_.slot();
        mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);
        load_panels<Shape::kPanels>(params_.k, memory_.key(stage), memory_.full_key(stage), tile, block, 0);
        keys_.advance();
    }
    __device__ void load_value(const Tile& tile, int32 block) {
        const uint32 stage = values_.slot();
#pragma unroll
        for (int part = 0; part < Shape::kDividers; ++part) {
            mbarrier_wait(memory_.empty_value(stage, part), values_.parity() ^ 1);
            load_panels<Shape::kOwnPanels>(params_.v, memory_.value(stage), memory_.full_value(stage, part), tile,
                                           block, part * Shape::kOwnPanels);
        }
        values_.advance();
    }

  private:
    // Loads panels from `first` on. Each block of a cluster loads every second panel, for both.
    template <int kPanels>
    __device__ void load_panels(const TensorMap& map, uint32 smem, uint32 full, const Tile& tile, int32 block,
                                int first) const {
        int32 key_tile = block;
        if constexpr (common::kListsTiles<Spec>) key_tile = tile.list.entries[block];
        const int32 row = key_tile * Shape::kBc, head = tile.head / params_.heads_per_group;
        mbarrier_arrive_expect(full, kPanels * Shape::kKeyPanelBytes);
#pragma unroll
        for (int panel = first; panel < first + kPanels; ++panel) {
            const uint32 to = smem + panel * Shape::kKeyPanelBytes;
            if constexpr (Shape::kCluster == 1)
                tile.keys.load(to, map, full, panel * kPanelColumns, row, head, tile.batch);
            else if (rank_in_cluster() == panel % Shape::kCluster)
                tile.keys.load_to(3, to, map, full, panel * kPanelColumns, row, head, tile.batch);
        }
    }
};

}  // namespace fa2::sm90
