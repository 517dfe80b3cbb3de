// Splits q, k, v and do into pairs of float16 matrices, which the float32 kernels multiply, and computes delta.
#include "common/spec.cuh.j2"
#include "float32_parts/split_inputs.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const {{ grid_constant }}fa2::Params params) {
    fa2::float32_parts::SplitInputs<fa2::Spec, true>::run(params);
}
