// FlashAttention-2 backward by query tiles, level 1 (see forward.cuh): dQ in registers, and, for `single_pass`, the
// rows' share of dK and dV added atomically, first in shared, then in global memory.
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P o (dP - delta)
//   dQ = scale dS K     dV = P^T dO          dK = scale dS^T Q
//
// A block owns kBr query rows of one head, a warp kBr / kWarps of them: Q, dO and dQ lie in registers.
//
// Shared memory: K | V | dK | dV (the last two for `single_pass`), each [kBc][row] | board of each warp.
// Barriers: one after a tile has been copied (and dK, dV cleared), one after it has been used.
#pragma once
#include "common/dbias.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
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
    static_assert((kTiles * Warp::kTileElements + Spec::kWarps * Warp::kBoardElements) * sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* k_tile = reinterpret_cast<Real*>(smem);
        Real* v_tile = k_tile + Warp::kTileElements;
        Real* dk_tile = v_tile + Warp::kTileElements;
        Real* dv_tile = dk_tile + Warp::kTileElements;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Real* board = k_tile + kTiles * Warp::kTileElements + warp * Warp::kBoardElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp * Warp::kRows;
        const int32 head_kv = where.head / params.heads_per_group;
        const Real* k = params.k + params.k_strides.offset(where.batch, 0, head_kv);
        const Real* v = params.v + params.v_strides.offset(where.batch, 0, head_kv);
        const auto mask = common::mask_of<Spec>(params);

        typename Warp::Rows q, dout, dq;
        Warp::load_rows(q, params.q + params.q_strides.offset(where.batch, 0, where.head), params.q_strides.row, first_row,
                        params.seqlen_q, lane);
        Warp::load_rows(dout, params.dout + params.dout_strides.offset(where.batch, 0, where.head),
                        params.dout_strides.row, first_row, params.seqlen_q, lane);
        Warp::clear(dq);

        // A row past the end or without a visible key gets an lse of +inf: its P is zero.
        const int32 row = first_row + Scores::row(0, lane);
        const int64 stat = (static_cast<int64>(where.batch) * params.num_heads + where.head) * common::statistic_rows<Spec>(params) + row;
        const bool valid = row < params.seqlen_q && params.lse[stat] != -common::infinity<Real>();
        const Real lse_log2 = valid ? params.lse[stat] * Real(common::kLog2e) : common::infinity<Real>();
        const Real delta = valid ? params.delta[stat] : Real(0);

        const auto tiles = common::key_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                         common::window_of<Spec>(params));
        for (int32 tile = tiles.begin; tile < tiles.end; ++tile) {
            __syncthreads();
            Warp::template load_tile<kThreads>(k_tile, k, params.k_strides.row, tile * kBc, params.seqlen_k);
            Warp::template load_tile<kThreads>(v_tile, v, params.v_strides.row, tile * kBc, params.seqlen_k);
            if constexpr (kWithDkdv)
                for (int32 index = threadIdx.x; index < 2 * Warp::kTileElements; index += kThreads) dk_tile[index] = 0;
            __syncthreads();

            Scores p, ds;
            Warp::dot(p, q, k_tile, board, lane);
            Warp::dot(ds, dout, v_tile, board, lane);
            const common::ScoreTile score_tile{where.batch, where.head, first_row, tile * kBc, lane};
            if constexpr (common::kTakesWeights<Spec>) {
                Scores weights = p;
                common::Products<Spec, Scores> products;
                products.keep(p);
                const bool masked = tile >= tiles.full_end || (tiles.kLeftLimit && tile < tiles.full_begin);
                common::take_weights<false, Spec>(weights, p, masked, params, score_tile,
                                                  [&](int, int) { return lse_log2; });
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j)
                    ds.value[j] = common::weighted<Spec>(
                        weights.value[j], Spec::kDropout ? ds.value[j] : ds.value[j] - delta, -delta, params);
                if constexpr (Spec::kDbias) common::add_dbias<Spec>(ds, params, score_tile);
                products.take_derivative(ds, params);
            } else {
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j)
                    p.value[j] = common::exp2_accurate(p.value[j] * params.scale_log2 - lse_log2);
                if (tile >= tiles.full_end || (tiles.kLeftLimit && tile < tiles.full_begin)) common::mask_scores(p, mask, score_tile.position, Real(0));
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) ds.value[j] = p.value[j] * (ds.value[j] - delta);
            }

            if constexpr (kWithDkdv) {
                Warp::post(p, board, lane);
                Warp::scatter_add(dv_tile, board, dout, lane);
            }
            Warp::post(ds, board, lane);
            Warp::accumulate(dq, board, k_tile, lane);
            if constexpr (kWithDkdv) {
                Warp::scatter_add(dk_tile, board, q, lane);
                __syncthreads();
                add_tile(dk_tile, params.softmax_scale, params.dk + params.dk_strides.offset(where.batch, 0, head_kv),
                         params.dk_strides.row, tile * kBc, params.seqlen_k);
                add_tile(dv_tile, common::kept_scale<Spec>(params), params.dv + params.dv_strides.offset(where.batch, 0, head_kv),
                         params.dv_strides.row, tile * kBc, params.seqlen_k);
            }
        }
        Warp::store_rows(dq, params.softmax_scale, params.dq + params.dq_strides.offset(where.batch, 0, where.head),
                         params.dq_strides.row, first_row, params.seqlen_q, lane);
    }

    __device__ static void add_tile(const Real* tile, Real scale, Real* gmem, int64 row_stride, int32 first_row,
                                    int32 num_rows) {
        for (int32 index = threadIdx.x; index < Warp::kTileElements; index += kThreads) {
            const int32 row = first_row + index / Warp::kRowLength, column = index % Warp::kRowLength;
            if (row < num_rows && column < Warp::kHeadDim) atomicAdd(&gmem[row * row_stride + column], scale * tile[index]);
        }
    }
};

}  // namespace fa2::simt
