// dsink = -sum_i exp(sink - lse_i) delta_i over all rows of a query head: the sink is a score of every row, with a
// value of zero.
//
// A block takes a head, and sums in a fixed order.
#pragma once
#include "common/math.cuh"
#include "common/params.cuh.j2"
#include "common/statistics.cuh"

namespace fa2::common {

template <class Spec>
struct Dsink {
    using Accum = typename ElementTraits<typename Spec::Element>::Accum;

    __device__ static void run(const Params& params) {
        __shared__ Accum of_warp[Spec::kWarps];
        const int32 head = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const Accum sink = params.sink[params.sink_strides.offset(0, head, 0, 0)];
        Accum sum = 0;
        for (int32 batch = 0; batch < params.batch; ++batch) {
            const int64 first = first_statistic<Spec>(params, batch, head);
            for (int32 row = threadIdx.x; row < params.seqlen_q; row += blockDim.x) {
                const Accum lse = params.lse[first + row];
                if (lse == -infinity<Accum>()) continue;  // neither a key nor a sink
                sum -= exp2_accurate((sink - lse) * Accum(kLog2e)) * params.delta[first + row];
            }
        }
        sum = row_sum<32>(sum);
        if (lane == 0) of_warp[warp] = sum;
        __syncthreads();
        if (warp > 0) return;
        sum = row_sum<32>(lane < Spec::kWarps ? of_warp[lane] : Accum(0));
        if (lane == 0) params.dsink[head] = sum;
    }
};

}  // namespace fa2::common
