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

// The same for the caller's mask function. Positions are a lane's first one, which the compiler is to take as it is, and
// compile-time distances from it: so it finds what differences of positions have in common. Elements of a column are
// evaluated together, so that what depends on the column alone is computed once. The truth values of a function that
// reads arrays, or is long, are collected as bits in a loop that is unrolled by a few columns only: a fragment leaves
// few registers for temporaries of the function.
template <bool kTransposed, class Spec, class Fragment, class Record, class Real>
__device__ __forceinline__ void hide_by_function(Fragment& scores, const Record& params, const ScoreTile& tile,
                                                 Real value) {
    const auto [first_query, first_key, lane] = tile.position;
    const auto args = mask_args_of(params);
    const int32 first_row = as_if_new((kTransposed ? first_key : first_query) + Fragment::row(0, lane));
    int32 first_column = as_if_new((kTransposed ? first_query : first_key) + Fragment::col(0, lane));
    const auto is_seen = [&](int i, int j) {
        const int32 row = first_row + Fragment::row(i, 0), column = first_column + Fragment::col(j, 0);
        return is_visible<Real>(args, tile.batch, tile.head, kTransposed ? column : row, kTransposed ? row : column);
    };
    if constexpr (mask_args_arrays::kIsShort) {
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i)
                if (!is_seen(i, j)) scores(i, j) = value;
    } else {
        constexpr int kCols = Fragment::kCols, kWords = ceil_div(kCols, 32), kAtOnce = min_of(kCols & -kCols, 8);
        uint32 visible[Fragment::kRows][kWords] = {};
#pragma unroll
        for (int word = 0; word < kWords; ++word)
#pragma unroll 1
            for (int first = 0; first < min_of(32, kCols - 32 * word); first += kAtOnce) {
                uint32 bits[Fragment::kRows] = {};
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
                    for (int i = 0; i < Fragment::kRows; ++i)
                        if (is_seen(i, j)) bits[i] |= 1u << j;
#pragma unroll
                for (int i = 0; i < Fragment::kRows; ++i) visible[i][word] |= bits[i] << first;
                first_column += Fragment::col(kAtOnce, 0);
            }
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
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
