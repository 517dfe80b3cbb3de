// Packed sequences: a block works on one sequence, with a record that says of it what it would say of a batch of one.
//
// Offsets come from memory that nobody has checked. They are held to the arrays, whatever they are, so that nothing is
// read or written out of bounds; offsets that do not grow give rows that mean nothing.
#pragma once
#include "common/params.cuh.j2"

namespace fa2::common {

struct Rows {
    int32 first, length;
};

__device__ __forceinline__ Rows rows_of_sequence(const int32* offsets, int32 number, int32 total, int32 longest) {
    const int32 first = min_of(max_of(offsets[number], 0), total);
    const int32 end = min_of(max_of(offsets[number + 1], first), total);
    return {first, min_of(end - first, longest)};
}

// Rows of a head's statistics: those of all sequences, where these are packed.
template <class Spec, class Record>
__device__ __forceinline__ int32 statistic_rows(const Record& params) {
    if constexpr (Spec::kVarlen)
        return params.total_q;
    else
        return params.seqlen_q;
}

// In a workspace of query tiles [head][tile] the first tile of a sequence: each starts with a tile of its own.
template <int kBr, class Record>
__device__ __forceinline__ int64 first_workspace_tile(const Record& params, int32 number, int32 head) {
    const Rows rows = rows_of_sequence(params.cu_seqlens_q, number, params.total_q, params.max_seqlen_q);
    return static_cast<int64>(head) * (params.total_q / kBr + params.num_sequences) + rows.first / kBr + number;
}

// A kernel whose blocks own tiles of queries, or of keys.
template <class Spec, class Kernel, class Record>
__device__ __forceinline__ void run_on_sequence(const Record& params, char* smem) {
    if constexpr (Spec::kVarlen) {
        constexpr bool kLongestLast = Spec::kCausal && !Kernel::kByKeys;
        const auto where = tile_of_block<kLongestLast>(params.schedule(), blockIdx.x);
        Record own = params;
        own.enter_sequence(
            where.batch, rows_of_sequence(params.cu_seqlens_q, where.batch, params.total_q, params.max_seqlen_q),
            rows_of_sequence(params.cu_seqlens_k, where.batch, params.total_k, params.max_seqlen_k));
        const int32 first = where.tile * (Kernel::kByKeys ? Spec::kBc : Spec::kBr);
        if (first < (Kernel::kByKeys ? own.seqlen_k : own.seqlen_q)) Kernel::run(own, smem);
    } else {
        Kernel::run(params, smem);
    }
}

}  // namespace fa2::common
