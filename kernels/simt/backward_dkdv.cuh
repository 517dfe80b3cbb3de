// FlashAttention-2 backward by key tiles (Dao 2023, Algorithm 2, without dQ), the second pass of `two_pass`. The kernel
// accumulates dK and dV in registers and needs no atomics. forward.cuh introduces the family.
//
//   S^T = scale K Q^T     P^T = exp(S^T - lse)     dP^T = V dO^T     dS^T = P^T o (dP^T - delta)
//   dV = P^T dO           dK = scale dS^T Q
//
//   block   owns B_c = kBc keys of one K/V head; loops over all query tiles of B_r = kBr rows that see them, in every
//           query head of the group, because dK and dV of a K/V head are sums over its query heads
//   warp    owns kBc / kWarps of these keys; keeps their K, V, dK and dV in registers
//   lane    holds columns lane, lane + 32, ... of K, V, dK and dV, and part of one row (one key) of S^T, P^T, dP^T and
//           dS^T
//
//   shared memory                   written by           read by
//   Q [kBr][kRowLength]             all warps            all warps, to compute S^T and dK
//   dO [kBr][kRowLength]            all warps            all warps, to compute dP^T and dV
//   scores [kWarps][kBr][keys]      each warp its part   the same warp; holds P^T, then dS^T
//   lse [kBr], in base 2            all warps            all warps, to compute P^T
//   delta [kBr]                     all warps            all warps, to compute dS^T
//
// The block synchronises twice per query tile: before the tile is overwritten and before it is read.
#pragma once
#include "common/exceptions.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_range.cuh"
#include "common/weights.cuh"
#include "simt/rows.cuh"

namespace fa2::simt {

template <class Spec>
struct BackwardDkdv {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = WarpRows<Real, kBc / Spec::kWarps, kBr, Spec::kHeadDim>;
    using Scores = typename Warp::Scores;
    static_assert((2 * Warp::kTileElements + Spec::kWarps * Warp::kScoreElements + 2 * kBr) * sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* q_tile = reinterpret_cast<Real*>(smem);
        Real* do_tile = q_tile + Warp::kTileElements;
        Real* all_scores = do_tile + Warp::kTileElements;
        Real* lse_tile = all_scores + Spec::kWarps * Warp::kScoreElements;
        Real* delta_tile = lse_tile + kBr;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Real* smem_scores = all_scores + warp * Warp::kScoreElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        if constexpr (Spec::kFallback)
            if (!common::is_exception<Spec>(params, where.batch, where.head)) return;
        const int32 first_key = where.tile * kBc + warp * Warp::kRows;
        const auto mask = common::mask_of<Spec>(params);

        const Real* k = head_of(params.k, params.k_strides, where.batch, where.head);
        typename Warp::Rows k_rows, v_rows, dk_rows, dv_rows;
        Warp::load_rows(k_rows, k, params.k_strides.row, first_key, params.seqlen_k, lane);
        const Real* v = head_of(params.v, params.v_strides, where.batch, where.head);
        Warp::load_rows(v_rows, v, params.v_strides.row, first_key, params.seqlen_k, lane);
        Warp::clear(dk_rows);
        Warp::clear(dv_rows);

        const auto tiles = common::query_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                           common::window_of<Spec>(params));
        for (int32 member = 0; member < params.heads_per_group; ++member) {
            const int32 head = where.head * params.heads_per_group + member;
            const Real* q = head_of(params.q, params.q_strides, where.batch, head);
            const Real* dout = head_of(params.dout, params.dout_strides, where.batch, head);
            const int64 first_stat = common::first_statistic<Spec>(params, where.batch, head);

            for (int32 tile = tiles.begin; tile < tiles.end; ++tile) {
                __syncthreads();
                Warp::template load_tile<kThreads>(q_tile, q, params.q_strides.row, tile * kBr, params.seqlen_q);
                Warp::template load_tile<kThreads>(do_tile, dout, params.dout_strides.row, tile * kBr, params.seqlen_q);
                for (int32 index = threadIdx.x; index < kBr; index += kThreads) {
                    // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
                    const int32 row = tile * kBr + index;
                    const bool valid =
                        row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<Real>();
                    lse_tile[index] =
                        valid ? params.lse[first_stat + row] * Real(common::kLog2e) : common::infinity<Real>();
                    delta_tile[index] = valid ? params.delta[first_stat + row] : Real(0);
                }
                __syncthreads();

                const common::ScoreTile score_tile{where.batch, head, tile * kBr, first_key, lane};
                Scores p, ds;
                Warp::dot(p, k_rows, q_tile, smem_scores, lane);
                Warp::dot(ds, v_rows, do_tile, smem_scores, lane);
                const common::OutsideFull outside{tiles.kLeftLimit && tile >= tiles.full_end, tile < tiles.full_begin};
                common::differentiate_softmax<true, Spec>(
                    p, ds, mask, outside, params, score_tile,
                    [&](int, int j) { return lse_tile[Scores::col(j, lane)]; },
                    [&](int, int j) { return delta_tile[Scores::col(j, lane)]; });

                Warp::post(p, smem_scores, lane);
                Warp::accumulate(dv_rows, smem_scores, do_tile, lane);
                Warp::post(ds, smem_scores, lane);
                Warp::accumulate(dk_rows, smem_scores, q_tile, lane);
            }
        }
        Warp::store_rows(dk_rows, params.softmax_scale, head_of(params.dk, params.dk_strides, where.batch, where.head),
                         params.dk_strides.row, first_key, params.seqlen_k, lane);
        Warp::store_rows(dv_rows, common::kept_scale<Spec>(params),
                         head_of(params.dv, params.dv_strides, where.batch, where.head), params.dv_strides.row,
                         first_key, params.seqlen_k, lane);
    }
};

}  // namespace fa2::simt
