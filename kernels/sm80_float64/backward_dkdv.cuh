// FlashAttention-2 backward of float64 data by key tiles (Algorithm 2) on mma.sync. The kernel computes dK and dV of a key
// tile; for `single_pass` it also adds the tile's contribution to dQ to a workspace (dq_workspace.cuh).
//
//   S^T = scale K Q^T     P^T = exp(S^T - lse)                dV = P^T dO
//   dP^T = V dO^T         dS^T = P^T o (dP^T - delta)         dK = scale dS^T Q         dQ = scale dS K
//
//   block   owns kBc keys of one K/V head; loops over the query tiles of B_r = kBr rows that see them, in all query
//           heads of the group, so that dK and dV are summed on chip in a fixed order
//   warp    owns 16 of these keys, and keeps their dK and dV in registers
//   pair    owns 16 of these keys where a warp has no registers for both gradients. One of its warps computes P^T and
//           keeps dV, the other one computes dS^T and keeps dK. They lie on the same scheduler, because the first one has
//           the exponentials. Two pairs may own the same keys: the two warps that compute P^T then share its rows, and so
//           do the two of dS^T (sharers.cuh)
//
//   shared memory                        written by            read by
//   K [kBc][kD]                          all warps             its owners, to compute S^T; all warps, to compute dQ
//   V [kBc][kDv]                         all warps             its owners, to compute dP^T
//   (Q, dO) [kStages], [kBr][kD, kDv]    all warps             all warps
//   dS^T [kStages], [kBc][kBr]           its owners            all warps, to compute dQ (`single_pass` only)
//   (lse, -delta) [2], [kBr]             first 2 kBr threads   all warps
//   weights [pair][chunk][lane]          one warp of a pair    the other one, the same lane: P^T, with marks of dropout
//   slots of sharers                     two warps             the same two: sums, P^T or dS^T
//
// Barriers: one at the top of a step, behind which its Q, dO and statistics are there, and no warp reads the weights or the
// slots of the step before any more. With one stage, another one stands behind dK, and the copy of the next step behind
// it. dQ needs dS^T of all warps: with one stage it is computed behind that other barrier, while the copy is under way,
// and with two in the next step, by the second warp of a pair while it would wait for the weights. These have a named
// barrier, and so have warps that share rows.
#pragma once
#include "common/mask.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "common/weights.cuh"
#include "sm80_float64/dq_workspace.cuh"
#include "sm80_float64/sharers.cuh"

namespace fa2::sm80_float64 {

template <class Spec, bool kWithDq = false>
struct BackwardDkdv {
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kWarps = Spec::kWarps, kThreads = 32 * kWarps;
    static constexpr int kOfRows = kIsWide<Spec> ? 2 : 1;  // that share rows
    using RowWarps = Sharers<kOfRows, kBr>;
    static constexpr int kStages = Spec::kStages, kOwners = kBc / 16 * kOfRows;
    static constexpr bool kInPairs = kWarps == 2 * kOwners;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = common::round_up(kHeadDim, 16 * kOfRows);
    static constexpr int kDv = common::round_up(kHeadDimV, 16 * kOfRows);
    static_assert(kBc % 16 == 0 && (kInPairs || kWarps == kOwners) && kStages <= 2 && 2 * kBr <= kThreads);

    using KTile = Tile<kBc, kD>;
    using VTile = Tile<kBc, kDv>;
    using QTile = Tile<kBr, kD>;
    using DoTile = Tile<kBr, kDv>;
    using DsTile = Tile<kBc, common::round_up(kBr, 16)>;
    static constexpr int kV = KTile::kBytes, kSlots = kV + VTile::kBytes, kSlotBytes = QTile::kBytes + DoTile::kBytes;
    static constexpr int kDs = kSlots + kStages * kSlotBytes, kWeights = kDs + kWithDq * kStages * DsTile::kBytes;
    static constexpr int kPairBytes = 16 * kBr / kOfRows * 8;
    static constexpr int kStatistics = kWeights + kInPairs * kOwners * kPairBytes, kStatisticBytes = kBr * 8;
    static constexpr int kSharersSlots = kStatistics + 4 * kStatisticBytes;
    static_assert(kSharersSlots + 2 * (kBc / 16) * RowWarps::kBytes == Spec::kSharedBytes);

