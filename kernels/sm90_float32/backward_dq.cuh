// FlashAttention-2 backward of float32 data by query tiles, the first pass of `two_pass`: dQ on wgmma (Hopper), by products
// of float16 parts (parts.cuh). forward.cuh describes the structure; dO is one more operand with the query tile's rows.
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P o (dP - delta)     dQ = scale dS K
#pragma once
#include "sm90_float32/backward_dq_consumer.cuh"
#include "sm90_float32/query_tile_producer.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
struct BackwardDq {
    using Shape = PartsShape<Spec, 2>;
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
            BackwardDqConsumer<Spec>(params, memory, group - 1).run();
        }
    }
};

}  // namespace fa2::sm90_float32
