// For `one_tile` with a bias: what the block has of it in shared memory.
#pragma once
#include "common/held_array.cuh"
#include "common/weights.cuh"
#include "sm80/ptx.cuh"

namespace fa2::sm80 {

// The bias of a probability warp, in tiles of 16 keys. They lie where the other warp of the pair writes dS as soon as it
// has P^T; if the block sums dbias of a bias, they stay. In other kernels the bias stays in global memory.
template <class Spec, class Block>
struct BiasOfWarp {
    static constexpr int kBr = Block::kBr;
    using Held =
        typename common::HeldType<Block::kStoresDq && common::kMayHoldBias<Spec>, false,
                                  common::BiasOfKeys<typename Spec::Element, kBr, 16>, common::ArraysInMemory>::Type;
    static_assert(Held::Tile::kBytes == 0 || Held::Tile::kBytes == 16 * kBr * 2);

    __device__ static uint32 address(const Block& block, int m) {
        return block.smem + (Block::kSumsDbias ? Block::kBias : Block::kDs) +
               (block.pair * Block::kM16 + m) * 16 * kBr * 2;
    }
    __device__ static Held held(const Block& block, int m) {
        if constexpr (Held::kInMemory)
            return {};
        else
            return Held(address(block, m), block.lane, 0);
    }
    template <bool kProbability>
    __device__ static void load(const Block& block, const common::QueryStep& step) {
        if constexpr (kProbability && !Held::kInMemory)
#pragma unroll 1
            for (int m = 0; m < Block::kM16; ++m) {
                const common::ScoreTile tile{block.where.batch, step.head, step.tile * kBr,
                                             block.where.tile * Block::kBc + block.first_own_key() + 16 * m,
                                             block.lane};
                if (Held::Tile::takes(block.params))
                    Held::Tile::load(address(block, m), block.params, tile);
                else
                    Held::Tile::load_elements(address(block, m), block.params, tile);
            }
    }
};

// With a bias that sequences share: the sums of dS^T over these sequences. They have the order of the accumulators, of
// which each thread reads and writes its own.
template <class Block>
struct DbiasSums {
    static constexpr int kBr = Block::kBr, kBc = Block::kBc, kM16 = Block::kM16;

    // Those of this lane for 16 keys and 8 queries.
    __device__ static uint32 address(const Block& block, int m, int n) {
        return block.smem + Block::kDbias + (((block.pair * kM16 + m) * (kBr / 8) + n) * 32 + block.lane) * 16;
    }
    __device__ static void clear(const Block& block) {
#pragma unroll 1
        for (int m = 0; m < kM16; ++m)
            for (int n = 0; n < kBr / 8; ++n) store_shared(address(block, m, n), 0, 0, 0, 0);
    }
    template <class Scores>
    __device__ static void add(const Block& block, const Scores& ds, int m) {
#pragma unroll
        for (int n = 0; n < kBr / 8; ++n) {
            float sum[4];
            load_shared(address(block, m, n), sum);
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += ds.value[n][e];
            store_shared(address(block, m, n), __float_as_uint(sum[0]), __float_as_uint(sum[1]),
                         __float_as_uint(sum[2]), __float_as_uint(sum[3]));
        }
    }
    // Stores the sums of the block, behind a barrier.
    template <class Owner>
    __device__ static void store(const Block& block, const Owner& owner) {
        for (int32 i = block.thread; i < kBr * kBc; i += Block::kThreads) {
            const int32 query = i / kBc, key = i % kBc;
            const int32 lane = key % 8 * 4 + query % 8 / 2, element = key / 8 % 2 * 2 + query % 2;
            const int32 index = ((key / 16 * (kBr / 8) + query / 8) * 32 + lane) * 4 + element;
            owner.store(query, key, load_shared<float>(block.smem + Block::kDbias + index * 4));
        }
    }
};

}  // namespace fa2::sm80
