// Visibility, applied to a fragment. Only tiles that tile_range.cuh calls not full come here.
#pragma once
#include "common/fragment.cuh"

namespace fa2::common {

template <bool kCausal>
struct Mask {
    int32 seqlen_k;
    int32 diagonal;  // seqlen_k - seqlen_q

    __device__ bool visible(int32 query, int32 key) const {
        return key < seqlen_k && (!kCausal || key <= query + diagonal);
    }
};

// Writes `value` over every element that is not visible. first_query, first_key: position of the fragment's tile.
template <class Fragment, bool kCausal, class Real>
__device__ __forceinline__ void mask_scores(Fragment& scores, const Mask<kCausal>& mask, int32 first_query,
                                            int32 first_key, int32 lane, Real value) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (!mask.visible(first_query + Fragment::row(i, lane), first_key + Fragment::col(j, lane)))
                scores(i, j) = value;
}

// The same for a fragment of S^T, whose rows are keys.
template <class Fragment, bool kCausal, class Real>
__device__ __forceinline__ void mask_transposed(Fragment& scores, const Mask<kCausal>& mask, int32 first_query,
                                                int32 first_key, int32 lane, Real value) {
#pragma unroll
    for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (!mask.visible(first_query + Fragment::col(j, lane), first_key + Fragment::row(i, lane)))
                scores(i, j) = value;
}

}  // namespace fa2::common
