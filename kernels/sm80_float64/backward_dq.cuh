// FlashAttention-2 backward of float64 data by query tiles on mma.sync, the first pass of `two_pass`: dQ.
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P o (dP - delta)     dQ = scale dS K
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 of these rows, alone or with another warp (sharers.cuh); keeps their dQ, lse and delta in registers
//
//   shared memory         written by          read by
//   Q [kBr][kD]           all warps           each warp its rows, to compute S
//   dO [kBr][kDv]         all warps           each warp its rows, to compute dP
//   K [kBc][kD]           all warps           all warps, to compute S and dQ
//   V [kBc][kDv]          all warps           all warps, to compute dP
//   slots of sharers      two warps           the same two: sums, dS
//
// K of a tile is copied while dP is computed, and V of the next tile while S and dQ are. Barriers: as in the forward, one
// in front of the products with V and one in front of those with K, and a named one of warps that share rows.
#pragma once
#include "common/dbias.cuh"
#include "common/mask.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "common/weights.cuh"
#include "sm80_float64/sharers.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
struct BackwardDq {
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kSharers = sharers_of_rows<Spec, kBr>();
    using RowWarps = Sharers<kSharers, kBc>;
    static constexpr int kD = common::round_up(kHeadDim, 16 * kSharers);
    static constexpr int kDv = common::round_up(kHeadDimV, 16 * kSharers);
    static_assert(Spec::kStages == 1);

    using QTile = Tile<kBr, kD>;
    using DoTile = Tile<kBr, kDv>;
    using KTile = Tile<kBc, kD>;
    using VTile = Tile<kBc, kDv>;
    static constexpr int kDo = QTile::kBytes, kK = kDo + DoTile::kBytes, kV = kK + KTile::kBytes;
    static constexpr int kSlots = kV + VTile::kBytes;
    static_assert(kSlots + kBr / 16 * RowWarps::kBytes == Spec::kSharedBytes);

    using Scores = typename RowWarps::Scores;
    using Gradient = Fragment<kD / kSharers / 8>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32;
        const int32 rows16 = thread / 32 / kSharers, half = thread / 32 % kSharers, warp_row = 16 * rows16;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr, head_kv = where.head / params.heads_per_group;
        const double* k = params.k + params.k_strides.offset(where.batch, 0, head_kv);
        const double* v = params.v + params.v_strides.offset(where.batch, 0, head_kv);
        const auto copy_k = [&](int32 tile) {
            load_tile_async<KTile, kThreads, kHeadDim>(smem + kK, k, params.k_strides.row, tile * kBc, params.seqlen_k,
                                                       thread);
        };
        const auto copy_v = [&](int32 tile) {
            load_tile_async<VTile, kThreads, kHeadDimV>(smem + kV, v, params.v_strides.row, tile * kBc, params.seqlen_k,
                                                        thread);
        };
        const auto mask = common::mask_of<Spec>(params);
        const auto tiles = common::key_tiles<Spec>(params, where);
        constexpr int kClearedRows = 16 / kSharers;
        common::clear_skipped_dbias<Spec>(
            params, {where.batch, where.head, first_row + warp_row + half * kClearedRows, 0, lane}, kClearedRows,
            tiles.begin * kBc, tiles.end * kBc);
        if (tiles.begin < tiles.end) {
            load_tile_async<QTile, kThreads, kHeadDim>(smem,
                                                       params.q + params.q_strides.offset(where.batch, 0, where.head),
                                                       params.q_strides.row, first_row, params.seqlen_q, thread);
            load_tile_async<DoTile, kThreads, kHeadDimV>(
                smem + kDo, params.dout + params.dout_strides.offset(where.batch, 0, where.head),
                params.dout_strides.row, first_row, params.seqlen_q, thread);
            copy_v(tiles.at(tiles.begin));
        }

        // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
        const int64 first_stat = common::first_statistic<Spec>(params, where.batch, where.head);
        double lse[2], delta[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = first_row + warp_row + Scores::row(i, lane);
            const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<double>();
            lse[i] = valid ? params.lse[first_stat + row] : common::infinity<double>();
            delta[i] = valid ? params.delta[first_stat + row] : 0.0;
        }

        const RowWarps sharers(smem + kSlots + rows16 * RowWarps::kBytes, half, 1 + rows16, lane);
        const auto q_rows = sharers.template along_rows<QTile>(smem, warp_row);
        const auto do_rows = sharers.template along_rows<DoTile>(smem + kDo, warp_row);
        const auto k_rows = sharers.template along_rows<KTile>(smem + kK, 0);
        const auto v_rows = sharers.template along_rows<VTile>(smem + kV, 0);
        const auto k_columns = sharers.template across_rows<KTile>(smem + kK);
        Gradient dq;
        dq.fill(0.0);
        for (int32 position = tiles.begin; position < tiles.end; ++position) {
            const int32 tile = tiles.at(position);
            common::cp_async_wait_all();
            __syncthreads();  // Q, dO and V are there, K is free
            copy_k(tile);
            if (common::may_hide_rows<Spec>(params) && position == tiles.begin) {
                sharers.template clear_hidden_rows<QTile, DoTile>(warp_row, lse, smem, smem + kDo);
                sharers.wait();
            }

            const common::ScoreTile score_tile{where.batch, where.head, first_row + warp_row,
                                               tile * kBc + sharers.first_column(), lane};
            Scores ds = sharers.products(do_rows, v_rows);
            common::cp_async_wait_all();
            __syncthreads();  // K is there, V is free
            if (position + 1 < tiles.end) copy_v(tiles.next(position));

            Scores p = sharers.products(q_rows, k_rows);
            common::SavedScores<Spec, Scores> saved;
            saved.save(p);
            const common::OutsideFull outside{position >= tiles.full_end,
                                              tiles.kLeftLimit && position < tiles.full_begin};
            common::differentiate_softmax<false, Spec>(
                p, ds, mask, outside, params, score_tile, [&](int i, int) { return lse[i]; },
                [&](int i, int) { return delta[i]; });
            common::write_dbias<Spec>(ds, params, score_tile);
            saved.take_derivative(ds, params, score_tile);
            sharers.give(ds);
            sharers.wait();
            sharers.multiply_columns(dq, ds, k_columns);
        }
        const double scale[2] = {params.softmax_scale, params.softmax_scale};
        scale_rows(dq, scale);
        store_rows<kHeadDim, kD>(dq, params.dq + params.dq_strides.offset(where.batch, 0, where.head),
                                 params.dq_strides.row, first_row + warp_row, params.seqlen_q, half * (kD / kSharers),
                                 lane);
    }
};

}  // namespace fa2::sm80_float64
