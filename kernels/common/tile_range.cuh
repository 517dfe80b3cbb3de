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

// True if the tiles that a block visits are those of a list (tile_lists.cuh).
template <class Spec>
inline constexpr bool kListsTiles = Spec::kBlockMask;

// True if tiles are boxes of tokens (neighborhood.cuh).
template <class Spec>
inline constexpr bool kHasBoxes = Spec::kBoxes;

// True if most tiles that a block visits need a mask.
template <class Spec>
inline constexpr bool kMasksMost = kListsTiles<Spec> || kHasBoxes<Spec>;

// True if more than the last tile of a range may need the mask, at its end (kRightLimit) or at its begin (kLeftLimit):
// if a query's position may hide the last or the first keys of its sequence. In lists (tile_lists.cuh), masked tiles are
// at the end.
template <class Spec>
inline constexpr bool kRightLimit = Spec::kCausal || Spec::kWindow || Spec::kBlockMask;
template <class Spec>
inline constexpr bool kLeftLimit = Spec::kWindow && !Spec::kBlockMask;

// The key tiles [begin, end) that a query tile sees. Tiles before full_begin (only under a left limit) and from
// full_end on contain pairs that are not visible, and need the mask. Main loops count positions and ask for the tile at
// one: it is the position itself, unless the tiles are those of a list (tile_lists.cuh).
template <bool kWindow>
struct KeyTileRange {
    static constexpr bool kListed = false, kLeftLimit = kWindow;
    int32 begin, full_begin, full_end, end;

    __device__ __forceinline__ int32 at(int32 position) const { return position; }
    __device__ __forceinline__ int32 next(int32 position) const { return position + 1; }
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

// A step of a block that owns keys: a query head of the group, and the position of one of its query tiles.
struct QueryStep {
    int32 head, tile;
};

// The query tiles [begin, end) that see a key tile. Tiles before full_begin and from full_end on (only under a left
// limit) need the mask. A partial key tile, which reaches past seqlen_k, needs it for all query tiles.
template <bool kWindow>
struct QueryTileRange {
    static constexpr bool kLeftLimit = kWindow;
    int32 begin, full_begin, full_end, end;

    // The head and the query tile of a step.
    __device__ __forceinline__ QueryStep at(const QueryStep& step) const { return step; }
    // How many heads of a group have positions of their own.
    __device__ __forceinline__ static int32 num_heads(int32 heads_per_group) { return heads_per_group; }
};

// On which side of the full tiles a tile lies: on either, it needs the mask.
struct OutsideFull {
    bool behind, before;
};

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
