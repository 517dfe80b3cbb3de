// FlashAttention-2 backward of float64 data by key tiles on mma.sync, the second pass of `two_pass`: dK and dV.
//
//   S^T = scale K Q^T     P^T = exp(S^T - lse)                dV = P^T dO
//   dP^T = V dO^T         dS^T = P^T o (dP^T - delta)         dK = scale dS^T Q
//
//   block   owns kBc keys of one K/V head; loops over the query tiles of B_r = kBr rows that see them, in all query
//           heads of the group, so that dK and dV are summed on chip in a fixed order
//   pair    owns 16 of these keys. One of its warps computes P^T and keeps dV in registers, the other one computes dS^T
//           and keeps dK: a warp has no registers for both. Warps of a pair lie on the same scheduler, because the first
//           one has the exponentials
//
//   shared memory                        written by            read by
//   K [kBc][kD], V [kBc][kDv]            all warps             each pair its rows, to compute S^T, or dP^T
//   (Q, dO) [kStages], [kBr][kD, kDv]    all warps             all warps
//   (lse, delta) [2], [kBr]              first 2 kBr threads   all warps
//   weights [pair][chunk][lane]          one warp of a pair    the other one, the same lane: P^T, with marks of dropout
//
// Barriers: one __syncthreads per step, behind which its Q, dO and statistics are there, and no warp reads the weights or
// the slots of the step before any more; with one stage, another one in front of the copy. The warps of a pair have a
// named barrier, at which the second one waits for the weights.
#pragma once
#include "common/mask.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "common/weights.cuh"
#include "sm80_float64/multiply.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
struct BackwardDkdv {
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps, kStages = Spec::kStages;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV, kPairs = Spec::kWarps / 2;
    static constexpr int kD = common::round_up(kHeadDim, 16), kDv = common::round_up(kHeadDimV, 16);
    static_assert(kBc == 16 * kPairs && kStages <= 2 && 2 * kBr <= kThreads);

    using KTile = Tile<kBc, kD>;
    using VTile = Tile<kBc, kDv>;
    using QTile = Tile<kBr, kD>;
    using DoTile = Tile<kBr, kDv>;
    static constexpr int kV = KTile::kBytes, kSlots = kV + VTile::kBytes, kSlotBytes = QTile::kBytes + DoTile::kBytes;
    static constexpr int kWeights = kSlots + kStages * kSlotBytes, kPairBytes = 16 * kBr * 8;
    static constexpr int kStatistics = kWeights + kPairs * kPairBytes, kStatisticBytes = kBr * 8;
    static_assert(kStatistics + 4 * kStatisticBytes == Spec::kSharedBytes);

    using Scores = Fragment<kBr / 8>;

