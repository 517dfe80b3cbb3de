// FlashAttention backward on wgmma and TMA (Hopper): blocks own key tiles and compute their dK and dV; for
// `single_pass` they also add the key tile's contribution to dQ to an fp32 workspace.
//
//   S^T = K Q^T          P^T = exp(scale S^T - lse)       dV = P^T dO
//   dP^T = V dO^T        dS^T = P^T o (dP^T - delta)      dK = scale dS^T Q       dQ = scale dS K
//
// A block owns kBc keys of one K/V head and loops over the query tiles of all query heads that share it, so that dK and
// dV are summed in registers in a fixed order. Warp groups of a block:
//
//   0       producer: one thread loads tiles by TMA, two warps prepare lse and delta, one thread fences dS; the group
//           releases most of its registers
//   1, 2    consumers. Up to head_dim 128 each owns 64 of 128 keys (backward_keys.cuh). If one of the two is wider,
//           the registers of a group hold only one gradient of 64 keys: one group computes dV, the other dK
//           (backward_divided.cuh)
//
// Short sequences of up to 32 columns wait for latencies more than for products: a multiprocessor then has two blocks,
// with half of the registers each. Their groups take the 64 queries of a tile in two parts, one after the other, and
// their panels of K, V, Q and dO have 32 columns.
//
// Where the groups are divided, dQ's additions in the L2 cache take longer than the products if a block adds those of 64
// keys. With kBc = 128, two blocks, a cluster, have a key tile: 64 keys each. They visit the same query tiles and compute
// dQ by turns, each for all 128 keys: in every second step a block sends its dS to the other one, which has K of both.
// Q and dO are loaded once for both, Q by the first block and dO by the second.
//
// Shared memory, in panels of 64 columns with the 128-byte swizzle that TMA writes and wgmma reads:
//
//   K [kBc][D], of all keys | V [kBc][Dv] | Q [kStages][kBr][D] | dO [kStages][kBr][Dv] | dS [2][kBr][kBc] if dQ is computed |
//   P [2] in register order, beyond head_dim 128 | -lse / scale, -delta [kStages][kBr] | ones (statistic.cuh) |
//   barriers | the array that warps hold (held_array.cuh), or that products start from, [groups][kBr][64], and barriers
//
// The producer copies a tile of the array that products start from (common/start_from_bias.cuh) as soon as the group has
// read that of the step before, at the beginning of it.
//
// Barriers: a pair of mbarriers for each stage of Q and dO and each buffer of dS and P. `full` completes when TMA has
// written all bytes and the producer the statistic (Q, dO), or when the warps that write the buffer have arrived (P);
// `empty` when every warp that reads it has arrived. dS has a third barrier, `written`, of the warps that write it: the
// producer waits for it, fences, and then arrives at `full`. So have Q and dO where rows may see no key: TMA completes
// `landed`, and the producer clears such rows before it arrives at `full`. K and V, which stay, have only `full`.
//
// dK and dV are stored by TMA from the memory of K and V, 16 rows per warp. TMA loads columns beyond head_dim and rows
// beyond the sequence as zeros, and does not store them.
#pragma once
#include "sm90/backward_divided.cuh"
#include "sm90/backward_keys.cuh"
#include "sm90/backward_producer.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape, int kGroup, bool kDivided>
struct ConsumerOf {
    using Type = BackwardKeys<Spec, Shape, kGroup>;
};
template <class Spec, class Shape, int kGroup>
struct ConsumerOf<Spec, Shape, kGroup, true> {
    using Type = BackwardDivided<Spec, Shape, kGroup == 0>;
};

template <class Spec, bool kWithDq = false>
struct BackwardDkdv {
    using Shape = BackwardShape<Spec, kWithDq>;
    template <int kGroup>
    using Consumer = typename ConsumerOf<Spec, Shape, kGroup, Shape::kDivided>::Type;

    static constexpr bool kFindsSequences = true;

    __device__ __forceinline__ static void run(const Params& launch, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, true>(launch, tile_index<Spec>());
        const auto& params = common::record_of_sequence<Spec>(launch, where.batch);
        if (has_no_step<Spec, typename Shape::Shares>(params, where.tile)) return;
        const BackwardMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers(rank_in_pair<Spec>());
        if constexpr (Shape::kStatisticsAsStep) store_ones(memory.ones());
        if constexpr (Shape::kPair)
            cluster_sync();
        else
            __syncthreads();
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);
        if (group == 0) {
            deallocate_registers<Shape::kProducerRegisters>();
            BackwardProducer<Spec, Shape>(params, launch, memory).run();
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            if (group == 1)
                Consumer<0>(params, launch, memory).run();
            else
                Consumer<1>(params, launch, memory).run();
        }
    }
};

}  // namespace fa2::sm90
