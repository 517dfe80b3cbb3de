// The tangent of the backward by query tiles on mma.sync: how dQ changes along a direction (Q', K', V', dO').
// backward_dq.cuh has the backward, common/tangents.cuh the formulas of dS and dS'.
//
//   S = scale Q K^T     T = scale (Q' K^T + Q K'^T)     dP = dO V^T     dP' = dO' V^T + dO V'^T
//   dQ' = scale (dS' K + dS K')                                 dbias' = dS', summed to the shape of the bias
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 or more of these rows; keeps their dQ', lse, delta, lse' and delta' in registers. Above 256 columns
//           of Q or V, two warps share the rows (kParts) and divide the columns; both compute S to dP', so that neither waits
//
//   shared memory                               written by   read by
//   Q, Q' [2][kBr][kD]                          all warps    each warp its rows, to compute S and T
//   dO, dO' [2][kBr][kDv]                       all warps    each warp its rows, to compute dP and dP'
//   (K, V, K', V') [kStages], [kBc][kD, kDv]    all warps    all warps, to compute S, T and dQ' (K, K'), dP and dP' (V, V')
//
// At the end dQ' is staged in the rows of Q.
//
// Barriers: as in the forward, one __syncthreads per key tile, in the ring of keys.
#pragma once
#include "common/dbias.cuh"
#include "common/mask.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "sm80/hidden_rows.cuh"
#include "sm80/tangents.cuh"

namespace fa2::sm80 {

template <class Spec>
struct DqJvp {
    using Element = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = Spec::kWarps * 32;
    static constexpr int kParts = sharers_of_gradient(common::max_of(kD, kDv));
    static constexpr int kWarpRows = kBr / (Spec::kWarps / kParts);
    static constexpr int kM16 = kWarpRows / 16;
    static constexpr int kColumns = kD / kParts;  // of dQ' that a warp has

    using QTile = SmemTile<kBr, kD>;
    using DoTile = SmemTile<kBr, kDv>;
    static constexpr int kQ = 0, kQMoved = kQ + QTile::kBytes;
    static constexpr int kDo = kQMoved + QTile::kBytes, kDoMoved = kDo + DoTile::kBytes;
    static constexpr int kKeys = kDoMoved + DoTile::kBytes;
    using Moved = KeyTangents<Element, kBc, kThreads, kHeadDim, kHeadDimV>;
    using Ring = KeyRing<common::KeyTiles<Spec>, Element, kBc, Spec::kStages, kThreads, kHeadDim, kHeadDimV, Moved>;
    using KTile = typename Ring::KTile;
    using VTile = typename Ring::VTile;
    static constexpr int kSharedBytes = kKeys + Ring::kBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kBc / 8>;
    using Packed = PackedFragment<Element, kBc / 8>;
    using Gradient = QuadFragment<kColumns / 8>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 batch = where.batch, head = where.head, head_kv = head / params.heads_per_group;
        const int32 tile_row = where.tile * kBr, own_row = warp / kParts * kWarpRows, first_row = tile_row + own_row;
        const int32 part = warp % kParts, first_c16 = part * (kColumns / 16);
        const Element* qt = head_of(params.qt, params.qt_strides, batch, head);
        const Element* dot = head_of(params.dot, params.dot_strides, batch, head);
        const auto tiles = common::key_tiles<Spec>(params, where);
        const auto mask = common::mask_of<Spec>(params);

        const Moved moved_keys{head_of(params.kt, params.kt_strides, batch, head_kv),
                               head_of(params.vt, params.vt_strides, batch, head_kv), params.kt_strides.row,
                               params.vt_strides.row};
        const Ring ring(smem + kKeys, head_of(params.k, params.k_strides, batch, head_kv),
                        head_of(params.v, params.v_strides, batch, head_kv), params, tiles, thread, moved_keys);
        const int32 begin = mask.first_query(0);  // rows before it see no key
        load_tile_async<QTile, kThreads, kHeadDim>(smem + kQ, head_of(params.q, params.q_strides, batch, head),
                                                   params.q_strides.row, tile_row, params.seqlen_q, thread, begin);
        load_tile_async<DoTile, kThreads, kHeadDimV>(smem + kDo, head_of(params.dout, params.dout_strides, batch, head),
                                                     params.dout_strides.row, tile_row, params.seqlen_q, thread, begin);
        if (qt != nullptr)
            load_tile_async<QTile, kThreads, kHeadDim>(smem + kQMoved, qt, params.qt_strides.row, tile_row,
                                                       params.seqlen_q, thread, begin);
        if (dot != nullptr)
            load_tile_async<DoTile, kThreads, kHeadDimV>(smem + kDoMoved, dot, params.dot_strides.row, tile_row,
                                                         params.seqlen_q, thread, begin);
        cp_async_commit();
        ring.start();
        if (part == 0)
            common::clear_skipped_dbias<Spec>(params, {batch, head, first_row, 0, lane}, kWarpRows, tiles.begin * kBc,
                                              tiles.end * kBc);

