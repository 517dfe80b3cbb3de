// O and lse of a few queries against a cache of keys and values, to which rows may be appended.
#include "common/spec.cuh.j2"
#include "decode/decode.cuh"
#include "{{ family }}/decode.cuh"

extern "C" __global__ void __launch_bounds__(32 * fa2::Spec::kWarps, fa2::Spec::kBlocksPerSm) {{ cluster }}
{{ symbol }}(const fa2::Params params) {
    extern __shared__ __align__({{ 1024 if family == "sm90_latent" else 128 }}) char smem[];
    fa2::decode::Decode<fa2::Spec, fa2::{{ family }}::DecodeWarp<fa2::Spec>>::run(params, smem);
}
