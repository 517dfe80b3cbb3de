// Where the statistics of a head's rows begin: lse, delta and dlse are contiguous arrays [batch][head][row].
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// Packed sequences have [head][row] with the rows of all of them. The pointers of a sequence's record are moved so that
// its number can be taken for the batch (`enter_sequence`); with the record of the launch, the batch is 0.
template <class Spec, class Record>
__device__ __forceinline__ int64 first_statistic(const Record& params, int32 batch, int32 head) {
    const int64 head_index = static_cast<int64>(batch) * params.num_heads + head;
    if constexpr (Spec::kVarlen)
        return head_index * params.total_q;
    else
        return head_index * params.seqlen_q;
}

}  // namespace fa2::common
