// The forward and its tangent: O and lse, and how they change along a direction (Q', K', V'). forward.cuh introduces the
// family.
//
//   S = scale Q K^T                          P = exp(S - lse)       O = P V
//   T = scale (Q' K^T + Q K'^T)              lse' = rowsum(P o T)   O' = (P o T) V + P V' - lse' O
//
// The online softmax carries rowsum(P o T) and (P o T) V + P V' along with the row sum and O: all are sums over keys with
// the factor exp(-row_max), and are rescaled and divided alike. Where O and lse are given (kGiven), P is known, and the
// kernel computes O' and lse' alone.
//
//   block   owns B_r = kBr query rows of one head; loops over all key tiles of B_c = kBc keys that these rows see
//   warp    owns kBr / kWarps of these rows
//   lane    holds a part of O, O', S, P, T and P o T of these rows, as microtile.cuh says
//
//   shared memory                   written by           read by
//   Q, Q' [2][kBr][Rows]            all warps            each warp its rows, to compute S and T
//   K, K' [2][kBc][Rows]            all warps            all warps, to compute S and T
//   V, V' [2][kBc][RowsV]           all warps            all warps, to compute O and O'
//   posted [kBr][kPostedLength]     each warp its rows   the same warp; holds P, then P o T, then P again
//
// The block synchronises as in the forward.
#pragma once
#include "common/online_softmax.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "simt/hidden_rows.cuh"
#include "simt/tangents.cuh"

namespace fa2::simt {

template <class Spec, bool kGiven = false, class Params = fa2::Params>
struct Jvp {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDim>;
    using WarpV = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDimV, kGiven ? 0 : Spec::kHeadDimV>;
    using Rows = typename Warp::Rows;
    using RowsV = typename WarpV::Rows;
    using Queries = MovedRows<Rows, Real, kBr, kThreads>;
    using Keys = MovedRows<Rows, Real, kBc, kThreads>;
    using Values = MovedRows<RowsV, Real, kBc, kThreads>;
    using Scores = typename Warp::Scores;
    static constexpr int kRows = Scores::kRows;
    static_assert((Queries::kElements + Keys::kElements + Values::kElements + kBr * Warp::kPostedLength) *
                      sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 own = warp * Warp::kOwn * Rows::kRowLength, first_row = where.tile * kBr + warp * Warp::kOwn;
        const int32 batch = where.batch, head = where.head, head_kv = head / params.heads_per_group;
        const Queries q{reinterpret_cast<Real*>(smem), head_of(params.q, params.q_strides, batch, head),
                        head_of(params.qt, params.qt_strides, batch, head), params.q_strides.row,
                        params.qt_strides.row};
        const Keys k{q.end(), head_of(params.k, params.k_strides, batch, head_kv),
                     head_of(params.kt, params.kt_strides, batch, head_kv), params.k_strides.row,
                     params.kt_strides.row};
        const Values v{k.end(), head_of(params.v, params.v_strides, batch, head_kv),
                       head_of(params.vt, params.vt_strides, batch, head_kv), params.v_strides.row,
                       params.vt_strides.row};
        Real* posted = v.end() + warp * Warp::kPostedElements;
        const auto mask = common::mask_of<Spec>(params);

        typename WarpV::Sums output, moved;
        output.clear();
        moved.clear();
        common::OnlineSoftmax<Real, kRows, Scores::kLanesPerRow, common::exp_accurate, true, Scores::kLaneStep> softmax;
        softmax.reset();
        Real lse_tangent[kRows] = {};  // rowsum(P o T), of this lane's columns
        const int64 first = common::first_statistic<Spec>(params, batch, head);
        Real lse[kRows];
        if constexpr (kGiven)
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
                const int32 row = first_row + Scores::row(i, lane);
                const bool valid = row < params.seqlen_q && params.lse[first + row] != -common::infinity<Real>();
                lse[i] = valid ? params.lse[first + row] : common::infinity<Real>();
            }

        const auto tiles = common::key_tiles<Spec>(params, where);
        if (tiles.begin < tiles.end) {
            q.copy(where.tile, params.seqlen_q);
            k.copy(tiles.at(tiles.begin), params.seqlen_k);
        }
        for (int32 position = tiles.begin; position < tiles.end; ++position) {
            const int32 tile = tiles.at(position);
            wait_for_copies();
            __syncthreads();  // Q, K and their tangents are there, V is free
            v.copy(tile, params.seqlen_k);
            if (kGiven && common::may_hide_rows<Spec>(params) && position == tiles.begin)
                clear_hidden_rows<Scores, Rows>(q.rows + own, lse, lane);

            const common::ScoreTile score_tile{batch, head, first_row, tile * kBc, lane};
            Scores p, tangents;
            dot_moved<Warp>(p, tangents, q, own, k, lane);
            wait_for_copies();
            __syncthreads();  // V and its tangent are there, K is free
            if (position + 1 < tiles.end) k.copy(tiles.next(position), params.seqlen_k);

            common::NoSlopes slopes;
            common::move_scores<false, Spec>(p, tangents, slopes, params, score_tile);
            const bool masked = position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin);
            if (masked) common::hide_scores<false, Spec>(p, mask, params, score_tile, -common::infinity<Real>());
            Real rescale[kRows];
            if constexpr (kGiven)
                common::take_exponentials<Spec>(p, params, [&](int i, int) { return lse[i]; });
            else
                softmax.update(p, rescale);
            common::weigh_tangents<Spec>(tangents, p, params);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                Real share = 0;
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) share += tangents(i, j);
                lse_tangent[i] = (kGiven ? lse_tangent[i] : lse_tangent[i] * rescale[i]) + share;
            }
            common::drop<Spec>(p, params, score_tile);
            common::drop<Spec>(tangents, params, score_tile);
            if constexpr (!kGiven) {
                Warp::post(p, posted, lane);
                __syncwarp();
                WarpV::accumulate(output, rescale, posted, v.rows, lane);
                moved.scale(rescale);
            }
            accumulate_moved<WarpV>(moved, p, tangents, posted, v, lane);
        }

        Real inverse_sum[kRows];
        if constexpr (kGiven)
#pragma unroll
            for (int i = 0; i < kRows; ++i) inverse_sum[i] = 1;
        else
            common::finish_sums<Spec>(softmax, params, head, 0, inverse_sum, lse);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            lse_tangent[i] = common::row_sum<Scores::kLanesPerRow, Scores::kLaneStep>(lse_tangent[i]) * inverse_sum[i];
            lse_tangent[i] += common::sink_tangent_of<Spec>(params, head, lse[i]);
            inverse_sum[i] *= common::kept_scale<Spec>(params);
            const int32 row = first_row + Scores::row(i, lane);
            if (lane_column(lane) != 0 || row >= params.seqlen_q) continue;
            if constexpr (!kGiven) params.lse[first + row] = lse[i];
            params.lset[first + row] = lse_tangent[i];
        }
        auto* o = head_of(params.o, params.o_strides, batch, head);
        if constexpr (kGiven) {
            WarpV::load(output, o, params.o_strides.row, first_row, lane,
                        [&](int i) { return lse[i] != common::infinity<Real>(); });
        } else {
            output.scale(inverse_sum);
            WarpV::store(output, Real(1), o, params.o_strides.row, first_row, params.seqlen_q, lane);
        }
        moved.scale(inverse_sum);
        moved.subtract(lse_tangent, output);
        WarpV::store(moved, Real(1), head_of(params.ot, params.ot_strides, batch, head), params.ot_strides.row,
                     first_row, params.seqlen_q, lane);
    }
};

}  // namespace fa2::simt