    const Params& params;
    const uint32 smem;
    const common::TileCoordinates where;
    const common::QueryTiles<Spec> tiles;
    const int32 lane, pair;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const auto tiles = common::query_tiles<Spec>(params, where);
        const int32 thread = threadIdx.x, warp = thread / 32;
        const BackwardDkdv block{params, shared_address(dynamic_smem), where, tiles, thread % 32, warp % kPairs};
        if (warp < kPairs)
            block.template loop<true>(params.dv, params.dv_strides, common::kept_scale<Spec>(params));
        else
            block.template loop<false>(params.dk, params.dk_strides, params.softmax_scale);
    }

  private:
    // kOfV: the warp computes P^T and dV; otherwise dS^T and dK.
    template <bool kOfV>
    __device__ __forceinline__ void loop(double* result, const Strides& strides, double scale) const {
        constexpr int kColumns = kOfV ? kHeadDimV : kHeadDim;
        const int32 thread = threadIdx.x;
        const int32 steps = tiles.num_heads(params.heads_per_group) * (tiles.end - tiles.begin);
        int32 head = where.head * params.heads_per_group, tile = tiles.begin;
        if (steps > 0) {
            load_tile_async<KTile, kThreads, kHeadDim>(smem,
                                                       params.k + params.k_strides.offset(where.batch, 0, where.head),
                                                       params.k_strides.row, where.tile * kBc, params.seqlen_k, thread);
            load_tile_async<VTile, kThreads, kHeadDimV>(
                smem + kV, params.v + params.v_strides.offset(where.batch, 0, where.head), params.v_strides.row,
                where.tile * kBc, params.seqlen_k, thread);
            const auto first = tiles.at({head, tile});
            copy(first, 0);
            store_statistic(statistic(first), 0);
        }
        Fragment<common::round_up(kColumns, 16) / 8> gradient;
        gradient.fill(0.0);
        for (int32 t = 0; t < steps; ++t) {
            const auto step = tiles.at({head, tile});
            const bool starts_with_full = tile >= tiles.full_begin,
                       past_full = tiles.kLeftLimit && tile >= tiles.full_end;
            if (++tile == tiles.end) {
                tile = tiles.begin;
                ++head;
            }
            const bool more = t + 1 < steps;
            common::QueryStep next = step;
            if (more) next = tiles.at({head, tile});
            common::cp_async_wait_all();
            block_barrier();  // Q, dO and statistics are there, the other slot and the weights are free
            if (kStages == 2 && more) copy(next, t + 1);
            const double of_next = more ? statistic(next) : 0.0;
            clear_hidden_rows(t);
            const common::OutsideFull outside{past_full, !starts_with_full};
            if constexpr (kOfV)
                add_to_dv(gradient, step, t, outside);
            else
                add_to_dk(gradient, t);
            if (more) store_statistic(of_next, t + 1);
            if (kStages == 1 && more) {
                block_barrier();
                copy(next, t + 1);
            }
        }
        const double factor[2] = {scale, scale};
        scale_rows(gradient, factor);
        store_rows<kColumns>(gradient, result + strides.offset(where.batch, 0, where.head), strides.row, first_key(),
                             params.seqlen_k, lane);
    }

    template <class Gradient>
    __device__ __forceinline__ void add_to_dv(Gradient& dv, const common::QueryStep& step, int32 t,
                                              const common::OutsideFull& outside) const {
        const AlongRows<KTile> k_rows(smem, 16 * pair, lane);
        const AlongRows<QTile> q_rows(slot(t), 0, lane);
        const AcrossRows<DoTile> do_columns(slot(t) + QTile::kBytes, lane);
        const common::ScoreTile score_tile{where.batch, step.head, step.tile * kBr, first_key(), lane};
        Scores p;
        p.fill(0.0);
        multiply_rows<kD / 8>(p, k_rows, q_rows);
        Scores weights;
        common::take_probabilities<true, Spec>(p, weights, common::mask_of<Spec>(params), outside, params, score_tile,
                                               [&](int, int j) { return statistic_at(t, 0, j); });
#pragma unroll
        for (int n = 0; n < kBr / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const double pair_of_row[2] = {weights(i, 2 * n), weights(i, 2 * n + 1)};
                store_shared(weight_address(2 * n + i), pair_of_row);
            }
        common::barrier_arrive(1 + pair, 64);
        multiply_columns(dv, p, do_columns);
    }

    template <class Gradient>
    __device__ __forceinline__ void add_to_dk(Gradient& dk, int32 t) const {
        const AlongRows<VTile> v_rows(smem + kV, 16 * pair, lane);
        const AlongRows<DoTile> do_rows(slot(t) + QTile::kBytes, 0, lane);
        const AcrossRows<QTile> q_columns(slot(t), lane);
        Scores ds;
        ds.fill(0.0);
        multiply_rows<kDv / 8>(ds, v_rows, do_rows);
        common::barrier_sync(1 + pair, 64);
#pragma unroll
        for (int n = 0; n < kBr / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                double weight[2];
                load_shared(weight_address(2 * n + i), weight);
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    ds(i, 2 * n + e) = common::weighted_from_zero<Spec>(weight[e], ds(i, 2 * n + e),
                                                                        statistic_at(t, 1, 2 * n + e), params);
            }
        multiply_columns(dk, ds, q_columns);
    }

    __device__ __forceinline__ int32 first_key() const { return where.tile * kBc + 16 * pair; }
    __device__ __forceinline__ uint32 slot(int32 t) const { return smem + kSlots + t % kStages * kSlotBytes; }
    __device__ __forceinline__ uint32 weight_address(int chunk) const {
        return smem + kWeights + pair * kPairBytes + (chunk * 32 + lane) * 16;
    }
    // lse (0) or delta (1) of the query of column j.
    __device__ __forceinline__ double statistic_at(int32 t, int which, int j) const {
        return load_shared<double>(statistics(t) + which * kStatisticBytes + Scores::col(j, lane) * 8);
    }
    __device__ __forceinline__ uint32 statistics(int32 t) const {
        return smem + kStatistics + t % 2 * 2 * kStatisticBytes;
    }

    __device__ __forceinline__ void copy(const common::QueryStep& step, int32 t) const {
        const int32 thread = threadIdx.x;
        load_tile_async<QTile, kThreads, kHeadDim>(slot(t),
                                                   params.q + params.q_strides.offset(where.batch, 0, step.head),
                                                   params.q_strides.row, step.tile * kBr, params.seqlen_q, thread);
        load_tile_async<DoTile, kThreads, kHeadDimV>(
            slot(t) + QTile::kBytes, params.dout + params.dout_strides.offset(where.batch, 0, step.head),
            params.dout_strides.row, step.tile * kBr, params.seqlen_q, thread);
    }
    // The first kBr threads return lse, the next kBr return delta. An lse of +inf makes P zero in rows past the end and in
    // rows without a visible key.
    __device__ __forceinline__ double statistic(const common::QueryStep& step) const {
        const int32 thread = threadIdx.x, row = step.tile * kBr + thread % kBr;
        const int64 at = common::first_statistic<Spec>(params, where.batch, step.head) + row;
        const bool valid = row < params.seqlen_q && params.lse[at] != -common::infinity<double>();
        if (thread < kBr) return valid ? params.lse[at] : common::infinity<double>();
        return valid && thread < 2 * kBr ? params.delta[at] : 0.0;
    }
    __device__ __forceinline__ void store_statistic(double x, int32 t) const {
        const int32 thread = threadIdx.x;
        if (thread < 2 * kBr) store_shared(statistics(t) + thread * 8, x);
    }

    // Stores zeros to the rows of the step's Q and dO that see no key.
    __device__ __forceinline__ void clear_hidden_rows(int32 t) const {
        if (!common::may_hide_rows<Spec>(params)) return;
        const auto is_hidden = [&](int32 row) {
            return load_shared<double>(statistics(t) + row * 8) == common::infinity<double>();
        };
        bool any = false;
        for (int32 row = lane; row < kBr; row += 32) any = any || is_hidden(row);
        if (!__any_sync(common::kFullWarp, any)) return;  // and no other warp goes on, either
        const int32 thread = threadIdx.x;
        for (int32 row = thread / 4; row < kBr; row += kThreads / 4)
            if (is_hidden(row)) {
                clear_row<QTile, 4>(slot(t), row, thread % 4);
                clear_row<DoTile, 4>(slot(t) + QTile::kBytes, row, thread % 4);
            }
        block_barrier();
    }
};

}  // namespace fa2::sm80_float64