    // The warps share the kBr x kDqColumns products of dQ. Each has 16 rows, and some of the columns.
    static constexpr int kBands = ceil_div(kBr, 16), kSharers = kWarps / kBands;
    static constexpr int kDqColumns = common::round_up(kHeadDim, 16), kDqN16 = ceil_div(kDqColumns / 16, kSharers);
    static_assert(!kWithDq || (kBr % 16 == 0 && kWarps % kBands == 0));

    using Scores = typename RowWarps::Scores;
    using Dk = Fragment<kD / kOfRows / 8>;
    using Dv = Fragment<kDv / kOfRows / 8>;
    using Step = common::QueryStep;

    const Params& params;
    const uint32 smem;
    const common::TileCoordinates where;
    const common::QueryTiles<Spec> tiles;
    const int32 lane, warp;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const auto tiles = common::query_tiles<Spec>(params, where);
        const int32 thread = threadIdx.x;
        const BackwardDkdv block{params, shared_address(dynamic_smem), where, tiles, thread % 32, thread / 32};
        if constexpr (!kInPairs)
            block.template loop<true, true>();
        else if (block.warp < kOwners)
            block.template loop<true, false>();
        else
            block.template loop<false, true>();
    }

  private:
    // kOfV: the warp computes P^T and dV. kOfK: it computes dS^T and dK.
    template <bool kOfV, bool kOfK>
    __device__ __forceinline__ void loop() const {
        const int32 thread = threadIdx.x, tiles_per_head = tiles.end - tiles.begin;
        const int32 steps = tiles.num_heads(params.heads_per_group) * tiles_per_head;
        // Without a mask all blocks visit the same query tiles. Each starts at a different one, so that their additions
        // do not meet in the same rows of dQ.
        constexpr bool kApart = kWithDq && !Spec::kCausal && !common::kListsTiles<Spec>;
        const int32 start = tiles.begin + (kApart && steps > 0 ? where.tile % tiles_per_head : 0);
        Step position{where.head * params.heads_per_group, start};
        if (steps > 0) {
            load_tile_async<KTile, kThreads, kHeadDim>(smem,
                                                       params.k + params.k_strides.offset(where.batch, 0, where.head),
                                                       params.k_strides.row, where.tile * kBc, params.seqlen_k, thread);
            load_tile_async<VTile, kThreads, kHeadDimV>(
                smem + kV, params.v + params.v_strides.offset(where.batch, 0, where.head), params.v_strides.row,
                where.tile * kBc, params.seqlen_k, thread);
            copy(tiles.at(position), 0);
            store_statistic(statistic(tiles.at(position)), 0);
        }
        Dv dv;
        Dk dk;
        if constexpr (kOfV) dv.fill(0.0);
        if constexpr (kOfK) dk.fill(0.0);
        Step previous{};
        for (int32 t = 0; t < steps; ++t) {
            const auto step = tiles.at(position);
            const bool starts_with_full = position.tile >= tiles.full_begin,
                       past_full = tiles.kLeftLimit && position.tile >= tiles.full_end;
            if (++position.tile == tiles.end) position.tile = tiles.begin;
            if (position.tile == start) ++position.head;
            const bool more = t + 1 < steps;
            double of_next = 0.0;
            const auto start_next = [&] {
                if (!more) return;
                const auto next = tiles.at(position);
                copy(next, t + 1);
                of_next = statistic(next);
            };
            common::cp_async_wait_all();
            block_barrier();  // Q, dO and statistics are there, the other slot and the weights are free
            if constexpr (kStages == 2) start_next();
            clear_hidden_rows(t);
            if constexpr (kWithDq && kStages == 2 && kOfK)
                if (t > 0) add_dq(previous, t - 1);
            add_step<kOfV, kOfK>(dv, dk, step, t, common::OutsideFull{past_full, !starts_with_full});
            if constexpr (kWithDq && kStages == 2 && !kOfK)
                if (t > 0) add_dq(previous, t - 1);
            if constexpr (kStages == 1) {
                block_barrier();  // dS^T is there, the slot is free
                start_next();
                if constexpr (kWithDq) add_dq(step, t);
            }
            if (more) store_statistic(of_next, t + 1);
            previous = step;
        }
        if constexpr (kWithDq && kStages == 2)
            if (steps > 0) {
                block_barrier();  // the last dS^T is there
                add_dq(previous, steps - 1);
            }
        if constexpr (kOfV) store<kHeadDimV, kDv>(dv, common::kept_scale<Spec>(params), params.dv, params.dv_strides);
        if constexpr (kOfK) store<kHeadDim, kD>(dk, params.softmax_scale, params.dk, params.dk_strides);
    }

