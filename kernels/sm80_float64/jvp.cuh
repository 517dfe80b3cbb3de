// The forward of float64 data and its tangent on mma.sync: O and lse, and how they change along a direction (Q', K', V').
// forward.cuh has the forward, and says what limits these kernels; common/tangents.cuh has the formulas of scores.
//
//   S = scale Q K^T                          P = exp(S - lse)       O = P V
//   T = scale (Q' K^T + Q K'^T)              lse' = rowsum(P o T)   O' = (P o T) V + P V' - lse' O
//
// rowsum(P o T) and (P o T) V + P V' are sums over keys with the factor exp(-row_shift), as the row sum and O are: they are
// rescaled and divided alike. Where O and lse are given (kGiven), P is known, and the kernel computes O' and lse' alone.
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 of these rows, alone or with another warp (sharers.cuh); keeps their O and O', and S and T of a tile, in
//           registers
//
//   shared memory            written by          read by
//   powers [64]              first 64 threads    all warps, to compute exponentials (not if kGiven)
//   Q, Q' [2][kBr][kD]       all warps           each warp its rows, to compute S and T
//   K, K' [2][kBc][kD]       all warps           all warps, to compute S and T
//   V, V' [2][kBc][kDv]      all warps           all warps, to compute O and O'
//   slots of sharers [2]     two warps           the same two: sums, row statistics, and P; sums and P o T
//
// The block synchronises as in the forward.
#pragma once
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "sm80_float64/softmax.cuh"
#include "sm80_float64/tangents.cuh"

namespace fa2::sm80_float64 {

template <class Spec, bool kGiven = false, class Params = fa2::Params>
struct Jvp {
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kSharers = sharers_of_rows<Spec, kBr>();
    using RowWarps = Sharers<kSharers, kBc>;
    static constexpr int kD = common::round_up(kHeadDim, 16 * kSharers);
    static constexpr int kDv = common::round_up(kHeadDimV, 16 * kSharers);

    using QTile = Tile<kBr, kD>;
    using Queries = MovedRows<QTile, kThreads, kHeadDim>;
    using Keys = MovedRows<Tile<kBc, kD>, kThreads, kHeadDim>;
    using VTile = Tile<kBc, kDv>;
    using Values = MovedRows<VTile, kThreads, kHeadDimV>;
    static constexpr int kQ = kGiven ? 0 : kPowersBytes, kK = kQ + Queries::kBytes, kV = kK + Keys::kBytes;
    static constexpr int kSlots = kV + Values::kBytes;
    static_assert(kSlots + kBr / 16 * 2 * RowWarps::kBytes == Spec::kSharedBytes && Spec::kStages == 1);

    using Scores = typename RowWarps::Scores;
    static constexpr int kN8 = kDv / kSharers / 8, kGroup = kN8 % 4 == 0 ? 4 : 2;
    using Output = Fragment<kN8>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32;
        const int32 rows16 = thread / 32 / kSharers, half = thread / 32 % kSharers, warp_row = 16 * rows16;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp_row, batch = where.batch, head = where.head;
        const auto q = [&] {
            return Queries(smem + kQ, params.q, params.q_strides, params.qt, params.qt_strides, batch, head);
        };
        const auto k = [&] {
            return Keys(smem + kK, params.k, params.k_strides, params.kt, params.kt_strides, computed_anew(batch),
                        computed_anew(head) / params.heads_per_group);
        };
        const auto v = [&] {
            return Values(smem + kV, params.v, params.v_strides, params.vt, params.vt_strides, computed_anew(batch),
                          computed_anew(head) / params.heads_per_group);
        };
        // The warps that share these rows, for P (0) or P o T (1).
        const uint32 slots = smem + kSlots + rows16 * 2 * RowWarps::kBytes;
        const auto row_warps = [&](int which) {
            return RowWarps(slots + which * RowWarps::kBytes, half, 1 + rows16, computed_anew(lane));
        };
        const auto mask = common::mask_of<Spec>(params);

        Softmax softmax;
        softmax.reset();
        Output output, moved;
        if constexpr (!kGiven) output.fill(0.0);
        moved.fill(0.0);
        double lse_tangent[2] = {};  // rowsum(P o T), of this lane's columns
        const int64 first_stat = common::first_statistic<Spec>(params, batch, head);
        double lse[2];
        if constexpr (kGiven)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
                const int32 row = first_row + Scores::row(i, lane);
                const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<double>();
                lse[i] = valid ? params.lse[first_stat + row] : common::infinity<double>();
            }

