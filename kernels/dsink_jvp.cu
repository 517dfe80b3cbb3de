// The tangent of the gradient of the sink.
#include "common/spec.cuh.j2"
#include "common/dsink.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps)
{{ symbol }}(const fa2::Params params) {
    fa2::common::Dsink<fa2::Spec, true>::run(params);
}
