// Addresses of per-row statistics: lse, delta and dlse are contiguous arrays [batch][head][row].
#pragma once
#include "common/math.cuh"

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

// Loads -lse, in base 2, and -delta of a row of a head that has `rows`. A row beyond them or without a visible key gets
// lse = +inf, so that its P is zero. It has no delta.
template <bool kLoadsDelta = true>
__device__ __forceinline__ void load_negated(const float* lse, const float* delta, int32 row, int32 rows,
                                             float& minus_lse, float& minus_delta) {
    const float natural = row < rows ? lse[row] : -infinity<float>();
    const bool has_none = natural == -infinity<float>();
    minus_lse = has_none ? natural : -in_base2(natural);
    if constexpr (kLoadsDelta) minus_delta = has_none ? 0.0f : -delta[row];
}

}  // namespace fa2::common
