// A sparse map: which tiles of the scores the caller's mask function hides as a whole (0), in part (1) or not at all (2),
// and where visibility begins and ends in each row and column (map_edges.cuh).
//
// A block evaluates the function for all pairs of a tile; the mask is not formed. A lane combines a few keys with all
// queries of its warp before it goes on to others, so that what depends on a key alone, or on a query alone, is
// computed once for several pairs.
#pragma once
#include "common/functions.cuh.j2"
#include "common/map_edges.cuh"

namespace fa2::common {

template <class Spec, class Params = fa2::Params>
struct TileStates {
    static constexpr int kKeys = 4;  // of a lane at a time
    static constexpr uint32 kAll = (1u << kKeys) - 1;

    const Params& params;
    int32 batch, head, first_query, end_query, end_key;  // queries are those of the warp
    bool is_seen = false, is_hidden = false;
    bool is_many_in_rows = false, is_many_in_columns = false;  // some row or column of the tile has three rises or more

    __device__ static void run(const Params& params) {
        const int32 column = blockIdx.x % params.map_columns, rows = blockIdx.x / params.map_columns;
        const int32 row = rows % params.map_rows, heads = rows / params.map_rows;
        const int32 head = heads % params.num_heads, batch = heads / params.num_heads;
        const int32 first_key = column * Spec::kBc, end_key = min_of(first_key + Spec::kBc, params.seqlen_k);
        const int32 first_query = row * Spec::kBr, end_query = min_of(first_query + Spec::kBr, params.seqlen_q);
        const int32 of_warp = ceil_div(end_query - first_query, Spec::kWarps), warp = threadIdx.x / 32;
        const int32 own_query = first_query + warp * of_warp;
        TileStates own{params, batch, head, own_query, min_of(own_query + of_warp, end_query), end_key};
        if (own.first_query < own.end_query) own.evaluate(first_key);
        own.is_seen = __syncthreads_or(own.is_seen);
        own.is_hidden = __syncthreads_or(own.is_hidden);
        if (threadIdx.x == 0) params.states[blockIdx.x] = own.is_seen ? (own.is_hidden ? 1 : 2) : 0;
        if (!params.row_intervals) return;
        own.is_many_in_rows = __syncthreads_or(own.is_many_in_rows);
        own.is_many_in_columns = __syncthreads_or(own.is_many_in_columns);
        if (threadIdx.x == 0 && own.is_many_in_rows) atomicMax(params.most_intervals, kMostIntervals + 1);
        if (threadIdx.x == 0 && own.is_many_in_columns) atomicMax(params.most_intervals + 1, kMostIntervals + 1);
    }

  private:
    __device__ bool sees(int32 query, int32 key) const {
        return is_visible<float>(mask_args_of(params), batch, head, query, key);
    }

    __device__ void evaluate(int32 first_key) {
        for (int32 keys = first_key; keys < end_key; keys += 32 * kKeys) {
            if (params.row_intervals)
                find_edges(keys);
            else
                find_states(keys);
            // A tile with pairs of both kinds is mixed, whatever the others are.
            const bool is_mixed = __any_sync(kFullWarp, is_seen) && __any_sync(kFullWarp, is_hidden);
            if (is_mixed && !params.row_intervals) break;
        }
    }

    // Past the last key it is repeated: no edges are found there.
    __device__ int32 key_of_lane(int32 keys, int i) const {
        const int32 lane = threadIdx.x % 32;
        return min_of(keys + 32 * i + lane, end_key - 1);
    }
    // Which of a lane's keys a query sees, a bit for each.
    __device__ uint32 seen_by(int32 query, int32 keys) {
        uint32 seen = 0;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) seen |= static_cast<uint32>(sees(query, key_of_lane(keys, i))) << i;
        return seen;
    }
    __device__ uint32 look_at(int32 query, int32 keys) {
        const uint32 seen = seen_by(query, keys);
        is_seen |= seen != 0;
        is_hidden |= seen != kAll;
        return seen;
    }
    __device__ void find_states(int32 keys) {
#pragma unroll 4
        for (int32 query = first_query; query < end_query; ++query) look_at(query, keys);
    }

    __device__ void find_edges(int32 keys) {
        const int32 lane = threadIdx.x % 32;
        const int64 matrix = static_cast<int64>(batch) * params.num_heads + head;
        const bool ends_row = end_key == params.seqlen_k && keys + 32 * kKeys >= end_key;
        uint32 above = first_query > 0 ? seen_by(first_query - 1, keys) : 0;
        MapEdges of_column[kKeys];
        for (int32 queries = first_query; queries < end_query; queries += 32) {
            // Which of 32 queries see the key ahead of these.
            const bool is_seen_ahead =
                keys > 0 && queries + lane < end_query && sees(queries + lane, keys > 0 ? keys - 1 : 0);
            const uint32 ahead = __ballot_sync(kFullWarp, is_seen_ahead);
#pragma unroll 2
            for (int32 query = queries; query < min_of(queries + 32, end_query); ++query) {
                const uint32 seen = look_at(query, keys), before = ahead >> (query - queries) & 1;
                if (seen != above) {
#pragma unroll
                    for (int i = 0; i < kKeys; ++i) of_column[i].step(above >> i & 1, seen >> i & 1, query);
                    above = seen;
                }
                // Most rows of most tiles have no edge.
                if (!__all_sync(kFullWarp, seen == (before ? kAll : 0)) || (before && ends_row))
                    add_row(seen, before, keys, ends_row, matrix * params.seqlen_q + query);
            }
        }
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const int32 key = keys + 32 * i + lane;
            if (key >= end_key) break;
            if (above >> i & 1 && end_query == params.seqlen_q) of_column[i].fall(end_query);
            is_many_in_columns |= of_column[i].rises > kMostIntervals;
            if (!is_many_in_columns)
                of_column[i].add_to(params.column_intervals, params.column_rises, matrix * params.seqlen_k + key);
        }
    }

    // Adds the edges of a row, number `index` of all; `before`: whether its query sees the key ahead of these.
    __device__ void add_row(uint32 seen, uint32 before, int32 keys, bool ends_row, int64 index) {
        MapEdges edges;
#pragma unroll
        for (int i = 0; i < kKeys; ++i) {
            const uint32 bits = __ballot_sync(kFullWarp, seen >> i & 1), previous = bits << 1 | before;
            edges.add_rises(bits & ~previous, keys + 32 * i);
            edges.add_falls(previous & ~bits, keys + 32 * i);
            before = bits >> 31;
        }
        if (before && ends_row) edges.fall(end_key);
        is_many_in_rows |= edges.rises > kMostIntervals;
        if (threadIdx.x % 32 == 0 && !is_many_in_rows) edges.add_to(params.row_intervals, params.row_rises, index);
    }
};

}  // namespace fa2::common
