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
// keys. The function's truth values are collected as bits, in a loop that is unrolled by four only: a fragment leaves
// few registers for temporaries of the function, and few tiles are mixed.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Real>
__device__ __forceinline__ void hide_scores(Fragment& scores, const Mask& mask, const Record& params,
                                            const ScoreTile& tile, Real value) {
    if constexpr (kTransposed)
        mask_transposed(scores, mask, tile.position, value);
    else
        mask_scores(scores, mask, tile.position, value);
    if constexpr (kMasksByFunction<Spec>) {
        const auto [first_query, first_key, lane] = tile.position;
        constexpr int kCols = Fragment::kCols, kWords = ceil_div(kCols, 32);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            const int32 row = Fragment::row(i, lane);
            uint32 visible[kWords] = {};
#pragma unroll
            for (int word = 0; word < kWords; ++word)
#pragma unroll 4
                for (int bit = 0; bit < min_of(32, kCols - 32 * word); ++bit) {
                    const int32 column = Fragment::col(32 * word + bit, lane);
                    const int32 query = first_query + (kTransposed ? column : row);
                    const int32 key = first_key + (kTransposed ? row : column);
                    const bool is_seen = is_visible<Real>(mask_args_of(params), tile.batch, tile.head, query, key);
                    visible[word] |= static_cast<uint32>(is_seen) << bit;
                }
#pragma unroll
            for (int j = 0; j < kCols; ++j)
                if (!(visible[j / 32] >> j % 32 & 1)) scores(i, j) = value;
        }
    }
}

}  // namespace fa2::common
