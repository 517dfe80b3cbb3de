// FlashAttention-2 backward by query tiles. The kernel accumulates dQ in registers (the first pass of `two_pass`). For
// `single_pass` it also adds the contribution of its rows to dK and dV, with atomics: the warps' sums meet in shared
// memory, the blocks' sums in global memory. Algorithm 2 (Dao 2023) does the opposite: a block owns keys and adds to dQ
// atomically. forward.cuh introduces the family.
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P o (dP - delta)
//   dQ = scale dS K     dV = P^T dO          dK = scale dS^T Q
//
// delta = rowsum(dO o O) comes from common/delta.cuh, so that dS needs no second pass over a row.
//
//   block   owns B_r = kBr query rows of one head; loops over all key tiles of B_c = kBc keys that these rows see
//   warp    owns kBr / kWarps of these rows; keeps their Q, dO and dQ in registers
//   lane    holds columns lane, lane + 32, ... of Q, dO and dQ, part of one row of S, P, dP and dS, and that row's lse
//           and delta
//
//   shared memory                   written by           read by
//   K [kBc][kRowLength]             all warps            all warps, to compute S and dQ
//   V [kBc][kRowLength]             all warps            all warps, to compute dP
//   dK [kBc][kRowLength]            all warps            all warps, to add it to global memory (`single_pass` only)
//   dV [kBc][kRowLength]            all warps            all warps, to add it to global memory (`single_pass` only)
//   scores [kWarps][kBc][rows]      each warp its part   the same warp; holds P (`single_pass` only), then dS
//
// The block synchronises twice per key tile: before K and V are overwritten (and dK and dV cleared), and before they
// are read. `single_pass` has a third barrier: all warps must have added to dK and dV before these leave shared memory.
#pragma once
#include "common/dbias.cuh"
#include "common/exceptions.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_range.cuh"
#include "common/weights.cuh"
#include "simt/rows.cuh"

namespace fa2::simt {

template <class Spec, bool kWithDkdv = false, class Params = fa2::Params>
struct BackwardDq {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = WarpRows<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDim>;
    using Scores = typename Warp::Scores;
    static constexpr int kTiles = kWithDkdv ? 4 : 2;
    static_assert((kTiles * Warp::kTileElements + Spec::kWarps * Warp::kScoreElements) * sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* k_tile = reinterpret_cast<Real*>(smem);
        Real* v_tile = k_tile + Warp::kTileElements;
        Real* dk_tile = v_tile + Warp::kTileElements;
        Real* dv_tile = dk_tile + Warp::kTileElements;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Real* smem_scores = k_tile + kTiles * Warp::kTileElements + warp * Warp::kScoreElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp * Warp::kRows;
        const int32 head_kv = where.head / params.heads_per_group;
        if constexpr (Spec::kFallback)
            if (!common::is_exception<Spec>(params, where.batch, head_kv)) return;
        const Real* k = head_of(params.k, params.k_strides, where.batch, head_kv);
        const Real* v = head_of(params.v, params.v_strides, where.batch, head_kv);
        const auto mask = common::mask_of<Spec>(params);

        const Real* q = head_of(params.q, params.q_strides, where.batch, where.head);
        typename Warp::Rows q_rows, do_rows, dq_rows;
        Warp::load_rows(q_rows, q, params.q_strides.row, first_row, params.seqlen_q, lane);
        const Real* dout = head_of(params.dout, params.dout_strides, where.batch, where.head);
        Warp::load_rows(do_rows, dout, params.dout_strides.row, first_row, params.seqlen_q, lane);
        Warp::clear(dq_rows);

        // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
        const int32 row = first_row + Scores::row(0, lane);
        const int64 stat = common::first_statistic<Spec>(params, where.batch, where.head) + row;
        const bool valid = row < params.seqlen_q && params.lse[stat] != -common::infinity<Real>();
        const Real lse_log2 = valid ? params.lse[stat] * Real(common::kLog2e) : common::infinity<Real>();
        const Real delta = valid ? params.delta[stat] : Real(0);

        const auto tiles = common::key_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                         common::window_of<Spec>(params));
        common::clear_skipped_dbias<Spec>(params, {where.batch, where.head, first_row, 0, lane}, Warp::kRows,
                                          tiles.begin * kBc, tiles.end * kBc);
        for (int32 tile = tiles.begin; tile < tiles.end; ++tile) {
            __syncthreads();
            Warp::template load_tile<kThreads>(k_tile, k, params.k_strides.row, tile * kBc, params.seqlen_k);
            Warp::template load_tile<kThreads>(v_tile, v, params.v_strides.row, tile * kBc, params.seqlen_k);
            if constexpr (kWithDkdv)
                for (int32 index = threadIdx.x; index < 2 * Warp::kTileElements; index += kThreads) dk_tile[index] = 0;
            __syncthreads();

            const common::ScoreTile score_tile{where.batch, where.head, first_row, tile * kBc, lane};
            Scores p, ds;
            Warp::dot(p, q_rows, k_tile, smem_scores, lane);
            Warp::dot(ds, do_rows, v_tile, smem_scores, lane);
            common::SavedScores<Spec, Scores> saved;
            saved.save(p);
            const common::OutsideFull outside{tile >= tiles.full_end, tiles.kLeftLimit && tile < tiles.full_begin};
            common::differentiate_softmax<false, Spec>(
                p, ds, mask, outside, params, score_tile, [&](int, int) { return lse_log2; },
                [&](int, int) { return delta; });
            common::write_dbias<Spec>(ds, params, score_tile);
            saved.take_derivative(ds, params);

            if constexpr (kWithDkdv) {
                Warp::post(p, smem_scores, lane);
                Warp::scatter_add(dv_tile, smem_scores, do_rows, lane);
            }
            Warp::post(ds, smem_scores, lane);
            Warp::accumulate(dq_rows, smem_scores, k_tile, lane);
            if constexpr (kWithDkdv) {
                Warp::scatter_add(dk_tile, smem_scores, q_rows, lane);
                __syncthreads();
                add_tile(dk_tile, params.softmax_scale, head_of(params.dk, params.dk_strides, where.batch, head_kv),
                         params.dk_strides.row, tile * kBc, params.seqlen_k);
                add_tile(dv_tile, common::kept_scale<Spec>(params),
                         head_of(params.dv, params.dv_strides, where.batch, head_kv), params.dv_strides.row, tile * kBc,
                         params.seqlen_k);
            }
        }
        Warp::store_rows(dq_rows, params.softmax_scale, head_of(params.dq, params.dq_strides, where.batch, where.head),
                         params.dq_strides.row, first_row, params.seqlen_q, lane);
    }

    __device__ static void add_tile(const Real* tile, Real scale, Real* gmem, int64 row_stride, int32 first_row,
                                    int32 num_rows) {
        for (int32 index = threadIdx.x; index < Warp::kTileElements; index += kThreads) {
            const int32 row = first_row + index / Warp::kRowLength, column = index % Warp::kRowLength;
            if (row < num_rows && column < Warp::kHeadDim)
                atomicAdd(&gmem[row * row_stride + column], scale * tile[index]);
        }
    }
};

}  // namespace fa2::simt
