// FlashAttention-2 backward by query tiles on mma.sync: dQ without atomics, the first pass of `two_pass`.
//
//   S = Q K^T        P = exp(scale S - lse)        dP = dO V^T        dS = P o (dP - delta)        dQ = scale dS K
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   group   kSharers warps, one up to 256 columns and two beyond, own kGroupRows of these rows
//   warp    computes S, dP and dS for its part of the tile's keys, exchanges dS with the other sharer, and accumulates its
//           part of the columns of dQ; keeps these, lse and delta in registers
//
// The structure is that of the forward (forward_rows.cuh). lse and delta are known in advance, so dQ is all that a warp
// carries from one key tile to the next.
//
//   shared memory                     written by          read by
//   Q [kBr][kD]                       all warps           each group its rows, to compute S
//   dO [kBr][kDv]                     all warps           each group its rows, to compute dP
//   (K, V) [kStages], [kBc][kD, kDv]  all warps           all warps, to compute S and dQ (K) and dP (V)
//   dS per warp, in register order    each warp its part  the other sharer, to compute dQ
//
// At the end dQ is staged in the rows of Q.
//
// Barriers: as in the forward, one __syncthreads per key tile, in the ring of K and V, and a second one where V and K
// alternate. Named barrier 1 + group: both parts of dS are written.
#pragma once
#include "common/dbias.cuh"
#include "common/mask.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "common/weights.cuh"
#include "sm80/hidden_rows.cuh"
#include "sm80/key_ring.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

template <class Spec>
struct BackwardDq {
    using Element = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = Spec::kWarps * 32;
    static constexpr int kSharers = sharers_of_gradient(kD), kGroupThreads = 32 * kSharers;
    static constexpr int kGroupRows = kBr / (Spec::kWarps / kSharers), kM16 = kGroupRows / 16;
    static constexpr int kPartKeys = kBc / kSharers, kPartCols = kD / kSharers;

    using QTile = SmemTile<kBr, kD>;
    using DoTile = SmemTile<kBr, kDv>;
    static constexpr int kQ = 0;
    static constexpr int kDo = QTile::kBytes;
    static constexpr int kKeys = kDo + DoTile::kBytes;
    using Ring = KeyRing<common::KeyTiles<Spec>, Element, kBc, Spec::kStages, kThreads, kHeadDim, kHeadDimV, NoOthers,
                         turns_of(common::max_of(kD, kDv), Spec::kStages, Turns::kValuesFirst)>;
    using KTile = typename Ring::KTile;
    using VTile = typename Ring::VTile;
    static constexpr int kDs = kKeys + Ring::kBytes;
    static constexpr int kSharedBytes = kDs + (kSharers > 1 ? kBr * kBc * 2 : 0);
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kPartKeys / 8>;
    using Gradient = QuadFragment<kPartCols / 8>;

    // dQ += dS K over one part of the tile's keys, at which `k` starts.
    template <class FetchDs>
    __device__ static void accumulate(Gradient (&dq)[kM16], const LaneAddress<KTile, MatrixOrder::kRowsFirst>& k,
                                      int32 first_c16, FetchDs fetch_ds) {
        multiply<Element, kPartKeys / 16>(dq, fetch_ds,
                                          [&](int n, int kk) { return ldmatrix_x4<true>(k.at(kk, first_c16 + n)); });
    }

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 group = warp / kSharers, part = warp % kSharers, first_part_key = part * kPartKeys;
        const int32 first_row = where.tile * kBr, group_row = group * kGroupRows;
        const int32 head_kv = where.head / params.heads_per_group;
        const Element* q = params.q + params.q_strides.offset(where.batch, 0, where.head);
        const Element* dout = params.dout + params.dout_strides.offset(where.batch, 0, where.head);
        const Element* k = params.k + params.k_strides.offset(where.batch, 0, head_kv);
        const Element* v = params.v + params.v_strides.offset(where.batch, 0, head_kv);

        const auto tiles = common::key_tiles<Spec>(params, where);
        const auto mask = common::mask_of<Spec>(params);

        const Ring ring(smem + kKeys, k, v, params, tiles, thread);
        const int32 begin = mask.first_query(0);  // rows before it see no key
        load_tile_async<QTile, kThreads, kHeadDim>(smem + kQ, q, params.q_strides.row, first_row, params.seqlen_q,
                                                   thread, begin);
        load_tile_async<DoTile, kThreads, kHeadDimV>(smem + kDo, dout, params.dout_strides.row, first_row,
                                                     params.seqlen_q, thread, begin);
        cp_async_commit();
        ring.start();
        if (part == 0)
            common::clear_skipped_dbias<Spec>(params, {where.batch, where.head, first_row + group_row, 0, lane},
                                              kGroupRows, tiles.begin * kBc, tiles.end * kBc);

        // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
        const int64 first_stat = common::first_statistic<Spec>(params, where.batch, where.head);
        float lse[kM16][2], minus_delta[kM16][2];
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 row = first_row + group_row + 16 * m + Scores::row(i, lane);
                const bool valid = row < params.seqlen_q;
                const float natural = valid ? params.lse[first_stat + row] : -common::infinity<float>();
                const bool hidden = natural == -common::infinity<float>();  // delta may be NaN then
                lse[m][i] = hidden ? -natural : common::in_base2(natural);
                minus_delta[m][i] = hidden ? 0.0f : -params.delta[first_stat + row];
            }

        const LaneAddress<QTile, MatrixOrder::kRowsFirst> q_address(smem + kQ, group_row, lane);
        const LaneAddress<DoTile, MatrixOrder::kRowsFirst> do_address(smem + kDo, group_row, lane);
        Gradient dq[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) dq[m].fill(0.0f);

        for (int32 position = tiles.end - 1; position >= tiles.begin; --position) {
            const uint32 slot = ring.acquire(position);
            int32 tile = position;
            if constexpr (common::kListsTiles<Spec>) tile = tiles.at(position);
            if (Spec::kMayHideRows && position == tiles.end - 1) {
                if (part == 0)
                    clear_hidden_rows(group_row, lse, lane, [&](int32 row) {
                        clear_row<QTile, 4>(smem + kQ, row, lane % 4);
                        clear_row<DoTile, 4>(smem + kDo, row, lane % 4);
                    });
                if constexpr (kSharers > 1) barrier_sync(1 + group, kGroupThreads);
            }
            const LaneAddress<KTile, MatrixOrder::kChunksFirst> k_rows(slot, first_part_key, lane);
            const LaneAddress<VTile, MatrixOrder::kChunksFirst> v_rows(slot + KTile::kBytes, first_part_key, lane);
            const LaneAddress<KTile, MatrixOrder::kRowsFirst> k_columns(slot, first_part_key, lane);

            Scores p[kM16], ds[kM16];
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                p[m].fill(0.0f);
#pragma unroll
                for (int n = 0; n < kPartKeys / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        ds[m].value[n][e] = common::kProductsFromDelta<Spec> ? minus_delta[m][e / 2] : 0.0f;
            }
            common::SavedScores<Spec, Scores> saved[kM16];
            const auto compute_weights = [&] {
                multiply<Element, kD / 16>(
                    p, [&](int m, int kk) { return ldmatrix_x4<false>(q_address.at(m, kk)); },
                    [&](int n, int kk) { return ldmatrix_x4<false>(k_rows.at(n, kk)); });
#pragma unroll
                for (int m = 0; m < kM16; ++m) {
                    const common::ScoreTile score_tile{where.batch, where.head, first_row + group_row + 16 * m,
                                                       tile * kBc + first_part_key, lane};
                    saved[m].save(p[m]);
                    if constexpr (common::kTakesWeights<Spec>) {
                        const bool masked =
                            position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin);
                        common::Unused unused;
                        common::take_weights<false, Spec>(p[m], unused, masked, params, score_tile,
                                                          [&](int i, int) { return lse[m][i]; });
                    } else {
#pragma unroll
                        for (int n = 0; n < kPartKeys / 8; ++n)
#pragma unroll
                            for (int e = 0; e < 4; ++e)
                                p[m].value[n][e] =
                                    common::exponential<Spec>(p[m].value[n][e], params.scale_log2, lse[m][e / 2]);
                        if (position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin))
                            common::hide_scores<false, Spec>(p[m], mask, params, score_tile, 0.0f);
                    }
                }
            };
            const auto compute_products = [&] {
                multiply<Element, kDv / 16>(
                    ds, [&](int m, int kk) { return ldmatrix_x4<false>(do_address.at(m, kk)); },
                    [&](int n, int kk) { return ldmatrix_x4<false>(v_rows.at(n, kk)); });
            };
            if constexpr (Ring::kAlternates) {
                compute_products();
                ring.acquire_second(position);
                compute_weights();
            } else {
                compute_weights();
                compute_products();
            }

            PackedFragment<Element, kPartKeys / 8> packed[kM16];
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
#pragma unroll
                for (int n = 0; n < kPartKeys / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        ds[m].value[n][e] =
                            common::weighted<Spec>(p[m].value[n][e], ds[m].value[n][e], minus_delta[m][e / 2], params);
                const common::ScoreTile score_tile{where.batch, where.head, first_row + group_row + 16 * m,
                                                   tile * kBc + first_part_key, lane};
                common::write_dbias<Spec>(ds[m], params, score_tile);
                saved[m].take_derivative(ds[m], params, score_tile);
                packed[m].set(ds[m]);
            }
            const int32 first_c16 = part * (kPartCols / 16);
            if constexpr (kSharers > 1) {
                const auto ds_address = [&](int32 of_part, int m, int kk) {
                    return smem + kDs +
                           ((((group * kSharers + of_part) * kM16 + m) * (kPartKeys / 16) + kk) * 32 + lane) * 16;
                };
#pragma unroll
                for (int m = 0; m < kM16; ++m)
#pragma unroll
                    for (int kk = 0; kk < kPartKeys / 16; ++kk)
                        store_shared(ds_address(part, m, kk), packed[m].k16(kk));
                accumulate(dq, k_columns, first_c16, [&](int m, int kk) { return packed[m].k16(kk); });
                barrier_sync(1 + group, kGroupThreads);
                accumulate(dq, {slot, (1 - part) * kPartKeys, lane}, first_c16,
                           [&](int m, int kk) { return load_shared_operand(ds_address(1 - part, m, kk)); });
            } else {
                accumulate(dq, k_columns, 0, [&](int m, int kk) { return packed[m].k16(kk); });
            }
        }

        // If there was no key tile, the copy of Q is still in flight, and dQ is about to overwrite it.
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int n = 0; n < kPartCols / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dq[m].value[n][e] *= params.softmax_scale;
        store_rows<QTile, kM16, kHeadDim>(smem + kQ, group_row, part * (kPartCols / 8), dq,
                                          params.dq + params.dq_strides.offset(where.batch, 0, where.head),
                                          params.dq_strides.row, first_row + group_row, params.seqlen_q, lane);
    }
};

}  // namespace fa2::sm80
