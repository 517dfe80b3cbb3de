// The query tiles that each key tile meets under a sparse map, in all query heads of its K/V head.
#include "common/spec.cuh.j2"
#include "common/list_tiles.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::ListTiles<fa2::Spec, true>::run(params, params.query_lists);
}
