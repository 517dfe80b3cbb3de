// Masks by position together with the caller's mask function. Under a sparse map the function is evaluated here, for
// masked tiles alone, because the others are full; without one, scores are hidden wherever they are modified
// (score_mod.cuh).
#pragma once
#include "common/functions.cuh.j2"
#include "common/mask.cuh"
#include "common/ptx.cuh"

namespace fa2::common {

template <class Spec>
inline constexpr bool kMasksByFunction = Spec::kMaskMod && Spec::kBlockMask;

// Writes `value` over every element that the mask by position hides. kTransposed: the rows of the fragment are keys.
template <bool kTransposed, class Fragment, class Mask, class Real>
__device__ __forceinline__ void hide_by_position(Fragment& scores, const Mask& mask, const TilePosition& position,
                                                 Real value) {
    if constexpr (kTransposed)
        mask_transposed(scores, mask, position, value);
    else
        mask_scores(scores, mask, position, value);
}

// The caller's mask function for one sequence and head. Rows are queries and columns keys, or with kTransposed the other
// way round.
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

// The terms of a fragment's columns, of which `first` is the first.
template <class Fragment, class Function>
class ColumnTerms {
  public:
    __device__ __forceinline__ ColumnTerms(const Function& function, int32 first, int32 lane)
        : function_(function), first_(first + Fragment::col(0, lane)) {}
    __device__ __forceinline__ auto at(int j) const { return function_.of_column(first_ + Fragment::col(j, 0)); }

  private:
    const Function& function_;
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
    __device__ __forceinline__ auto at(int j) const { return own_[j % kOwn].of_quad(j / kOwn); }

  private:
    decltype(static_cast<const Function*>(nullptr)->of_column(0)) own_[kOwn];
};

// Writes `value` over every element that the caller's mask function hides. Positions are a lane's first one, which the
// compiler is to take as it is, and compile-time distances from it: so it finds what differences of positions have in
// common. The truth values of a function of which much is left for each pair are collected as bits, in a loop that is
// unrolled by a few columns only: a fragment leaves few registers for temporaries of the function.
template <bool kTransposed, class Spec, class Fragment, class Record, class Real>
__device__ __forceinline__ void hide_by_function(Fragment& scores, const Record& params, const ScoreTile& tile,
                                                 Real value) {
    using Function = MaskFunction<kTransposed, Real>;
    constexpr int kRows = Fragment::kRows, kCols = Fragment::kCols;
    const auto [first_query, first_key, lane] = tile.position;
    const Function function = {mask_args_of(params), tile.batch, tile.head};
    const int32 row = as_if_new((kTransposed ? first_key : first_query) + Fragment::row(0, lane));
    int32 column = as_if_new((kTransposed ? first_query : first_key) + Fragment::col(0, lane));
    if constexpr (mask_args_arrays::kIsShort) {
        const ColumnTerms<Fragment, Function> columns(function, kTransposed ? first_query : first_key, lane);
        decltype(function.of_row(0)) rows[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) rows[i] = function.of_row(row + Fragment::row(i, 0));
#pragma unroll
        for (int j = 0; j < kCols; ++j) {
            const auto terms = columns.at(j);
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                if (!function.shows(row + Fragment::row(i, 0), column + Fragment::col(j, 0), rows[i], terms))
                    scores(i, j) = value;
        }
    } else {
        constexpr int kWords = ceil_div(kCols, 32), kAtOnce = min_of(kCols & -kCols, 8);
        uint32 visible[kRows][kWords] = {};
#pragma unroll
        for (int word = 0; word < kWords; ++word)
#pragma unroll 1
            for (int first = 0; first < min_of(32, kCols - 32 * word); first += kAtOnce) {
                uint32 bits[kRows] = {};
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
                    for (int i = 0; i < kRows; ++i)
                        if (function.shows(row + Fragment::row(i, 0), column + Fragment::col(j, 0))) bits[i] |= 1u << j;
#pragma unroll
                for (int i = 0; i < kRows; ++i) visible[i][word] |= bits[i] << first;
                column += Fragment::col(kAtOnce, 0);
            }
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < kCols; ++j)
                if (!(visible[i][j / 32] & 1u << j % 32)) scores(i, j) = value;
    }
}

// Writes `value` over every element of a masked tile that is not visible. Most tiles that are masked for the sake of a
// function lie inside the limits by position: then these are not looked at.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Real>
__device__ __forceinline__ void hide_scores(Fragment& scores, const Mask& mask, const Record& params,
                                            const ScoreTile& tile, Real value) {
    if constexpr (kMasksByFunction<Spec>) {
        const int32 rows = Fragment::row(Fragment::kRows - 1, 31) + 1;
        const int32 columns = Fragment::col(Fragment::kCols - 1, 31) + 1;
        if (!mask.shows_all(tile.position.first_query, kTransposed ? columns : rows, tile.position.first_key,
                            kTransposed ? rows : columns))
            hide_by_position<kTransposed>(scores, mask, tile.position, value);
        hide_by_function<kTransposed, Spec>(scores, params, tile, value);
    } else {
        hide_by_position<kTransposed>(scores, mask, tile.position, value);
    }
}

}  // namespace fa2::common
