// The gradient of a broadcast bias, summed over the shares of a split kernel; the same kernel for every family.
#include "common/spec.cuh.j2"
#include "common/sum_dbias.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::SumDbias<fa2::Spec>::run(params);
}
