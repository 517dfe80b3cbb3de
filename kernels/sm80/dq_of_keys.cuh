// dQ of a query tile as far as a block's keys contribute to it, scale dS K, by all warps of the backward by key tiles
// (backward_dkdv.cuh): those of `single_pass` add it to a workspace; in `one_tile` it is all of dQ.
#pragma once
#include "common/schedule.cuh"
#include "common/tile_lists.cuh"
#include "sm80/dq_workspace.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

template <class Spec, class Block>
struct DqOfKeys {
    using Element = typename Block::Element;
    using KTile = typename Block::KTile;
    using QTile = typename Block::QTile;
    using DsTile = typename Block::DsTile;
    static constexpr int kBr = Block::kBr, kWarps = Block::kWarps, kD = Block::kD;

    // The warps share the kBr x kD products: 32 rows per warp if the columns then divide evenly, otherwise 16. Warps with
    // both roles have whole rows if these suffice, so that they leave as whole sectors.
    static constexpr bool kWholeRows = Block::kBothRoles && kWarps % (kBr / 16) == 0;
    static constexpr int kWarpRows = !kWholeRows && kBr % 32 == 0 && (kD / 16) % (kWarps / (kBr / 32)) == 0 ? 32 : 16;
    static constexpr int kM16 = kWarpRows / 16;
    static constexpr int kWarpsM = kBr / kWarpRows, kWarpsN = kWarps / kWarpsM;
    static constexpr int kN16 = ceil_div(kD / 16, kWarpsN);
    static_assert(kWarps % kWarpsM == 0);
    using Product = common::QuadFragment<2 * kN16>;

    // This warp's part of dS K: from which blocks of 16 rows and columns on, and the sums. dS^T is in buffer `parity`.
    __device__ static void multiply_by_keys(const Block& block, Product (&product)[kM16], int32 m0, int32 n0,
                                            int32 parity, int32 lane) {
        const LaneAddress<DsTile, MatrixOrder::kChunksFirst> ds(block.smem + Block::kDs + parity * DsTile::kBytes, 0,
                                                                lane);
        const LaneAddress<KTile, MatrixOrder::kRowsFirst> k(block.smem + Block::kK, 0, lane);
#pragma unroll
        for (int m = 0; m < kM16; ++m) product[m].fill(0.0f);
        multiply<Element, Block::kBc / 16>(
            product, [&](int m, int kk) { return ldmatrix_x4<true>(ds.at(kk, m0 + m)); },
            [&](int n, int kk) { return ldmatrix_x4<true>(k.at(kk, n0 + n)); });
    }

    // Adds this warp's part to dQ of the query tile of `step`.
    __device__ static void add(const Block& block, common::QueryStep step, int32 parity) {
        const int32 lane = block.lane_anew();
        const int32 m0 = block.warp % kWarpsM * kM16, n0 = block.warp / kWarpsM * kN16;
        Product product[kM16];
        multiply_by_keys(block, product, m0, n0, parity, lane);
        using Workspace = DqWorkspace<kBr, kD>;
        if constexpr (common::kListsTiles<Spec>) step = block.tiles.at(step);
        const int64 tile = common::first_workspace_tile<Spec>(block.params, block.where.batch, step.head) + step.tile;
        float* workspace = block.params.dq_accum + tile * Workspace::kTileElements;
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int n = 0; n < 2 * kN16; ++n)
                if (kD / 16 % kWarpsN == 0 || 2 * n0 + n < kD / 8)
                    add_accumulators(workspace + Workspace::offset(m0 + m, 2 * n0 + n, lane, 0), product[m].value[n]);
    }

    // Stores this warp's part of dQ of the query tile of `step`, in whose place it is staged: no warp reads Q any more.
    __device__ static void store(const Block& block, common::QueryStep step) {
        constexpr int kHeadDim = Block::kHeadDim;
        const int32 lane = block.lane_anew(), warp = computed_anew(block.warp);
        const int32 m0 = warp % kWarpsM * kM16, n0 = warp / kWarpsM * kN16;
        Product product[kM16];
        multiply_by_keys(block, product, m0, n0, 0, lane);
        Element* dq = block.params.dq + block.params.dq_strides.offset(block.where.batch, 0, step.head);
        if constexpr (kWholeRows && kWarpsN == 1 && 32 % QTile::kChunks == 0) {
#pragma unroll
            for (int m = 0; m < kM16; ++m) scale(product[m], block.params.softmax_scale);
            store_few_rows<QTile, kM16, kHeadDim>(block.smem + Block::kQ, 16 * m0, product, dq,
                                                  block.params.dq_strides.row, step.tile * kBr + 16 * m0,
                                                  block.params.seqlen_q, lane);
            return;
        }
#pragma unroll
        for (int n = 0; n < kN16; ++n) {
            if (kD / 16 % kWarpsN != 0 && n0 + n >= kD / 16) break;
            common::QuadFragment<2> columns[kM16];
#pragma unroll
            for (int m = 0; m < kM16; ++m)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    columns[m].value[i / 4][i % 4] =
                        product[m].value[2 * n + i / 4][i % 4] * block.params.softmax_scale;
            store_rows<QTile, kM16, kHeadDim>(block.smem + Block::kQ, 16 * m0, 2 * (n0 + n), columns, dq,
                                              block.params.dq_strides.row, step.tile * kBr + 16 * m0,
                                              block.params.seqlen_q, lane);
        }
    }
    __device__ static void scale(Product& x, float by) {
#pragma unroll
        for (int n = 0; n < 2 * kN16; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x.value[n][e] *= by;
    }

    // Stores zeros to dQ of the query tiles that no step has, since they see no key.
    __device__ static void clear_unseen(const Block& block) {
        constexpr int kChunks = Block::kHeadDim / 8;
        if (block.tiles.begin == 0 && block.tiles.end * kBr >= block.params.seqlen_q) return;
#pragma unroll 1
        for (int32 group_head = 0; group_head < block.params.heads_per_group; ++group_head) {
            const int32 head = block.where.head * block.params.heads_per_group + group_head;
            Element* dq = block.params.dq + block.params.dq_strides.offset(block.where.batch, 0, head);
            const auto clear = [&](int32 begin, int32 end) {
#pragma unroll 1
                for (int32 i = begin * kChunks + block.thread; i < end * kChunks; i += Block::kThreads)
                    *reinterpret_cast<float4*>(dq + i / kChunks * block.params.dq_strides.row + i % kChunks * 8) = {};
            };
            clear(0, min_of(block.tiles.begin * kBr, block.params.seqlen_q));
            clear(block.tiles.end * kBr, block.params.seqlen_q);
        }
    }
};

}  // namespace fa2::sm80
