// FlashAttention forward of float32 data on wgmma (Hopper): products of float16 parts (parts.cuh).
//
//   S = scale Q K^T        P = exp(S - row_max)        O = P V / rowsum(P)        lse = row_max + log(rowsum(P))
//
// The structure is that of sm90/forward.cuh: persistent blocks of a producer, which copies operands to shared memory, and
// of consumer warp groups, which own 64 query rows each. Every operand has two parts:
//
//   Q [part][panel][kBr] | K [kStages][part][panel][kBc] | V [kStages][part][panel][kBc] | barriers | query tiles [4]
//
// O is added up in registers, and stored from there: the results may have any strides.
#pragma once
#include "sm90_float32/forward_consumer.cuh"
#include "sm90_float32/query_tile_producer.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
struct Forward {
    using Shape = PartsShape<Spec, 1>;
    static constexpr bool kFindsSequences = true;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const QueryTileMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);
        if (group == 0) {
            deallocate_registers<Shape::kProducerRegisters>();
            if (threadIdx.x == 0) QueryTileProducer<Spec, Shape>(params, memory).run();
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            ForwardConsumer<Spec>(params, memory, group - 1).run();
        }
    }
};

}  // namespace fa2::sm90_float32
