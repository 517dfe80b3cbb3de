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
// keys.
template <bool kTransposed, class Spec, class Fragment, class Mask, class Record, class Real>
__device__ __forceinline__ void hide_scores(Fragment& scores, const Mask& mask, const Record& params,
                                            const ScoreTile& tile, Real value) {
    if constexpr (kTransposed)
        mask_transposed(scores, mask, tile.position, value);
    else
        mask_scores(scores, mask, tile.position, value);
    if constexpr (kMasksByFunction<Spec>) {
        const auto [first_query, first_key, lane] = tile.position;
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) {
                const int32 row = Fragment::row(i, lane), column = Fragment::col(j, lane);
                const int32 query = first_query + (kTransposed ? column : row);
                const int32 key = first_key + (kTransposed ? row : column);
                if (!is_visible<Real>(mask_args_of(params), tile.batch, tile.head, query, key)) scores(i, j) = value;
            }
    }
}

}  // namespace fa2::common
