// The body of the kernels of query_tile_loop.cuh: sets up the barriers, divides the registers of the warp groups, and
// runs the producer or a consumer.
#pragma once
#include "sm90/query_loop_producer.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape, class Consumer>
struct QueryLoopKernel {
    static constexpr bool kFindsSequences = true;

    // The block's first query tile is that with the index `first`.
    __device__ static void run(const Params& params, char* dynamic_smem, int32 first = blockIdx.x) {
        const QueryTileMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        if (threadIdx.x < kGroupThreads) {
            deallocate_registers<Shape::kProducerRegisters>();
            if (threadIdx.x == 0) QueryLoopProducer<Spec, Shape>(params, memory).run(first);
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            Consumer(params, memory).run();
        }
    }
};

}  // namespace fa2::sm90
