// The last step of the forward's two main loops.
#pragma once
#include "common/fragment.cuh"
#include "common/scores.cuh"

namespace fa2::sm80 {

// Divides 16 rows of O, which a warp holds, by their sums, and computes their lse. `total`: as for `finish_rows`.
template <class Spec, class Softmax, int kN8, class Record, class... Total>
__device__ __forceinline__ void finish_output(const Softmax& softmax, common::QuadFragment<kN8>& output,
                                              float (&lse)[2], const Record& params, int32 head, int32 share,
                                              const Total&... total) {
    float inverse_sum[2];
    common::finish_rows<Spec>(softmax, params, head, share, inverse_sum, lse, total...);
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) output.value[n][e] *= inverse_sum[e / 2];
}

}  // namespace fa2::sm80
