// single_pass: all three gradients from one kernel.
#include "common/spec.cuh.j2"
#include "{{ family }}/backward.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps, fa2::Spec::kBlocksPerSm)
{{ symbol }}(const {{ grid_constant }}fa2::Params params) {
    extern __shared__ __align__(128) char smem[];
    fa2::{{ family }}::Backward<fa2::Spec>::run(params, smem);
}
