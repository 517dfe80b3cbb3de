// The tangent of the backward by key tiles: how dK and dV change along a direction (Q', K', V', dO'). backward_dkdv.cuh
// has the backward, common/tangents.cuh the formulas of dS and dS'.
//
//   S^T = scale K Q^T     T^T = scale (K' Q^T + K Q'^T)     dP^T = V dO^T     dP'^T = V' dO^T + V dO'^T
//   dV' = (P o (T - lse'))^T dO + P^T dO'                   dK' = scale (dS'^T Q + dS^T Q')
//
//   block   owns B_c = kBc keys of one K/V head; loops over all query tiles of B_r = kBr rows that see them, in every
//           query head of the group
//   warp    owns kBc / kWarps of these keys
//   lane    holds a part of dK', dV', S^T, T^T, dP^T and dP'^T of these keys, as microtile.cuh says
//
//   shared memory                   written by           read by
//   K, K' [2][kBc][Rows]            all warps            each warp its rows, to compute S^T and T^T
//   V, V' [2][kBc][RowsV]           all warps            each warp its rows, to compute dP^T and dP'^T
//   Q, Q' [2][kBr][Rows]            all warps            all warps, to compute S^T, T^T and dK'
//   dO, dO' [2][kBr][RowsV]         all warps            all warps, to compute dP^T, dP'^T and dV'
//   posted [kBc][kPostedLength]     each warp its rows   the same warp; holds the tangent of P^T, P^T, dS'^T, dS^T
//   lse, delta, lse', delta' [kBr]  all warps            all warps, to compute P^T, dS^T and their tangents
//
// The block synchronises as in the backward, and goes over the query tiles twice where that does (beyond 416 columns).
#pragma once
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "simt/hidden_rows.cuh"
#include "simt/tangents.cuh"

namespace fa2::simt {

template <class Spec>
struct DkdvJvp {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    static constexpr bool kTogether =
        registers_of_row<Real>(Spec::kHeadDim) + registers_of_row<Real>(Spec::kHeadDimV) <= 208;
    using Warp = Microtile<Real, kBc / Spec::kWarps, kBr, Spec::kHeadDim, kTogether ? Spec::kHeadDimV : 0>;
    using WarpV = Microtile<Real, kBc / Spec::kWarps, kBr, Spec::kHeadDimV, kTogether ? Spec::kHeadDim : 0>;
    using Rows = typename Warp::Rows;
    using RowsV = typename WarpV::Rows;
    using Keys = MovedRows<Rows, Real, kBc, kThreads>;
    using Values = MovedRows<RowsV, Real, kBc, kThreads>;
    using Queries = MovedRows<Rows, Real, kBr, kThreads>;
    using Outputs = MovedRows<RowsV, Real, kBr, kThreads>;
    using Scores = typename Warp::Scores;
    static_assert((Keys::kElements + Values::kElements + Queries::kElements + Outputs::kElements +
                   kBc * Warp::kPostedLength + 4 * kBr) *
                      sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        if constexpr (kTogether) {
            sum<true, true>(params, smem);
        } else {
            sum<false, true>(params, smem);
            sum<true, false>(params, smem);
        }
    }

