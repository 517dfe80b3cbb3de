// dsink = -sum_i exp(sink - lse_i) delta_i over all rows i of a query head. This is dS = P o (dP - delta) for the sink.
// It acts as an additional key of every row, with a value vector of zero, and so with a dP of zero.
//
// Its tangent (kTangent) is dsink' = -sum_i exp(sink - lse_i) ((sink' - lse'_i) delta_i + delta'_i).
//
// One block per query head sums in a fixed order, so that the result is deterministic.
#pragma once
#include "common/math.cuh"
#include "common/params.cuh.j2"
#include "common/statistics.cuh"

namespace fa2::common {

template <class Spec, bool kTangent = false, class Params = fa2::Params>
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
                if (lse == -infinity<Accum>()) continue;  // no visible key, and the sink is -inf
                sum -= exp2_accurate(at_most_zero(sink - lse) * Accum(kLog2e)) * of_row(params, head, first + row);
            }
        }
        sum = row_sum<32>(sum);
        if (lane == 0) of_warp[warp] = sum;
        __syncthreads();
        if (warp > 0) return;
        sum = row_sum<32>(lane < Spec::kWarps ? of_warp[lane] : Accum(0));
        if (lane == 0) params.dsink[head] = sum;
    }

  private:
    __device__ __forceinline__ static Accum of_row(const Params& params, int32 head, int64 index) {
        if constexpr (!kTangent) {
            return params.delta[index];
        } else {
            Accum change = -params.lset[index];
            if constexpr (Spec::kSinkTangent)
                change += params.sink_tangent[params.sink_tangent_strides.offset(0, head, 0, 0)];
            return change * params.delta[index] + params.deltat[index];
        }
    }
};

}  // namespace fa2::common
