// Tiles that are boxes of tokens of a grid, in which each query sees a window of keys (fa2cupy/problem/boxes.py).
//
// Row r of a tile is token r of its box, x first. The key tiles of a query tile divide the union of its windows, which is a
// box, too: they begin at its first token, wherever that lies, and have no key in common. So do the query tiles of a key
// tile, with the queries whose windows have any of its keys. Tokens outside of the grid, where boxes reach across its end,
// are zeros, and hidden.
#pragma once
#include "common/map_intervals.cuh"
#include "common/schedule.cuh"
#include "common/tile_range.cuh"

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
        const uint32 at = row;  // whose quotients are shifts
        return {static_cast<int32>(at % kWidth), static_cast<int32>(at / kWidth % kHeight),
                static_cast<int32>(at / (kWidth * kHeight))};
    }
};
template <class Spec>
using QueryBox = Box<Spec::kQueryWidth, Spec::kQueryHeight, Spec::kBr>;
template <class Spec>
using KeyBox = Box<Spec::kKeyWidth, Spec::kKeyHeight, Spec::kBc>;

// True if there may be several tokens along z.
template <class Spec>
inline constexpr bool kHasLayers = QueryBox<Spec>::kDepth > 1 || KeyBox<Spec>::kDepth > 1;

// The box that a block owns and those of the other side, which divide a box of tokens: the first token of either, and the
// number of boxes of the other side along x and y.
struct TileBoxes {
    Token own, others;
    int32 along_x, along_y;

    // The first token of a tile of the other side. A warp with registers to spare is faster without divisions (kFast), whose
    // results the others have in registers that are the same for all lanes.
    template <class Box, bool kLayers, bool kFast = false>
    __device__ __forceinline__ Token other(int32 tile) const {
        const int32 row = quotient<kFast>(tile, along_x);
        const Token box{(tile - row * along_x) * Box::kWidth, 0, 0};
        if constexpr (!kLayers) return others + box + Token{0, row * Box::kHeight, 0};
        const int32 layer = quotient<kFast>(row, along_y);
        return others + box + Token{0, (row - layer * along_y) * Box::kHeight, layer * Box::kDepth};
    }

  private:
    // tile / along, of less than 2^20 tiles: what is added to them is more than the product errs by.
    template <bool kFast>
    __device__ __forceinline__ static int32 quotient(int32 tile, int32 along) {
        if constexpr (!kFast) return tile / along;
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(along)));
        return static_cast<int32>((tile + 0.5f) * inverse);
    }
};

// The boxes of a side, and what tokens of this side see: queries keys, and keys the queries that see them.
template <class Spec, bool kKeys>
struct Side {
    using Own = QueryBox<Spec>;
    using Other = KeyBox<Spec>;
    __device__ __forceinline__ static int32 begin(const Neighborhood::Axis& axis, int32 query) {
        return axis.begin(query);
    }
    __device__ __forceinline__ static int32 end(const Neighborhood::Axis& axis, int32 query) { return axis.end(query); }
};
template <class Spec>
struct Side<Spec, true> {
    using Own = KeyBox<Spec>;
    using Other = QueryBox<Spec>;
    __device__ __forceinline__ static int32 begin(const Neighborhood::Axis& axis, int32 key) {
        return axis.begin_of_queries(key);
    }
    __device__ __forceinline__ static int32 end(const Neighborhood::Axis& axis, int32 key) {
        return axis.end_of_queries(key);
    }
};

// The tiles of the other side that a tile sees, in the place of KeyTileRange or QueryTileRange. All need the mask.
struct BoxedTiles {
    static constexpr bool kListed = false, kLeftLimit = false;
    static constexpr int32 begin = 0, full_begin = 0, full_end = 0;
    TileBoxes boxes;
    int32 end;

    __device__ __forceinline__ static const QueryStep& at(const QueryStep& step) { return step; }
    __device__ __forceinline__ static int32 num_heads(int32 heads_per_group) { return heads_per_group; }
};

