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
    return {{pair(boxes.own.x, boxes.own.y), pair(boxes.others.x, boxes.others.y), pair(boxes.along_x, boxes.along_y),
             pair(boxes.own.z, boxes.others.z)}};
}
__device__ __forceinline__ common::TileBoxes unpack(const PackedBoxes& packed) {
    const auto low = [&](int i) { return packed.word[i] & 0xffff; };
    const auto high = [&](int i) { return packed.word[i] >> 16; };
    return {{low(0), high(0), low(3)}, {low(1), high(1), high(3)}, low(2), high(2)};
}

// The position of a token in its sequence; behind the last one for tokens outside of the grid.
__device__ __forceinline__ int32 position_in(const Neighborhood& grid, const common::Token& token) {
    const auto [x, y, z] = token;
    const bool is_inside = x < grid.x.length && y < grid.y.length && z < grid.z.length;
    return is_inside ? (z * grid.y.length + y) * grid.x.length + x : 0x7fffffff;
}

// The rows of the tile that a block owns.
template <class Box>
struct TmaOwnBox {
    PackedBoxes boxes;
    Neighborhood::SequenceAxis sequences;

    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32,
                                         int32 head, int32 batch) const {
        const auto [x, y, z] = unpack(boxes).own;
        tma_load(smem, map, barrier, column, x, y, z, sequences.at(head, batch));
    }
    __device__ __forceinline__ void store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32 batch) const {
        const auto [x, y, z] = unpack(boxes).own + Box::token(row);
        tma_store(map, smem, column, x, y, z, sequences.at(head, batch));
    }
    template <class Record>
    __device__ __forceinline__ int32 position(const Record& params, int32 row) const {
        return position_in(common::grid_of(params), unpack(boxes).own + Box::token(row));
    }
};

// The rows of the tiles of the other side, of kRows each: by the first one's number, or by the place, its token.
template <class Box, bool kLayers, int kRows>
struct TmaOtherBoxes {
    PackedBoxes boxes;
    Neighborhood::SequenceAxis sequences;

    __device__ __forceinline__ common::Token place(int32 tile) const {
        return unpack(boxes).template other<Box, kLayers, true>(tile);
    }
    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32 batch) const {
        load(smem, map, barrier, column, unpack(boxes).template other<Box, kLayers>(row / kRows), head, batch);
    }
    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column,
                                         const common::Token& place, int32 head, int32 batch) const {
        tma_load(smem, map, barrier, column, place.x, place.y, place.z, sequences.at(head, batch));
    }
    template <class Record>
    __device__ __forceinline__ static int32 position(const Record& params, const common::Token& place, int32 row) {
        return position_in(common::grid_of(params), place + Box::token(row));
    }
};

// Where the rows of a tile of queries, or of keys if kByKeys, are in memory, and those of the tiles that it sees.
template <class Spec, bool kByKeys, bool kHasBoxes = common::kHasBoxes<Spec>>
struct TileRows {
    TmaRows<Spec::kVarlen> queries, keys;
};
template <class Spec>
struct TileRows<Spec, false, true> {
    TmaOwnBox<common::QueryBox<Spec>> queries;
    TmaOtherBoxes<common::KeyBox<Spec>, common::kHasLayers<Spec>, Spec::kBc> keys;
};
template <class Spec>
struct TileRows<Spec, true, true> {
    TmaOtherBoxes<common::QueryBox<Spec>, common::kHasLayers<Spec>, Spec::kBr> queries;
    TmaOwnBox<common::KeyBox<Spec>> keys;
};

template <class Spec, bool kByKeys, class Record>
__device__ __forceinline__ TileRows<Spec, kByKeys> rows_of_boxes(const Record& params, const PackedBoxes& boxes) {
    const Neighborhood& grid = common::grid_of(params);
    return {{boxes, grid.queries}, {boxes, grid.keys}};
}

}  // namespace fa2::sm90
