// FlashAttention forward on wgmma and TMA (Hopper).
//
//   S = scale Q K^T        P = exp(S - row_shift)        O = P V / rowsum(P)        lse = row_shift + log(rowsum(P))
//
// One block a multiprocessor stays for the whole launch and takes one query tile of kBr rows after the other, whichever
// is next by a counter in memory: under a causal mask the tiles have different lengths, longest first. Its warp groups:
//
//   0          producer: one thread loads Q, K and V by TMA; the group gives most of its registers away
//   1 ..       consumers: 64 rows of the query tile each, 16 a warp; scores, P and O in registers
//
// Shared memory, in panels of 64 columns with the 128-byte swizzle that TMA writes and wgmma reads:
//
//   Q [1 or 2 buffers][kBr][D] | K [kStages][kBc][D] | V [kStages][kBc][D] | O [kBr][D], unless it leaves through Q's
//   barriers | query tiles to come [4] | scratch, a word for each thread
//
// Barriers, a pair for each buffer of Q, stage of K, stage of V and coming query tile: `full` completes when TMA has
// brought all bytes (of a query tile: when it is written), `empty` when each consumer warp has said that it is through.
// The producer thus runs ahead by what the buffers hold: over the end of a query tile into the next.
//
// Columns past head_dim and rows past the sequences arrive as zeros, and are not written where O goes.
#pragma once
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_producer.cuh"

namespace fa2::sm90 {

template <class Spec>
struct Forward {
    using Shape = ForwardShape<Spec>;
    static constexpr bool kFindsSequences = true;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const ForwardMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);
        if (group == 0) {
            deallocate_registers<Shape::kProducerRegisters>();
            if (threadIdx.x == 0) ForwardProducer<Spec>(params, memory).run();
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            ForwardConsumer<Spec>(params, memory, group - 1).run();
        }
    }
};

}  // namespace fa2::sm90
