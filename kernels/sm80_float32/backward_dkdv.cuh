// FlashAttention-2 backward of float32 data by key tiles, the second pass of `two_pass`: dK and dV on mma.sync, by
// products of float16 parts (float32_parts/parts.cuh).
//
//   S^T = scale K Q^T     P^T = exp(S^T - lse)     dV = P^T dO
//   dP^T = V dO^T         dS^T = P^T o (dP^T - delta)     dK = scale dS^T Q
//
//   block   owns kBc keys of one K/V head; loops over the query tiles of B_r = kBr rows that see them, in all query
//           heads of the group, so that dK and dV are summed on chip in a fixed order
//   warp    owns 16 of these keys; keeps their dK and dV in registers
//
//   shared memory                     written by            read by
//   K [part][panel][kBc]              all warps             each warp its rows, to compute S^T
//   V [part][panel][kBc]              all warps             each warp its rows, to compute dP^T
//   Q [kStages][part][panel][kBr]     all warps             all warps, to compute S^T and dK
//   dO [part][panel][kBr]             all warps             all warps, to compute dP^T and dV
//   (lse, delta) [2], [kBr]           first 2 kBr threads   all warps
//
// Barriers: one __syncthreads in front of S^T, behind which Q, dO and the statistics are there, and no warp reads the
// previous Q any more; one behind dP^T, after which the next dO is copied; with one stage, another one behind dK, after
// which Q is.
#pragma once
#include "common/exceptions.cuh"
#include "common/mask.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "float32_parts/softmax_gradient.cuh"
#include "sm80_float32/multiply.cuh"

namespace fa2::sm80_float32 {

template <class Spec>
struct BackwardDkdv {
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps, kStages = Spec::kStages;
    static constexpr int kD = common::round_up(Spec::kHeadDim, 16), kDv = common::round_up(Spec::kHeadDimV, 16);
    static constexpr int kStrips = ceil_div(kBr, kUnitRows), kStripSteps = kBr / kStrips / 16;
    static_assert(kBc == 16 * Spec::kWarps && kStages <= 2 && 2 * kBr <= kThreads);

    using KeyTile = PartsTile<kBc, Spec::kHeadDim>;
    using ValueTile = PartsTile<kBc, Spec::kHeadDimV>;
    using QueryTile = PartsTile<kBr, Spec::kHeadDim>;
    using DoutTile = PartsTile<kBr, Spec::kHeadDimV>;
    static constexpr int kK = 0, kV = KeyTile::kBytes, kQ = kV + ValueTile::kBytes;
    static constexpr int kDo = kQ + kStages * QueryTile::kBytes, kRowStats = kDo + DoutTile::kBytes;
    static constexpr int kStatisticBytes = 4 * kBr, kRowStatsBytes = 2 * kStatisticBytes;
    static constexpr int kSharedBytes = kRowStats + 2 * kRowStatsBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kBr / 8>;
    using Dk = QuadFragment<kD / 8>;
    using Dv = QuadFragment<kDv / 8>;

    // One iteration: a query head of the group and a query tile.
    struct Step {
        int32 head, tile;
    };

