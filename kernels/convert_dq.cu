// single_pass, last stage: converts dQ from its fp32 workspace to the element type.
#include "common/spec.cuh.j2"
#include "{{ family }}/convert_dq.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::{{ family }}::ConvertDq<fa2::Spec>::run(params, blockIdx.x, gridDim.x);
}