    // kOfKeys, kOfValues: whether dK' and dV' are computed.
    template <bool kOfKeys, bool kOfValues>
    __device__ __forceinline__ static void sum(const Params& params, char* smem) {
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 batch = where.batch, head_kv = where.head, first_key = where.tile * kBc + warp * Warp::kOwn;
        const int32 own = warp * Warp::kOwn * Rows::kRowLength, own_v = warp * Warp::kOwn * RowsV::kRowLength;
        const Keys k{reinterpret_cast<Real*>(smem), head_of(params.k, params.k_strides, batch, head_kv),
                     head_of(params.kt, params.kt_strides, batch, head_kv), params.k_strides.row,
                     params.kt_strides.row};
        const Values v{k.end(), head_of(params.v, params.v_strides, batch, head_kv),
                       head_of(params.vt, params.vt_strides, batch, head_kv), params.v_strides.row,
                       params.vt_strides.row};
        const auto queries = [&](int32 head) {
            return Queries{v.end(), head_of(params.q, params.q_strides, batch, head),
                           head_of(params.qt, params.qt_strides, batch, head), params.q_strides.row,
                           params.qt_strides.row};
        };
        const auto outputs = [&](int32 head) {
            return Outputs{v.end() + Queries::kElements, head_of(params.dout, params.dout_strides, batch, head),
                           head_of(params.dot, params.dot_strides, batch, head), params.dout_strides.row,
                           params.dot_strides.row};
        };
        Real* all_posted = v.end() + Queries::kElements + Outputs::kElements;
        Real* posted = all_posted + warp * Warp::kPostedElements;
        Real* lse_tile = all_posted + kBc * Warp::kPostedLength;
        Real *delta_tile = lse_tile + kBr, *lset_tile = delta_tile + kBr, *deltat_tile = lset_tile + kBr;
        const auto mask = common::mask_of<Spec>(params);

        // Copies dO, its tangent and the statistics, which are free at the same time.
        const auto copy_outputs = [&](int32 head, int32 tile) {
            outputs(head).copy(tile, params.seqlen_q);
            const int64 first_stat = common::first_statistic<Spec>(params, batch, head);
            for (int32 index = threadIdx.x; index < kBr; index += kThreads) {
                // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
                const int32 row = tile * kBr + index;
                const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<Real>();
                lse_tile[index] = valid ? params.lse[first_stat + row] : common::infinity<Real>();
                delta_tile[index] = valid ? params.delta[first_stat + row] : Real(0);
                lset_tile[index] = valid ? params.lset[first_stat + row] : Real(0);
                deltat_tile[index] = valid ? params.deltat[first_stat + row] : Real(0);
            }
        };

        typename Warp::Sums dk;
        typename WarpV::Sums dv;
        dk.clear();
        dv.clear();

        const auto tiles = common::query_tiles<Spec>(params, where);
        int32 head = head_kv * params.heads_per_group, tile = tiles.begin;
        if (tiles.begin < tiles.end) {
            k.copy(where.tile, params.seqlen_k);
            v.copy(where.tile, params.seqlen_k);
            const auto step = tiles.at({head, tile});
            copy_outputs(step.head, step.tile);
        }
        // The query tiles of one head of the group, then those of the next.
        for (int32 steps = tiles.num_heads(params.heads_per_group) * (tiles.end - tiles.begin); steps > 0; --steps) {
            const auto step = tiles.at({head, tile});
            const Queries q = queries(step.head);
            const Outputs dout = outputs(step.head);
            wait_for_copies();
            __syncthreads();  // K, V, dO, their tangents and the statistics are there, Q is free
            q.copy(step.tile, params.seqlen_q);
            clear_hidden_tile<Spec, RowsV>(params, dout.rows, lse_tile, lane);
            if (dout.moves()) clear_hidden_tile<Spec, RowsV>(params, dout.tangent(), lse_tile, lane);

            const common::ScoreTile score_tile{batch, step.head, step.tile * kBr, first_key, lane};
            Scores p, tangents, ds, ds_tangent;
            if constexpr (kOfKeys) {
                dot_moved<WarpV>(ds, ds_tangent, v, own_v, dout, lane);
            } else {
                WarpV::clear(ds);
                WarpV::clear(ds_tangent);
            }
            wait_for_copies();
            __syncthreads();  // Q and its tangent are there
            clear_hidden_tile<Spec, Rows>(params, q.rows, lse_tile, lane);
            if (q.moves()) clear_hidden_tile<Spec, Rows>(params, q.tangent(), lse_tile, lane);

            dot_moved<Warp>(p, tangents, k, own, q, lane);
            const common::OutsideFull outside{tiles.kLeftLimit && tile >= tiles.full_end, tile < tiles.full_begin};
            const auto slopes = common::differentiate_twice<true, Spec>(
                p, tangents, ds, ds_tangent, mask, outside, params, score_tile, [&](int, int j) {
                    const int32 row = Scores::col(j, lane);
                    return common::MovedRow<Real>{lse_tile[row], delta_tile[row], lset_tile[row], deltat_tile[row]};
                });

            slopes.apply(ds, ds_tangent);
            if constexpr (kOfValues) accumulate_moved<WarpV>(dv, p, tangents, posted, dout, lane);
            if (++tile == tiles.end) {
                tile = tiles.begin;
                ++head;
            }
            __syncthreads();  // dO, its tangent and the statistics are free
            if (steps > 1) {
                const auto next = tiles.at({head, tile});
                copy_outputs(next.head, next.tile);
            }
            if constexpr (kOfKeys) accumulate_moved<Warp>(dk, ds, ds_tangent, posted, q, lane);
        }
        if constexpr (kOfKeys)
            Warp::store(dk, params.softmax_scale, head_of(params.dkt, params.dkt_strides, batch, head_kv),
                        params.dkt_strides.row, first_key, params.seqlen_k, lane);
        if constexpr (kOfValues)
            WarpV::store(dv, common::kept_scale<Spec>(params), head_of(params.dvt, params.dvt_strides, batch, head_kv),
                         params.dvt_strides.row, first_key, params.seqlen_k, lane);
    }
};

}  // namespace fa2::simt
