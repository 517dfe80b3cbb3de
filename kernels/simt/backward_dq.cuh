// FlashAttention-2 backward by query tiles. The kernel accumulates dQ in registers (the first pass of `two_pass`). For
// `single_pass` it also adds the contribution of its rows to dK and dV, with atomics in global memory, where the sums
// of all blocks meet. Algorithm 2 (Dao 2023) does the opposite: a block owns keys and adds to dQ atomically. forward.cuh
// introduces the family.
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P o (dP - delta)
//   dQ = scale dS K     dV = P^T dO          dK = scale dS^T Q
//
// delta = rowsum(dO o O) comes from common/delta.cuh, so that dS needs no second pass over a row. A block of a fallback
// first computes the lse of its rows again (common/own_lse.cuh), with the forward's loop.
//
//   block   owns B_r = kBr query rows of one head; loops over all key tiles of B_c = kBc keys that these rows see
//   warp    owns kBr / kWarps of these rows, and (`single_pass` only) some keys of each tile, or some columns of them
//   lane    holds a part of dQ, S, P, dP and dS of these rows, as microtile.cuh says, and their lse and delta;
//           (`single_pass` only) for a while a part of dV, then of dK, of its warp's keys
//
//   shared memory                   written by           read by
//   Q [kBr][Rows]                   all warps            each warp its rows, to compute S; all warps, to compute dK
//   dO [kBr][RowsV]                 all warps            each warp its rows, to compute dP; all warps, to compute dV
//   K [kBc][Rows]                   all warps            all warps, to compute S and dQ
//   V [kBc][RowsV]                  all warps            all warps, to compute dP
//   posted [kBr][kPostedLength]     each warp its rows   the same warp, or all warps (`single_pass` only); holds P
//                                                        (`single_pass` only), then dS
//
// As in the forward, the block synchronises before it reads V and before it reads K, and behind either barrier the copy
// of the next tile of the other matrix starts. `single_pass` has three barriers more, because all warps read what each
// of them posts: behind P, before dS takes the place of P, and behind dS.
#pragma once
#include "common/dbias.cuh"
#include "common/exceptions.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "common/weights.cuh"
#include "simt/forward.cuh"
#include "simt/hidden_rows.cuh"
#include "simt/microtile.cuh"