    const Params& params;
    const uint32 smem;
    const common::TileCoordinates where;
    const common::QueryTiles<Spec> tiles;
    const int32 lane, warp_key;  // the first of this warp's keys in the tile

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        if (common::is_exception<Spec>(params, where.batch, where.head)) return;
        const auto tiles = common::query_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                           common::window_of<Spec>(params));
        const int32 thread = threadIdx.x;
        BackwardDkdv{params, shared_address(dynamic_smem), where, tiles, thread % 32, thread / 32 * 16}.loop();
    }

  private:
    __device__ __forceinline__ void loop() const {
        const auto keys = head_parts<Spec, true, true>(params, params.k_parts, params.k_units, where.batch, where.head);
        const auto values =
            head_parts<Spec, true, false>(params, params.v_parts, params.v_units, where.batch, where.head);
        const int32 steps = (tiles.end - tiles.begin) * params.heads_per_group;
        Step step{where.head * params.heads_per_group, tiles.begin};
        if (steps > 0) {
            keys.template load_async<KeyTile, kThreads>(smem + kK, where.tile * kBc);
            values.template load_async<ValueTile, kThreads>(smem + kV, where.tile * kBc);
            load_query(step, 0);
            load_dout(step);
            store_row_stat(load_row_stat(step), 0);
        }
        cp_async_commit();

        const float key_unit = keys.unit(where.tile * kBc + warp_key);
        const float value_unit = values.unit(where.tile * kBc + warp_key);
        Dk dk;
        Dv dv;
        dk.fill(0.0f);
        dv.fill(0.0f);
        for (int32 t = 0; t < steps; ++t) {
            const bool same_head = step.tile + 1 < tiles.end, more = t + 1 < steps;
            const Step next{same_head ? step.head : step.head + 1, same_head ? step.tile + 1 : tiles.begin};
            cp_async_wait<0>();
            __syncthreads();  // Q, dO and the statistics are there
            if (kStages > 1 && more) load_query(next, t + 1);
            cp_async_commit();
            const float row_stat = more ? load_row_stat(next) : 0.0f;
            add_step(dk, dv, step, t, key_unit, value_unit, [&] {
                __syncthreads();
                if (more) load_dout(next);
                cp_async_commit();
            });
            store_row_stat(row_stat, t + 1);
            if constexpr (kStages == 1) {
                __syncthreads();
                if (more) load_query(next, t + 1);
                cp_async_commit();
            }
            step = next;
        }
        store<Spec::kHeadDim>(dk, params.softmax_scale, params.dk, params.dk_strides);
        store<Spec::kHeadDimV>(dv, common::kept_scale<Spec>(params), params.dv, params.dv_strides);
    }

    // Adds the step's contribution to dK and dV. after_dp() is called when this warp has read dO for the last time.
    template <class AfterDp>
    __device__ __forceinline__ void add_step(Dk& dk, Dv& dv, Step step, int32 t, float key_unit, float value_unit,
                                             const AfterDp& after_dp) const {
        const uint32 query_slot = smem + kQ + t % kStages * QueryTile::kBytes;
        const uint32 lse = smem + kRowStats + t % 2 * kRowStatsBytes, delta = lse + kStatisticBytes;
        const PartsAddress<KeyTile, MatrixOrder::kRowsFirst> k_rows(smem + kK, warp_key, lane);
        const PartsAddress<ValueTile, MatrixOrder::kRowsFirst> v_rows(smem + kV, warp_key, lane);
        const PartsAddress<QueryTile, MatrixOrder::kChunksFirst> q_rows(query_slot, 0, lane);
        const PartsAddress<QueryTile, MatrixOrder::kRowsFirst> q_columns(query_slot, 0, lane);
        const PartsAddress<DoutTile, MatrixOrder::kChunksFirst> dout_rows(smem + kDo, 0, lane);
        const PartsAddress<DoutTile, MatrixOrder::kRowsFirst> dout_columns(smem + kDo, 0, lane);
        const int32 first_query = step.tile * kBr;
        const auto queries =
            head_parts<Spec, false, true>(params, params.q_parts, params.q_units, where.batch, step.head);
        const auto douts =
            head_parts<Spec, false, false>(params, params.dout_parts, params.dout_units, where.batch, step.head);
        float query_unit[kStrips], dout_unit[kStrips], score_unit[kStrips], dp_unit[kStrips];
#pragma unroll
        for (int c = 0; c < kStrips; ++c) {
            query_unit[c] = queries.unit(first_query + c * kUnitRows);
            dout_unit[c] = douts.unit(first_query + c * kUnitRows);
            score_unit[c] = key_unit * query_unit[c];
            dp_unit[c] = value_unit * dout_unit[c];
        }
        Scores scores, p;
        multiply_columns<kD / 16, true>(
            scores, [&](int part, int s) { return ldmatrix_x4<false>(k_rows.at(part, 0, s)); },
            [&](int part, int n, int s) { return ldmatrix_x4<false>(q_rows.at(part, n, s)); });
        scale_products<!common::kTakesWeights<Spec>>(scores, score_unit, params);
        const common::ScoreTile position{where.batch, step.head, first_query, where.tile * kBc + warp_key, lane};
        const bool masked = step.tile < tiles.full_begin || (tiles.kLeftLimit && step.tile >= tiles.full_end);
        take_probabilities<true, Spec>(scores, FloatProbabilities<kBr / 8>{p}, masked, params, position,
                                       statistics_at(lse));
        FragmentParts<kBr / 8> parts;
        const float probability_scale[2] = {kProbabilityScale, kProbabilityScale};
        parts.set_scaled(p, probability_scale);
#pragma unroll
        for (int c = 0; c < kStrips; ++c) {
            const float unit[2] = {dout_unit[c] / kProbabilityScale, dout_unit[c] / kProbabilityScale};
            add_chain<kStripSteps, true>(
                dv, [&](int part, int s) { return parts.k16(part, s); },
                [&](int part, int n, int s) { return ldmatrix_x4<true>(dout_columns.at(part, s, n)); }, c * kStripSteps,
                unit);
        }

        Scores dp;
        multiply_columns_from<kDv / 16, true>(
            dp, [&](int part, int s) { return ldmatrix_x4<false>(v_rows.at(part, 0, s)); },
            [&](int part, int n, int s) { return ldmatrix_x4<false>(dout_rows.at(part, n, s)); },
            [&](int n8, float (&x)[4]) {
                float own[2];
                load_shared(statistic_address(delta) + n8 * 32, own);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] = Comparand(own[e % 2], dp_unit[strip_of(2 * n8)]).start;
            });
        after_dp();
        take_gradients(scores, dp, delta, dp_unit);
        float scale[2], inverse[2];
        row_scales(scores, scale, inverse);
        parts.set_scaled(scores, scale);
