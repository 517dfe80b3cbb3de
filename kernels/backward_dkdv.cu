// two_pass, second pass: dK and dV of a key tile.
#include "common/spec.cuh.j2"
#include "common/sequence.cuh"
//% set shares_rows = family == "sm90" and [head_dim, head_dim_v] | max > 256
#include "{{ family }}/backward_dkdv{{ "_shared_rows" if shares_rows }}.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps, fa2::Spec::kBlocksPerSm)
{{ symbol }}(const {{ grid_constant }}fa2::Params params) {
    extern __shared__ __align__(128) char smem[];
    fa2::common::run_on_sequence<fa2::Spec, fa2::{{ family }}::BackwardDkdv<fa2::Spec>>(params, smem);
}
