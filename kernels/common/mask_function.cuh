// Masks by position together with what a sparse map hides of masked tiles; the others are full. This is decided by the
// caller's mask function, or by the map's intervals (map_intervals.cuh). Without a map, the function hides scores
// wherever they are modified (score_mod.cuh).
#pragma once
#include "common/functions.cuh.j2"
#include "common/map_intervals.cuh"
#include "common/mask.cuh"
#include "common/ptx.cuh"

namespace fa2::common {

template <class Spec>
inline constexpr bool kMasksByMap = Spec::kBlockMask && (Spec::kMaskMod || Spec::kIntervals);

// Writes `value` over every element that the mask by position hides. kTransposed: the rows of the fragment are keys.
template <bool kTransposed, class Fragment, class Mask, class Real>
__device__ __forceinline__ void hide_by_position(Fragment& scores, const Mask& mask, const TilePosition& position,
                                                 Real value) {
    if constexpr (kTransposed)
        mask_transposed(scores, mask, position, value);
    else
        mask_scores(scores, mask, position, value);
}

// The caller's mask function for one sequence and head. Rows are queries and columns are keys; with kTransposed, rows
// are keys.
template <bool kTransposed, class Real>
struct MaskFunction {
    mask_args_arrays args;
    int32 batch, head;

    // What of the function depends on a row alone, or on a column alone.
    __device__ __forceinline__ auto of_row(int32 row) const { return terms<kTransposed>(row); }
    __device__ __forceinline__ auto of_column(int32 column) const { return terms<!kTransposed>(column); }

    __device__ __forceinline__ bool shows(int32 row, int32 column) const {
        return is_visible<Real>(args, batch, head, kTransposed ? column : row, kTransposed ? row : column);
    }
    template <class RowTerms, class ColumnTerms>
    __device__ __forceinline__ bool shows(int32 row, int32 column, const RowTerms& of_row,
                                          const ColumnTerms& of_column) const {
        if constexpr (kTransposed)
            return is_visible<Real>(args, batch, head, column, row, of_column, of_row);
        else
            return is_visible<Real>(args, batch, head, row, column, of_row, of_column);
    }

  private:
    template <bool kOfKey>
    __device__ __forceinline__ auto terms(int32 position) const {
        if constexpr (kOfKey)
            return key_terms<Real>(args, batch, head, position);
        else
            return query_terms<Real>(args, batch, head, position);
    }
};

// The terms of a fragment's columns, from column `first` on.
template <class Fragment, class Function>
class ColumnTerms {
  public:
    __device__ __forceinline__ ColumnTerms(const Function&, int32 first, int32 lane)
        : first_(first + Fragment::col(0, lane)) {}
    __device__ __forceinline__ auto at(const Function& function, int j) const {
        return function.of_column(first_ + Fragment::col(j, 0));
    }
    template <class Terms>
    __device__ __forceinline__ static Terms held(const Terms& of_row, int32) {
        return of_row;
    }

  private:
    const int32 first_;
};
// In the quad layout, eight lanes have the same columns: each evaluates the terms of an eighth of them, and receives the
// others from the other quads.
template <int kN8, class Function>
class ColumnTerms<QuadFragment<kN8>, Function> {
    static constexpr int kOwn = 2 * ceil_div(kN8, 8);

  public:
    __device__ __forceinline__ ColumnTerms(const Function& function, int32 first, int32 lane) {
        first += lane / 4 * QuadFragment<kN8>::col(kOwn, 0);
#pragma unroll
        for (int j = 0; j < kOwn; ++j) own_[j] = function.of_column(first + QuadFragment<kN8>::col(j, lane));
    }
    __device__ __forceinline__ auto at(const Function&, int j) const { return own_[j % kOwn].of_quad(j / kOwn); }
    // A row's terms, received from the lane itself, so that registers hold them: the compiler would evaluate a shift
    // again for each column, because one instruction shifts and subtracts, and add the bound of a range by another.
    template <class Terms>
    __device__ __forceinline__ static Terms held(const Terms& of_row, int32 lane) {
        return of_row.of_quad(lane / 4);
    }

  private:
    decltype(static_cast<const Function*>(nullptr)->of_column(0)) own_[kOwn];
};

// What the caller's mask function hides of a fragment. The constructor evaluates what depends on a row or a column alone.
// A position is the lane's first one, an opaque value, plus a compile-time distance: the compiler then finds what
// differences of positions have in common.
template <bool kTransposed, class Fragment, class Real, bool kIsShort = mask_args_arrays::kIsShort>
class HiddenByFunction {
    using Function = MaskFunction<kTransposed, Real>;
    using Columns = ColumnTerms<Fragment, Function>;

  public:
    template <class Record>
    __device__ __forceinline__ HiddenByFunction(const Record& params, const ScoreTile& tile)
        : function_{mask_args_of(params), tile.batch, tile.head},
          first_row_(kTransposed ? tile.position.first_key : tile.position.first_query),
          first_column_(kTransposed ? tile.position.first_query : tile.position.first_key),
          lane_(tile.position.lane),
          columns_(function_, first_column_, lane_) {
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
            rows_[i] = Columns::held(function_.of_row(first_row_ + Fragment::row(i, lane_)), lane_);
    }

