// Masks by position together with the caller's mask function. Under a sparse map the function is evaluated here, for
// masked tiles alone, because the others are full; without one, scores are hidden wherever they are modified
// (score_mod.cuh).
#pragma once
#include "common/functions.cuh.j2"
#include "common/mask.cuh"

namespace fa2::common {

template <class Spec>
inline constexpr bool kMasksByFunction = Spec::kMaskMod && Spec::kBlockMask;

// Writes `value` over every element of a masked tile that is not visible. kTransposed: the rows of the fragment are
// keys. Elements of a column are evaluated together, so that what depends on the column alone is computed once. The truth
// values of a function that reads arrays, or is long, are collected as bits in a loop that is unrolled by a few columns
// only: a fragment leaves few registers for temporaries of the function.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Real>
__device__ __forceinline__ void hide_scores(Fragment& scores, const Mask& mask, const Record& params,
                                            const ScoreTile& tile, Real value) {
    if constexpr (kTransposed)
        mask_transposed(scores, mask, tile.position, value);
    else
        mask_scores(scores, mask, tile.position, value);
    if constexpr (kMasksByFunction<Spec>) {
        const auto [first_query, first_key, lane] = tile.position;
        const auto args = mask_args_of(params);
        const auto is_seen = [&, first_query = first_query, first_key = first_key](int32 row, int32 column) {
            const int32 query = first_query + (kTransposed ? column : row);
            const int32 key = first_key + (kTransposed ? row : column);
            return is_visible<Real>(args, tile.batch, tile.head, query, key);
        };
        if constexpr (mask_args_arrays::kIsShort) {
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
                for (int i = 0; i < Fragment::kRows; ++i)
                    if (!is_seen(Fragment::row(i, lane), Fragment::col(j, lane))) scores(i, j) = value;
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
                            if (is_seen(Fragment::row(i, lane), Fragment::col(32 * word + first + j, lane)))
                                bits[i] |= 1u << j;
#pragma unroll
                    for (int i = 0; i < Fragment::kRows; ++i) visible[i][word] |= bits[i] << first;
                }
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
                for (int j = 0; j < kCols; ++j)
                    if (!(visible[i][j / 32] >> j % 32 & 1)) scores(i, j) = value;
        }
    }
}

}  // namespace fa2::common
