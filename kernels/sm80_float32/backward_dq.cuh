// FlashAttention-2 backward of float32 data by query tiles, the first pass of `two_pass`: dQ on mma.sync, by products of
// float16 parts (float32_parts/parts.cuh).
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P o (dP - delta)     dQ = scale dS K
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 of these rows; keeps their dQ, lse and delta in registers
//
//   shared memory                     written by          read by
//   Q [part][panel][kBr]              all warps           each warp its rows, to compute S
//   dO [part][panel][kBr]             all warps           each warp its rows, to compute dP
//   K [kStages][part][panel][kBc]     all warps           all warps, to compute S and dQ
//   V [part][panel][kBc]              all warps           all warps, to compute dP
//
// Barriers: one __syncthreads in front of S, behind which K and V are there and no warp reads the previous K any more;
// one behind dP, after which V of the next tile is copied; with one stage, another one behind dQ, after which K is.
#pragma once
#include "common/dbias.cuh"
#include "common/exceptions.cuh"
#include "common/mask.cuh"
#include "common/statistics.cuh"
#include "common/tile_range.cuh"
#include "float32_parts/softmax_gradient.cuh"
#include "sm80_float32/multiply.cuh"

namespace fa2::sm80_float32 {

template <class Spec>
struct BackwardDq {
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps, kStages = Spec::kStages;
    static constexpr int kD = common::round_up(Spec::kHeadDim, 16), kDv = common::round_up(Spec::kHeadDimV, 16);
    static constexpr int kStrips = ceil_div(kBc, kUnitRows), kStripSteps = kBc / kStrips / 16;
    static_assert(kBr == 16 * Spec::kWarps && kStages <= 2);

    using QueryTile = PartsTile<kBr, Spec::kHeadDim>;
    using DoutTile = PartsTile<kBr, Spec::kHeadDimV>;
    using KeyTile = PartsTile<kBc, Spec::kHeadDim>;
    using ValueTile = PartsTile<kBc, Spec::kHeadDimV>;
    static constexpr int kQ = 0, kDo = QueryTile::kBytes, kK = kDo + DoutTile::kBytes;
    static constexpr int kV = kK + kStages * KeyTile::kBytes;
    static constexpr int kSharedBytes = kV + ValueTile::kBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kBc / 8>;
    using Gradient = QuadFragment<kD / 8>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 head_kv = where.head / params.heads_per_group;
        if (common::is_exception<Spec>(params, where.batch, head_kv)) return;
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16;
        const int32 first_row = where.tile * kBr;
        const auto tiles = common::key_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                         common::window_of<Spec>(params));
        const auto queries =
            head_parts<Spec, false, true>(params, params.q_parts, params.q_units, where.batch, where.head);
        const auto douts =
            head_parts<Spec, false, false>(params, params.dout_parts, params.dout_units, where.batch, where.head);
        const auto keys = head_parts<Spec, true, true>(params, params.k_parts, params.k_units, where.batch, head_kv);
        const auto values = head_parts<Spec, true, false>(params, params.v_parts, params.v_units, where.batch, head_kv);
        const auto load_key = [&](int32 tile) {
            keys.template load_async<KeyTile, kThreads>(smem + key_slot(tile), tile * kBc);
        };
        const auto load_value = [&](int32 tile) {
            values.template load_async<ValueTile, kThreads>(smem + kV, tile * kBc);
        };
        if (tiles.begin < tiles.end) {
            queries.template load_async<QueryTile, kThreads>(smem + kQ, first_row);
            douts.template load_async<DoutTile, kThreads>(smem + kDo, first_row);
            load_key(tiles.end - 1);
            load_value(tiles.end - 1);
        }
        cp_async_commit();
        common::clear_skipped_dbias<Spec>(params, {where.batch, where.head, first_row + warp_row, 0, lane}, 16,
                                          tiles.begin * kBc, tiles.end * kBc);

        const int64 first = common::first_statistic<Spec>(params, where.batch, where.head);
        float lse[2], delta[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto row = row_statistics(params, first, first_row + warp_row + Gradient::row(i, lane));
            lse[i] = row.lse;
            delta[i] = row.delta;
        }
        const PartsAddress<QueryTile, MatrixOrder::kRowsFirst> q_address(smem + kQ, warp_row, lane);
        const PartsAddress<DoutTile, MatrixOrder::kRowsFirst> dout_address(smem + kDo, warp_row, lane);
        const PartsAddress<ValueTile, MatrixOrder::kChunksFirst> v_address(smem + kV, 0, lane);
        const float query_unit = queries.unit(first_row + warp_row), dout_unit = douts.unit(first_row + warp_row);
        Gradient dq;
        dq.fill(0.0f);

