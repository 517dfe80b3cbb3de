// Addresses of per-row statistics: lse, delta and dlse are contiguous arrays [batch][head][row].
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// The offset of the first row of a head. Packed arrays are [head][row], with the rows of all sequences.
// `enter_sequence` moves the pointers of a sequence's record so that its number serves as `batch`; with the launch's
// record `batch` is 0.
template <class Spec, class Record>
__device__ __forceinline__ int64 first_statistic(const Record& params, int32 batch, int32 head) {
    const int64 head_index = static_cast<int64>(batch) * params.num_heads + head;
    if constexpr (Spec::kVarlen)
        return head_index * params.total_q;
    else
        return head_index * params.seqlen_q;
}

}  // namespace fa2::common
