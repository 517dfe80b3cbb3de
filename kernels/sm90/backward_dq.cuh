// FlashAttention-2 backward by query tiles on wgmma and TMA (Hopper): dQ of a query tile, without atomics (first pass
// of `two_pass`).
//
//   S = Q K^T        P = exp(scale S - lse)        dP = dO V^T        dS = P o (dP - delta)        dQ = scale dS K
//
// Built like the forward: one block a multiprocessor stays for the whole launch and takes one query tile of kBr rows
// after the other, whichever is next by a counter in memory. Its warp groups:
//
//   0          producer: one thread loads Q, dO, K and V by TMA; the group gives most of its registers away
//   1 ..       consumers: 64 rows of the query tile each, 16 a warp; S, dP and dQ in registers
//
// A row's lse and delta are two registers. dS never leaves registers either: accumulators, rounded to 16 bits, are the
// left operand of dS K as they lie. Each dQ is summed in one order by one thread, so that its bits do not vary.
//
// Shared memory, in panels of 64 columns with the 128-byte swizzle that TMA writes and wgmma reads:
//
//   Q [1 or 2 buffers][kBr][D] | dO [as many][kBr][D] | K [kStages][kBc][D] | V [kValueStages][kBc][D] |
//   dQ [kBr][D], unless it leaves through dO's | barriers | query tiles to come [4]
//
// K stays for S and, a key tile later, for dQ; V is through after dP, and therefore has a stage less.
//
// Barriers, a pair for each buffer of Q and of dO, stage of K, stage of V and coming query tile: `full` completes when
// TMA has brought all bytes (of a query tile: when it is written), `empty` when each consumer warp has said that it is
// through. The producer thus runs ahead by what the buffers hold: over the end of a query tile into the next.
//
// Columns past head_dim and rows past the sequences arrive as zeros, and are not written where dQ goes.
#pragma once
#include "sm90/backward_dq_consumer.cuh"
#include "sm90/backward_dq_producer.cuh"

namespace fa2::sm90 {

template <class Spec>
struct BackwardDq {
    using Shape = BackwardDqShape<Spec>;
    static constexpr bool kFindsSequences = true;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const QueryTileMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        if (threadIdx.x < kGroupThreads) {
            deallocate_registers<Shape::kProducerRegisters>();
            if (threadIdx.x == 0) BackwardDqProducer<Spec>(params, memory).run();
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            BackwardDqConsumer<Spec>(params, memory).run();
        }
    }
};

}  // namespace fa2::sm90
