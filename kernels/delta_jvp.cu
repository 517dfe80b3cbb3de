// delta and its tangent; the same kernel for every family.
#include "common/spec.cuh.j2"
#include "common/delta.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::DeltaJvp<fa2::Spec>::run(params);
}