#pragma unroll
        for (int c = 0; c < kStrips; ++c) {
            const float unit[2] = {inverse[0] * query_unit[c], inverse[1] * query_unit[c]};
            add_chain<kStripSteps, true>(
                dk, [&](int part, int s) { return parts.k16(part, s); },
                [&](int part, int n, int s) { return ldmatrix_x4<true>(q_columns.at(part, s, n)); }, c * kStripSteps,
                unit);
        }
    }

    __device__ __forceinline__ void load_query(Step step, int32 t) const {
        head_parts<Spec, false, true>(params, params.q_parts, params.q_units, where.batch, step.head)
            .template load_async<QueryTile, kThreads>(smem + kQ + t % kStages * QueryTile::kBytes, step.tile * kBr);
    }
    __device__ __forceinline__ void load_dout(Step step) const {
        head_parts<Spec, false, false>(params, params.dout_parts, params.dout_units, where.batch, step.head)
            .template load_async<DoutTile, kThreads>(smem + kDo, step.tile * kBr);
    }

    // The first kBr threads return lse, the next kBr return delta.
    __device__ __forceinline__ float load_row_stat(Step step) const {
        const int32 thread = threadIdx.x;
        const auto row = row_statistics(params, common::first_statistic<Spec>(params, where.batch, step.head),
                                        step.tile * kBr + thread % kBr);
        return thread < kBr ? row.lse : row.delta;
    }
    __device__ __forceinline__ void store_row_stat(float x, int32 t) const {
        const int32 thread = threadIdx.x;
        if (thread < 2 * kBr) store_shared(smem + kRowStats + t % 2 * kRowStatsBytes + thread * 4, x);
    }
    // Where a statistic of this lane's first two queries is; those of the next two are 32 bytes further on.
    __device__ __forceinline__ uint32 statistic_address(uint32 statistics) const {
        return statistics + Scores::col(0, lane) * 4;
    }
    // A statistic of the queries of this lane's columns.
    struct Statistics {
        float x[Scores::kCols];

        __device__ __forceinline__ float operator()(int j) const { return x[j]; }
    };
    __device__ __forceinline__ Statistics statistics_at(uint32 statistics) const {
        Statistics of;
#pragma unroll
        for (int j = 0; j < Scores::kCols; j += 2) {
            float pair[2];
            load_shared(statistic_address(statistics) + j / 2 * 32, pair);
            of.x[j] = pair[0], of.x[j + 1] = pair[1];
        }
        return of;
    }

    __device__ __forceinline__ void take_gradients(Scores& weights, const Scores& dp, uint32 delta,
                                                   const float (&unit)[kStrips]) const {
        const Statistics of = statistics_at(delta);
        float32_parts::take_gradients<true, Spec>(
            weights, dp, unit, params, [&](int j, int c) { return Comparand(of(j), unit[c]).rest; }, of);
    }

    template <int kHeadDim, class Gradient>
    __device__ __forceinline__ void store(Gradient& gradient, float scale, float* gmem, const Strides& strides) const {
        const float factor[2] = {scale, scale};
        multiply_rows(gradient, factor);
        store_fragment<kHeadDim>(gradient, gmem + strides.offset(where.batch, 0, where.head), strides.row,
                                 where.tile * kBc + warp_key, params.seqlen_k, 0, lane);
    }
};

}  // namespace fa2::sm80_float32
