// Tiles that are boxes of tokens of a grid, in which each query sees a window of keys (fa2cupy/problem/boxes.py).
//
// Row r of a tile is token r of its box, x first. The key tiles of a query tile divide the union of its windows, which is a
// box, too: they begin at its first token, wherever that lies, and have no key in common. Tokens outside of the grid, where
// boxes reach across its end, are zeros, and hidden.
#pragma once
#include "common/map_intervals.cuh"
#include "common/schedule.cuh"

namespace fa2::common {

template <class Record>
__device__ __forceinline__ const Neighborhood& grid_of(const Record& params) {
    return params.neighborhood;
}

struct Token {
    int32 x, y, z;

    __device__ Token operator+(const Token& other) const { return {x + other.x, y + other.y, z + other.z}; }
};

template <int kWidth_, int kHeight_, int kRows>
struct Box {
    static constexpr int kWidth = kWidth_, kHeight = kHeight_, kDepth = kRows / (kWidth * kHeight);
    static_assert(kRows % (kWidth * kHeight) == 0);

    __device__ static Token token(int32 row) {
        return {row % kWidth, row / kWidth % kHeight, row / (kWidth * kHeight)};
    }
};
template <class Spec>
using QueryBox = Box<Spec::kQueryWidth, Spec::kQueryHeight, Spec::kBr>;
template <class Spec>
using KeyBox = Box<Spec::kKeyWidth, Spec::kKeyHeight, Spec::kBc>;

// True if there may be several tokens along z.
template <class Spec>
inline constexpr bool kHasLayers = QueryBox<Spec>::kDepth > 1 || KeyBox<Spec>::kDepth > 1;

// The boxes of a query tile: its first query, the first key that any of its queries sees, and the number of boxes of keys
// along x and y.
struct TileBoxes {
    Token query, key;
    int32 along_x, along_y;

    // The first token of a key tile.
    template <class Spec>
    __device__ __forceinline__ Token key_box(int32 tile) const {
        using Keys = KeyBox<Spec>;
        const int32 row = tile / along_x;
        const Token box{(tile - row * along_x) * Keys::kWidth, 0, 0};
        if constexpr (!kHasLayers<Spec>) return key + box + Token{0, row * Keys::kHeight, 0};
        const int32 layer = row / along_y;
        return key + box + Token{0, (row - layer * along_y) * Keys::kHeight, layer * Keys::kDepth};
    }
};

// The key tiles of a query tile, in the place of KeyTileRange.
struct BoxedKeyTiles {
    static constexpr bool kListed = false, kLeftLimit = false;
    static constexpr int32 begin = 0, full_begin = 0, full_end = 0;
    TileBoxes boxes;
    int32 end;
};

template <class Spec, class Record>
__device__ __forceinline__ BoxedKeyTiles boxed_key_tiles(const Record& params, int32 tile) {
    using Queries = QueryBox<Spec>;
    using Keys = KeyBox<Spec>;
    const Neighborhood& grid = grid_of(params);
    const int32 row = tile / grid.x.boxes, layer = row / grid.y.boxes;
    const Token first{(tile - row * grid.x.boxes) * Queries::kWidth, (row - layer * grid.y.boxes) * Queries::kHeight,
                      layer * Queries::kDepth};
    const Token key{max_of(grid.x.begin(first.x), 0), max_of(grid.y.begin(first.y), 0),
                    max_of(grid.z.begin(first.z), 0)};
    const auto along = [](const Neighborhood::Axis& axis, int32 query, int32 queries, int32 key, int32 keys) {
        return ceil_div(axis.end(min_of(query + queries, axis.length) - 1) - key, keys);
    };
    const int32 along_x = along(grid.x, first.x, Queries::kWidth, key.x, Keys::kWidth);
    const int32 along_y = along(grid.y, first.y, Queries::kHeight, key.y, Keys::kHeight);
    const int32 along_z = along(grid.z, first.z, Queries::kDepth, key.z, Keys::kDepth);
    return {{first, key, along_x, along_y}, along_x * along_y * along_z};
}

// The keys of a box that the windows hide from the queries of a fragment. `row` is the first of the fragment in the query
// tile. Bits of a lane's elements grow with x, then y, then z, so that the keys of a window along each axis are bits in a
// row, repeated for each step along the axes behind it.
template <class Spec, class Fragment>
class HiddenByWindows {
    using Queries = QueryBox<Spec>;
    using Keys = KeyBox<Spec>;
    static_assert(Keys::kWidth % 8 == 0 && VisibleBits<Fragment>::kWords == 1);
    using Run = QuadFragment<Keys::kWidth / 8>;  // the keys of a box along x
    static constexpr int kRunBits = Run::kCols, kLayerBits = kRunBits * Keys::kHeight;

  public:
    template <class Record>
    __device__ __forceinline__ HiddenByWindows(const Record& params, const TileBoxes& boxes, int32 key_tile, int32 row,
                                               int32 lane) {
        const Neighborhood& grid = grid_of(params);
        const Token key = boxes.template key_box<Spec>(key_tile);
        const int32 first_x = key.x + Run::col(0, lane);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            const Token query = boxes.query + Queries::token(row + Fragment::row(i, lane));
            const int32 before = LaneColumns<Run>::before(grid.x.begin(query.x) - first_x);
            const int32 end = LaneColumns<Run>::before(grid.x.end(query.x) - first_x);
            uint32 visible = bits(before, end) * kRepeated<kRunBits>;
            visible &= along<kRunBits, kLayerBits>(grid.y, query.y, key.y) * kRepeated<kLayerBits>;
            if constexpr (kHasLayers<Spec>) visible &= along<kLayerBits, 32>(grid.z, query.z, key.z);
            visible_.word[i][0] = visible;
        }
    }

    template <class Mask, class Real>
    __device__ __forceinline__ void hide(Fragment& scores, const Mask&, Real value) const {
        visible_.hide_others(scores, value);
    }

  private:
    // A word with the lowest of every so many bits.
    __device__ static constexpr uint32 first_of_each(int bits) {
        uint32 word = 0;
        for (int bit = 0; bit < 32; bit += bits) word |= 1u << bit;
        return word;
    }
    template <int kBits>
    static constexpr uint32 kRepeated = first_of_each(kBits);

    __device__ __forceinline__ static uint32 bits(int32 begin, int32 end) {
        return VisibleBits<Fragment>::ones(end) & ~VisibleBits<Fragment>::ones(begin);
    }
    // The bits of the keys of a window along an axis, kBits for each of those of the box, which begin with `key`.
    template <int kBits, int kAllBits>
    __device__ __forceinline__ static uint32 along(const Neighborhood::Axis& axis, int32 query, int32 key) {
        const uint32 own = bits(kBits * (axis.begin(query) - key), kBits * (axis.end(query) - key));
        return kAllBits < 32 ? own & ((1u << kAllBits % 32) - 1) : own;
    }

    VisibleBits<Fragment> visible_;
};

}  // namespace fa2::common
