// Writes tile lists (tile_lists.cuh) from the states of a sparse map's tiles: 0 empty, 1 mixed, 2 full. The map's tiles
// may have other sizes than the kernel's, kBr x kBc: a tile that meets several of them is mixed unless all are full, or
// all are empty. So is a full one that reaches out of the band or past the last key.
//
// A warp writes one list. Its lanes take neighbouring candidates, and count before they write: the candidates of each
// kind stay in order.
#pragma once
#include "common/sequence.cuh"
#include "common/tile_lists.cuh"

namespace fa2::common {

// kOfKeys: the lists are those of key tiles.
template <class Spec, bool kOfKeys, class Params = fa2::Params>
struct ListTiles {
    static constexpr int kEmpty = 0, kMixed = 1, kFull = 2;
    static constexpr int kFirstKind = kOfKeys ? kMixed : kFull;

    const Params& params;
    int32 seqlen_q, seqlen_k, batch, head, tile;  // of the list

    __device__ static void run(const Params& params, int32* lists) {
        const int32 index = blockIdx.x * Spec::kWarps + threadIdx.x / 32;
        if (index >= params.num_lists) return;
        const int32 tile = index % params.list_tiles, rest = index / params.list_tiles;
        const int32 head = rest % params.list_heads, batch = rest / params.list_heads;
        int32 seqlen_q = params.seqlen_q, seqlen_k = params.seqlen_k;
        if constexpr (Spec::kVarlen) {
            seqlen_q = packed_axis<false>(params).rows(batch).length;
            seqlen_k = packed_axis<true>(params).rows(batch).length;
        }
        // In packed sequences, the lists of tiles that a sequence does not have are not read.
        if (!has_tile(tile, kOfKeys ? Spec::kBc : Spec::kBr, kOfKeys ? seqlen_k : seqlen_q)) return;
        const ListTiles own{params, seqlen_q, seqlen_k, batch, head, tile};
        own.write(list_of(lists, params, batch, head, tile));
    }

  private:
    __device__ int32 num_candidates() const {
        return kOfKeys ? params.heads_per_group * ceil_div(seqlen_q, Spec::kBr) : ceil_div(seqlen_k, Spec::kBc);
    }

    __device__ void write(int32* list) const {
        const int32 lane = threadIdx.x % 32, candidates = num_candidates();
        int32 in_first = 0, in_second = 0;
        for (int32 first = 0; first < candidates; first += 32) {
            const int state = state_of(first + lane, candidates);
            in_first += __popc(__ballot_sync(kFullWarp, state == kFirstKind));
            in_second += __popc(__ballot_sync(kFullWarp, state == kMixed + kFull - kFirstKind));
        }
        const int32 in_both = in_first + in_second;
        if (lane == 0) {
            list[0] = in_first;
            list[kListLength] = in_both;
            list[kListHead + in_both] = ceil_div(kOfKeys ? seqlen_q : seqlen_k, kOfKeys ? Spec::kBr : Spec::kBc);
        }
        int32 next[2] = {0, in_first};  // places of the two kinds
        for (int32 first = 0; first < candidates; first += 32) {
            const int state = state_of(first + lane, candidates);
#pragma unroll
            for (int kind = 0; kind < 2; ++kind) {
                const bool is_own = state == (kind == 0 ? kFirstKind : kMixed + kFull - kFirstKind);
                const uint32 lanes = __ballot_sync(kFullWarp, is_own);
                if (is_own) list[kListHead + next[kind] + __popc(lanes & ((1u << lane) - 1))] = entry_of(first + lane);
                next[kind] += __popc(lanes);
            }
        }
    }

    __device__ int32 entry_of(int32 candidate) const {
        if constexpr (!kOfKeys) return candidate;
        const int32 tiles = ceil_div(seqlen_q, Spec::kBr);
        return candidate / tiles << kTileBits | candidate % tiles;
    }

    __device__ int state_of(int32 candidate, int32 candidates) const {
        if (candidate >= candidates) return kEmpty;
        if constexpr (!kOfKeys) return state_of_pair(head, tile, candidate);
        const int32 tiles = ceil_div(seqlen_q, Spec::kBr);
        return state_of_pair(head * params.heads_per_group + candidate / tiles, candidate % tiles, tile);
    }

    // The state of a query tile and a key tile.
    __device__ int state_of_pair(int32 query_head, int32 query_tile, int32 key_tile) const {
        const auto seen = key_tiles_of<false, Spec::kBr, Spec::kBc>(
            query_tile, seqlen_q, seqlen_k, WindowLimits<true>{params.band_left, params.band_right});
        if (key_tile < seen.begin || key_tile >= seen.end) return kEmpty;
        const int32 first_row = query_tile * Spec::kBr / params.map_b_r;
        const int32 last_row = (min_of((query_tile + 1) * Spec::kBr, seqlen_q) - 1) / params.map_b_r;
        const int32 first_column = key_tile * Spec::kBc / params.map_b_c;
        const int32 last_column = (min_of((key_tile + 1) * Spec::kBc, seqlen_k) - 1) / params.map_b_c;
        const int64 matrix = static_cast<int64>(params.map_batches == 1 ? 0 : batch) * params.map_heads +
                             (params.map_heads == 1 ? 0 : query_head);
        const uint8* states = params.block_mask + matrix * params.map_rows * params.map_columns;
        int lowest = kFull, highest = kEmpty;
        for (int32 row = first_row; row <= last_row; ++row)
            for (int32 column = first_column; column <= last_column; ++column) {
                const int state = states[static_cast<int64>(row) * params.map_columns + column];
                lowest = min_of(lowest, state);
                highest = max_of(highest, state);
            }
        if (highest == kEmpty) return kEmpty;
        const bool crosses_band = key_tile < seen.full_begin || key_tile >= seen.full_end;
        return lowest == kFull && !params.has_other_function && !crosses_band ? kFull : kMixed;
    }
};

}  // namespace fa2::common
