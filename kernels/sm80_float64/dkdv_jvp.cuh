// The tangent of the float64 backward by key tiles on mma.sync: how dK and dV change along a direction (Q', K', V', dO').
// backward_dkdv.cuh has the backward, common/tangents.cuh the formulas of dS and dS'.
//
//   S^T = scale K Q^T     T^T = scale (K' Q^T + K Q'^T)     dP^T = V dO^T     dP'^T = V' dO^T + V dO'^T
//   dV' = (P o (T - lse'))^T dO + P^T dO'                   dK' = scale (dS'^T Q + dS^T Q')
//
//   block   owns kBc keys of one K/V head; loops over the query tiles of B_r = kBr rows that see them, in all query
//           heads of the group
//   warp    owns 16 of these keys, alone or with another warp (sharers.cuh); keeps their dK' and dV', and S^T, T^T, dP^T and
//           dP'^T of a tile, in registers
//
//   shared memory                        written by             read by
//   K, K' [2][kBc][kD]                   all warps              its owners, to compute S^T and T^T
//   V, V' [2][kBc][kDv]                  all warps              its owners, to compute dP^T and dP'^T
//   Q, Q' [2][kBr][kD]                   all warps              all warps, to compute S^T, T^T and dK'
//   dO, dO' [2][kBr][kDv]                all warps              all warps, to compute dP^T, dP'^T and dV'
//   lse, delta, lse', delta' [kBr]       all warps              all warps
//   slots of sharers [2]                 two warps              the same two: sums, P^T and dS^T; their tangents
//
// Q of a tile is copied while dP is computed, and dO of the next tile while dK' is. Barriers: three for a tile, in front of
// dP, in front of S, and behind dV'.
#pragma once
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "sm80_float64/tangents.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
struct DkdvJvp {
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kSharers = sharers_of_rows<Spec, kBc>();
    using RowWarps = Sharers<kSharers, kBr>;
    static constexpr int kD = common::round_up(kHeadDim, 16 * kSharers);
    static constexpr int kDv = common::round_up(kHeadDimV, 16 * kSharers);

    using Keys = MovedRows<Tile<kBc, kD>, kThreads, kHeadDim>;
    using Values = MovedRows<Tile<kBc, kDv>, kThreads, kHeadDimV>;
    using Queries = MovedRows<Tile<kBr, kD>, kThreads, kHeadDim>;
    using Outputs = MovedRows<Tile<kBr, kDv>, kThreads, kHeadDimV>;
    static constexpr int kV = Keys::kBytes, kQ = kV + Values::kBytes, kDo = kQ + Queries::kBytes;
    static constexpr int kStatistics = kDo + Outputs::kBytes, kStatisticBytes = kBr * 8;
    static constexpr int kSlots = kStatistics + 4 * kStatisticBytes;
    static_assert(kSlots + kBc / 16 * 2 * RowWarps::kBytes == Spec::kSharedBytes && Spec::kStages == 1);
    static constexpr int kOfThread = common::ceil_div(4 * kBr, kThreads);  // statistics that a thread copies

    using Scores = typename RowWarps::Scores;
    using Dk = Fragment<kD / kSharers / 8>;
    using Dv = Fragment<kDv / kSharers / 8>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32;
        const int32 rows16 = thread / 32 / kSharers, half = thread / 32 % kSharers, warp_row = 16 * rows16;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 batch = where.batch, head_kv = where.head, first_key = where.tile * kBc + warp_row;
        const auto k = [&] {
            return Keys(smem, params.k, params.k_strides, params.kt, params.kt_strides, batch, head_kv);
        };
        const auto v = [&] {
            return Values(smem + kV, params.v, params.v_strides, params.vt, params.vt_strides, batch, head_kv);
        };
        const auto q = [&](int32 head) {
            return Queries(smem + kQ, params.q, params.q_strides, params.qt, params.qt_strides, computed_anew(batch),
                           head);
        };
        const auto dout = [&](int32 head) {
            return Outputs(smem + kDo, params.dout, params.dout_strides, params.dot, params.dot_strides,
                           computed_anew(batch), head);
        };
        // The warps that share these keys, for S^T, P^T, dP^T and dS^T (0) or their tangents (1).
        const uint32 slots = smem + kSlots + rows16 * 2 * RowWarps::kBytes;
        const auto row_warps = [&](int which) {
            return RowWarps(slots + which * RowWarps::kBytes, half, 1 + rows16, computed_anew(lane));
        };
        const auto mask = common::mask_of<Spec>(params);

