// Copies of many matrices between the memory of ranks, by words of kHeadDim bytes; the same kernel for every family.
#include "common/copy_matrices.cuh"
#include "common/spec.cuh.j2"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::CopyMatrices<fa2::Spec>::run(params.copied);
}
