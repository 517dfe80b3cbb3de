// The tangent of the backward by key tiles on mma.sync: how dK and dV change along a direction (Q', K', V', dO').
// backward_dkdv.cuh has the backward, common/tangents.cuh the formulas of dS and dS'.
//
//   S^T = scale K Q^T     T^T = scale (K' Q^T + K Q'^T)     dP^T = V dO^T     dP'^T = V' dO^T + V dO'^T
//   dV' = (P o (T - lse'))^T dO + P^T dO'                   dK' = scale (dS'^T Q + dS^T Q')
//
//   block   owns kBc keys of one K/V head; loops over the query tiles of B_r = kBr rows that see them, in all query
//           heads of the group, so that dK' and dV' are summed on chip in a fixed order
//   warp    owns 16 or 32 of these keys: their dK' and dV'. Above 128 columns registers hold one of the two (kRoles), and
//           two warps share the keys; above 256 a half of its columns (kParts), and four warps do. All of them compute S^T
//           and T^T, so that none waits
//
// Scores are computed transposed: rounded to 16 bits, their accumulators are the left operands of the products that sum
// over queries.
//
//   shared memory                                    written by         read by
//   K, K' [2][kBc][kD], V, V' [2][kBc][kDv]          all warps          each warp its rows, to compute S^T to dP'^T
//   (Q, dO, Q', dO') [kStages], [kBr][kD, kDv]       all warps          all warps, as right operands of all products
//   (lse, delta, lse', delta') [2], [kBr]            kBr threads        all warps
//
// At the end dK' and dV' are staged at the places of K and V.
//
// Barriers: clear_hidden_tile at the top of an iteration guarantees that query tile and statistics are there, and that
// the slots read by the previous iteration are free. With one stage, another one before it protects the only slot from
// the next copy.
#pragma once
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
struct DkdvJvp {
    using Element = typename Spec::Element;
    static constexpr bool kByKeys = true, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kStages = Spec::kStages, kWarps = Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kRoles = common::max_of(kD, kDv) > 128 ? 2 : 1;
    static constexpr int kParts = sharers_of_gradient(common::max_of(kD, kDv));
    static constexpr int kWarpKeys = kBc / (kWarps / (kRoles * kParts));
    static constexpr int kM16 = kWarpKeys / 16;

    using KTile = SmemTile<kBc, kD>;
    using VTile = SmemTile<kBc, kDv>;
    using QTile = SmemTile<kBr, kD>;
    using DoTile = SmemTile<kBr, kDv>;
    using Scores = QuadFragment<kBr / 8>;
    using Packed = PackedFragment<Element, kBr / 8>;
    using Row = common::MovedRow<float>;
    using Dk = QuadFragment<kD / kParts / 8>;
    using Dv = QuadFragment<kDv / kParts / 8>;
    static constexpr int kK16 = kD / kParts / 16, kV16 = kDv / kParts / 16;  // steps of a part's columns
    using Step = common::QueryStep;

    static constexpr int kK = 0, kKMoved = kK + KTile::kBytes;
    static constexpr int kV = kKMoved + KTile::kBytes, kVMoved = kV + VTile::kBytes;
    static constexpr int kSlots = kVMoved + VTile::kBytes;
    // In a slot:
    static constexpr int kQ = 0, kDo = kQ + QTile::kBytes;
    static constexpr int kQMoved = kDo + DoTile::kBytes, kDoMoved = kQMoved + QTile::kBytes;
    static constexpr int kSlotBytes = kDoMoved + DoTile::kBytes;
    static constexpr int kRows = kSlots + kStages * kSlotBytes;
    static constexpr int kSharedBytes = kRows + 2 * kBr * sizeof(Row);
    static_assert(kSharedBytes == Spec::kSharedBytes);
    static_assert(kBr <= kThreads);

    const Params& params;
    char* const memory;
    const uint32 smem;
    const common::TileCoordinates where;
    const common::QueryTiles<Spec> tiles;
    const int32 thread, lane;
    const int32 own_row, part;  // the first of the warp's keys in the tile; its part of the columns

