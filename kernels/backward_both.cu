// two_pass in one launch: dQ of query tiles, and dK and dV of key tiles.
#include "common/spec.cuh.j2"
#include "common/sequence.cuh"
#include "{{ family }}/backward_both.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps, fa2::Spec::kBlocksPerSm)
{{ symbol }}(const {{ grid_constant }}fa2::Params params) {
    extern __shared__ __align__(128) char smem[];
    fa2::common::run_on_sequence<fa2::Spec, fa2::{{ family }}::BackwardBoth<fa2::Spec>>(params, smem);
}
