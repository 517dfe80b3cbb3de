// FlashAttention-2 forward (Algorithm 1), level 1: no tensor cores, IEEE arithmetic in float or double, any head
// dimension up to 256, any CUDA GPU.
//
//   S = scale Q K^T        P = exp(S - max)        O = P V / rowsum(P)        lse = max + log(rowsum(P))
//
// A block owns kBr query rows of one head, a warp kBr / kWarps of them: Q and O lie in registers, lanes over the head
// dimension. The loop runs over the key tiles that the rows see; K and V lie in shared memory.
//
// Shared memory: K [kBc][row] | V [kBc][row] | board of each warp.
// Barriers: one after a tile has been copied, one after it has been used.
#pragma once
#include "common/online_softmax.cuh"
#include "common/params.cuh.j2"
#include "common/scores.cuh"
#include "common/sequence.cuh"
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
    static_assert((2 * Warp::kTileElements + Spec::kWarps * Warp::kBoardElements) * sizeof(Real) == Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* k_tile = reinterpret_cast<Real*>(smem);
        Real* v_tile = k_tile + Warp::kTileElements;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        Real* board = v_tile + Warp::kTileElements + warp * Warp::kBoardElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp * Warp::kRows;
        const int32 head_kv = where.head / params.heads_per_group;
        const Real* k = params.k + params.k_strides.offset(where.batch, 0, head_kv);
        const Real* v = params.v + params.v_strides.offset(where.batch, 0, head_kv);
        const auto mask = common::mask_of<Spec>(params);

        typename Warp::Rows q, o;
        Warp::load_rows(q, params.q + params.q_strides.offset(where.batch, 0, where.head), params.q_strides.row, first_row,
                        params.seqlen_q, lane);
        Warp::clear(o);
        common::OnlineSoftmax<Real, 1, Scores::kLanesPerRow, common::exp2_accurate> softmax;
        softmax.reset();

        const auto tiles = common::key_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                         common::window_of<Spec>(params));
        for (int32 tile = tiles.begin; tile < tiles.end; ++tile) {
            __syncthreads();
            Warp::template load_tile<kThreads>(k_tile, k, params.k_strides.row, tile * kBc, params.seqlen_k);
            Warp::template load_tile<kThreads>(v_tile, v, params.v_strides.row, tile * kBc, params.seqlen_k);
            __syncthreads();

            Scores scores;
            Warp::dot(scores, q, k_tile, board, lane);
            const common::ScoreTile score_tile{where.batch, where.head, first_row, tile * kBc, lane};
            common::modify_scores<Spec>(scores, params, score_tile);
            if constexpr (!common::kModifiesScores<Spec>)
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) scores.value[j] *= params.scale_log2;
            if (tile >= tiles.full_end || (tiles.kLeftLimit && tile < tiles.full_begin))
                common::mask_scores(scores, mask, score_tile.position, -common::infinity<Real>());
            Real rescale[1];
            softmax.update(scores, rescale);
#pragma unroll
            for (int r = 0; r < Warp::kRows; ++r) {
                const Real factor = Warp::of_row(rescale[0], r);
#pragma unroll
                for (int c = 0; c < Warp::kCols; ++c) o[r][c] *= factor;
            }
            common::drop<Spec>(scores, params, score_tile);
            Warp::post(scores, board, lane);
            Warp::accumulate(o, board, v_tile, lane);
        }

        Real inverse_sum[1], lse[1];
        common::finish_rows<Spec>(softmax, params, where.head, inverse_sum, lse);
#pragma unroll
        for (int r = 0; r < Warp::kRows; ++r) {
            const Real factor = Warp::of_row(inverse_sum[0], r);
#pragma unroll
            for (int c = 0; c < Warp::kCols; ++c) o[r][c] *= factor;
        }
        Warp::store_rows(o, Real(1), params.o + params.o_strides.offset(where.batch, 0, where.head), params.o_strides.row,
                         first_row, params.seqlen_q, lane);
        const int32 row = first_row + Scores::row(0, lane);
        if (lane % Scores::kLanesPerRow == 0 && row < params.seqlen_q)
            params.lse[(static_cast<int64>(where.batch) * params.num_heads + where.head) * common::statistic_rows<Spec>(params) + row] = lse[0];
    }
};

}  // namespace fa2::simt
