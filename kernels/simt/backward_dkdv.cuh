// FlashAttention-2 backward by key tiles (Dao 2023, Algorithm 2, without dQ), the second pass of `two_pass`. The kernel
// accumulates dK and dV in registers and needs no atomics. forward.cuh introduces the family.
//
//   S^T = scale K Q^T     P^T = exp(S^T - lse)     dP^T = V dO^T     dS^T = P^T o (dP^T - delta)
//   dV = P^T dO           dK = scale dS^T Q
//
//   block   owns B_c = kBc keys of one K/V head; loops over all query tiles of B_r = kBr rows that see them, in every
//           query head of the group, because dK and dV of a K/V head are sums over its query heads
//   warp    owns kBc / kWarps of these keys
//   lane    holds a part of dK, dV, S^T, P^T, dP^T and dS^T of these keys, as microtile.cuh says
//
//   shared memory                   written by           read by
//   K [kBc][Rows]                   all warps            each warp its rows, to compute S^T
//   V [kBc][RowsV]                  all warps            each warp its rows, to compute dP^T
//   Q [kBr][Rows]                   all warps            all warps, to compute S^T and dK
//   dO [kBr][RowsV]                 all warps            all warps, to compute dP^T and dV
//   posted [kBc][kPostedLength]     each warp its rows   the same warp; holds P^T, then dS^T
//   lse [kBr]                       all warps            all warps, to compute P^T
//   delta [kBr]                     all warps            all warps, to compute dS^T
//
// Where the registers of a lane do not hold both gradients (double, beyond 448 columns each), the block goes over the
// query tiles twice: for dV, and then for dK.
//
// The block synchronises three times per query tile: before it reads dO, where the copy of Q starts; before it reads Q;
// and when dV is computed, where the copy of the next dO starts, with its lse and delta.
#pragma once
#include "common/exceptions.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "common/weights.cuh"
#include "simt/hidden_rows.cuh"
#include "simt/microtile.cuh"

