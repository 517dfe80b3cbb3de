// What the kernels by query tiles have in common: the tiles, how a block comes by them, and which key tiles a warp
// group sees of them.
#pragma once
#include "common/tile_range.cuh"
#include "sm90/layout.cuh"
#include "sm90/tma_rows.cuh"

namespace fa2::sm90 {

inline constexpr int kTileSlots = 4;

// A query tile, as the producer writes it to a slot in shared memory: consumers read of it what they need when they
// need it, and spend no registers on the rest. Its key tiles are taken from the last to the first, `first_key_tile`
// (0 without a left limit); those from `full_key_tiles` on need the mask. Rows that see no key have one all the same,
// wholly masked, which leaves them without a sum. A tile without key tiles is the end of the work.
struct alignas(32) QueryTile {
    int32 key_tiles, full_key_tiles, first_row, head, batch, first_key_tile;
};

// Blocks start with the tile of their own number and then take the next one that no block has, or -1 if there is none.
// Without a counter the order is fixed.
__device__ __forceinline__ int32 next_index(const Params& params, int32 previous) {
    if (previous < 0) return -1;
    const int32 index = (params.tile_counter ? atomicAdd(params.tile_counter, 1) : previous) + gridDim.x;
    return index < params.num_tiles * params.scheduled_heads * params.batch ? index : -1;
}

// As the producer has it, with what it must know to load it.
template <class Spec>
struct LoadedTile : QueryTile {
    TmaRows<Spec::kVarlen> queries, keys;
};

// Of the next index that has one; packed sequences have indices that belong to none.
template <class Spec>
__device__ __forceinline__ LoadedTile<Spec> query_tile(const Params& params, int32& index) {
    while (index >= 0) {
        const auto where = common::scheduled_tile<Spec, false>(params, index);
        const auto& own = common::record_of_sequence<Spec>(params, where.batch);
        if (Spec::kVarlen && !common::has_tile(where.tile, Spec::kBr, own.seqlen_q)) {
            index = next_index(params, index);
            continue;
        }
        const auto keys = common::key_tiles_of<Spec::kCausal, Spec::kBr, Spec::kBc>(
            where.tile, own.seqlen_q, own.seqlen_k, common::window_of<Spec>(params));
        return {{max_of(keys.end, 1), keys.full_end, where.tile * Spec::kBr, where.head, where.batch, keys.begin},
                query_tma_rows<Spec>(params, where.batch),
                key_tma_rows<Spec>(params, where.batch)};
    }
    return {};
}

// A tile that is read where it lies, member by member.
struct TileInSlot {
    uint32 address, empty;  // of the slot, of its barrier

    __device__ int32 key_tiles() const { return load_shared<int32>(address); }
    __device__ int32 full_key_tiles() const { return load_shared<int32>(address + 4); }
    __device__ int32 first_row() const { return load_shared<int32>(address + 8); }
    __device__ int32 head() const { return load_shared<int32>(address + 12); }
    __device__ int32 batch() const { return load_shared<int32>(address + 16); }
    __device__ int32 first_key_tile() const { return load_shared<int32>(address + 20); }
};

// The next one in the ring of slots, when the producer has written it.
template <class Memory>
__device__ __forceinline__ TileInSlot next_tile(const Memory& memory, RingPosition<kTileSlots>& tiles) {
    const uint32 slot = tiles.slot();
    mbarrier_wait(memory.full_tile(slot), tiles.parity());
    tiles.advance();
    return {memory.tile_slot(slot), memory.empty_tile(slot)};
}

// The record of the tile's sequence.
template <class Spec>
__device__ __forceinline__ decltype(auto) record_of(const Params& params, const TileInSlot& tile) {
    return common::record_of_sequence<Spec>(params, Spec::kVarlen ? tile.batch() : 0);
}

template <class Spec>
__device__ __forceinline__ void store_tile(uint32 address, const QueryTile& tile) {
    store_shared(address, tile.key_tiles, tile.full_key_tiles, tile.first_row, tile.head);
    store_shared(address + 16, tile.batch);
    if constexpr (common::kLeftLimit<Spec>) store_shared(address + 20, tile.first_key_tile);
}

// The key tiles that a group's rows see: those that it passes over, then [begin, end), of which [full_begin, full_end)
// need no mask.
struct GroupKeys {
    int32 skipped, end, full_end, full_begin, begin;
};

// Under a right limit the tile's last key tiles may be for its lower groups alone; a group passes over at most
// `most_skipped` of them. What is left of a lower group's left limit it takes with the mask.
template <class Spec>
__device__ __forceinline__ GroupKeys keys_of_group(const Params& params, const TileInSlot& tile, int32 group,
                                                   int32 most_skipped) {
    if constexpr (!common::kRightLimit<Spec>) return {0, tile.key_tiles(), tile.full_key_tiles(), 0, 0};
    const int32 group_tile = tile.first_row() / kGroupRows + group;
    const auto& record = record_of<Spec>(params, tile);
    const auto own = common::key_tiles_of<Spec::kCausal, kGroupRows, Spec::kBc>(
        group_tile, record.seqlen_q, record.seqlen_k, common::window_of<Spec>(params));
    const int32 all = tile.key_tiles(), skipped = min_of(all - max_of(own.end, 1), most_skipped);
    int32 begin = 0;
    if constexpr (common::kLeftLimit<Spec>) begin = tile.first_key_tile();
    return {skipped, all - skipped, own.full_end, own.full_begin, begin};
}

// The last block to come here has seen all others leave the counter: it is zero again for the next launch.
__device__ __forceinline__ void leave_counter(const Params& params) {
    if (!params.tile_counter) return;
    __threadfence();
    if (atomicAdd(params.tile_counter + 1, 1) == gridDim.x - 1) {
        params.tile_counter[0] = 0;
        params.tile_counter[1] = 0;
    }
}

}  // namespace fa2::sm90