template <class Spec, bool kByKeys, class Record>
__device__ __forceinline__ BoxedTiles boxed_tiles(const Record& params, int32 tile) {
    using Sees = Side<Spec, kByKeys>;
    using Own = typename Sees::Own;
    using Other = typename Sees::Other;
    const Neighborhood& grid = grid_of(params);
    const int32 row = tile / grid.x.boxes, layer = row / grid.y.boxes;
    const Token first{(tile - row * grid.x.boxes) * Own::kWidth, (row - layer * grid.y.boxes) * Own::kHeight,
                      layer * Own::kDepth};
    const Token other{max_of(Sees::begin(grid.x, first.x), 0), max_of(Sees::begin(grid.y, first.y), 0),
                      max_of(Sees::begin(grid.z, first.z), 0)};
    const auto along = [](const Neighborhood::Axis& axis, int32 own, int32 tokens, int32 other, int32 others) {
        return ceil_div(Sees::end(axis, min_of(own + tokens, axis.length) - 1) - other, others);
    };
    const int32 along_x = along(grid.x, first.x, Own::kWidth, other.x, Other::kWidth);
    const int32 along_y = along(grid.y, first.y, Own::kHeight, other.y, Other::kHeight);
    const int32 along_z = along(grid.z, first.z, Own::kDepth, other.z, Other::kDepth);
    return {{first, other, along_x, along_y}, along_x * along_y * along_z};
}

// What windows hide in a fragment of the scores of two boxes, whose rows are queries, or keys if kTransposed. `row` is the
// first of the fragment in the box of the rows. Bits of a lane's elements grow with x, then y, then z, so that what a row
// sees along each axis are bits in a row, repeated for each step along the axes behind it.
template <bool kTransposed, class Spec, class Fragment>
class HiddenByWindows {
    using Sees = Side<Spec, kTransposed>;
    using Rows = typename Sees::Own;
    using Columns = typename Sees::Other;
    static_assert(Columns::kWidth % 8 == 0 && VisibleBits<Fragment>::kWords == 1);
    using Run = QuadFragment<Columns::kWidth / 8>;  // the tokens of a box along x
    static constexpr int kRunBits = Run::kCols, kLayerBits = kRunBits * Columns::kHeight;

  public:
    template <class Record>
    __device__ __forceinline__ HiddenByWindows(const Record& params, const TileBoxes& boxes, int32 other_tile,
                                               int32 row, int32 lane) {
        const Neighborhood& grid = grid_of(params);
        const Token column = boxes.template other<Columns, kHasLayers<Spec>>(other_tile);
        const int32 first_x = column.x + Run::col(0, lane);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            // A block that owns keys has the same in each step: loops would keep what they see, and spill it.
            const int32 own_row = row + Fragment::row(i, lane);
            const Token own = boxes.own + Rows::token(kTransposed ? as_if_new(own_row) : own_row);
            const int32 before = LaneColumns<Run>::before(Sees::begin(grid.x, own.x) - first_x);
            const int32 end = LaneColumns<Run>::before(Sees::end(grid.x, own.x) - first_x);
            uint32 visible = bits(before, end) * kRepeated<kRunBits>;
            visible &= along<kRunBits, kLayerBits>(grid.y, own.y, column.y) * kRepeated<kLayerBits>;
            if constexpr (kHasLayers<Spec>) visible &= along<kLayerBits, 32>(grid.z, own.z, column.z);
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
    // The bits of what a row sees along an axis, kBits for each token of the other box, which begins with `other`.
    template <int kBits, int kAllBits>
    __device__ __forceinline__ static uint32 along(const Neighborhood::Axis& axis, int32 own, int32 other) {
        const uint32 seen = bits(kBits * (Sees::begin(axis, own) - other), kBits * (Sees::end(axis, own) - other));
        return kAllBits < 32 ? seen & ((1u << kAllBits % 32) - 1) : seen;
    }

    VisibleBits<Fragment> visible_;
};

}  // namespace fa2::common
