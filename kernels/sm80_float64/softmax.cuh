// The softmax of a tile of rows that one or two warps own.
#pragma once
#include "common/online_softmax.cuh"
#include "sm80_float64/exponential.cuh"
#include "sm80_float64/sharers.cuh"

namespace fa2::sm80_float64 {

using Softmax = common::OnlineSoftmax<double, 2, 4, exp_by_table, true>;

// Replaces natural scores by P. Where row shifts move, rescale(factors) must multiply what is summed over the keys before.
template <class RowWarps, class Rescale>
__device__ __forceinline__ void take_softmax(Softmax& softmax, const RowWarps& sharers,
                                             typename RowWarps::Scores& scores, const Rescale& rescale) {
    if (sharers.all(softmax.keeps_row_shift(scores))) {
        softmax.keep_row_shift(scores);
        sharers.wait();  // the barrier of the other branch
    } else {
        double highest[2], factors[2];
        softmax.maximum_of(scores, highest);
        sharers.combine(highest, [](double x, double y) { return common::maximum(x, y); });
        softmax.move_row_shift(highest, scores, factors);
        rescale(factors);
    }
}

// The row sums of all lanes and warps. Two warps must have passed a barrier since they last read a slot.
template <class RowWarps>
__device__ __forceinline__ void total_of(const RowWarps& sharers, double (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) sum[i] = common::row_sum<4>(sum[i]);
    sharers.combine(sum, [](double x, double y) { return x + y; });
}

}  // namespace fa2::sm80_float64
