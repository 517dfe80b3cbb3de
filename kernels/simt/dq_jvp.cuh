// The tangent of the backward by query tiles: how dQ changes along a direction (Q', K', V', dO'). backward_dq.cuh has the
// backward, common/tangents.cuh the formulas of dS and dS'.
//
//   S = scale Q K^T     T = scale (Q' K^T + Q K'^T)     dP = dO V^T     dP' = dO' V^T + dO V'^T
//   dQ' = scale (dS' K + dS K')                                 dbias' = dS', summed to the shape of the bias
//
//   block   owns B_r = kBr query rows of one head; loops over all key tiles of B_c = kBc keys that these rows see
//   warp    owns kBr / kWarps of these rows
//   lane    holds a part of dQ', S, T, dP and dP' of these rows, as microtile.cuh says, and their statistics
//
//   shared memory                   written by           read by
//   Q, Q' [2][kBr][Rows]            all warps            each warp its rows, to compute S and T
//   dO, dO' [2][kBr][RowsV]         all warps            each warp its rows, to compute dP and dP'
//   K, K' [2][kBc][Rows]            all warps            all warps, to compute S, T and dQ'
//   V, V' [2][kBc][RowsV]           all warps            all warps, to compute dP and dP'
//   posted [kBr][kPostedLength]     each warp its rows   the same warp; holds dS', then dS
//
// The block synchronises as in the backward: before it reads V, and before it reads K.
#pragma once
#include "common/dbias.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "simt/hidden_rows.cuh"
#include "simt/tangents.cuh"

namespace fa2::simt {

template <class Spec>
struct DqJvp {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDim>;
    using WarpV = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDimV>;
    using Rows = typename Warp::Rows;
    using RowsV = typename WarpV::Rows;
    using Queries = MovedRows<Rows, Real, kBr, kThreads>;
    using Outputs = MovedRows<RowsV, Real, kBr, kThreads>;
    using Keys = MovedRows<Rows, Real, kBc, kThreads>;
    using Values = MovedRows<RowsV, Real, kBc, kThreads>;
    using Scores = typename Warp::Scores;
    static constexpr int kRows = Scores::kRows;
    static_assert((Queries::kElements + Outputs::kElements + Keys::kElements + Values::kElements +
                   kBr * Warp::kPostedLength) *
                      sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp * Warp::kOwn;
        const int32 own = warp * Warp::kOwn * Rows::kRowLength, own_v = warp * Warp::kOwn * RowsV::kRowLength;
        const int32 batch = where.batch, head = where.head, head_kv = head / params.heads_per_group;
        const Queries q{reinterpret_cast<Real*>(smem), head_of(params.q, params.q_strides, batch, head),
                        head_of(params.qt, params.qt_strides, batch, head), params.q_strides.row,
                        params.qt_strides.row};
        const Outputs dout{q.end(), head_of(params.dout, params.dout_strides, batch, head),
                           head_of(params.dot, params.dot_strides, batch, head), params.dout_strides.row,
                           params.dot_strides.row};
        const Keys k{dout.end(), head_of(params.k, params.k_strides, batch, head_kv),
                     head_of(params.kt, params.kt_strides, batch, head_kv), params.k_strides.row,
                     params.kt_strides.row};
        const Values v{k.end(), head_of(params.v, params.v_strides, batch, head_kv),
                       head_of(params.vt, params.vt_strides, batch, head_kv), params.v_strides.row,
                       params.vt_strides.row};
        Real* posted = v.end() + warp * Warp::kPostedElements;
        const auto mask = common::mask_of<Spec>(params);

        const int64 first_stat = common::first_statistic<Spec>(params, batch, head);
        Real lse[kRows], delta[kRows], lse_tangent[kRows], delta_tangent[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
            const int32 row = first_row + Scores::row(i, lane);
            const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<Real>();
            lse[i] = valid ? params.lse[first_stat + row] : common::infinity<Real>();
            delta[i] = valid ? params.delta[first_stat + row] : Real(0);
            lse_tangent[i] = valid ? params.lset[first_stat + row] : Real(0);
            delta_tangent[i] = valid ? params.deltat[first_stat + row] : Real(0);
        }
        typename Warp::Sums dq;
        dq.clear();

        const auto tiles = common::key_tiles<Spec>(params, where);
        common::clear_skipped_dbias<Spec>(params, {batch, head, first_row, 0, lane}, Warp::kOwn, tiles.begin * kBc,
                                          tiles.end * kBc);
        if (tiles.begin < tiles.end) {
            q.copy(where.tile, params.seqlen_q);
            dout.copy(where.tile, params.seqlen_q);
            v.copy(tiles.at(tiles.begin), params.seqlen_k);
        }
        for (int32 position = tiles.begin; position < tiles.end; ++position) {
            const int32 tile = tiles.at(position);
            wait_for_copies();
            __syncthreads();  // Q, dO, V and their tangents are there, K is free
            k.copy(tile, params.seqlen_k);
            if (common::may_hide_rows<Spec>(params) && position == tiles.begin) {
                clear_hidden_rows<Scores, Rows>(q.rows + own, lse, lane);
                clear_hidden_rows<Scores, RowsV>(dout.rows + own_v, lse, lane);
                if (dout.moves()) clear_hidden_rows<Scores, RowsV>(dout.tangent() + own_v, lse, lane);
            }

            const common::ScoreTile score_tile{batch, head, first_row, tile * kBc, lane};
            Scores p, tangents, ds, ds_tangent;
            dot_moved<WarpV>(ds, ds_tangent, dout, own_v, v, lane);
            wait_for_copies();
            __syncthreads();  // K and its tangent are there, V is free
            if (position + 1 < tiles.end) v.copy(tiles.next(position), params.seqlen_k);

            dot_moved<Warp>(p, tangents, q, own, k, lane);
            const common::OutsideFull outside{position >= tiles.full_end,
                                              tiles.kLeftLimit && position < tiles.full_begin};
            const auto slopes = common::differentiate_twice<false, Spec>(
                p, tangents, ds, ds_tangent, mask, outside, params, score_tile,
                [&](int i, int) { return common::MovedRow<Real>{lse[i], delta[i], lse_tangent[i], delta_tangent[i]}; });
            common::write_dbias<Spec>(ds_tangent, params, score_tile);
            slopes.apply(ds, ds_tangent);
            accumulate_moved<Warp>(dq, ds, ds_tangent, posted, k, lane);
        }
        Warp::store(dq, params.softmax_scale, head_of(params.dqt, params.dqt_strides, batch, head),
                    params.dqt_strides.row, first_row, params.seqlen_q, lane);
    }
};

}  // namespace fa2::simt
