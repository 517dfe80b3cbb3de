// The sparse map of a mask function.
#include "common/spec.cuh.j2"
#include "common/tile_states.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::TileStates<fa2::Spec>::run(params);
}