    __device__ __forceinline__ void hide(Fragment& scores, Real value) const {
        const int32 row = as_if_new(first_row_ + Fragment::row(0, lane_));
        const int32 column = as_if_new(first_column_ + Fragment::col(0, lane_));
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j) {
            const auto terms = columns_.at(function_, j);
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i)
                if (!function_.shows(row + Fragment::row(i, 0), column + Fragment::col(j, 0), rows_[i], terms))
                    scores(i, j) = value;
        }
    }

  private:
    const Function function_;
    const int32 first_row_, first_column_, lane_;
    const Columns columns_;
    decltype(static_cast<const Function*>(nullptr)->of_row(0)) rows_[Fragment::kRows];
};

// If much of the function is left for each pair, its truth values are collected as bits, in a loop that is unrolled by
// a few columns only: a fragment leaves few registers for temporaries of the function.
template <bool kTransposed, class Fragment, class Real>
class HiddenByFunction<kTransposed, Fragment, Real, false> {
    static constexpr int kRows = Fragment::kRows, kCols = Fragment::kCols, kAtOnce = min_of(kCols & -kCols, 8);

  public:
    template <class Record>
    __device__ __forceinline__ HiddenByFunction(const Record& params, const ScoreTile& tile) {
        const MaskFunction<kTransposed, Real> function = {mask_args_of(params), tile.batch, tile.head};
        const auto [first_query, first_key, lane] = tile.position;
        const int32 row = as_if_new((kTransposed ? first_key : first_query) + Fragment::row(0, lane));
        int32 column = as_if_new((kTransposed ? first_query : first_key) + Fragment::col(0, lane));
#pragma unroll
        for (int word = 0; word < VisibleBits<Fragment>::kWords; ++word)
#pragma unroll 1
            for (int first = 0; first < min_of(32, kCols - 32 * word); first += kAtOnce) {
                uint32 bits[kRows] = {};
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
                    for (int i = 0; i < kRows; ++i)
                        if (function.shows(row + Fragment::row(i, 0), column + Fragment::col(j, 0))) bits[i] |= 1u << j;
#pragma unroll
                for (int i = 0; i < kRows; ++i) visible_.word[i][word] |= bits[i] << first;
                column += Fragment::col(kAtOnce, 0);
            }
    }

    __device__ __forceinline__ void hide(Fragment& scores, Real value) const { visible_.hide_others(scores, value); }

  private:
    VisibleBits<Fragment> visible_;
};

// What the intervals of a map hide of a fragment.
template <bool kTransposed, class Fragment>
class HiddenByIntervals {
  public:
    template <class Record>
    __device__ __forceinline__ HiddenByIntervals(const Record& params, const ScoreTile& tile)
        : visible_(visible_by_intervals<kTransposed, Fragment>(params, tile)) {}

    template <class Real>
    __device__ __forceinline__ void hide(Fragment& scores, Real value) const {
        visible_.hide_others(scores, value);
    }

  private:
    const VisibleBits<Fragment> visible_;
};

// What a map hides of a fragment.
template <bool kTransposed, class Spec, class Fragment, class Real, bool kByIntervals = Spec::kIntervals>
struct HiddenByMap : HiddenByFunction<kTransposed, Fragment, Real> {
    using HiddenByFunction<kTransposed, Fragment, Real>::HiddenByFunction;
};
template <bool kTransposed, class Spec, class Fragment, class Real>
struct HiddenByMap<kTransposed, Spec, Fragment, Real, true> : HiddenByIntervals<kTransposed, Fragment> {
    using HiddenByIntervals<kTransposed, Fragment>::HiddenByIntervals;
};

// The mask of a tile. A main loop that waits for asynchronous products makes it before the wait, because it reads the
// position of a listed tile and the arrays of the function in memory.
template <bool kTransposed, class Spec, class Fragment, class Real, bool kByMap = kMasksByMap<Spec>>
class TileMask {
  public:
    template <class Record>
    __device__ __forceinline__ TileMask(const Record&, const ScoreTile& tile) : position_(tile.position) {}

    // Writes `value` over every element that is not visible.
    template <class Mask>
    __device__ __forceinline__ void hide(Fragment& scores, const Mask& mask, Real value) const {
        hide_by_position<kTransposed>(scores, mask, position_, value);
    }

  protected:
    const TilePosition position_;
};
template <bool kTransposed, class Spec, class Fragment, class Real>
class TileMask<kTransposed, Spec, Fragment, Real, true> : TileMask<kTransposed, Spec, Fragment, Real, false> {
    using Base = TileMask<kTransposed, Spec, Fragment, Real, false>;
    using Base::position_;

  public:
    template <class Record>
    __device__ __forceinline__ TileMask(const Record& params, const ScoreTile& tile)
        : Base(params, tile), hidden_(params, tile) {}

    // Most tiles that are masked for the sake of a map lie inside the limits by position: then these are not looked
    // at.
    template <class Mask>
    __device__ __forceinline__ void hide(Fragment& scores, const Mask& mask, Real value) const {
        const int32 rows = Fragment::row(Fragment::kRows - 1, 31) + 1;
        const int32 columns = Fragment::col(Fragment::kCols - 1, 31) + 1;
        if (!mask.shows_all(position_.first_query, kTransposed ? columns : rows, position_.first_key,
                            kTransposed ? rows : columns))
            Base::hide(scores, mask, value);
        hidden_.hide(scores, value);
    }

  private:
    const HiddenByMap<kTransposed, Spec, Fragment, Real> hidden_;
};

// Writes `value` over every element of a masked tile that is not visible.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Real>
__device__ __forceinline__ void hide_scores(Fragment& scores, const Mask& mask, const Record& params,
                                            const ScoreTile& tile, Real value) {
    TileMask<kTransposed, Spec, Fragment, Real>(params, tile).hide(scores, mask, value);
}

}  // namespace fa2::common