namespace fa2::simt {

template <class Spec>
struct BackwardDkdv {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    static constexpr bool kTogether =
        registers_of_row<Real>(Spec::kHeadDim) + registers_of_row<Real>(Spec::kHeadDimV) <= 224;
    using Warp = Microtile<Real, kBc / Spec::kWarps, kBr, Spec::kHeadDim, kTogether ? Spec::kHeadDimV : 0>;
    using WarpV = Microtile<Real, kBc / Spec::kWarps, kBr, Spec::kHeadDimV, kTogether ? Spec::kHeadDim : 0>;
    using Rows = typename Warp::Rows;
    using RowsV = typename WarpV::Rows;
    using Scores = typename Warp::Scores;
    static_assert(((kBr + kBc) * (Rows::kRowLength + RowsV::kRowLength) + kBc * Warp::kPostedLength + 2 * kBr) *
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

    // kOfKeys, kOfValues: whether dK and dV are computed.
    template <bool kOfKeys, bool kOfValues>
    __device__ __forceinline__ static void sum(const Params& params, char* smem) {
        Real* k_rows = reinterpret_cast<Real*>(smem);
        Real* v_rows = k_rows + kBc * Rows::kRowLength;
        Real* q_tile = v_rows + kBc * RowsV::kRowLength;
        Real* do_tile = q_tile + kBr * Rows::kRowLength;
        Real* all_posted = do_tile + kBr * RowsV::kRowLength;
        Real* lse_tile = all_posted + kBc * Warp::kPostedLength;
        Real* delta_tile = lse_tile + kBr;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int32 own = warp * Warp::kOwn * Rows::kRowLength, own_v = warp * Warp::kOwn * RowsV::kRowLength;
        Real* posted = all_posted + warp * Warp::kPostedElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        if constexpr (Spec::kFallback)
            if (!common::is_exception<Spec>(params, where.batch, where.head)) return;
        const int32 first_key = where.tile * kBc + warp * Warp::kOwn;
        const auto mask = common::mask_of<Spec>(params);

        const auto copy_q = [&](int32 head, int32 tile) {
            const Real* q = head_of(params.q, params.q_strides, where.batch, head);
            Rows::template copy<kThreads, kBr>(q_tile, q, params.q_strides.row, tile * kBr, params.seqlen_q);
        };
        // Copies dO, lse and delta, which are free at the same time.
        const auto copy_dout = [&](int32 head, int32 tile) {
            const Real* dout = head_of(params.dout, params.dout_strides, where.batch, head);
            RowsV::template copy<kThreads, kBr>(do_tile, dout, params.dout_strides.row, tile * kBr, params.seqlen_q);
            const int64 first_stat = common::first_statistic<Spec>(params, where.batch, head);
            for (int32 index = threadIdx.x; index < kBr; index += kThreads) {
                // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
                const int32 row = tile * kBr + index;
                const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<Real>();
                lse_tile[index] = valid ? params.lse[first_stat + row] : common::infinity<Real>();
                delta_tile[index] = valid ? params.delta[first_stat + row] : Real(0);
            }
        };

        typename Warp::Sums dk;
        typename WarpV::Sums dv;
        dk.clear();
        dv.clear();

        const auto tiles = common::query_tiles<Spec>(params, where);
        int32 head = where.head * params.heads_per_group, tile = tiles.begin;
        if (tiles.begin < tiles.end) {
            const Real* k = head_of(params.k, params.k_strides, where.batch, where.head);
            Rows::template copy<kThreads, kBc>(k_rows, k, params.k_strides.row, where.tile * kBc, params.seqlen_k);
            const Real* v = head_of(params.v, params.v_strides, where.batch, where.head);
            RowsV::template copy<kThreads, kBc>(v_rows, v, params.v_strides.row, where.tile * kBc, params.seqlen_k);
            const auto step = tiles.at({head, tile});
            copy_dout(step.head, step.tile);
        }
        // The query tiles of one head of the group, then those of the next.
        for (int32 steps = tiles.num_heads(params.heads_per_group) * (tiles.end - tiles.begin); steps > 0; --steps) {
            const auto step = tiles.at({head, tile});
            wait_for_copies();
            __syncthreads();  // K, V, dO, lse and delta are there, Q is free
            copy_q(step.head, step.tile);
            clear_hidden_tile<Spec, RowsV>(params, do_tile, lse_tile, lane);

            const common::ScoreTile score_tile{where.batch, step.head, step.tile * kBr, first_key, lane};
            Scores p, ds;
            if constexpr (kOfKeys)
                WarpV::dot(ds, v_rows + own_v, do_tile, lane);
            else
                WarpV::clear(ds);
            wait_for_copies();
            __syncthreads();  // Q is there
            clear_hidden_tile<Spec, Rows>(params, q_tile, lse_tile, lane);

            Warp::dot(p, k_rows + own, q_tile, lane);
            const common::OutsideFull outside{tiles.kLeftLimit && tile >= tiles.full_end, tile < tiles.full_begin};
            common::differentiate_softmax<true, Spec>(
                p, ds, mask, outside, params, score_tile, [&](int, int j) { return lse_tile[Scores::col(j, lane)]; },
                [&](int, int j) { return delta_tile[Scores::col(j, lane)]; });

            if constexpr (kOfValues) {
                Warp::post(p, posted, lane);
                __syncwarp();
                WarpV::accumulate(dv, posted, do_tile, lane);
            }
            if (++tile == tiles.end) {
                tile = tiles.begin;
                ++head;
            }
            __syncthreads();  // dO, lse, delta and what was posted are free
            if (steps > 1) {
                const auto next = tiles.at({head, tile});
                copy_dout(next.head, next.tile);
            }
            if constexpr (kOfKeys) {
                Warp::post(ds, posted, lane);
                __syncwarp();
                Warp::accumulate(dk, posted, q_tile, lane);
            }
        }
        if constexpr (kOfKeys)
            Warp::store(dk, params.softmax_scale, head_of(params.dk, params.dk_strides, where.batch, where.head),
                        params.dk_strides.row, first_key, params.seqlen_k, lane);
        if constexpr (kOfValues)
            WarpV::store(dv, common::kept_scale<Spec>(params),
                         head_of(params.dv, params.dv_strides, where.batch, where.head), params.dv_strides.row,
                         first_key, params.seqlen_k, lane);
    }
};

}  // namespace fa2::simt
