// The body of the forward's kernels: sets up the barriers, divides the registers of the warp groups, and runs the producer
// or a consumer.
#pragma once
#include "sm90/layout.cuh"

namespace fa2::sm90 {

template <class Shape, class Memory, class Producer, class Consumer, class BiasProducer = void>
struct ForwardKernel {
    static constexpr bool kFindsSequences = true;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const Memory memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        synchronize();
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);
        if (group == 0) {
            deallocate_registers<Shape::kProducerRegisters>();
            if (threadIdx.x == 0) Producer(params, memory).run();
            if constexpr (Shape::kLoadsStart) {
                const int32 warp = __shfl_sync(common::kFullWarp, threadIdx.x / 32, 0);
                if (warp > 0 && warp <= Shape::kGroups) BiasProducer(params, memory, warp - 1).run();
            }
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            Consumer(params, memory, group - 1).run();
        }
        if constexpr (Shape::kCluster > 1) {  // a block must not end before the other one has signalled its barriers
            __syncwarp();
            cluster_sync();
        }
    }

  private:
    __device__ __forceinline__ static void synchronize() {
        if constexpr (Shape::kCluster > 1)
            cluster_sync();
        else
            __syncthreads();
    }
};

}  // namespace fa2::sm90
