// A sparse map: which tiles of the scores the caller's mask function hides as a whole (0), in part (1) or not at all (2).
//
// A block evaluates the function for all pairs of a tile; the mask is not formed. A lane combines a few keys with all
// queries of its warp before it goes on to others, so that what depends on a key alone, or on a query alone, is
// computed once for several pairs.
#pragma once
#include "common/functions.cuh.j2"

namespace fa2::common {

template <class Spec, class Params = fa2::Params>
struct TileStates {
    __device__ static void run(const Params& params) {
        const int32 column = blockIdx.x % params.map_columns, rows = blockIdx.x / params.map_columns;
        const int32 row = rows % params.map_rows, heads = rows / params.map_rows;
        const int32 head = heads % params.num_heads, batch = heads / params.num_heads;
        const int32 first_key = column * Spec::kBc, end_key = min_of(first_key + Spec::kBc, params.seqlen_k);
        const int32 first_query = row * Spec::kBr, end_query = min_of(first_query + Spec::kBr, params.seqlen_q);
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const auto args = mask_args_of(params);

        constexpr int kKeys = 4;
        bool is_seen = false, is_hidden = false;
        for (int32 keys = first_key; keys < end_key; keys += 32 * kKeys) {
#pragma unroll 4
            for (int32 query = first_query + warp; query < end_query; query += Spec::kWarps)
#pragma unroll
                for (int i = 0; i < kKeys; ++i) {
                    const int32 key = min_of(keys + 32 * i + lane, end_key - 1);  // past the last key it is repeated
                    const bool visible = is_visible<float>(args, batch, head, query, key);
                    is_seen |= visible;
                    is_hidden |= !visible;
                }
            // A tile with pairs of both kinds is mixed, whatever the others are.
            if (__any_sync(kFullWarp, is_seen) && __any_sync(kFullWarp, is_hidden)) break;
        }
        is_seen = __syncthreads_or(is_seen);
        is_hidden = __syncthreads_or(is_hidden);
        if (threadIdx.x == 0) params.states[blockIdx.x] = is_seen ? (is_hidden ? 1 : 2) : 0;
    }
};

}  // namespace fa2::common