    __device__ static void run(const Params& params, char* memory) {
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 thread = threadIdx.x, warp = __shfl_sync(common::kFullWarp, thread / 32, 0);
        const DkdvJvp block{params,
                            memory,
                            shared_address(memory),
                            where,
                            common::query_tiles<Spec>(params, where),
                            thread,
                            thread % 32,
                            warp / (kRoles * kParts) * kWarpKeys,
                            warp / kRoles % kParts};
        block.load_keys();
        if constexpr (kRoles == 1)
            block.template loop<true, true>();
        else if (warp % 2 == 0)
            block.template loop<true, false>();
        else
            block.template loop<false, true>();
    }

    template <class Tile, int kColumns>
    __device__ void load(uint32 tile, const Element* matrix, const Strides& strides, int32 head, int32 first_row,
                         int32 num_rows) const {
        if (matrix != nullptr)
            load_tile_async<Tile, kThreads, kColumns>(tile, head_of(matrix, strides, where.batch, head), strides.row,
                                                      first_row, num_rows, thread);
    }
    __device__ void load_keys() const {
        const int32 first = where.tile * kBc, rows = params.seqlen_k;
        load<KTile, kHeadDim>(smem + kK, params.k, params.k_strides, where.head, first, rows);
        load<KTile, kHeadDim>(smem + kKMoved, params.kt, params.kt_strides, where.head, first, rows);
        load<VTile, kHeadDimV>(smem + kV, params.v, params.v_strides, where.head, first, rows);
        load<VTile, kHeadDimV>(smem + kVMoved, params.vt, params.vt_strides, where.head, first, rows);
    }
    __device__ void load_queries(const Step& step, uint32 slot) const {
        const Step at = tiles.at(step);
        const int32 first = at.tile * kBr, rows = params.seqlen_q;
        load<QTile, kHeadDim>(slot + kQ, params.q, params.q_strides, at.head, first, rows);
        load<DoTile, kHeadDimV>(slot + kDo, params.dout, params.dout_strides, at.head, first, rows);
        load<QTile, kHeadDim>(slot + kQMoved, params.qt, params.qt_strides, at.head, first, rows);
        load<DoTile, kHeadDimV>(slot + kDoMoved, params.dot, params.dot_strides, at.head, first, rows);
    }

    // The statistics of a step's queries, of which the first kBr threads have one each.
    __device__ Row load_row(const Step& step) const {
        if (thread >= kBr) return {};
        const Step at = tiles.at(step);
        const int64 first = common::first_statistic<Spec>(params, where.batch, at.head);
        const int32 row = at.tile * kBr + thread;
        return moved_row(params, first, row, base2_lse(params, first, row));
    }
    __device__ Row* rows_of(int32 parity) const { return reinterpret_cast<Row*>(memory + kRows) + parity * kBr; }
    __device__ void store_row(const Row& row, int32 parity) const {
        if (thread < kBr) rows_of(parity)[thread] = row;
    }

    template <bool kOfKeys, bool kOfValues>
    __device__ __forceinline__ void iterate(Dk (&dk)[kM16], Dv (&dv)[kM16], uint32 slot, const Row* rows,
                                            const Step& step) const {
        const uint32 q = slot + kQ, q_moved = slot + kQMoved, dout = slot + kDo, dout_moved = slot + kDoMoved;
        Scores p[kM16], tangents[kM16], ds[kM16], ds_tangent[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            p[m].fill(0.0f);
            tangents[m].fill(0.0f);
#pragma unroll
            for (int j = 0; j < Scores::kCols; ++j) {
                const Row row = rows[Scores::col(j, lane)];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    ds[m](i, j) = common::kProductsFromDelta<Spec> ? -row.delta : 0.0f;
                    ds_tangent[m](i, j) = common::kProductsFromDelta<Spec> ? -row.delta_tangent : 0.0f;
                }
            }
        }
        multiply_moved<Element, KTile, QTile>(p, tangents, smem + kK, smem + kKMoved, params.kt != nullptr, own_row, q,
                                              q_moved, params.qt != nullptr, lane);
        if constexpr (kOfKeys)
            multiply_moved<Element, VTile, DoTile>(ds, ds_tangent, smem + kV, smem + kVMoved, params.vt != nullptr,
                                                   own_row, dout, dout_moved, params.dot != nullptr, lane);

