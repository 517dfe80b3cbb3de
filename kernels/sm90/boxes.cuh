// TMA coordinates of boxes of tokens. Tensor maps have the axes column, x, y, z, and one for heads and sequences
// (fa2cupy/plan/tensor_maps.py). TMA loads zeros outside of the grid, and stores nothing there.
#pragma once
#include "common/neighborhood.cuh"
#include "sm90/tma_rows.cuh"

namespace fa2::sm90 {

// TileBoxes in a QueryTile: positions and numbers have 16 bits.
struct PackedBoxes {
    int32 word[4];
};
__device__ __forceinline__ PackedBoxes pack(const common::TileBoxes& boxes) {
    const auto pair = [](int32 low, int32 high) { return low | high << 16; };
    return {{pair(boxes.query.x, boxes.query.y), pair(boxes.key.x, boxes.key.y), pair(boxes.along_x, boxes.along_y),
             pair(boxes.query.z, boxes.key.z)}};
}
__device__ __forceinline__ common::TileBoxes unpack(const PackedBoxes& packed) {
    const auto low = [&](int i) { return packed.word[i] & 0xffff; };
    const auto high = [&](int i) { return packed.word[i] >> 16; };
    return {{low(0), high(0), low(3)}, {low(1), high(1), high(3)}, low(2), high(2)};
}

// The rows of a query tile.
template <class Spec>
struct TmaQueryBox {
    using Box = common::QueryBox<Spec>;
    PackedBoxes boxes;
    Neighborhood::SequenceAxis sequences;

    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32,
                                         int32 head, int32 batch) const {
        const auto [x, y, z] = unpack(boxes).query;
        tma_load(smem, map, barrier, column, x, y, z, sequences.at(head, batch));
    }
    __device__ __forceinline__ void store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32 batch) const {
        const auto [x, y, z] = unpack(boxes).query + Box::token(row);
        tma_store(map, smem, column, x, y, z, sequences.at(head, batch));
    }
    // Behind the last row for rows outside of the grid.
    template <class Record>
    __device__ __forceinline__ int32 position(const Record& params, int32 row) const {
        const Neighborhood& grid = common::grid_of(params);
        const auto [x, y, z] = unpack(boxes).query + Box::token(row);
        const bool is_inside = x < grid.x.length && y < grid.y.length && z < grid.z.length;
        return is_inside ? (z * grid.y.length + y) * grid.x.length + x : 0x7fffffff;
    }
};

// The rows of the key tiles of a query tile.
template <class Spec>
struct TmaKeyBoxes {
    PackedBoxes boxes;
    Neighborhood::SequenceAxis sequences;

    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32 batch) const {
        const auto [x, y, z] = unpack(boxes).template key_box<Spec>(row / Spec::kBc);
        tma_load(smem, map, barrier, column, x, y, z, sequences.at(head, batch));
    }
};

template <class Spec, class Record>
__device__ __forceinline__ TmaQueryBox<Spec> query_boxes(const Record& params, const PackedBoxes& boxes) {
    return {boxes, common::grid_of(params).queries};
}
template <class Spec, class Record>
__device__ __forceinline__ TmaKeyBoxes<Spec> key_boxes(const Record& params, const PackedBoxes& boxes) {
    return {boxes, common::grid_of(params).keys};
}

// Where the rows of a query tile are in memory, and those of its key tiles.
template <class Spec, bool kHasBoxes = common::kHasBoxes<Spec>>
struct TileRows {
    TmaRows<Spec::kVarlen> queries, keys;
};
template <class Spec>
struct TileRows<Spec, true> {
    TmaQueryBox<Spec> queries;
    TmaKeyBoxes<Spec> keys;
};

}  // namespace fa2::sm90
