// Maps a linear index to a tile of a head. The hardware starts blocks in index order, and persistent blocks draw
// indices in the same order, so this map is the schedule. Heads form sections (fa2cupy/plan/schedule.py), which are
// scheduled one after the other. Within a section, consecutive indices take the same tile of all heads, then the next
// tile. Under a causal mask the longest tiles come first, so that no long tile starts last and runs alone.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

struct TileCoordinates {
    int32 tile, head, batch;
};

struct TileSchedule {
    int32 num_tiles, num_heads, batch, heads_per_section;
};

// kLongestLast: the last tile has the most work (query tiles under a causal mask), so tiles are taken in reverse order.
template <bool kLongestLast>
__device__ __forceinline__ TileCoordinates tile_of_block(const TileSchedule& schedule, int32 block) {
    const int32 blocks_per_section = schedule.heads_per_section * schedule.num_tiles;
    const int32 section = block / blocks_per_section;
    const int32 rank = block - section * blocks_per_section;
    const int32 first_head = section * schedule.heads_per_section;
    const int32 heads = min_of(schedule.heads_per_section, schedule.batch * schedule.num_heads - first_head);
    const int32 tile = rank / heads;
    const int32 head = first_head + rank - tile * heads;
    return {kLongestLast ? schedule.num_tiles - 1 - tile : tile, head % schedule.num_heads, head / schedule.num_heads};
}

}  // namespace fa2::common
