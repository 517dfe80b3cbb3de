// FlashAttention-2 backward by key tiles, level 1 (see forward.cuh): dK and dV in registers, no atomics (second pass of
// `two_pass`).
//
//   S^T = K Q^T     P^T = exp(scale S^T - lse)     dP^T = V dO^T     dS^T = P^T o (dP^T - delta)
//   dV = P^T dO     dK = scale dS^T Q
//
// A block owns kBc keys of one K/V head, a warp kBc / kWarps of them: K, V, dK and dV lie in registers. The loop runs over
// the query tiles of all query heads of the group, whose Q and dO lie in shared memory.
//
// Shared memory: Q [kBr][row] | dO [kBr][row] | board of each warp | lse [kBr] | delta [kBr].
// Barriers: one after a tile has been copied, one after it has been used.
#pragma once
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
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
    static_assert((2 * Warp::kTileElements + Spec::kWarps * Warp::kBoardElements + 2 * kBr) * sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* q_tile = reinterpret_cast<Real*>(smem);
        Real* do_tile = q_tile + Warp::kTileElements;
        Real* boards = do_tile + Warp::kTileElements;
        Real* lse_tile = boards + Spec::kWarps * Warp::kBoardElements;
        Real* delta_tile = lse_tile + kBr;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Real* board = boards + warp * Warp::kBoardElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_key = where.tile * kBc + warp * Warp::kRows;
        const auto mask = common::mask_of<Spec>(params);

        typename Warp::Rows k, v, dk, dv;
        Warp::load_rows(k, params.k + params.k_strides.offset(where.batch, 0, where.head), params.k_strides.row, first_key,
                        params.seqlen_k, lane);
        Warp::load_rows(v, params.v + params.v_strides.offset(where.batch, 0, where.head), params.v_strides.row, first_key,
                        params.seqlen_k, lane);
        Warp::clear(dk);
        Warp::clear(dv);

        const auto tiles = common::query_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                           common::window_of<Spec>(params));
        for (int32 member = 0; member < params.heads_per_group; ++member) {
            const int32 head = where.head * params.heads_per_group + member;
            const Real* q = params.q + params.q_strides.offset(where.batch, 0, head);
            const Real* dout = params.dout + params.dout_strides.offset(where.batch, 0, head);
            const int64 first_stat = (static_cast<int64>(where.batch) * params.num_heads + head) * common::statistic_rows<Spec>(params);

            for (int32 tile = tiles.begin; tile < tiles.end; ++tile) {
                __syncthreads();
                Warp::template load_tile<kThreads>(q_tile, q, params.q_strides.row, tile * kBr, params.seqlen_q);
                Warp::template load_tile<kThreads>(do_tile, dout, params.dout_strides.row, tile * kBr, params.seqlen_q);
                for (int32 index = threadIdx.x; index < kBr; index += kThreads) {
                    // A row past the end or without a visible key gets an lse of +inf: its P is zero.
                    const int32 row = tile * kBr + index;
                    const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<Real>();
                    lse_tile[index] = valid ? params.lse[first_stat + row] * Real(common::kLog2e) : common::infinity<Real>();
                    delta_tile[index] = valid ? params.delta[first_stat + row] : Real(0);
                }
                __syncthreads();

                Scores p, ds;
                Warp::dot(p, k, q_tile, board, lane);
                Warp::dot(ds, v, do_tile, board, lane);
                const common::ScoreTile score_tile{where.batch, head, tile * kBr, first_key, lane};
                if constexpr (common::kTakesWeights<Spec>) {
                    Scores weights = p;
                    const bool masked = tile < tiles.full_begin || (tiles.kLeftLimit && tile >= tiles.full_end);
                    common::take_weights<true, Spec>(weights, p, masked, params, score_tile,
                                                     [&](int, int j) { return lse_tile[Scores::col(j, lane)]; });
#pragma unroll
                    for (int j = 0; j < Scores::kCols; ++j) {
                        const Real delta = delta_tile[Scores::col(j, lane)];
                        ds.value[j] = common::weighted<Spec>(
                            weights.value[j], Spec::kDropout ? ds.value[j] : ds.value[j] - delta, -delta, params);
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < Scores::kCols; ++j)
                        p.value[j] = common::exp2_accurate(p.value[j] * params.scale_log2 - lse_tile[Scores::col(j, lane)]);
                    if (tile < tiles.full_begin || (tiles.kLeftLimit && tile >= tiles.full_end)) common::mask_transposed(p, mask, score_tile.position, Real(0));
#pragma unroll
                    for (int j = 0; j < Scores::kCols; ++j)
                        ds.value[j] = p.value[j] * (ds.value[j] - delta_tile[Scores::col(j, lane)]);
                }

                Warp::post(p, board, lane);
                Warp::accumulate(dv, board, do_tile, lane);
                Warp::post(ds, board, lane);
                Warp::accumulate(dk, board, q_tile, lane);
            }
        }
        Warp::store_rows(dk, params.softmax_scale, params.dk + params.dk_strides.offset(where.batch, 0, where.head),
                         params.dk_strides.row, first_key, params.seqlen_k, lane);
        Warp::store_rows(dv, common::kept_scale<Spec>(params), params.dv + params.dv_strides.offset(where.batch, 0, where.head),
                         params.dv_strides.row, first_key, params.seqlen_k, lane);
    }
};

}  // namespace fa2::simt
