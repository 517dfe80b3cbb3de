// FlashAttention-2 forward (Dao 2023, Algorithm 1) without tensor cores: IEEE arithmetic in float or double, any head
// dimension up to 256, any CUDA GPU. Read this kernel first: the other forward kernels compute the same and differ in
// how they use the hardware.
//
//   S = scale Q K^T        P = exp(S - row_max)        O = P V / row_sum        lse = row_max + log(row_sum)
//
// S and P never reach global memory: a block visits the key tiles one after the other and keeps running values of
// row_max, row_sum and O (online softmax, common/online_softmax.cuh). When a tile raises row_max, the O and row_sum
// accumulated so far are multiplied by exp(old row_max - new row_max). O is divided by row_sum once, at the end.
//
//   block   owns B_r = kBr query rows of one head; loops over all key tiles of B_c = kBc keys that these rows see
//   warp    owns kBr / kWarps of these rows; keeps their Q and O in registers
//   lane    holds columns lane, lane + 32, ... of the warp's Q and O, and part of one row of S and P (see rows.cuh)
//
//   shared memory                   written by           read by
//   K [kBc][kRowLength]             all warps            all warps, to compute S
//   V [kBc][kRowLength]             all warps            all warps, to compute O
//   scores [kWarps][kBc][rows]      each warp its part   the same warp; holds S, then P
//
// The block synchronises twice per key tile. The first barrier comes before K and V are overwritten, because another
// warp may still be reading the previous tile. The second comes before they are read, because every warp copies a part
// of them. The scores of a warp are private to it, so __syncwarp is enough for them.
#pragma once
#include "common/exceptions.cuh"
#include "common/online_softmax.cuh"
#include "common/params.cuh.j2"
#include "common/scores.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_range.cuh"
#include "simt/rows.cuh"

namespace fa2::simt {

template <class Spec>
struct Forward {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = WarpRows<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDim>;
    using Scores = typename Warp::Scores;
    static_assert((2 * Warp::kTileElements + Spec::kWarps * Warp::kScoreElements) * sizeof(Real) == Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* k_tile = reinterpret_cast<Real*>(smem);
        Real* v_tile = k_tile + Warp::kTileElements;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Real* smem_scores = v_tile + Warp::kTileElements + warp * Warp::kScoreElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp * Warp::kRows;
        const int32 head_kv = where.head / params.heads_per_group;
        if constexpr (Spec::kFallback)
            if (!common::is_exception<Spec>(params, where.batch, head_kv)) return;
        const Real* q = head_of(params.q, params.q_strides, where.batch, where.head);
        const Real* k = head_of(params.k, params.k_strides, where.batch, head_kv);
        const Real* v = head_of(params.v, params.v_strides, where.batch, head_kv);
        const auto mask = common::mask_of<Spec>(params);

        typename Warp::Rows q_rows, o_rows;
        Warp::load_rows(q_rows, q, params.q_strides.row, first_row, params.seqlen_q, lane);
        Warp::clear(o_rows);
        common::OnlineSoftmax<Real, 1, Scores::kLanesPerRow, common::exp2_accurate> softmax;
        softmax.reset();

        const auto tiles = common::key_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                         common::window_of<Spec>(params));
        for (int32 tile = tiles.begin; tile < tiles.end; ++tile) {
            __syncthreads();
            Warp::template load_tile<kThreads>(k_tile, k, params.k_strides.row, tile * kBc, params.seqlen_k);
            Warp::template load_tile<kThreads>(v_tile, v, params.v_strides.row, tile * kBc, params.seqlen_k);
            __syncthreads();

            const common::ScoreTile score_tile{where.batch, where.head, first_row, tile * kBc, lane};
            Scores scores;
            Warp::dot(scores, q_rows, k_tile, smem_scores, lane);
            common::scores_in_base2<Spec>(scores, params, score_tile);
            const bool masked = tile >= tiles.full_end || (tiles.kLeftLimit && tile < tiles.full_begin);
            if (masked) common::mask_scores(scores, mask, score_tile.position, -common::infinity<Real>());
            Real rescale[1];
            softmax.update(scores, rescale);  // S becomes P
            Warp::scale_rows(o_rows, rescale[0]);
            common::drop<Spec>(scores, params, score_tile);
            Warp::post(scores, smem_scores, lane);
            Warp::accumulate(o_rows, smem_scores, v_tile, lane);
        }

        Real inverse_sum[1], lse[1];
        common::finish_rows<Spec>(softmax, params, where.head, 0, inverse_sum, lse);
        Warp::scale_rows(o_rows, inverse_sum[0]);
        Real* o = head_of(params.o, params.o_strides, where.batch, where.head);
        Warp::store_rows(o_rows, Real(1), o, params.o_strides.row, first_row, params.seqlen_q, lane);
        const int32 row = first_row + Scores::row(0, lane);
        if (lane % Scores::kLanesPerRow == 0 && row < params.seqlen_q)
            params.lse[common::first_statistic<Spec>(params, where.batch, where.head) + row] = lse[0];
    }
};

}  // namespace fa2::simt
