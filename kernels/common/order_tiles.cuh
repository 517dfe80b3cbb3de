// Orders the tiles of each head by the lengths of their lists (tile_lists.cuh), the longest first. Tiles with lists of one
// length keep their order.
//
// A warp finds the place of one tile: it counts the tiles with longer lists, and those ahead of it with lists as long.
// So the order does not depend on which warp comes first.
#pragma once
#include "common/params.cuh.j2"
#include "common/tile_lists.cuh"

namespace fa2::common {

template <class Spec, class Params = fa2::Params>
struct OrderTiles {
    __device__ static void run(const Params& params, int32* lists) {
        const int32 index = blockIdx.x * Spec::kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
        if (index >= params.num_lists) return;
        const auto head_of = [&](int32 list) { return lists + static_cast<int64>(list) * params.list_stride; };
        const int32 length = head_of(index)[kListLength];
        const int32 first = index - index % params.list_tiles, end = first + params.list_tiles;
        int32 place = 0;
        for (int32 others = first; others < end; others += 32) {
            const int32 other = others + lane;
            const int32 of_other = other < end ? head_of(other)[kListLength] : -1;
            const bool is_ahead = of_other > length || (of_other == length && other < index);
            place += __popc(__ballot_sync(kFullWarp, is_ahead));
        }
        if (lane == 0) head_of(first + place)[kListScheduled] = index - first;
    }
};

}  // namespace fa2::common
