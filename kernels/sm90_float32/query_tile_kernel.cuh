// A kernel whose blocks own query tiles: starts the barriers, and gives each warp group its part.
#pragma once
#include "sm90_float32/query_tile_producer.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape, class Consumer>
struct QueryTileKernel {
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
            Consumer(params, memory, group - 1).run();
        }
    }
};

}  // namespace fa2::sm90_float32