namespace fa2::simt {

// Warps that share their keys and divide the chunks of columns of dK and dV. A lane that has more keys and fewer columns
// loads fewer numbers for as many products: the fewest where a warp has 16 keys.
__host__ __device__ constexpr int sharers_of_keys(int keys_of_warp, int warps, int chunks) {
    int sharers = 1;
    while (2 * sharers * keys_of_warp <= 16 && warps % (2 * sharers) == 0 && chunks % (2 * sharers) == 0) sharers *= 2;
    return sharers;
}

template <class Spec, bool kWithDkdv = false, class Params = fa2::Params>
struct BackwardDq {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDim>;
    using WarpV = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDimV>;
    using Rows = typename Warp::Rows;
    using RowsV = typename WarpV::Rows;
    using Scores = typename Warp::Scores;
    static constexpr int kRows = Scores::kRows;
    static_assert(((kBr + kBc) * (Rows::kRowLength + RowsV::kRowLength) + kBr * Warp::kPostedLength) * sizeof(Real) ==
                  Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        if constexpr (common::kComputesLse<Spec>) {
            Forward<Spec, Params>::run(params, smem);
            __syncthreads();  // lse is there, and shared memory is free
        }
        Real* q_rows = reinterpret_cast<Real*>(smem);
        Real* do_rows = q_rows + kBr * Rows::kRowLength;
        Real* k_tile = do_rows + kBr * RowsV::kRowLength;
        Real* v_tile = k_tile + kBc * Rows::kRowLength;
        Real* all_posted = v_tile + kBc * RowsV::kRowLength;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int32 own = warp * Warp::kOwn * Rows::kRowLength, own_v = warp * Warp::kOwn * RowsV::kRowLength;
        Real* posted = all_posted + warp * Warp::kPostedElements;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr + warp * Warp::kOwn;
        const int32 head_kv = where.head / params.heads_per_group;
        if constexpr (Spec::kFallback)
            if (!common::is_exception<Spec>(params, where.batch, head_kv)) return;
        const Real* k = head_of(params.k, params.k_strides, where.batch, head_kv);
        const Real* v = head_of(params.v, params.v_strides, where.batch, head_kv);
        const auto copy_k = [&](Real* tile, const Real* gmem, const Strides& strides, int32 key_tile) {
            Rows::template copy<kThreads, kBc>(tile, gmem, strides.row, key_tile * kBc, params.seqlen_k);
        };
        const auto copy_v = [&](Real* tile, const Real* gmem, const Strides& strides, int32 key_tile) {
            RowsV::template copy<kThreads, kBc>(tile, gmem, strides.row, key_tile * kBc, params.seqlen_k);
        };
        const auto mask = common::mask_of<Spec>(params);

        // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
        const int64 first_stat = common::first_statistic<Spec>(params, where.batch, where.head);
        Real lse[kRows], delta[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int32 row = first_row + Scores::row(i, lane);
            const bool valid = row < params.seqlen_q && params.lse[first_stat + row] != -common::infinity<Real>();
            lse[i] = valid ? params.lse[first_stat + row] : common::infinity<Real>();
            delta[i] = valid ? params.delta[first_stat + row] : Real(0);
        }
        typename Warp::Sums dq;
        dq.clear();

        const auto tiles = common::key_tiles<Spec>(params, where);
        common::clear_skipped_dbias<Spec>(params, {where.batch, where.head, first_row, 0, lane}, Warp::kOwn,
                                          tiles.begin * kBc, tiles.end * kBc);
        if (tiles.begin < tiles.end) {
            const Real* q = head_of(params.q, params.q_strides, where.batch, where.head);
            Rows::template copy<kThreads, kBr>(q_rows, q, params.q_strides.row, where.tile * kBr, params.seqlen_q);
            const Real* dout = head_of(params.dout, params.dout_strides, where.batch, where.head);
            RowsV::template copy<kThreads, kBr>(do_rows, dout, params.dout_strides.row, where.tile * kBr,
                                                params.seqlen_q);
            copy_v(v_tile, v, params.v_strides, tiles.at(tiles.begin));
        }
        for (int32 position = tiles.begin; position < tiles.end; ++position) {
            const int32 tile = tiles.at(position);
            wait_for_copies();
            __syncthreads();  // Q, dO and V are there, K and what was posted is free
            copy_k(k_tile, k, params.k_strides, tile);
            if (common::may_hide_rows<Spec>(params) && position == tiles.begin) {
                clear_hidden_rows<Scores, Rows>(q_rows + own, lse, lane);
                clear_hidden_rows<Scores, RowsV>(do_rows + own_v, lse, lane);
            }

            const common::ScoreTile score_tile{where.batch, where.head, first_row, tile * kBc, lane};
            Scores p, ds;
            WarpV::dot(ds, do_rows + own_v, v_tile, lane);
            wait_for_copies();
            __syncthreads();  // K is there, V is free
            if (position + 1 < tiles.end) copy_v(v_tile, v, params.v_strides, tiles.next(position));

            Warp::dot(p, q_rows + own, k_tile, lane);
            common::SavedScores<Spec, Scores> saved;
            saved.save(p);
            const common::OutsideFull outside{position >= tiles.full_end,
                                              tiles.kLeftLimit && position < tiles.full_begin};
            common::differentiate_softmax<false, Spec>(
                p, ds, mask, outside, params, score_tile, [&](int i, int) { return lse[i]; },
                [&](int i, int) { return delta[i]; });
            common::write_dbias<Spec>(ds, params, score_tile);
            saved.take_derivative(ds, params, score_tile);

            if constexpr (kWithDkdv) {
                Warp::post(p, posted, lane);
                __syncthreads();  // P is there
                add_to_keys<Spec::kHeadDimV>(all_posted, do_rows, common::kept_scale<Spec>(params),
                                             head_of(params.dv, params.dv_strides, where.batch, head_kv),
                                             params.dv_strides.row, tile * kBc, params.seqlen_k);
                __syncthreads();  // P is used
                Warp::post(ds, posted, lane);
                __syncthreads();  // dS is there
                add_to_keys<Spec::kHeadDim>(all_posted, q_rows, params.softmax_scale,
                                            head_of(params.dk, params.dk_strides, where.batch, head_kv),
                                            params.dk_strides.row, tile * kBc, params.seqlen_k);
            } else {
                Warp::post(ds, posted, lane);
                __syncwarp();
            }
            Warp::accumulate(dq, posted, k_tile, lane);
        }
        Warp::store(dq, params.softmax_scale, head_of(params.dq, params.dq_strides, where.batch, where.head),
                    params.dq_strides.row, first_row, params.seqlen_q, lane);
    }

