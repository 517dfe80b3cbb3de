// dbias, summed over the shares of a split kernel (bias_owner.cuh) and rounded. A share is an array of dbias's shape in C
// order. A thread sums one element over all of them in their order, so that the result is bit-reproducible.
#pragma once
#include "common/dbias.cuh"
#include "common/params.cuh.j2"

namespace fa2::common {

template <class Spec, class Params = fa2::Params>
struct SumDbias {
    using Accum = typename ElementTraits<typename Spec::Element>::Accum;

    __device__ static void run(const Params& params) {
        const int64 index = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
        if (index >= params.share_elements) return;
        Accum sum = 0;
#pragma unroll 8
        for (int32 copy = 0; copy < params.num_copies; ++copy)
            sum += params.shares[copy * params.share_elements + index];
        const ScoreStrides& strides = params.dbias_strides.inside();
        int64 rest = index;
        const int32 key = take(rest, strides.column, params.seqlen_k);
        const int32 query = take(rest, strides.row, params.seqlen_q);
        const int32 head = take(rest, strides.head, params.num_heads);
        const int32 batch = static_cast<int32>(params.owned_strides.offset(static_cast<int32>(rest), 0, 0, 0));
        store_rounded(params.dbias + params.dbias_strides.offset(batch, head, query, key), sum);
    }

  private:
    // Takes the index along an axis, which has one element if dbias is broadcast along it.
    __device__ __forceinline__ static int32 take(int64& rest, int64 stride, int32 length) {
        if (stride == 0) return 0;
        const int32 index = static_cast<int32>(rest % length);
        rest /= length;
        return index;
    }
};

}  // namespace fa2::common
