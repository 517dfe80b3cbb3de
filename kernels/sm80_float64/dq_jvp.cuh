// The tangent of the float64 backward by query tiles on mma.sync: how dQ changes along a direction (Q', K', V', dO').
// backward_dq.cuh has the backward, common/tangents.cuh the formulas of dS and dS'.
//
//   S = scale Q K^T     T = scale (Q' K^T + Q K'^T)     dP = dO V^T     dP' = dO' V^T + dO V'^T
//   dQ' = scale (dS' K + dS K')                                 dbias' = dS', summed to the shape of the bias
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 of these rows, alone or with another warp (sharers.cuh); keeps their dQ' and statistics, and S, T, dP and
//           dP' of a tile, in registers
//
//   shared memory            written by          read by
//   Q, Q' [2][kBr][kD]       all warps           each warp its rows, to compute S and T
//   dO, dO' [2][kBr][kDv]    all warps           each warp its rows, to compute dP and dP'
//   K, K' [2][kBc][kD]       all warps           all warps, to compute S, T and dQ'
//   V, V' [2][kBc][kDv]      all warps           all warps, to compute dP and dP'
//   slots of sharers [2]     two warps           the same two: sums and dS; sums and dS'
//
// The block synchronises as in the backward: in front of the products with V, and in front of those with K.
#pragma once
#include "common/dbias.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "sm80_float64/tangents.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
struct DqJvp {
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kSharers = sharers_of_rows<Spec, kBr>();
    using RowWarps = Sharers<kSharers, kBc>;
    static constexpr int kD = common::round_up(kHeadDim, 16 * kSharers);
    static constexpr int kDv = common::round_up(kHeadDimV, 16 * kSharers);

    using Queries = MovedRows<Tile<kBr, kD>, kThreads, kHeadDim>;
    using Outputs = MovedRows<Tile<kBr, kDv>, kThreads, kHeadDimV>;
    using Keys = MovedRows<Tile<kBc, kD>, kThreads, kHeadDim>;
    using Values = MovedRows<Tile<kBc, kDv>, kThreads, kHeadDimV>;
    static constexpr int kDo = Queries::kBytes, kK = kDo + Outputs::kBytes, kV = kK + Keys::kBytes;
    static constexpr int kSlots = kV + Values::kBytes;
    static_assert(kSlots + kBr / 16 * 2 * RowWarps::kBytes == Spec::kSharedBytes && Spec::kStages == 1);

    using Scores = typename RowWarps::Scores;
    using Gradient = Fragment<kD / kSharers / 8>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32;
        const int32 rows16 = thread / 32 / kSharers, half = thread / 32 % kSharers, warp_row = 16 * rows16;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp_row, batch = where.batch, head = where.head;
        const auto q = [&] {
            return Queries(smem, params.q, params.q_strides, params.qt, params.qt_strides, batch, head);
        };
        const auto dout = [&] {
            return Outputs(smem + kDo, params.dout, params.dout_strides, params.dot, params.dot_strides, batch, head);
        };
        const auto k = [&] {
            return Keys(smem + kK, params.k, params.k_strides, params.kt, params.kt_strides, computed_anew(batch),
                        computed_anew(head) / params.heads_per_group);
        };
        const auto v = [&] {
            return Values(smem + kV, params.v, params.v_strides, params.vt, params.vt_strides, computed_anew(batch),
                          computed_anew(head) / params.heads_per_group);
        };
        // The warps that share these rows, for S, dP and dS (0) or their tangents (1).
        const uint32 slots = smem + kSlots + rows16 * 2 * RowWarps::kBytes;
        const auto row_warps = [&](int which) {
            return RowWarps(slots + which * RowWarps::kBytes, half, 1 + rows16, computed_anew(lane));
        };
        const auto mask = common::mask_of<Spec>(params);

        const auto tiles = common::key_tiles<Spec>(params, where);
        constexpr int kClearedRows = 16 / kSharers;
        common::clear_skipped_dbias<Spec>(params, {batch, head, first_row + half * kClearedRows, 0, lane}, kClearedRows,
                                          tiles.begin * kBc, tiles.end * kBc);
        if (tiles.begin < tiles.end) {
            q().copy(where.tile, params.seqlen_q);
            dout().copy(where.tile, params.seqlen_q);
            v().copy(tiles.at(tiles.begin), params.seqlen_k);
        }

        // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
        const int64 first_stat = common::first_statistic<Spec>(params, batch, head);
        double lse[2], delta[2], lse_tangent[2], delta_tangent[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = first_row + Scores::row(i, lane);
            const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<double>();
            lse[i] = valid ? params.lse[first_stat + row] : common::infinity<double>();
            delta[i] = valid ? params.delta[first_stat + row] : 0.0;
            lse_tangent[i] = valid ? params.lset[first_stat + row] : 0.0;
            delta_tangent[i] = valid ? params.deltat[first_stat + row] : 0.0;
        }

        Gradient dq;
        dq.fill(0.0);
        for (int32 position = tiles.begin; position < tiles.end; ++position) {
            const int32 tile = tiles.at(position);
            common::cp_async_wait_all();
            __syncthreads();  // Q, dO, V and their tangents are there, K is free
            k().copy(tile, params.seqlen_k);
            const RowWarps sharers = row_warps(0), of_tangents = row_warps(1);
            if (common::may_hide_rows<Spec>(params) && position == tiles.begin) {
                q().clear_hidden_rows(sharers, warp_row, lse);
                dout().clear_hidden_rows(sharers, warp_row, lse);
                sharers.wait();
            }

            const common::ScoreTile score_tile{batch, head, first_row, tile * kBc + sharers.first_column(), lane};
            const auto do_rows = dout().along_rows(sharers, warp_row);
            const auto v_rows = v().along_rows(sharers, 0);
            Scores ds = sharers.products(do_rows.own, v_rows.own);
            Scores ds_tangent = moved_products<false>(of_tangents, do_rows, v_rows);
            common::cp_async_wait_all();
            __syncthreads();  // K and its tangent are there, V is free
            if (position + 1 < tiles.end) v().copy(tiles.next(position), params.seqlen_k);

            const auto q_rows = q().along_rows(sharers, warp_row);
            const auto k_rows = k().along_rows(sharers, 0);
            Scores p = sharers.products(q_rows.own, k_rows.own);
            Scores tangents = moved_products<false>(of_tangents, q_rows, k_rows);
            const common::OutsideFull outside{position >= tiles.full_end,
                                              tiles.kLeftLimit && position < tiles.full_begin};
            const auto slopes = common::differentiate_twice<false, Spec>(
                p, tangents, ds, ds_tangent, mask, outside, params, score_tile, [&](int i, int) {
                    return common::MovedRow<double>{lse[i], delta[i], lse_tangent[i], delta_tangent[i]};
                });
            common::write_dbias<Spec>(ds_tangent, params, score_tile);
            slopes.apply(ds, ds_tangent);
            sharers.give(ds);
            of_tangents.give(ds_tangent);
            sharers.wait();
            const auto k_columns = k().across_rows(row_warps(0));
            of_tangents.multiply_columns(dq, ds_tangent, k_columns.own);
            if (k_columns.moves) sharers.multiply_columns(dq, ds, k_columns.tangent);
        }
        const double scale[2] = {params.softmax_scale, params.softmax_scale};
        scale_rows(dq, scale);
        store_rows<kHeadDim, kD>(dq, params.dqt + params.dqt_strides.offset(batch, 0, head), params.dqt_strides.row,
                                 first_row, params.seqlen_q, half * (kD / kSharers), lane);
    }
};

}  // namespace fa2::sm80_float64
