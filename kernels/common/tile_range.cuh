// Which tiles meet which. The only place that knows how causal attention is aligned: key j is visible to query i iff
// j <= i + diagonal with diagonal = seqlen_k - seqlen_q (bottom right).
#pragma once
#include "common/math.cuh"

namespace fa2::common {

// Key tiles [begin, end) of one query tile; tiles from full_end on hold a pair that is not visible and need the mask.
struct KeyTileRange {
    int32 begin, full_end, end;
};

template <bool kCausal, int kBr, int kBc>
__device__ __forceinline__ KeyTileRange key_tiles_of(int32 query_tile, int32 seqlen_q, int32 seqlen_k) {
    int32 seen_by_all = seqlen_k, seen_by_any = seqlen_k;
    if constexpr (kCausal) {
        const int32 diagonal = seqlen_k - seqlen_q;
        const int32 first_row = query_tile * kBr;
        const int32 last_row = min_of(first_row + kBr, seqlen_q) - 1;
        seen_by_all = max_of(0, min_of(first_row + diagonal + 1, seqlen_k));
        seen_by_any = max_of(0, min_of(last_row + diagonal + 1, seqlen_k));
    }
    return {0, seen_by_all / kBc, ceil_div(seen_by_any, kBc)};
}

// Query tiles [begin, end) of one key tile; tiles before full_begin need the mask. A key tile that reaches past seqlen_k
// needs it everywhere.
struct QueryTileRange {
    int32 begin, full_begin, end;
};

template <bool kCausal, int kBr, int kBc>
__device__ __forceinline__ QueryTileRange query_tiles_of(int32 key_tile, int32 seqlen_q, int32 seqlen_k) {
    const int32 end = ceil_div(seqlen_q, kBr);
    int32 begin = 0, full_begin = 0;
    if constexpr (kCausal) {
        const int32 diagonal = seqlen_k - seqlen_q;
        const int32 first_key = key_tile * kBc;
        begin = min_of(max_of(0, first_key - diagonal) / kBr, end);
        full_begin = min_of(ceil_div(max_of(0, first_key + kBc - 1 - diagonal), kBr), end);
    }
    if ((key_tile + 1) * kBc > seqlen_k) full_begin = end;
    return {begin, full_begin, end};
}

}  // namespace fa2::common