    // Adds a query tile's contribution to dV, to dK, or to both, and leaves dS^T for dQ.
    template <bool kOfV, bool kOfK>
    __device__ __forceinline__ void add_step(Dv& dv, Dk& dk, const Step& step, int32 t,
                                             const common::OutsideFull& outside) const {
        const int32 lane = computed_anew(this->lane);
        const uint32 q = slot(t), dout = q + QTile::kBytes;
        Scores weights;
        if constexpr (kOfV) {
            const RowWarps sharers = row_warps(0, lane);
            const common::ScoreTile score_tile{where.batch, step.head, step.tile * kBr + sharers.first_column(),
                                               first_key(), lane};
            Scores p = sharers.products(sharers.template along_rows<KTile>(smem, own_rows()),
                                        sharers.template along_rows<QTile>(q, 0));
            common::take_probabilities<true, Spec>(p, weights, common::mask_of<Spec>(params), outside, params,
                                                   score_tile, [&](int, int j) { return statistic_at(t, 0, j); });
            if constexpr (!kOfK) {
                for_each_pair([&](int i, int j) {
                    const double both[2] = {weights(i, j), weights(i, j + 1)};
                    store_shared(weight_address(i, j), both);
                });
                common::barrier_arrive(1 + owner(), 64);
            }
            sharers.give(p);
            sharers.wait();
            sharers.multiply_columns(dv, p, sharers.template across_rows<DoTile>(dout));
        }
        if constexpr (kOfK) {
            constexpr bool kFromDelta = common::kProductsFromDelta<Spec>;
            const RowWarps sharers = row_warps(1, lane);
            Scores ds;
            for_each_pair([&](int i, int j) {
                for (int e = 0; e < 2; ++e) ds(i, j + e) = kFromDelta ? statistic_at(t, 1, j + e) : 0.0;
            });
            ds = sharers.products(sharers.template along_rows<VTile>(smem + kV, own_rows()),
                                  sharers.template along_rows<DoTile>(dout, 0), ds);
            if constexpr (!kOfV) common::barrier_sync(1 + owner(), 64);
            for_each_pair([&](int i, int j) {
                double weight[2];
                if constexpr (kOfV)
                    weight[0] = weights(i, j), weight[1] = weights(i, j + 1);
                else
                    load_shared(weight_address(i, j), weight);
                double both[2];
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    ds(i, j + e) = both[e] = common::weighted<Spec>(
                        weight[e], ds(i, j + e), kFromDelta ? 0.0 : statistic_at(t, 1, j + e), params);
                if constexpr (kWithDq)
                    store_shared(ds_tile(t) + DsTile::offset(own_rows() + Scores::row(i, lane),
                                                             sharers.first_column() / 2 + j / 2 * 4 + lane % 4),
                                 both);
            });
            sharers.give(ds);
            sharers.wait();
            sharers.multiply_columns(dk, ds, sharers.template across_rows<QTile>(q));
        }
    }

    // Adds this warp's part of dS K to dQ of a step's query tile.
    __device__ __forceinline__ void add_dq(const Step& step, int32 t) const {
        const int32 lane = computed_anew(this->lane), warp = computed_anew(this->warp);
        const int32 band = warp % kBands, first16 = warp / kBands * kDqN16;
        if (first16 >= kDqColumns / 16) return;
        Fragment<2 * kDqN16> product;
        product.fill(0.0);
        multiply_transposed<kBc / 8>(product, AcrossRows<DsTile>(ds_tile(t) + band * 128, lane),
                                     AcrossRows<KTile>(smem + first16 * 128, lane));
        using Workspace = DqWorkspace<kBr, kDqColumns>;
        const int64 tile =
            common::first_workspace_tile<Spec>(params, computed_anew(where.batch), step.head) + step.tile;
        double* own = params.dq_accum + tile * Workspace::kTileElements + Workspace::offset(band, 2 * first16, 0, lane);
#pragma unroll
        for (int n = 0; n < 2 * kDqN16; ++n)
            if (kDqColumns / 16 % kDqN16 == 0 || 2 * first16 + n < kDqColumns / 8)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    common::add_global(own + Workspace::offset(0, n, e, 0), product.value[n][e]);
    }

