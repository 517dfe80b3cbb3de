// O and lse, merged from the shares of a split forward; the same kernel for every family.
#include "common/spec.cuh.j2"
#include "common/merge_forward.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::MergeForward<fa2::Spec>::run(params);
}
