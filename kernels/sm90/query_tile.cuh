// For kernels whose blocks own query tiles: the records of these tiles in shared memory, the scheduler that hands them
// to blocks, and the key tiles that a warp group sees.
#pragma once
#include "common/output_shares.cuh"
#include "common/series.cuh"
#include "common/tile_lists.cuh"
#include "sm90/boxes.cuh"
#include "sm90/layout.cuh"

namespace fa2::sm90 {

inline constexpr int kTileSlots = 4;

// A query tile, as the producer writes it to a slot in shared memory. Consumers read each field when they need it, so
// that a tile takes no registers. Its key tiles are processed from the last, key_tiles - 1, down to `first_key_tile` (0
// unless kHasBegin); those from `full_key_tiles` on need the mask. Under a sparse map they are positions in a list. A
// query tile that sees no key still gets one key tile, fully masked, so that its row sums become zero, and so does an
// empty share: the key tile after the last that is seen. key_tiles = 0 marks the end of the work. `bias_is_kept` is not 0
// if an earlier tile of the series has loaded the bias (series.cuh). The block processes this tile of kSequences sequences
// at a time, from `batch` on; `share` is the number of sequences that the series has behind that. Of boxes of tokens,
// first_row and the last three fields are PackedBoxes.
struct alignas(32) QueryTile {
    int32 key_tiles, full_key_tiles, first_row, head, batch, first_key_tile, share, bias_is_kept;
};

// Blocks that keep the bias may have a warp group for each of several sequences, whose tiles then have 64 rows and up to
// 32 columns.
template <class Spec>
inline constexpr int kSequences =
    common::kHasSeries<Spec> && Spec::kBr == kGroupRows ? common::max_of(1, Spec::kWarps / 4 - 1) : 1;

// True if the key tiles of a query tile need not begin with the sequence's first.
template <class Spec>
inline constexpr bool kHasBegin = common::kLeftLimit<Spec> || Spec::kSplit;

// Key tiles of a query tile whose loads hide the latency of drawing the next one. A block draws no earlier: it would hold
// the tile while others have nothing left to do.
inline constexpr int kDrawnAhead = 2;

// Block b starts with tile b and then draws indices from the shared counter; -1: none left. Without a counter the
// stride is gridDim.x, so that the order is fixed. The blocks of a cluster have the same tiles, without a counter: the
// first cluster of a round, with the longest tile, is the last of the next one.
template <class Spec>
__device__ __forceinline__ int32 first_index() {
    return blockIdx.x / Spec::kCluster;
}
template <class Spec>
__device__ __forceinline__ int32 next_index(const Params& params, int32 previous) {
    if (previous < 0) return -1;
    int32 index;
    if constexpr (Spec::kCluster > 1) {
        const int32 clusters = gridDim.x / Spec::kCluster;
        index = 2 * (previous / clusters + 1) * clusters - 1 - previous;
    } else {
        index = (params.tile_counter ? atomicAdd(params.tile_counter, 1) : previous) + gridDim.x;
    }
    return index < params.num_tiles * params.scheduled_heads * params.schedule().batch ? index : -1;
}

template <bool kListsTiles>
struct ListOfKeys {};
template <>
struct ListOfKeys<true> {
    const int32* entries;
};

// A query tile with the TMA coordinates that the producer needs to load it, and the entries of its list.
template <class Spec>
struct LoadedTile : QueryTile, TileRows<Spec, false> {
    ListOfKeys<common::kListsTiles<Spec>> list;
};
template <class Spec, class... Entries>
__device__ __forceinline__ LoadedTile<Spec> loaded_tile(const Params& params, const QueryTile& tile,
                                                        Entries... entries) {
    return {tile, {query_tma_rows<Spec>(params, tile.batch), key_tma_rows<Spec>(params, tile.batch)}, {entries...}};
}
// The same of boxes of tokens.
template <class Spec>
__device__ __forceinline__ LoadedTile<Spec> loaded_boxes(const Params& params, QueryTile tile,
                                                         const common::TileBoxes& boxes) {
    const PackedBoxes packed = pack(boxes);
    tile.first_row = packed.word[0];
    tile.first_key_tile = packed.word[1];
    tile.share = packed.word[2];
    tile.bias_is_kept = packed.word[3];
    return {tile, rows_of_boxes<Spec, false>(params, packed), {}};
}

// True if the series of a tile goes on behind its sequences.
template <class Spec>
__device__ __forceinline__ bool goes_on(const QueryTile& tile) {
    return common::kHasSeries<Spec> && tile.share >= kSequences<Spec>;
}
// The tile of the next sequences of such a series.
template <class Spec>
__device__ __forceinline__ LoadedTile<Spec> tile_of_next_sequence(const Params& params, const LoadedTile<Spec>& tile) {
    if constexpr (common::kHasSeries<Spec>) {
        QueryTile next = tile;
        next.batch += kSequences<Spec>;
        next.share -= kSequences<Spec>;
        next.bias_is_kept = 1;
        return loaded_tile<Spec>(params, next);
    } else {
        return tile;
    }
}

// The tile of the next used index (packed sequences leave some indices unused); key_tiles = 0 if none is left.
template <class Spec>
__device__ __forceinline__ LoadedTile<Spec> query_tile(const Params& params, int32& index) {
    while (index >= 0) {
        auto where = common::scheduled_tile<Spec, false>(params, index);
        const int32 share = common::take_share<Spec>(where, params);
        const int32 rest = common::enter_series<Spec>(where, params);
        const auto& own = common::record_of_sequence<Spec>(params, where.batch);
        if (Spec::kVarlen && !common::has_tile(where.tile, Spec::kBr, own.seqlen_q)) {
            index = next_index<Spec>(params, index);
            continue;
        }
        auto keys = common::key_tiles<Spec>(own, where);
        common::limit_to_share<Spec>(keys, params, share);
        const QueryTile tile{max_of(keys.end, Spec::kSplit ? keys.begin + 1 : 1),
                             keys.full_end,
                             where.tile * Spec::kBr,
                             where.head,
                             where.batch,
                             keys.begin,
                             share + rest,
                             0};
        if constexpr (common::kListsTiles<Spec>)
            return loaded_tile<Spec>(params, tile, keys.entries);
        else if constexpr (common::kHasBoxes<Spec>)
            return loaded_boxes<Spec>(params, tile, keys.boxes);
        else
            return loaded_tile<Spec>(params, tile);
    }
    return {};
}

// Reads a QueryTile from its slot in shared memory, one field at a time.
struct TileInSlot {
    uint32 address, empty;  // the slot, its empty barrier

