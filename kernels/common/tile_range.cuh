// Tile ranges: which key tiles a query tile sees, and which query tiles see a key tile. Attention is aligned to the
// bottom right: the diagonal key of query i is i + diagonal, with diagonal = seqlen_k - seqlen_q. Under a causal mask
// the query sees no key after its diagonal key; under a window it sees the keys from `left` before it to `right` after
// it.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

template <bool kWindow>
struct WindowLimits {};
template <>
struct WindowLimits<true> {
    int32 left, right;
};

// Record is a template parameter because the record has these fields only if there is a window.
template <class Spec, class Record>
__device__ __forceinline__ WindowLimits<Spec::kWindow> window_of(const Record& params) {
    if constexpr (Spec::kWindow)
        return {params.window_left, params.window_right};
    else
        return {};
}

// True if a query's position may hide the last (kRightLimit) or the first (kLeftLimit) keys of its sequence.
template <class Spec>
inline constexpr bool kRightLimit = Spec::kCausal || Spec::kWindow;
template <class Spec>
inline constexpr bool kLeftLimit = Spec::kWindow;

// On which side of the full tiles a tile lies: on either, it needs the mask.
struct OutsideFull {
    bool behind, before;
};

// The key tiles [begin, end) that a query tile sees. Tiles before full_begin (only under a left limit) and from
// full_end on contain pairs that are not visible, and need the mask. The position of a tile is the tile itself; in a
// list (tile_lists.cuh) the two differ.
template <bool kWindow>
struct KeyTileRange {
    static constexpr bool kLeftLimit = kWindow;
    int32 begin, full_begin, full_end, end;

    __device__ __forceinline__ int32 at(int32 position) const { return position; }
    __device__ __forceinline__ OutsideFull outside(int32 position) const {
        return {position >= full_end, kLeftLimit && position < full_begin};
    }
    __device__ __forceinline__ bool needs_mask(int32 position) const {
        return position >= full_end || (kLeftLimit && position < full_begin);
    }
};

template <bool kCausal, int kBr, int kBc, bool kWindow>
__device__ __forceinline__ KeyTileRange<kWindow> key_tiles_of(int32 query_tile, int32 seqlen_q, int32 seqlen_k,
                                                              const WindowLimits<kWindow>& window) {
    int32 begin = 0, full_begin = 0, seen_by_all = seqlen_k, seen_by_any = seqlen_k;
    if constexpr (kCausal || kWindow) {
        int32 diagonal = seqlen_k - seqlen_q;
        const int32 first_row = query_tile * kBr;
        const int32 last_row = min_of(first_row + kBr, seqlen_q) - 1;
        if constexpr (kWindow) {
            begin = max_of(0, first_row + diagonal - window.left) / kBc;
            full_begin = ceil_div(max_of(0, last_row + diagonal - window.left), kBc);
            diagonal += window.right;
        }
        seen_by_all = max_of(0, min_of(first_row + diagonal + 1, seqlen_k));
        seen_by_any = max_of(0, min_of(last_row + diagonal + 1, seqlen_k));
    }
    return {begin, full_begin, seen_by_all / kBc, ceil_div(seen_by_any, kBc)};
}

// A step of a block that owns keys: a query head of the group, a query tile, and its position.
struct GroupStep {
    int32 head, tile, position;
};

// The query tiles [begin, end) that see a key tile. Tiles before full_begin and from full_end on (only under a left
// limit) need the mask. A partial key tile, which reaches past seqlen_k, needs it for all query tiles.
template <bool kWindow>
struct QueryTileRange {
    static constexpr bool kLeftLimit = kWindow;
    int32 begin, full_begin, full_end, end;

    __device__ __forceinline__ OutsideFull outside(int32 position) const {
        return {kLeftLimit && position >= full_end, position < full_begin};
    }
    __device__ __forceinline__ bool needs_mask(int32 position) const {
        return position < full_begin || (kLeftLimit && position >= full_end);
    }
    // The number of steps of the heads of a group.
    __device__ __forceinline__ int32 num_steps(int32 heads) const { return heads * (end - begin); }
};

// The steps of a group: the query tiles of one head, each from `start` on, then those of the next. kFromBegin: `start`
// is the first of them.
template <class Tiles, bool kFromBegin>
struct GroupWalk {
    Tiles tiles;
    int32 first_head, start;

    __device__ __forceinline__ GroupStep first() const { return {first_head, start, start}; }
    __device__ __forceinline__ GroupStep at(int32 number) const {
        const int32 of_head = tiles.end - tiles.begin;
        const int32 tile = tiles.begin + (start - tiles.begin + number) % of_head;
        return {first_head + number / of_head, tile, tile};
    }
    __device__ __forceinline__ GroupStep next(const GroupStep& step) const {
        const int32 tile = step.tile + 1 < tiles.end ? step.tile + 1 : tiles.begin;
        const bool same_head = kFromBegin ? step.tile + 1 < tiles.end : tile != start;
        return {same_head ? step.head : step.head + 1, tile, tile};
    }
};

// The walk of a block. kApart: blocks of different key tiles start with different query tiles.
template <bool kApart, bool kWindow>
__device__ __forceinline__ GroupWalk<QueryTileRange<kWindow>, !kApart> walk_of(const QueryTileRange<kWindow>& tiles,
                                                                               int32 first_head, int32 key_tile) {
    const int32 of_head = tiles.end - tiles.begin;
    return {tiles, first_head, tiles.begin + (kApart && of_head > 0 ? key_tile % of_head : 0)};
}

template <bool kCausal, int kBr, int kBc, bool kWindow>
__device__ __forceinline__ QueryTileRange<kWindow> query_tiles_of(int32 key_tile, int32 seqlen_q, int32 seqlen_k,
                                                                  const WindowLimits<kWindow>& window) {
    int32 end = ceil_div(seqlen_q, kBr);
    int32 begin = 0, full_begin = 0, full_end = end;
    if constexpr (kCausal || kWindow) {
        int32 diagonal = seqlen_k - seqlen_q;
        const int32 first_key = key_tile * kBc;
        if constexpr (kWindow) {
            const int32 last_key = min_of(first_key + kBc, seqlen_k) - 1;
            end = ceil_div(max_of(0, min_of(last_key - diagonal + window.left + 1, seqlen_q)), kBr);
            full_end = max_of(0, min_of(first_key - diagonal + window.left + 1, seqlen_q)) / kBr;
            diagonal += window.right;
        }
        begin = min_of(max_of(0, first_key - diagonal) / kBr, end);
        full_begin = min_of(ceil_div(max_of(0, first_key + kBc - 1 - diagonal), kBr), end);
    }
    if ((key_tile + 1) * kBc > seqlen_k) full_begin = end;
    return {begin, full_begin, full_end, end};
}

}  // namespace fa2::common
