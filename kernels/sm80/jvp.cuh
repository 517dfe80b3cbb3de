// The forward and its tangent on mma.sync: O and lse, and how they change along a direction (Q', K', V').
// forward_rows.cuh has the forward.
//
//   S = scale Q K^T                          P = exp(S - lse)       O = P V
//   T = scale (Q' K^T + Q K'^T)              lse' = rowsum(P o T)   O' = (P o T) V + P V' - lse' O
//
// The online softmax carries rowsum(P o T) and (P o T) V + P V' along with the row sum and O: all are sums over keys with
// the factor exp(-row_max), and are rescaled and divided alike. The row shift is the row maximum of the tiles so far:
// P o T is rounded to 16 bits, and where P could exceed 1, it might exceed float16. Where O and lse are given (kGiven), P
// is known, and the kernel computes O' and lse' alone.
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 or 32 of these rows: their S, T, O and O'. Registers hold O and O' of up to 128 columns of V, or O'
//           alone of up to 256: beyond, two or four warps share the rows (kParts) and divide the columns; all of them
//           compute S and T, so that none waits
//
//   shared memory                               written by   read by
//   Q, Q' [2][kBr][kD]                          all warps    each warp its rows, to compute S and T
//   (K, V, K', V') [kStages], [kBc][kD, kDv]    all warps    all warps, to compute S and T (K, K'), O and O' (V, V')
//
// At the end O and then O' [kBr][kDv] are staged at the place of Q, and of what follows if they are larger.
//
// Barriers: as in the forward, one __syncthreads per key tile, in the ring of keys.
#pragma once
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tangents.cuh"
#include "common/tile_lists.cuh"
#include "sm80/hidden_rows.cuh"
#include "sm80/tangents.cuh"

namespace fa2::sm80 {

template <class Spec, bool kGiven = false, class Params = fa2::Params>
struct Jvp {
    using Element = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = Spec::kWarps * 32;
    static constexpr int kParts = kGiven ? sharers_of_gradient(common::max_of(kD, kDv)) : sharers_of_columns(kDv);
    static constexpr int kWarpRows = kBr / (Spec::kWarps / kParts);
    static constexpr int kM16 = kWarpRows / 16;
    static constexpr int kColumns = kDv / kParts;  // of O that a warp has

    using QTile = SmemTile<kBr, kD>;
    using OTile = SmemTile<kBr, kDv>;
    using Moved = KeyTangents<Element, kBc, kThreads, kHeadDim, kHeadDimV>;
    using Ring = KeyRing<common::KeyTiles<Spec>, Element, kBc, Spec::kStages, kThreads, kHeadDim, kHeadDimV, Moved>;
    using KTile = typename Ring::KTile;
    using VTile = typename Ring::VTile;
    static constexpr int kQMoved = QTile::kBytes, kKeys = 2 * QTile::kBytes;
    static constexpr int kSharedBytes = common::max_of(kKeys + Ring::kBytes, OTile::kBytes);
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kBc / 8>;
    using Packed = PackedFragment<Element, kBc / 8>;
    using Output = QuadFragment<kColumns / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp2_approx, false, 1, common::kNaturalInExponent<Spec>>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32;
        const int32 warp = kParts == 1 ? thread / 32 : __shfl_sync(common::kFullWarp, thread / 32, 0);
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 batch = where.batch, head = where.head, head_kv = head / params.heads_per_group;
        const int32 own_row = warp / kParts * kWarpRows, first_row = where.tile * kBr + own_row;
        const int32 first_c16 = warp % kParts * (kColumns / 16);
        const Element* q = head_of(params.q, params.q_strides, batch, head);
        const Element* qt = head_of(params.qt, params.qt_strides, batch, head);
        const auto tiles = common::key_tiles<Spec>(params, where);
        const auto mask = common::mask_of<Spec>(params);

        const Moved moved_keys{head_of(params.kt, params.kt_strides, batch, head_kv),
                               head_of(params.vt, params.vt_strides, batch, head_kv), params.kt_strides.row,
                               params.vt_strides.row};
        const Ring ring(smem + kKeys, head_of(params.k, params.k_strides, batch, head_kv),
                        head_of(params.v, params.v_strides, batch, head_kv), params, tiles, thread, moved_keys);
        load_tile_async<QTile, kThreads, kHeadDim>(smem, q, params.q_strides.row, where.tile * kBr, params.seqlen_q,
                                                   thread);
        if (qt != nullptr)
            load_tile_async<QTile, kThreads, kHeadDim>(smem + kQMoved, qt, params.qt_strides.row, where.tile * kBr,
                                                       params.seqlen_q, thread);
        cp_async_commit();
        ring.start();

        const int64 first = common::first_statistic<Spec>(params, batch, head);
        float lse[kM16][2];          // where it is given, in base 2
        float lse_tangent[kM16][2];  // rowsum(P o T), of this lane's columns
        Softmax softmax[kM16];
        Output output[kM16], moved[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            softmax[m].reset();
            output[m].fill(0.0f);
            moved[m].fill(0.0f);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                lse_tangent[m][i] = 0.0f;
                if constexpr (kGiven) lse[m][i] = base2_lse(params, first, first_row + 16 * m + Scores::row(i, lane));
            }
        }