    template <class Visit>
    __device__ __forceinline__ static void for_each_pair(const Visit& visit) {
#pragma unroll
        for (int n = 0; n < Scores::kCols / 2; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) visit(i, 2 * n);
    }

    template <int kColumns, int kPadded, class Gradient>
    __device__ __forceinline__ void store(Gradient& gradient, double scale, double* gmem,
                                          const Strides& strides) const {
        const double factor[2] = {scale, scale};
        scale_rows(gradient, factor);
        store_rows<kColumns, kPadded>(gradient, gmem + strides.offset(where.batch, 0, where.head), strides.row,
                                      first_key(), params.seqlen_k, owner() % kOfRows * (kPadded / kOfRows), lane);
    }

    __device__ __forceinline__ int32 owner() const { return kInPairs ? warp % kOwners : warp; }
    __device__ __forceinline__ int32 own_rows() const { return 16 * (owner() / kOfRows); }
    // The warps that share this one's rows of P^T (0) or dS^T (1).
    __device__ __forceinline__ RowWarps row_warps(int which, int32 lane) const {
        const int32 number = which * (kBc / 16) + owner() / kOfRows;
        return {smem + kSharersSlots + number * RowWarps::kBytes, owner() % kOfRows, 1 + kOwners + number, lane};
    }
    __device__ __forceinline__ int32 first_key() const { return where.tile * kBc + own_rows(); }
    __device__ __forceinline__ uint32 slot(int32 t) const { return smem + kSlots + t % kStages * kSlotBytes; }
    __device__ __forceinline__ uint32 ds_tile(int32 t) const { return smem + kDs + t % kStages * DsTile::kBytes; }
    __device__ __forceinline__ uint32 weight_address(int i, int j) const {
        return smem + kWeights + owner() * kPairBytes + ((j + i) * 32 + lane) * 16;
    }
    // lse (0) or -delta (1) of the query of this warp's column j.
    __device__ __forceinline__ double statistic_at(int32 t, int which, int j) const {
        const int32 column = owner() % kOfRows * (kBr / kOfRows) + Scores::col(j, lane);
        return load_shared<double>(statistics(t) + which * kStatisticBytes + column * 8);
    }
    __device__ __forceinline__ uint32 statistics(int32 t) const {
        return smem + kStatistics + t % 2 * 2 * kStatisticBytes;
    }

    __device__ __forceinline__ void copy(const common::QueryStep& step, int32 t) const {
        const int32 thread = computed_anew(threadIdx.x), batch = computed_anew(where.batch);
        load_tile_async<QTile, kThreads, kHeadDim>(slot(t), params.q + params.q_strides.offset(batch, 0, step.head),
                                                   params.q_strides.row, step.tile * kBr, params.seqlen_q, thread);
        load_tile_async<DoTile, kThreads, kHeadDimV>(slot(t) + QTile::kBytes,
                                                     params.dout + params.dout_strides.offset(batch, 0, step.head),
                                                     params.dout_strides.row, step.tile * kBr, params.seqlen_q, thread);
    }
    // The first kBr threads return lse, the next kBr return -delta. An lse of +inf makes P zero in rows past the end and in
    // rows without a visible key.
    __device__ __forceinline__ double statistic(const common::QueryStep& step) const {
        const int32 thread = threadIdx.x, row = step.tile * kBr + thread % kBr;
        const int64 at = common::first_statistic<Spec>(params, computed_anew(where.batch), step.head) + row;
        const bool valid = row < params.seqlen_q && params.lse[at] != -common::infinity<double>();
        if (thread < kBr) return valid ? params.lse[at] : common::infinity<double>();
        return valid && thread < 2 * kBr ? -params.delta[at] : 0.0;
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
