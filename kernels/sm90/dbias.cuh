// The gradient of a broadcast bias on wgmma and TMA (Hopper): blocks own tiles of the bias and need no atomics.
//
//   S = Q K^T        P = exp(scale S + bias - lse)        dP = dO V^T        dbias = sum of P o (dP - delta)
//
// A block owns a tile of the bias, kBr queries and kBc keys; it visits the tiles of scores that share it, one after the
// other (common/bias_owner.cuh). Warp groups of a block:
//
//   0          producer: one warp loads Q, dO, K and V, and another one the statistics of rows; the group releases most of
//              its registers
//   1 ..       consumers: each owns 64 rows of the tile, each of its warps 16; S, dP and the sums are in registers
//
// The tile of the bias is the same for all steps, and is loaded once. Shared memory, where operands are in panels of 64
// columns with the 128-byte swizzle that TMA writes and wgmma reads, or of 32 with that of 64 bytes:
//
//   (Q [kBr][D] | dO [kBr][Dv] | K [kBc][D] | V [kBc][Dv]) [kStages] | bias, 16 rows for each warp |
//   (lse, delta) [kStages][kBr] | steps, and the keys that the padding leaves [kStages] | barriers
//
// At the end, sums over queries pass through the first stage.
//
// Barriers: a pair of mbarriers for each stage. `full` completes when the producer's warps have stored the step and the
// statistics and TMA has written all bytes, `empty` when every consumer warp has arrived. The producer runs ahead as far
// as there are stages.
#pragma once
#include "sm90/dbias_consumer.cuh"
#include "sm90/dbias_producer.cuh"

namespace fa2::sm90 {

template <class Spec>
struct Dbias {
    static constexpr bool kFindsSequences = true;
    using Shape = DbiasShape<Spec>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const DbiasMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        if (threadIdx.x < kGroupThreads) {
            deallocate_registers<Shape::kProducerRegisters>();
            if (threadIdx.x < 64) DbiasProducer<Spec>(params, memory).run();
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            char* stages = dynamic_smem + (memory.base - shared_address(dynamic_smem));
            DbiasConsumer<Spec>(params, memory).run(reinterpret_cast<float*>(stages));
        }
    }
};

}  // namespace fa2::sm90