        Dk dk;
        Dv dv;
        dk.fill(0.0);
        dv.fill(0.0);
        const auto tiles = common::query_tiles<Spec>(params, where);
        common::QueryStep position{head_kv * params.heads_per_group, tiles.begin};
        if (tiles.begin < tiles.end) {
            k().copy(where.tile, params.seqlen_k);
            v().copy(where.tile, params.seqlen_k);
            const auto step = tiles.at(position);
            dout(step.head).copy(step.tile, params.seqlen_q);
            double statistics[kOfThread];
            load_statistics(params, batch, step, statistics);
            store_statistics(smem, statistics);
        }
        // The query tiles of one head of the group, then those of the next.
        for (int32 steps = tiles.num_heads(params.heads_per_group) * (tiles.end - tiles.begin); steps > 0; --steps) {
            const auto step = tiles.at(position);
            const common::OutsideFull outside{tiles.kLeftLimit && position.tile >= tiles.full_end,
                                              position.tile < tiles.full_begin};
            common::cp_async_wait_all();
            __syncthreads();  // K, V, dO, their tangents and the statistics are there, Q is free
            q(step.head).copy(step.tile, params.seqlen_q);
            clear_hidden_rows(params, smem, dout(step.head), lane);

            const RowWarps sharers = row_warps(0), of_tangents = row_warps(1);
            const common::ScoreTile score_tile{batch, step.head, step.tile * kBr + sharers.first_column(), first_key,
                                               lane};
            const auto v_rows = v().along_rows(sharers, warp_row);
            const auto do_rows = dout(step.head).along_rows(sharers, 0);
            Scores ds = sharers.products(v_rows.own, do_rows.own);
            Scores ds_tangent = moved_products<true>(of_tangents, v_rows, do_rows);
            common::cp_async_wait_all();
            __syncthreads();  // Q and its tangent are there
            clear_hidden_rows(params, smem, q(step.head), lane);

            const auto k_rows = k().along_rows(sharers, warp_row);
            const auto q_rows = q(step.head).along_rows(sharers, 0);
            Scores p = sharers.products(k_rows.own, q_rows.own);
            Scores tangents = moved_products<true>(of_tangents, k_rows, q_rows);
            const auto slopes = common::differentiate_twice<true, Spec>(
                p, tangents, ds, ds_tangent, mask, outside, params, score_tile, [&](int, int j) {
                    const uint32 at = smem + kStatistics + (sharers.first_column() + Scores::col(j, lane)) * 8;
                    return common::MovedRow<double>{load_shared<double>(at), load_shared<double>(at + kStatisticBytes),
                                                    load_shared<double>(at + 2 * kStatisticBytes),
                                                    load_shared<double>(at + 3 * kStatisticBytes)};
                });
            slopes.apply(ds, ds_tangent);

            sharers.give(p);
            of_tangents.give(tangents);
            sharers.wait();
            const auto do_columns = dout(step.head).across_rows(row_warps(0));
            of_tangents.multiply_columns(dv, tangents, do_columns.own);
            if (do_columns.moves) sharers.multiply_columns(dv, p, do_columns.tangent);
            if (++position.tile == tiles.end) {
                position.tile = tiles.begin;
                ++position.head;
            }
            __syncthreads();  // dO, its tangent, the statistics and P are free
            double of_next[kOfThread];
            if (steps > 1) {
                const auto next = tiles.at(position);
                dout(next.head).copy(next.tile, params.seqlen_q);
                load_statistics(params, computed_anew(batch), next, of_next);
            }
            sharers.give(ds);
            of_tangents.give(ds_tangent);
            sharers.wait();
            const auto q_columns = q(step.head).across_rows(row_warps(0));
            of_tangents.multiply_columns(dk, ds_tangent, q_columns.own);
            if (q_columns.moves) sharers.multiply_columns(dk, ds, q_columns.tangent);
            if (steps > 1) store_statistics(smem, of_next);
        }
        store<kHeadDimV, kDv>(dv, common::kept_scale<Spec>(params), params,
                              params.dvt + params.dvt_strides.offset(batch, 0, head_kv), params.dvt_strides.row,
                              first_key, half, lane);
        store<kHeadDim, kD>(dk, params.softmax_scale, params, params.dkt + params.dkt_strides.offset(batch, 0, head_kv),
                            params.dkt_strides.row, first_key, half, lane);
    }

  private:
    template <int kColumns, int kPadded, class Gradient>
    __device__ __forceinline__ static void store(Gradient& gradient, double scale, const Params& params, double* gmem,
                                                 int64 row_stride, int32 first_key, int32 half, int32 lane) {
        const double factor[2] = {scale, scale};
        scale_rows(gradient, factor);
        store_rows<kColumns, kPadded>(gradient, gmem, row_stride, first_key, params.seqlen_k,
                                      half * (kPadded / kSharers), lane);
    }

    // Loads this thread's part of a tile's lse, delta, lse' and delta'. An lse of +inf makes P zero in rows past the end and
    // in rows without a visible key.
    __device__ __forceinline__ static void load_statistics(const Params& params, int32 batch,
                                                           const common::QueryStep& step, double (&x)[kOfThread]) {
        const double* arrays[4] = {params.lse, params.delta, params.lset, params.deltat};
#pragma unroll
        for (int n = 0; n < kOfThread; ++n) {
            const int32 index = threadIdx.x + n * kThreads, which = index / kBr;
            const int32 row = step.tile * kBr + index % kBr;
            const int64 at = common::first_statistic<Spec>(params, batch, step.head) + row;
            const bool valid = row < params.seqlen_q && params.lse[at] != -common::infinity<double>();
            x[n] = which == 0 ? common::infinity<double>() : 0.0;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (valid && which == i) x[n] = arrays[i][at];
        }
    }
    __device__ __forceinline__ static void store_statistics(uint32 smem, const double (&x)[kOfThread]) {
#pragma unroll
        for (int n = 0; n < kOfThread; ++n) {
            const int32 index = threadIdx.x + n * kThreads;
            if (index < 4 * kBr) store_shared(smem + kStatistics + index * 8, x[n]);
        }
    }

    // Stores zeros to the rows of a query tile that see no key, by all threads of the block.
    template <class Rows>
    __device__ __forceinline__ static void clear_hidden_rows(const Params& params, uint32 smem, const Rows& rows,
                                                             int32 lane) {
        if (!common::may_hide_rows<Spec>(params)) return;
        const auto is_hidden = [&](int32 row) {
            return load_shared<double>(smem + kStatistics + row * 8) == common::infinity<double>();
        };
        bool any = false;
        for (int32 row = lane; row < kBr; row += 32) any = any || is_hidden(row);
        if (!__any_sync(common::kFullWarp, any)) return;  // and no other warp goes on, either
        const int32 thread = threadIdx.x;
        for (int32 row = thread / 4; row < kBr; row += kThreads / 4)
            if (is_hidden(row)) rows.template clear_row<4>(row, thread % 4);
        __syncthreads();
    }
};

}  // namespace fa2::sm80_float64
