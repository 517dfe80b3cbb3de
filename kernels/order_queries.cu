// The order in which kernels whose blocks own key tiles take them under a sparse map.
#include "common/spec.cuh.j2"
#include "common/order_tiles.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::OrderTiles<fa2::Spec>::run(params, params.query_lists);
}
