// The gradient of a broadcast bias on mma.sync: blocks own tiles of the bias and need no atomics.
//
//   S = Q K^T        P = exp(scale S - lse)        dP = dO V^T        dbias = sum of P o (dP - delta)
//
//   block   owns a tile of the bias, kBr queries and kBc keys; visits the tiles of scores that share it
//           (common/bias_owner.cuh)
//   warp    owns kBr / kWarps rows of the tile; keeps their sums in registers
//
//   shared memory                              written by          read by
//   (Q, dO, K, V) [kStages], Q, dO [kBr][...], all warps           each warp its rows of Q and dO, all warps K and V
//       K, V [kBc][kD, kDv]
//
// At the end, sums over queries pass through the same memory.
//
// Barriers: one __syncthreads per tile of scores. Behind it the tile has landed, and the slot of the tile before it is
// free for the next copy. With one stage, another one protects the only slot.
#pragma once
#include "common/bias_owner.cuh"
#include "common/params.cuh.j2"
#include "common/statistics.cuh"
#include "common/weights.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

template <class Spec>
struct Dbias {
    using Element = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = true;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kStages = Spec::kStages;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = Spec::kWarps * 32;
    static constexpr int kWarpRows = kBr / Spec::kWarps;
    static constexpr int kM16 = kWarpRows / 16;

    using QTile = SmemTile<kBr, kD>;
    using DoTile = SmemTile<kBr, kDv>;
    using KTile = SmemTile<kBc, kD>;
    using VTile = SmemTile<kBc, kDv>;
    static constexpr int kDo = QTile::kBytes;
    static constexpr int kK = kDo + DoTile::kBytes;
    static constexpr int kV = kK + KTile::kBytes;
    static constexpr int kSlotBytes = kV + VTile::kBytes;
    static_assert(kStages * kSlotBytes == Spec::kSharedBytes && kStages <= 2 && common::kTakesWeights<Spec>);
    static_assert(Spec::kWarps * kBc * sizeof(float) <= kSlotBytes);

    using Scores = QuadFragment<kBc / 8>;

    // The statistics of a warp's rows.
    struct Rows {
        float lse[kM16][2], minus_delta[kM16][2];
    };

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp * kWarpRows;
        common::BiasOwner<Spec, Params> owner(params);
        Scores sums[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) sums[m].fill(0.0f);

        Rows next;
        if (owner.has_step()) load(next, params, owner.step(), smem, warp_row, lane);
        for (int32 slot = 0; owner.has_step(); slot = (slot + 1) % kStages) {
            const common::BiasStep step = owner.step();
            const Rows rows = next;
            common::cp_async_wait_all();
            __syncthreads();  // the tile is there, the other slot is free
            owner.advance();
            if (kStages > 1 && owner.has_step())
                load(next, params, owner.step(), smem + (slot + 1) % kStages * kSlotBytes, warp_row, lane);
            add(sums, rows, params, step, smem + slot * kSlotBytes, warp_row, lane);
            if (kStages == 1 && owner.has_step()) {
                __syncthreads();  // the slot is free
                load(next, params, owner.step(), smem, warp_row, lane);
            }
        }
        owner.store(sums, reinterpret_cast<float*>(dynamic_smem), warp_row, warp, lane);
    }

    // Starts the copies of a tile's operands, and loads the statistics of a warp's rows.
    __device__ __forceinline__ static void load(Rows& rows, const Params& params, const common::BiasStep& step,
                                                uint32 slot, int32 warp_row, int32 lane) {
        const auto& own = common::record_of_sequence<Spec>(params, step.batch);
        const int32 thread = threadIdx.x, head_kv = step.head / own.heads_per_group;
        const int32 first_row = step.query_tile * kBr, first_key = step.key_tile * kBc;
        load_tile_async<QTile, kThreads, kHeadDim>(slot, own.q + own.q_strides.offset(step.batch, 0, step.head),
                                                   own.q_strides.row, first_row, own.seqlen_q, thread);
        load_tile_async<DoTile, kThreads, kHeadDimV>(slot + kDo,
                                                     own.dout + own.dout_strides.offset(step.batch, 0, step.head),
                                                     own.dout_strides.row, first_row, own.seqlen_q, thread);
        load_tile_async<KTile, kThreads, kHeadDim>(slot + kK, own.k + own.k_strides.offset(step.batch, 0, head_kv),
                                                   own.k_strides.row, first_key, own.seqlen_k, thread);
        load_tile_async<VTile, kThreads, kHeadDimV>(slot + kV, own.v + own.v_strides.offset(step.batch, 0, head_kv),
                                                    own.v_strides.row, first_key, own.seqlen_k, thread);
        // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
        const int64 first_stat = common::first_statistic<Spec>(own, step.batch, step.head);
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 row = first_row + warp_row + 16 * m + Scores::row(i, lane);
                const bool valid = row < own.seqlen_q;
                const float natural = valid ? own.lse[first_stat + row] : -common::infinity<float>();
                const bool hidden = natural == -common::infinity<float>();  // delta may be NaN then
                rows.lse[m][i] = hidden ? -natural : common::in_base2(natural);
                rows.minus_delta[m][i] = hidden ? 0.0f : -own.delta[first_stat + row];
            }
    }

    // Adds dS of a tile of scores.
    __device__ __forceinline__ static void add(Scores (&sums)[kM16], const Rows& rows, const Params& params,
                                               const common::BiasStep& step, uint32 slot, int32 warp_row, int32 lane) {
        const auto& own = common::record_of_sequence<Spec>(params, step.batch);
        const LaneAddress<QTile, MatrixOrder::kRowsFirst> q_rows(slot, warp_row, lane);
        const LaneAddress<DoTile, MatrixOrder::kRowsFirst> do_rows(slot + kDo, warp_row, lane);
        const LaneAddress<KTile, MatrixOrder::kChunksFirst> k_rows(slot + kK, 0, lane);
        const LaneAddress<VTile, MatrixOrder::kChunksFirst> v_rows(slot + kV, 0, lane);
        Scores p[kM16], dp[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            p[m].fill(0.0f);
#pragma unroll
            for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    dp[m].value[n][e] = common::kProductsFromDelta<Spec> ? rows.minus_delta[m][e / 2] : 0.0f;
        }
        multiply<Element, kD / 16>(
            p, [&](int m, int kk) { return ldmatrix_x4<false>(q_rows.at(m, kk)); },
            [&](int n, int kk) { return ldmatrix_x4<false>(k_rows.at(n, kk)); });
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            const common::ScoreTile score_tile{
                step.batch, step.head, {step.query_tile * kBr + warp_row + 16 * m, step.key_tile * kBc, lane}};
            common::Unused unused;
            common::take_weights<false, Spec>(p[m], unused, step.masked, own, score_tile,
                                              [&](int i, int) { return rows.lse[m][i]; });
        }
        multiply<Element, kDv / 16>(
            dp, [&](int m, int kk) { return ldmatrix_x4<false>(do_rows.at(m, kk)); },
            [&](int n, int kk) { return ldmatrix_x4<false>(v_rows.at(n, kk)); });
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float ds =
                        common::weighted<Spec>(p[m].value[n][e], dp[m].value[n][e], rows.minus_delta[m][e / 2], own);
                    // Rows that see no key may have NaN in Q and dO.
                    if (rows.lse[m][e / 2] != common::infinity<float>()) sums[m].value[n][e] += ds;
                }
    }
};

}  // namespace fa2::sm80
