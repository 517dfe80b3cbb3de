// Packed sequences. A block works on one sequence, with a copy of the record that describes this sequence as if it were
// a batch of one.
//
// No tile spans two sequences. Sequence n owns the tile indices from first_row / kRows + n on, so that its tiles are
// found without summing the lengths before it. The sequences before it fit below that index, because each adds less
// than one tile by rounding up. The total is bounded by total / kRows + num_sequences; at most one index per sequence
// stays unused.
//
// The offsets are in device memory, so the host cannot check them. They are clamped to the arrays, so that nothing is
// read or written out of bounds; decreasing offsets give undefined results.
#pragma once
#include "common/tile_lists.cuh"
#include "common/params.cuh.j2"

namespace fa2::common {

struct Rows {
    int32 first, length;

    __device__ __forceinline__ bool contain(int32 row) const { return row >= first && row - first < length; }
};

// The packed rows of queries, or of keys: offsets and the bounds to which these are clamped.
struct PackedAxis {
    const int32* offsets;
    int32 num_sequences, total, longest;

    __device__ __forceinline__ int32 first_row(int32 number) const { return min_of(max_of(offsets[number], 0), total); }
    __device__ __forceinline__ Rows rows(int32 number) const {
        const int32 first = first_row(number);
        const int32 end = min_of(max_of(offsets[number + 1], first), total);
        return {first, min_of(end - first, longest)};
    }
    template <int kRows>
    __device__ __forceinline__ int32 first_tile(int32 number) const {
        return first_row(number) / kRows + number;
    }

    // The last sequence that starts at or before a row or tile. The caller must check that it reaches so far.
    __device__ __forceinline__ int32 sequence_of_row(int32 row) const {
        return last_up_to(row, [&](int32 number) { return first_row(number); });
    }
    template <int kRows>
    __device__ __forceinline__ int32 sequence_of_tile(int32 tile) const {
        return last_up_to(tile, [&](int32 number) { return first_tile<kRows>(number); });
    }

  private:
    template <class Start>
    __device__ __forceinline__ int32 last_up_to(int32 position, const Start& start) const {
        int32 begin = 0, end = num_sequences;
        while (end - begin > 1) {
            const int32 middle = (begin + end) / 2;
            (start(middle) <= position ? begin : end) = middle;
        }
        return begin;
    }
};

template <bool kOfKeys, class Record>
__device__ __forceinline__ PackedAxis packed_axis(const Record& params) {
    if constexpr (kOfKeys)
        return {params.cu_seqlens_k, params.num_sequences, params.total_k, params.max_seqlen_k};
    else
        return {params.cu_seqlens_q, params.num_sequences, params.total_q, params.max_seqlen_q};
}

// The record of a sequence; without packed sequences a reference to the launch's record, which costs no copy.
template <class Spec, class Record>
__device__ __forceinline__ decltype(auto) record_of_sequence(const Record& params, int32 number) {
    if constexpr (Spec::kVarlen) {
        Record own = params;
        own.enter_sequence(number, packed_axis<false>(params).rows(number), packed_axis<true>(params).rows(number));
        return own;
    } else {
        return (params);
    }
}

// -------------------------------------------------------------------------------------------------------------- tiles

// Turns a tile index over all sequences into a sequence and a tile of this sequence. The index may be unused, so the
// tile must be checked with `has_tile`.
template <int kRows>
__device__ __forceinline__ void enter_sequence_of(TileCoordinates& where, const PackedAxis& axis) {
    where.batch = axis.sequence_of_tile<kRows>(where.tile);
    where.tile -= axis.first_tile<kRows>(where.batch);
}

// The tile at a position in the schedule, for a kernel whose blocks own query tiles or (kByKeys) key tiles.
template <class Spec, bool kByKeys, class Record>
__device__ __forceinline__ TileCoordinates scheduled_tile(const Record& params, int32 index) {
    auto where = tile_in_order<Spec, kByKeys>(params, index);
    if constexpr (Spec::kVarlen)
        enter_sequence_of<kByKeys ? Spec::kBc : Spec::kBr>(where, packed_axis<kByKeys>(params));
    return where;
}

// True if a sequence of `length` rows has the tile.
__device__ __forceinline__ bool has_tile(int32 tile, int32 rows_of_tile, int32 length) {
    return tile >= 0 && tile < ceil_div(length, rows_of_tile);
}

// True if a packed sequence has no keys. Other calls without keys launch no kernel that multiplies.
template <class Spec, class Record>
__device__ __forceinline__ bool lacks_keys(const Record& params) {
    return Spec::kVarlen && params.seqlen_k == 0;
}

// The workspace of query tiles is laid out [head][tile]: the number of tiles of a head, and the first tile of a
// sequence (or batch) and head.
template <class Spec, class Record>
__device__ __forceinline__ int32 workspace_tiles(const Record& params) {
    if constexpr (Spec::kVarlen)
        return params.total_q / Spec::kBr + params.num_sequences;
    else
        return ceil_div(params.seqlen_q, Spec::kBr);
}
template <class Spec, class Record>
__device__ __forceinline__ int64 first_workspace_tile(const Record& params, int32 batch, int32 head) {
    if constexpr (Spec::kVarlen)
        return static_cast<int64>(head) * workspace_tiles<Spec>(params) +
               packed_axis<false>(params).template first_tile<Spec::kBr>(batch);
    else
        return (static_cast<int64>(batch) * params.num_heads + head) * workspace_tiles<Spec>(params);
}

// The rows of a head's query tile, or (kByKeys) key tile, in the workspace: the first one, and the number of rows of the
// sequence from there on. Unused tile indices give an empty range.
template <class Spec, bool kByKeys = false, class Record>
__device__ __forceinline__ Rows workspace_rows(const Record& params, int32 tile) {
    constexpr int kRows = kByKeys ? Spec::kBc : Spec::kBr;
    if constexpr (Spec::kVarlen) {
        TileCoordinates where{tile, 0, 0};
        const PackedAxis axis = packed_axis<kByKeys>(params);
        enter_sequence_of<kRows>(where, axis);
        const Rows all = axis.rows(where.batch);
        if (!has_tile(where.tile, kRows, all.length)) return {0, 0};
        return {all.first + where.tile * kRows, all.length - where.tile * kRows};
    } else if constexpr (kByKeys) {
        return {tile * kRows, params.seqlen_k - tile * kRows};
    } else {
        return {tile * kRows, params.seqlen_q - tile * kRows};
    }
}

// Runs a kernel with the record of the block's sequence in place of the launch's. Blocks with an unused tile index
// exit. Kernels with kFindsSequences look up their sequences themselves, so they get the launch's record.
template <class Spec, class Kernel, class Record>
__device__ __forceinline__ void run_on_sequence(const Record& params, char* smem) {
    if constexpr (Spec::kVarlen && !Kernel::kFindsSequences) {
        constexpr bool kByKeys = Kernel::kByKeys;
        const auto where = scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const Record own = record_of_sequence<Spec>(params, where.batch);
        if (has_tile(where.tile, kByKeys ? Spec::kBc : Spec::kBr, kByKeys ? own.seqlen_k : own.seqlen_q))
            Kernel::run(own, smem);
    } else {
        Kernel::run(params, smem);
    }
}

}  // namespace fa2::common