        const auto tiles = common::key_tiles<Spec>(params, where);
        if (tiles.begin < tiles.end) {
            q().copy(where.tile, params.seqlen_q);
            k().copy(tiles.at(tiles.end - 1), params.seqlen_k);
        }
        if constexpr (!kGiven) store_powers<kThreads>(smem, thread);
        for (int32 position = tiles.end - 1; position >= tiles.begin; --position) {
            const int32 tile = tiles.at(position);
            common::cp_async_wait_all();
            __syncthreads();  // Q, K and their tangents are there, V is free
            v().copy(tile, params.seqlen_k);
            const RowWarps sharers = row_warps(0), of_tangents = row_warps(1);
            if (kGiven && common::may_hide_rows<Spec>(params) && position == tiles.end - 1) {
                q().clear_hidden_rows(sharers, warp_row, lse);
                sharers.wait();
            }

            const common::ScoreTile score_tile{batch, head, first_row, tile * kBc + sharers.first_column(), lane};
            const auto q_rows = q().along_rows(sharers, warp_row);
            const auto k_rows = k().along_rows(sharers, 0);
            Scores p = sharers.products(q_rows.own, k_rows.own);
            Scores tangents = moved_products<false>(of_tangents, q_rows, k_rows);
            common::NoSlopes slopes;
            common::move_scores<false, Spec>(p, tangents, slopes, params, score_tile);
            if (position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin))
                common::hide_scores<false, Spec>(p, mask, params, score_tile, -common::infinity<double>());
            // Row shifts move here, O and O' below, where they must lie in registers.
            bool rescales = false;
            double factors[2];
            if constexpr (kGiven)
                common::take_exponentials<Spec>(p, params, [&](int i, int) { return lse[i]; });
            else
                take_softmax(softmax, sharers, p, [&](const double (&of_rows)[2]) {
                    rescales = true;
#pragma unroll
                    for (int i = 0; i < 2; ++i) lse_tangent[i] *= factors[i] = of_rows[i];
                });
            common::weigh_tangents<Spec>(tangents, p, params);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                double share = 0.0;
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) share += tangents(i, j);
                lse_tangent[i] += share;
            }
            common::drop<Spec>(p, params, score_tile);
            common::drop<Spec>(tangents, params, score_tile);
            sharers.give(p);
            of_tangents.give(tangents);

            common::cp_async_wait_all();
            __syncthreads();  // V, its tangent, P and P o T are there, K is free
            if (position > tiles.begin) k().copy(tiles.at(position - 1), params.seqlen_k);
            const auto v_rows = v().across_rows(row_warps(0));
            const auto all_p = sharers.whole(p), all_tangents = of_tangents.whole(tangents);
            if (rescales) {
                scale_rows(output, factors);
                scale_rows(moved, factors);
            }
            if constexpr (!kGiven) add_products(output, all_p, v_rows.own);
            add_products(moved, all_tangents, v_rows.own);
            if (v_rows.moves) add_products(moved, all_p, v_rows.tangent);
        }

        const RowWarps sharers = row_warps(0), of_tangents = row_warps(1);
        double inverse_sum[2] = {1.0, 1.0};
        sharers.wait();  // P and P o T have been read
        total_of(of_tangents, lse_tangent);
        if constexpr (!kGiven) {
            double total[2] = {softmax.sum[0], softmax.sum[1]};
            total_of(sharers, total);
            common::finish_sums<Spec>(softmax, params, head, 0, inverse_sum, lse, total);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            lse_tangent[i] *= inverse_sum[i];
            lse_tangent[i] += common::sink_tangent_of<Spec>(params, head, lse[i]);
            inverse_sum[i] *= common::kept_scale<Spec>(params);
            const int32 row = first_row + Scores::row(i, lane);
            if (half > 0 || lane % 4 > 0 || row >= params.seqlen_q) continue;
            if constexpr (!kGiven) params.lse[first_stat + row] = lse[i];
            params.lset[first_stat + row] = lse_tangent[i];
        }
        const int32 first_column = half * (kDv / kSharers);
        auto* o = params.o + params.o_strides.offset(batch, 0, head);
        if constexpr (kGiven) {
            load_rows<kHeadDimV, kDv>(output, o, params.o_strides.row, first_row, first_column, lane,
                                      [&](int i) { return lse[i] != common::infinity<double>(); });
        } else {
            scale_rows(output, inverse_sum);
            store_rows<kHeadDimV, kDv>(output, o, params.o_strides.row, first_row, params.seqlen_q, first_column, lane);
        }
        scale_rows(moved, inverse_sum);
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) moved.value[n][e] -= lse_tangent[e / 2] * output.value[n][e];
        store_rows<kHeadDimV, kDv>(moved, params.ot + params.ot_strides.offset(batch, 0, head), params.ot_strides.row,
                                   first_row, params.seqlen_q, first_column, lane);
    }

  private:
    // Behind a barrier in front of each group of columns, loads of the next group take no registers of this one.
    __device__ __forceinline__ static void add_products(Output& output, const typename RowWarps::All& p,
                                                        const AcrossRows<VTile>& v) {
        add_sums<kGroup>(output, [&](Fragment<kGroup>& sums, int first8) {
            __syncwarp();
            multiply_columns(sums, p, v, 0, first8);
        });
    }
};

}  // namespace fa2::sm80_float64