    // True if the GPU adds four neighbouring elements at a time.
#if __CUDA_ARCH__ >= 900
    static constexpr bool kAddsVectors = sizeof(Real) == 4;
#else
    static constexpr bool kAddsVectors = false;
#endif

    // Adds scale * posted^T rows to the rows of dK or dV in global memory from `first_key` on.
    template <int kHeadDim>
    __device__ __forceinline__ static void add_to_keys(const Real* posted, const Real* rows, Real scale, Real* gmem,
                                                       int64 row_stride, int32 first_key, int32 num_keys) {
        using RowsOf = SharedRows<Real, kHeadDim>;
        constexpr int kChunksOfRow = RowsOf::kColumns / (8 * RowsOf::kVector);
        constexpr int kSharers = sharers_of_keys(kBc / Spec::kWarps, Spec::kWarps, kChunksOfRow);
        using Keys = Microtile<Real, kBc / Spec::kWarps * kSharers, kBr, kHeadDim>;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp / kSharers * Keys::kOwn;
        const bool in_vectors = RowsOf::in_vectors(gmem, row_stride);
        constexpr int kChunks = kChunksOfRow / kSharers;  // of this warp
        constexpr int kFitting = common::min_of(Keys::chunks_beside(sizeof(typename Warp::Sums)), kChunks);
        constexpr int kAtOnce = kChunks % kFitting == 0 ? kFitting : 1;
        const int32 own_column = Keys::Sums::col(warp % kSharers * kChunks, 0);
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk += kAtOnce) {
            typename Keys::template SumsOf<kAtOnce> sums;
            sums.clear();
            const int32 first_column = own_column + Keys::Sums::col(chunk, 0);
            Keys::template accumulate_transposed<Warp::kPostedLength>(sums, posted + own, rows + first_column, lane);
#pragma unroll
            for (int i = 0; i < Keys::kRows; ++i) {
                const int32 key = first_key + own + Keys::adjacent_row(lane) + i;
                if (key >= num_keys) break;
#pragma unroll
                for (int c = 0; c < kAtOnce; ++c) {
                    const int32 column = own_column + Keys::Sums::col(chunk + c, lane);
                    const auto x = sums.scaled(i, c, scale);
                    Real* first = gmem + key * row_stride + column;
                    if constexpr (kAddsVectors) {
                        if (in_vectors) {
                            if (column < kHeadDim) common::add_global(first, x.item);
                            continue;
                        }
                    }
#pragma unroll
                    for (int v = 0; v < Keys::kVector; ++v)
                        if (column + v < kHeadDim) atomicAdd(first + v, x.item[v]);
                }
            }
        }
    }
};

}  // namespace fa2::simt
