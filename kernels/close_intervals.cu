// The intervals of the rows and columns of a sparse map.
#include "common/spec.cuh.j2"
#include "common/map_edges.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::CloseIntervals<fa2::Spec>::run(params);
}
