// Sums of arrays that calls or ranks have left, each rounded once; the same kernel for every family. A thread has words of
// kHeadDim elements.
#include "common/sum_arrays.cuh"
#include "common/spec.cuh.j2"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::SumArrays<fa2::Spec>::run(params.summed);
}
