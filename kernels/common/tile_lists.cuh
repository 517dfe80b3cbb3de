// Tile lists: under a sparse map (fa2cupy/problem/block_mask.py) the tiles that a block visits are those of a list, not
// those of a range (tile_range.cuh). Main loops ask either kind of range for the tile at a position.
//
// A list is made for the tiles of one kernel, and holds all that hides pairs by position: the map, the band of causal
// masks and windows, and the ends of the sequences. Tiles are full, and run without a mask, or mixed. A list is
//
//   [tiles of the first kind][tiles of both kinds][scheduled tile][entry] ...
//
// where the first kind are the full key tiles of a query tile, or the mixed query tiles of a key tile: the masked tiles
// lie where those of a causal mask do. Tiles of one kind are in ascending order, so that sums have a fixed order. An
// entry is a key tile; or a query tile, with its head's number in the group in the bits from kTileBits on, because the
// query tiles of all heads of a group are one list. Behind the entries of a list is the tile after the last one, which
// is hidden as a whole: kernels that must visit a tile visit this one if the list is empty.
//
// The scheduled tile in the list of a tile t has nothing to do with t's entries: it is the tile that is scheduled at the
// place of t. The tiles of a head with the longest lists come first (order_tiles.cuh), so that no long one starts last
// and runs alone.
#pragma once
#include "common/schedule.cuh"
#include "common/neighborhood.cuh"
#include "common/tile_range.cuh"

namespace fa2::common {

inline constexpr int kTileBits = 24;
// Numbers ahead of the entries of a list, and which of them are the tiles of both kinds and the scheduled tile.
inline constexpr int kListHead = 3, kListLength = 1, kListScheduled = 2;

// The list of a tile. Lists are laid out [batch][head][tile], where all sequences or all heads may have the same.
template <class Item, class Record>
__device__ __forceinline__ Item* list_of(Item* lists, const Record& params, int32 batch, int32 head, int32 tile) {
    const int64 index = static_cast<int64>(batch) * params.list_batch_stride +
                        static_cast<int64>(head) * params.list_head_stride + tile;
    return lists + index * params.list_stride;
}

// True if tiles are scheduled by the lengths of their lists. Packed sequences leave unused places in the schedule.
template <class Spec>
inline constexpr bool kOrdersTiles = Spec::kBlockMask && !Spec::kVarlen;

// The tile of a block, for a kernel whose blocks own query tiles or (kByKeys) key tiles. Shares of a head are heads here.
template <class Spec, bool kByKeys, class Record>
__device__ __forceinline__ TileCoordinates tile_in_order(const Record& params, int32 block) {
    auto where = tile_of_block<(Spec::kCausal && !kByKeys && !kOrdersTiles<Spec>)>(params.schedule(), block);
    if constexpr (kOrdersTiles<Spec>) {
        int32 head = where.head;
        if constexpr (Spec::kSplit) head /= params.num_splits;
        const int32* lists;
        if constexpr (kByKeys)
            lists = params.query_lists;
        else
            lists = params.key_lists;
        where.tile = list_of(lists, params, where.batch, head, where.tile)[kListScheduled];
    }
    return where;
}

// The key tiles of a query tile, in the place of KeyTileRange.
struct ListedKeyTiles {
    static constexpr bool kListed = true, kLeftLimit = false;
    static constexpr int32 full_begin = 0;
    const int32* entries;
    int32 begin, full_end, end;

    __device__ __forceinline__ int32 at(int32 position) const { return entries[position]; }
    __device__ __forceinline__ int32 next(int32 position) const { return entries[position + 1]; }
};

// The query tiles of a key tile in all heads of its group, in the place of QueryTileRange. Steps have positions in the
// list, all in the first head of the group.
struct ListedQueryTiles {
    static constexpr bool kLeftLimit = false;
    static constexpr int32 full_end = 0x7fffffff;
    const int32* entries;
    int32 begin, full_begin, end;

    __device__ __forceinline__ QueryStep at(const QueryStep& step) const {
        const int32 entry = entries[step.tile];
        return {step.head + (entry >> kTileBits), entry & ((1 << kTileBits) - 1)};
    }
    __device__ __forceinline__ static int32 num_heads(int32) { return 1; }
};

template <class Spec, bool kListed = Spec::kBlockMask, bool kBoxed = kHasBoxes<Spec>>
struct TilesOf {
    using Keys = KeyTileRange<Spec::kWindow>;
    using Queries = QueryTileRange<Spec::kWindow>;
};
template <class Spec>
struct TilesOf<Spec, true, false> {
    using Keys = ListedKeyTiles;
    using Queries = ListedQueryTiles;
};
template <class Spec>
struct TilesOf<Spec, false, true> {
    using Keys = BoxedTiles;
    using Queries = BoxedTiles;
};
template <class Spec>
using KeyTiles = typename TilesOf<Spec>::Keys;
template <class Spec>
using QueryTiles = typename TilesOf<Spec>::Queries;

// The key tiles that a query tile sees.
template <class Spec, class Record>
__device__ __forceinline__ KeyTiles<Spec> key_tiles(const Record& params, const TileCoordinates& where) {
    if constexpr (Spec::kBlockMask) {
        const int32* list = list_of(params.key_lists, params, where.batch, where.head, where.tile);
        return {list + kListHead, 0, list[0], list[1]};
    } else if constexpr (kHasBoxes<Spec>) {
        return boxed_tiles<Spec, false>(params, where.tile);
    } else {
        return key_tiles_of<Spec::kCausal, Spec::kBr, Spec::kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                 window_of<Spec>(params));
    }
}

// The query tiles that see a key tile: of each head, or those of a list of all heads of the group.
template <class Spec, class Record>
__device__ __forceinline__ QueryTiles<Spec> query_tiles(const Record& params, const TileCoordinates& where) {
    if constexpr (Spec::kBlockMask) {
        const int32* list = list_of(params.query_lists, params, where.batch, where.head, where.tile);
        return {list + kListHead, 0, list[0], list[1]};
    } else if constexpr (kHasBoxes<Spec>) {
        return boxed_tiles<Spec, true>(params, where.tile);
    } else {
        return query_tiles_of<Spec::kCausal, Spec::kBr, Spec::kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                   window_of<Spec>(params));
    }
}

}  // namespace fa2::common