        Packed packed[kM16], packed_tangents[kM16], packed_ds[kM16], packed_ds_tangents[kM16];
        const auto mask = common::mask_of<Spec>(params);
        const common::OutsideFull outside{tiles.kLeftLimit && step.tile >= tiles.full_end,
                                          step.tile < tiles.full_begin};
        const Step at = tiles.at(step);
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            const common::ScoreTile score_tile{where.batch, at.head, at.tile * kBr, where.tile * kBc + own_row + 16 * m,
                                               lane};
            const auto slopes = common::differentiate_twice<true, Spec>(
                p[m], tangents[m], ds[m], ds_tangent[m], mask, outside, params, score_tile,
                [&](int, int j) { return common::without_delta<Spec>(rows[Scores::col(j, lane)]); });
            slopes.apply(ds[m], ds_tangent[m]);
            packed[m].set(p[m]);
            packed_tangents[m].set(tangents[m]);
            packed_ds[m].set(ds[m]);
            packed_ds_tangents[m].set(ds_tangent[m]);
        }
        if constexpr (kOfValues) {
            accumulate<DoTile>(dv, packed_tangents, dout, part * kV16, lane);
            if (params.dot != nullptr) accumulate<DoTile>(dv, packed, dout_moved, part * kV16, lane);
        }
        if constexpr (kOfKeys) {
            accumulate<QTile>(dk, packed_ds_tangents, q, part * kK16, lane);
            if (params.qt != nullptr) accumulate<QTile>(dk, packed_ds, q_moved, part * kK16, lane);
        }
    }

    // kOfKeys, kOfValues: whether the warp has dK' and dV'.
    template <bool kOfKeys, bool kOfValues>
    __device__ __forceinline__ void loop() const {
        Dk dk[kM16];
        Dv dv[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            dk[m].fill(0.0f);
            dv[m].fill(0.0f);
        }
        const int32 steps = (tiles.end - tiles.begin) * tiles.num_heads(params.heads_per_group);
        Step step{where.head * params.heads_per_group, tiles.begin};
        if (steps > 0) {
            if constexpr (kStages > 1) load_queries(step, smem + kSlots);
            store_row(load_row(step), 0);
        }
        cp_async_commit();

        for (int32 t = 0; t < steps; ++t) {
            const uint32 slot = smem + kSlots + t % kStages * kSlotBytes;
            const bool more = t + 1 < steps;
            const Step next =
                step.tile + 1 < tiles.end ? Step{step.head, step.tile + 1} : Step{step.head + 1, tiles.begin};
            if constexpr (kStages == 1) {
                block_barrier();
                load_queries(step, slot);
                cp_async_commit();
            }
            cp_async_wait<0>();
            const Row* rows = rows_of(t % 2);
            clear_hidden_tile<Spec, kThreads>(
                params, step.tile == tiles.begin,
                [&](int32 row) { return row < kBr && rows[row].lse == common::infinity<float>(); },
                [&](int32 row) {
                    clear_row<QTile>(slot + kQ, row);
                    clear_row<QTile>(slot + kQMoved, row);
                    clear_row<DoTile>(slot + kDo, row);
                    clear_row<DoTile>(slot + kDoMoved, row);
                });
            if constexpr (kStages > 1) {
                if (more) load_queries(next, smem + kSlots + (t + 1) % kStages * kSlotBytes);
                cp_async_commit();
            }
            const Row row = more ? load_row(next) : Row{};
            iterate<kOfKeys, kOfValues>(dk, dv, slot, rows, step);
            store_row(row, (t + 1) % 2);
            step = next;
        }
        cp_async_wait<0>();
        block_barrier();  // no warp reads K and V any more
        if constexpr (kOfKeys)
            store<KTile, kHeadDim>(smem + kK, dk, params.softmax_scale, params.dkt, params.dkt_strides);
        if constexpr (kOfValues)
            store<VTile, kHeadDimV>(smem + kV, dv, common::kept_scale<Spec>(params), params.dvt, params.dvt_strides);
    }

    template <class Tile, int kColumns, int kN8>
    __device__ __forceinline__ void store(uint32 tile, QuadFragment<kN8> (&gradient)[kM16], float scale,
                                          Element* matrix, const Strides& strides) const {
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int n = 0; n < kN8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) gradient[m].value[n][e] *= scale;
        store_rows<Tile, kM16, kColumns>(tile, own_row, part * kN8, gradient,
                                         head_of(matrix, strides, where.batch, where.head), strides.row,
                                         where.tile * kBc + own_row, params.seqlen_k, lane);
    }
};

}  // namespace fa2::sm80