        const int64 first_stat = common::first_statistic<Spec>(params, batch, head);
        float lse[kM16][2];
        common::MovedRow<float> rows[kM16][2];
        Gradient dq[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            dq[m].fill(0.0f);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 row = first_row + 16 * m + Scores::row(i, lane);
                lse[m][i] = base2_lse(params, first_stat, row);
                rows[m][i] = moved_row(params, first_stat, row, lse[m][i]);
            }
        }

        for (int32 position = tiles.end - 1; position >= tiles.begin; --position) {
            const uint32 k = ring.acquire(position), v = k + KTile::kBytes;
            const uint32 k_moved = k + Ring::kOthers, v_moved = k_moved + KTile::kBytes;
            int32 tile = position;
            if constexpr (common::kListsTiles<Spec>) tile = tiles.at(position);
            if (Spec::kMayHideRows && position == tiles.end - 1) {
                if (part == 0)
                    clear_hidden_rows(own_row, lse, lane, [&](int32 row) {
                        clear_row<QTile, 4>(smem + kQ, row, lane % 4);
                        clear_row<QTile, 4>(smem + kQMoved, row, lane % 4);
                        clear_row<DoTile, 4>(smem + kDo, row, lane % 4);
                        clear_row<DoTile, 4>(smem + kDoMoved, row, lane % 4);
                    });
                if constexpr (kParts > 1) __syncthreads();
            }

            Scores p[kM16], tangents[kM16], ds[kM16], ds_tangent[kM16];
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                p[m].fill(0.0f);
                tangents[m].fill(0.0f);
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < Scores::kCols; ++j) {
                        ds[m](i, j) = common::kProductsFromDelta<Spec> ? -rows[m][i].delta : 0.0f;
                        ds_tangent[m](i, j) = common::kProductsFromDelta<Spec> ? -rows[m][i].delta_tangent : 0.0f;
                    }
            }
            multiply_moved<Element, QTile, KTile>(p, tangents, smem + kQ, smem + kQMoved, qt != nullptr, own_row, k,
                                                  k_moved, moved_keys.k != nullptr, lane);
            multiply_moved<Element, DoTile, VTile>(ds, ds_tangent, smem + kDo, smem + kDoMoved, dot != nullptr, own_row,
                                                   v, v_moved, moved_keys.v != nullptr, lane);

            Packed packed[kM16], packed_tangents[kM16];
            const common::OutsideFull outside{position >= tiles.full_end,
                                              tiles.kLeftLimit && position < tiles.full_begin};
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                const common::ScoreTile score_tile{batch, head, first_row + 16 * m, tile * kBc, lane};
                const auto slopes = common::differentiate_twice<false, Spec>(
                    p[m], tangents[m], ds[m], ds_tangent[m], mask, outside, params, score_tile,
                    [&](int i, int) { return common::without_delta<Spec>(rows[m][i]); });
                if (part == 0) common::write_dbias<Spec>(ds_tangent[m], params, score_tile);
                slopes.apply(ds[m], ds_tangent[m]);
                packed[m].set(ds[m]);
                packed_tangents[m].set(ds_tangent[m]);
            }
            accumulate<KTile>(dq, packed_tangents, k, first_c16, lane);
            if (moved_keys.k != nullptr) accumulate<KTile>(dq, packed, k_moved, first_c16, lane);
        }

        // If there was no key tile, the copy of Q is still in flight, and dQ' is about to overwrite it.
        cp_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dq[m].value[n][e] *= params.softmax_scale;
        store_rows<QTile, kM16, kHeadDim>(smem + kQ, own_row, 2 * first_c16, dq,
                                          head_of(params.dqt, params.dqt_strides, batch, head), params.dqt_strides.row,
                                          first_row, params.seqlen_q, lane);
    }
};

}  // namespace fa2::sm80
