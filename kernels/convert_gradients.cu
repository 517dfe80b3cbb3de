// single_pass, last stage of a split kernel: converts dQ, then dK and dV, from their fp32 workspaces to the element type.
#include "common/spec.cuh.j2"
#include "common/sum_dkdv.cuh"
#include "{{ family }}/convert_dq.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    const int blocks_of_dq = params.batch * params.num_heads * params.num_tiles, block = blockIdx.x;
    if (block < blocks_of_dq)
        fa2::{{ family }}::ConvertDq<fa2::Spec>::run(params, block, blocks_of_dq);
    else
        fa2::common::SumDkdv<fa2::Spec>::run(params, block - blocks_of_dq);
}
