// lse and -delta of the rows of a query tile, which a block that owns keys has in shared memory for two tiles.
#pragma once
#include "common/delta.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "sm80/smem_tile.cuh"

namespace fa2::sm80 {

template <class Spec, class Block>
struct RowStatistics {
    static constexpr int kBr = Block::kBr;

    // The first kBr threads return lse * log2(e), the next kBr return -delta. An lse of +inf makes P zero, without a
    // mask, in rows past the end and in rows without a visible key, whose delta may be NaN.
    __device__ static float load(const Block& block, common::QueryStep step) {
        const int32 thread = block.thread_anew();
        if constexpr (common::kListsTiles<Spec>) step = block.tiles.at(step);
        const auto& params = block.params;
        const int32 row = step.tile * kBr + thread % kBr;
        const int64 first = common::first_statistic<Spec>(params, block.where.batch, step.head);
        const bool valid = row < params.seqlen_q;
        if (thread >= 2 * kBr) return 0.0f;
        const float lse = valid ? params.lse[first + row] : -common::infinity<float>();
        const bool hidden = lse == -common::infinity<float>();
        if (thread < kBr) return hidden ? -lse : common::in_base2(lse);
        if constexpr (Block::kStoresDq)
            if (params.o != nullptr) return hidden ? 0.0f : common::dlse_of<Spec>(params, first + row);
        return hidden ? 0.0f : -params.delta[first + row];
    }
    __device__ static void store(const Block& block, float x, int32 parity) {
        if (block.thread < 2 * kBr)
            store_shared(block.smem + Block::kRowStats + parity * Block::kRowStatsBytes + block.thread * 4, x);
    }

    // In `one_tile`: subtracts the products of O and dO, unless delta is given, from what is stored for -delta.
    __device__ static void take_delta(const Block& block, int32 parity) {
        using Tile = typename Block::DoTile;
        using Element = typename Block::Element;
        constexpr int kLanes = lanes_of_row<Tile>();
        const int32 thread = block.thread_anew();
        const int32 row = thread / kLanes, first_chunk = thread % kLanes;
        const uint32 lse = block.smem + Block::kRowStats + parity * Block::kRowStatsBytes + row * 4,
                     minus_delta = lse + kBr * 4;
        if (block.params.o == nullptr || row >= kBr) return;
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < ceil_div(Tile::kChunks, kLanes); ++c) {
            const int32 chunk = first_chunk + c * kLanes;
            if (Tile::kChunks % kLanes != 0 && chunk >= Tile::kChunks) break;
            const auto o = load_shared_operand(block.smem + Block::kO + Tile::offset(row, chunk));
            const auto dout = load_shared_operand(block.smem + Block::kDo + Tile::offset(row, chunk));
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                sum += common::unpack_lo<Element>(o.reg[w]) * common::unpack_lo<Element>(dout.reg[w]);
                sum += common::unpack_hi<Element>(o.reg[w]) * common::unpack_hi<Element>(dout.reg[w]);
            }
        }
        sum = common::row_sum<kLanes>(sum);
        if (first_chunk == 0 && load_shared<float>(lse) != common::infinity<float>())
            store_shared(minus_delta, load_shared<float>(minus_delta) - sum);
    }
    // How many lanes share a row then: a power of two, so that warps have whole rows.
    template <class Tile>
    __host__ __device__ static constexpr int lanes_of_row() {
        int lanes = 2;
        while (2 * lanes * kBr <= Block::kThreads && lanes < Tile::kChunks) lanes *= 2;
        return lanes;
    }
};

}  // namespace fa2::sm80
