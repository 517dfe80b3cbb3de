// O and lse, merged from partial results over different keys; the same kernel for every family.
#include "common/spec.cuh.j2"
#include "common/merge_parts.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::MergeParts<fa2::Spec>::run(params);
}