        for (int32 position = tiles.end - 1; position >= tiles.begin; --position) {
            const uint32 slot = ring.acquire(position), k_moved = slot + Ring::kOthers;
            const uint32 v = slot + KTile::kBytes, v_moved = k_moved + KTile::kBytes;
            int32 tile = position;
            if constexpr (common::kListsTiles<Spec>) tile = tiles.at(position);
            if constexpr (kGiven && Spec::kMayHideRows)
                if (position == tiles.end - 1) {
                    if (warp % kParts == 0)
                        clear_hidden_rows(own_row, lse, lane,
                                          [&](int32 row) { clear_row<QTile, 4>(smem, row, lane % 4); });
                    if constexpr (kParts > 1) __syncthreads();
                }

            Scores p[kM16], tangents[kM16];
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                p[m].fill(0.0f);
                tangents[m].fill(0.0f);
            }
            multiply_moved<Element, QTile, KTile>(p, tangents, smem, smem + kQMoved, qt != nullptr, own_row, slot,
                                                  k_moved, moved_keys.k != nullptr, lane);

            Packed packed[kM16], packed_tangents[kM16];
            const bool masked = position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin);
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                const common::ScoreTile score_tile{batch, head, first_row + 16 * m, tile * kBc, lane};
                common::NoSlopes slopes;
                common::move_scores<false, Spec>(p[m], tangents[m], slopes, params, score_tile);
                if constexpr (kGiven) {
                    common::take_exponentials<Spec>(p[m], params, [&](int i, int) { return lse[m][i]; });
                    if (masked) common::hide_scores<false, Spec>(p[m], mask, params, score_tile, 0.0f);
                } else {
                    common::scale_scores<Spec>(p[m], params);
                    if (masked)
                        common::hide_scores<false, Spec>(p[m], mask, params, score_tile, -common::infinity<float>());
                    float rescale[2];
                    softmax[m].update(p[m], rescale);
                    if (__any_sync(common::kFullWarp, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
                        scale(output[m], rescale);
                        scale(moved[m], rescale);
                    }
#pragma unroll
                    for (int i = 0; i < 2; ++i) lse_tangent[m][i] *= rescale[i];
                }
                if constexpr (common::kMovesProducts<Spec>)
                    if (masked) common::hide_scores<false, Spec>(tangents[m], mask, params, score_tile, 0.0f);
                common::weigh_tangents<Spec>(tangents[m], p[m], params);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float share = 0.0f;
#pragma unroll
                    for (int j = 0; j < Scores::kCols; ++j) share += tangents[m](i, j);
                    lse_tangent[m][i] += share;
                }
                packed[m].set(p[m]);
                packed_tangents[m].set(tangents[m]);
                common::drop<Spec>(packed[m], params, score_tile);
                common::drop<Spec>(packed_tangents[m], params, score_tile);
            }
            if constexpr (kGiven)
                accumulate<VTile>(moved, packed_tangents, v, first_c16, lane);
            else
                accumulate_both<VTile>(output, moved, packed, packed_tangents, v, first_c16, lane);
            if (moved_keys.v != nullptr) accumulate<VTile>(moved, packed, v_moved, first_c16, lane);
        }

        // If there was no key tile, copies of Q are still in flight, and O is about to overwrite it.
        cp_async_wait<0>();
        __syncthreads();
        auto* o = head_of(params.o, params.o_strides, batch, head);
        float inverse_sum[kM16][2];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            if constexpr (!kGiven) common::finish_sums<Spec>(softmax[m], params, head, 0, inverse_sum[m], lse[m]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 row = first_row + 16 * m + Scores::row(i, lane);
                const bool has_row = row < params.seqlen_q;
                if constexpr (kGiven) {
                    inverse_sum[m][i] = 1.0f;
                    lse[m][i] = has_row ? params.lse[first + row] : -common::infinity<float>();
                    const bool visible = lse[m][i] != -common::infinity<float>();
                    load_row(output[m], i, 16 * first_c16, o + row * params.o_strides.row, visible, lane);
                }
                float& change = lse_tangent[m][i];
                change = common::row_sum<4>(change) * inverse_sum[m][i];
                change += common::sink_tangent_of<Spec>(params, head, lse[m][i]);
                inverse_sum[m][i] *= common::kept_scale<Spec>(params);
                if (lane % 4 != 0 || !has_row || warp % kParts != 0) continue;
                if constexpr (!kGiven) params.lse[first + row] = lse[m][i];
                params.lset[first + row] = change;
            }
            if constexpr (!kGiven) scale(output[m], inverse_sum[m]);
            scale(moved[m], inverse_sum[m]);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < Output::kCols; ++j) moved[m](i, j) -= lse_tangent[m][i] * output[m](i, j);
        }
        const auto store = [&](Output(&rows)[kM16], Element* gmem, int64 stride) {
            store_rows<OTile, kM16, kHeadDimV>(smem, own_row, 2 * first_c16, rows, gmem, stride, first_row,
                                               params.seqlen_q, lane);
            __syncwarp();  // the rows are read
        };
        if constexpr (!kGiven) store(output, o, params.o_strides.row);
        store(moved, head_of(params.ot, params.ot_strides, batch, head), params.ot_strides.row);
    }

  private:
    __device__ __forceinline__ static void scale(Output& x, const float (&factor)[2]) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x.value[n][e] *= factor[e / 2];
    }

    // Row i of the given O, from a column on. Its elements are 0 if no key is visible.
    __device__ __forceinline__ static void load_row(Output& output, int i, int32 first_column, const Element* row,
                                                    bool visible, int32 lane) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            const int32 first = kParts > 1 ? first_column : 0;
            const bool has_columns = visible && first + 8 * n < kHeadDimV;
            const int32 column = first + Output::col(2 * n, lane);
            const uint32 two = has_columns ? *reinterpret_cast<const uint32*>(row + column) : 0;
            output(i, 2 * n) = common::unpack_lo<Element>(two);
            output(i, 2 * n + 1) = common::unpack_hi<Element>(two);
        }
    }
};

}  // namespace fa2::sm80