    __device__ int32 key_tiles() const { return load_shared<int32>(address); }
    __device__ int32 full_key_tiles() const { return load_shared<int32>(address + 4); }
    __device__ int32 first_row() const { return load_shared<int32>(address + 8); }
    __device__ int32 head() const { return load_shared<int32>(address + 12); }
    __device__ int32 batch() const { return load_shared<int32>(address + 16); }
    __device__ int32 first_key_tile() const { return load_shared<int32>(address + 20); }
    __device__ int32 share() const { return load_shared<int32>(address + 24); }
    __device__ bool bias_is_kept() const { return load_shared<int32>(address + 28); }
    __device__ PackedBoxes boxes() const {
        return {{first_row(), first_key_tile(), share(), load_shared<int32>(address + 28)}};
    }
};

// The key tiles of a query tile in a slot.
template <class Spec>
__device__ __forceinline__ common::KeyTiles<Spec> listed_keys(const Params& params, const TileInSlot& tile) {
    return common::key_tiles<Spec>(params, {tile.first_row() / Spec::kBr, tile.head(), tile.batch()});
}

// Waits until the producer has written the next slot of the ring, and returns its tile.
template <class Memory>
__device__ __forceinline__ TileInSlot next_tile(const Memory& memory, RingPosition<kTileSlots>& tiles) {
    const uint32 slot = tiles.slot();
    mbarrier_wait(memory.full_tile(slot), tiles.parity());
    tiles.advance();
    return {memory.tile_slot(slot), memory.empty_tile(slot)};
}

// The parameter record of the tile's sequence.
template <class Spec>
__device__ __forceinline__ decltype(auto) record_of(const Params& params, const TileInSlot& tile) {
    return common::record_of_sequence<Spec>(params, Spec::kVarlen ? tile.batch() : 0);
}

template <class Spec>
__device__ __forceinline__ void store_tile(uint32 address, const QueryTile& tile) {
    store_shared(address, tile.key_tiles, tile.full_key_tiles, tile.first_row, tile.head);
    store_shared(address + 16, tile.batch);
    constexpr bool kHasBoxes = common::kHasBoxes<Spec>;
    if constexpr (kHasBegin<Spec> || kHasBoxes) store_shared(address + 20, tile.first_key_tile);
    if constexpr (Spec::kSplit || kSequences<Spec> > 1 || kHasBoxes) store_shared(address + 24, tile.share);
    if constexpr (common::kHasSeries<Spec> || kHasBoxes) store_shared(address + 28, tile.bias_is_kept);
}

// Hands a tile to the consumers, in the next slot of the ring.
template <class Spec, class Memory>
__device__ __forceinline__ void publish_tile(const Memory& memory, RingPosition<kTileSlots>& tiles,
                                             const QueryTile& tile) {
    const uint32 slot = tiles.slot(), address = memory.tile_slot(slot);
    mbarrier_wait(memory.empty_tile(slot), tiles.parity() ^ 1);
    store_tile<Spec>(address, tile);
    mbarrier_arrive(memory.full_tile(slot));
    tiles.advance();
}

// The key tiles of a warp group: it skips `skipped` tiles from `end` on, then processes [begin, end). Those of
// [full_begin, full_end) need no mask. Those of a share are counted from its first, so that loops end at the constant
// 0, which takes no register; `full_end` and `full_begin` of a share may be below 0, but not under a sparse map, where a
// loop ends at `full_end`.
struct GroupKeys {
    int32 skipped, end, full_end, full_begin, begin;
};

// Under a right limit the last key tiles may be visible only to the lower groups (those with the later rows); the
// others skip up to `most_skipped` of them. Under a left limit all groups end with the same key tile, and the lower
// groups mask the keys before their own limit.
template <class Spec>
__device__ __forceinline__ GroupKeys keys_of_group(const Params& params, const TileInSlot& tile, int32 group,
                                                   int32 most_skipped) {
    const int32 first = Spec::kSplit ? tile.first_key_tile() : 0;
    if constexpr (!common::kRightLimit<Spec> || common::kListsTiles<Spec>) {
        const int32 full_end = tile.full_key_tiles() - first;
        return {0, tile.key_tiles() - first, Spec::kSplit ? max_of(full_end, 0) : full_end, 0, 0};
    }
    const int32 group_tile = tile.first_row() / kGroupRows + group;
    const auto& record = record_of<Spec>(params, tile);
    const auto own = common::key_tiles_of<Spec::kCausal, kGroupRows, Spec::kBc>(
        group_tile, record.seqlen_q, record.seqlen_k, common::window_of<Spec>(params));
    const int32 all = tile.key_tiles() - first;
    int32 skipped = min_of(all - max_of(own.end - first, 1), most_skipped);
    if constexpr (Spec::kSplit) skipped = max_of(skipped, 0);  // the group's keys may go on behind the share
    int32 begin = 0;
    if constexpr (common::kLeftLimit<Spec> && !Spec::kSplit) begin = tile.first_key_tile();
    return {skipped, all - skipped, own.full_end - first, own.full_begin - first, begin};
}

// The first row of a block among those of its cluster.
template <class Spec>
__device__ __forceinline__ int32 first_row_of_block() {
    if constexpr (Spec::kCluster > 1) return rank_in_cluster() * (Spec::kBr / Spec::kCluster);
    return 0;
}

// The scores of key tile `block` of GroupKeys, from row `row` of a query tile on.
template <class Spec>
__device__ __forceinline__ common::ScoreTile score_tile_of(const Params& params, const TileInSlot& tile, int32 batch,
                                                           int32 row, int32 block, int32 lane) {
    if constexpr (Spec::kSplit) block += tile.first_key_tile();
    if constexpr (common::kListsTiles<Spec>) block = listed_keys<Spec>(params, tile).at(block);
    return {batch, tile.head(), {tile.first_row() + row, block * Spec::kBc, lane}};
}

// Called once per block, after its last draw. The last block resets the counter for the next launch; its plain stores
// must come after the draws of all others. `params` is of a template type because kernels whose blocks own keys, which
// share code with the others, have no counter.
template <class Record>
__device__ __forceinline__ void leave_counter(const Record& params) {
    if (!params.tile_counter) return;
    if (increment_in_order(params.tile_counter + 1) == gridDim.x - 1) {
        params.tile_counter[0] = 0;
        params.tile_counter[1] = 0;
    }
}

}  // namespace fa2::sm90
