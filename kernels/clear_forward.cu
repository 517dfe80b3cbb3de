// Clears O and lse in rows outside all packed sequences; the same kernel for every family.
#include "common/spec.cuh.j2"
#include "common/clear_padding.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::clear_forward<fa2::Spec>(params);
}
