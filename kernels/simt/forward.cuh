// FlashAttention-2 forward (Dao 2023, Algorithm 1) without tensor cores: IEEE arithmetic in float or double, any head
// dimension up to 512, any CUDA GPU. Read this kernel first: the other forward kernels compute the same and differ in
// how they use the hardware.
//
//   S = scale Q K^T        P = exp(S - row_max)        O = P V / row_sum        lse = row_max + log(row_sum)
//
// S and P never reach global memory: a block visits the key tiles one after the other and keeps running values of
// row_max, row_sum and O (online softmax, common/online_softmax.cuh). When a tile raises row_max, the O and row_sum
// accumulated so far are multiplied by exp(old row_max - new row_max). O is divided by row_sum once, at the end.
//
//   block   owns B_r = kBr query rows of one head; loops over all key tiles of B_c = kBc keys that these rows see
//   warp    owns kBr / kWarps of these rows
//   lane    holds a part of O, S and P of these rows, as microtile.cuh says, and computes their products
//
//   shared memory                   written by           read by
//   Q [kBr][Rows]                   all warps            each warp its rows, to compute S
//   K [kBc][Rows]                   all warps            all warps, to compute S
//   V [kBc][RowsV]                  all warps            all warps, to compute O
//   P [kBr][kPostedLength]          each warp its rows   the same warp, to compute O
//
// The copies of K and V are asynchronous: V arrives while S is computed, and the next K while O is. The block
// synchronises twice per key tile, before it reads K and before it reads V. Either barrier follows each thread's wait
// for its own copies, so that all of the tile is there; and behind it nobody reads the previous tile of the other
// matrix any more, so that the copy of the next one can start. The P of a warp is private to it, so __syncwarp is
// enough.
//
// Where a backward is given the lse of other arithmetic, this kernel computes it again, and nothing else
// (common/own_lse.cuh). The kernels of a fallback that own queries do so ahead of their gradients (backward_dq.cuh).
#pragma once
#include "common/exceptions.cuh"
#include "common/online_softmax.cuh"
#include "common/own_lse.cuh"
#include "common/params.cuh.j2"
#include "common/scores.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "simt/microtile.cuh"

namespace fa2::simt {

template <class Spec, class Params = fa2::Params>
struct Forward {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDim>;
    using WarpV = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDimV>;
    using Rows = typename Warp::Rows;
    using RowsV = typename WarpV::Rows;
    using Scores = typename Warp::Scores;
    static constexpr int kRows = Scores::kRows;
    static constexpr int kBytes =
        ((kBr + kBc) * Rows::kRowLength + kBc * RowsV::kRowLength + kBr * Warp::kPostedLength) * sizeof(Real);
    static_assert(common::kHasOutput<Spec> ? kBytes == Spec::kSharedBytes : kBytes <= Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* q_rows = reinterpret_cast<Real*>(smem);
        Real* k_tile = q_rows + kBr * Rows::kRowLength;
        Real* v_tile = k_tile + kBc * Rows::kRowLength;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const Real* own_q = q_rows + warp * Warp::kOwn * Rows::kRowLength;
        Real* posted = v_tile + kBc * RowsV::kRowLength + warp * Warp::kPostedElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp * Warp::kOwn;
        const int32 head_kv = where.head / params.heads_per_group;
        if constexpr (Spec::kFallback)
            if (!common::is_exception<Spec>(params, where.batch, head_kv)) return;
        const Real* q = head_of(params.q, params.q_strides, where.batch, where.head);
        const Real* k = head_of(params.k, params.k_strides, where.batch, head_kv);
        const Real* v = head_of(params.v, params.v_strides, where.batch, head_kv);
        const auto copy_k = [&](Real* tile, const Real* gmem, const Strides& strides, int32 key_tile) {
            Rows::template copy<kThreads, kBc>(tile, gmem, strides.row, key_tile * kBc, params.seqlen_k);
        };
        const auto copy_v = [&](Real* tile, const Real* gmem, const Strides& strides, int32 key_tile) {
            RowsV::template copy<kThreads, kBc>(tile, gmem, strides.row, key_tile * kBc, params.seqlen_k);
        };
        const auto mask = common::mask_of<Spec>(params);

        typename WarpV::Sums output;
        output.clear();
        common::OnlineSoftmax<Real, kRows, Scores::kLanesPerRow, common::exp_accurate, true, Scores::kLaneStep> softmax;
        softmax.reset();

        const auto tiles = common::key_tiles<Spec>(params, where);
        if (tiles.begin < tiles.end) {
            Rows::template copy<kThreads, kBr>(q_rows, q, params.q_strides.row, where.tile * kBr, params.seqlen_q);
            copy_k(k_tile, k, params.k_strides, tiles.at(tiles.begin));
        }
        for (int32 position = tiles.begin; position < tiles.end; ++position) {
            const int32 tile = tiles.at(position);
            wait_for_copies();
            __syncthreads();  // Q and K are there, V is free
            if constexpr (common::kHasOutput<Spec>) copy_v(v_tile, v, params.v_strides, tile);

            const common::ScoreTile score_tile{where.batch, where.head, first_row, tile * kBc, lane};
            Scores scores;
            Warp::dot(scores, own_q, k_tile, lane);
            wait_for_copies();
            __syncthreads();  // V is there, K is free
            if (position + 1 < tiles.end) copy_k(k_tile, k, params.k_strides, tiles.next(position));

            common::natural_scores<Spec>(scores, params, score_tile);
            const bool masked = position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin);
            if (masked) common::hide_scores<false, Spec>(scores, mask, params, score_tile, -common::infinity<Real>());
            Real rescale[kRows];
            softmax.update(scores, rescale);  // S becomes P
            if constexpr (common::kHasOutput<Spec>) {
                common::drop<Spec>(scores, params, score_tile);
                Warp::post(scores, posted, lane);
                __syncwarp();
                WarpV::accumulate(output, rescale, posted, v_tile, lane);
            }
        }

        Real inverse_sum[kRows], lse[kRows];
        common::finish_rows<Spec>(softmax, params, where.head, 0, inverse_sum, lse);
        const int64 first = common::first_statistic<Spec>(params, where.batch, where.head);
        if constexpr (common::kHasOutput<Spec>) {
            output.scale(inverse_sum);
            Real* o = head_of(params.o, params.o_strides, where.batch, where.head);
            WarpV::store(output, Real(1), o, params.o_strides.row, first_row, params.seqlen_q, lane);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int32 row = first_row + Scores::row(i, lane);
            if (lane_column(lane) != 0 || row >= params.seqlen_q) continue;
            params.lse[first + row] = common::own_lse<Spec>(params, first + row, lse[i]);
        }
    }
};

}  // namespace fa2::simt
