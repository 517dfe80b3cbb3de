// Exceptions: heads whose values float16 parts do not represent well (float32_parts/split_inputs.cuh). The kernels that
// multiply parts leave them to fallback kernels of IEEE arithmetic (Spec::kFallback), which compute no others.
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// True if the K/V head is an exception. Packed sequences are one batch.
template <class Spec, class Record>
__device__ __forceinline__ bool is_exception(const Record& params, int32 batch, int32 head_kv) {
    const int32 num_heads_kv = params.num_heads / params.heads_per_group;
    return params.exceptions[(Spec::kVarlen ? 0 : batch * num_heads_kv) + head_kv] != 0;
}

}  // namespace fa2::common