        for (int32 tile = tiles.end - 1; tile >= tiles.begin; --tile) {
            cp_async_wait<0>();
            __syncthreads();  // K and V are there
            if (kStages > 1 && tile > tiles.begin) load_key(tile - 1);
            cp_async_commit();
            const uint32 slot = smem + key_slot(tile);
            const PartsAddress<KeyTile, MatrixOrder::kChunksFirst> k_rows(slot, 0, lane);
            const PartsAddress<KeyTile, MatrixOrder::kRowsFirst> k_columns(slot, 0, lane);
            float key_unit[kStrips], score_unit[kStrips], dp_unit[kStrips];
#pragma unroll
            for (int c = 0; c < kStrips; ++c) {
                key_unit[c] = keys.unit(tile * kBc + c * kUnitRows);
                score_unit[c] = query_unit * key_unit[c];
                dp_unit[c] = dout_unit * values.unit(tile * kBc + c * kUnitRows);
            }
            Scores scores, dp;
            multiply_columns<kD / 16, false>(
                scores, [&](int part, int s) { return ldmatrix_x4<false>(q_address.at(part, 0, s)); },
                [&](int part, int n, int s) { return ldmatrix_x4<false>(k_rows.at(part, n, s)); });
            multiply_columns_from<kDv / 16, false>(
                dp, [&](int part, int s) { return ldmatrix_x4<false>(dout_address.at(part, 0, s)); },
                [&](int part, int n, int s) { return ldmatrix_x4<false>(v_address.at(part, n, s)); },
                [&](int n8, float (&x)[4]) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[e] = Comparand(delta[e / 2], dp_unit[strip_of(2 * n8)]).start;
                });
            __syncthreads();
            if (tile > tiles.begin) load_value(tile - 1);
            cp_async_commit();

            const common::ScoreTile position{where.batch, where.head, first_row + warp_row, tile * kBc, lane};
            const bool masked = tile >= tiles.full_end || (tiles.kLeftLimit && tile < tiles.full_begin);
            scale_products<!common::kTakesWeights<Spec>>(scores, score_unit, params);
            common::SavedScores<Spec, Scores> saved;
            saved.save(scores);
            take_probabilities<false, Spec>(scores, common::Unused{}, masked, params, position,
                                            [&](int i) { return lse[i]; });
            take_gradients<false, Spec>(
                scores, dp, dp_unit, params, [&](int i, int c) { return Comparand(delta[i], dp_unit[c]).rest; },
                [&](int i) { return delta[i]; });
            common::write_dbias<Spec>(scores, params, position);
            saved.take_derivative(scores, params, position);
            float scale[2], inverse[2];
            row_scales(scores, scale, inverse);
            FragmentParts<kBc / 8> ds;
            ds.set_scaled(scores, scale);
#pragma unroll
            for (int c = 0; c < kStrips; ++c) {
                const float unit[2] = {inverse[0] * key_unit[c], inverse[1] * key_unit[c]};
                add_chain<kStripSteps, true>(
                    dq, [&](int part, int s) { return ds.k16(part, s); },
                    [&](int part, int n, int s) { return ldmatrix_x4<true>(k_columns.at(part, s, n)); },
                    c * kStripSteps, unit);
            }
            if constexpr (kStages == 1) {
                __syncthreads();
                if (tile > tiles.begin) load_key(tile - 1);
                cp_async_commit();
            }
        }
        const float scale[2] = {params.softmax_scale, params.softmax_scale};
        multiply_rows(dq, scale);
        store_fragment<Spec::kHeadDim>(dq, params.dq + params.dq_strides.offset(where.batch, 0, where.head),
                                       params.dq_strides.row, first_row + warp_row, params.seqlen_q, 0, lane);
    }

  private:
    __device__ __forceinline__ static int32 key_slot(int32 tile) { return kK + tile % kStages * KeyTile::kBytes; }
};

}  // namespace fa2::sm80_float32
