// dK and dV, summed over the shares of a split kernel; the same kernel for every family.
#include "common/spec.cuh.j2"
#include "common/sum_dkdv.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::SumDkdv<fa2::Spec>::run(params, blockIdx.x);
}
