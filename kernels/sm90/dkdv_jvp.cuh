// The tangents of dK and dV on wgmma and TMA (Hopper): how they change along a direction (Q', K', V', dO').
// backward_dkdv.cuh has the backward, common/tangents.cuh the formulas of dS and dS'.
//
//   S^T = K Q^T           T^T = K' Q^T + K Q'^T            P' = P o (scale T - lse')     dV' = P'^T dO + P^T dO'
//   dP^T = V dO^T         dP'^T = V' dO^T + V dO'^T        dS, dS'                       dK' = scale (dS'^T Q + dS^T Q')
//
// A block owns kBc keys of one K/V head and loops over the query tiles of all query heads that share it. Warp groups of a
// block:
//
//   0       producer: one thread loads K and V, two warps load tiles of Q and dO and their statistics (dkdv_jvp_producer.cuh)
//   1, 2    consumers: each owns 64 of 128 keys (dkdv_jvp_consumer.cuh)
//
// Registers of a consumer thread, for head_dim 128 and 32 queries: 64 each for dK' and dV', and 16 each for S, T, dP and
// dP'. Beyond head_dim 128 there are not enough.
//
// Shared memory, in panels as in the backward; tangents that the call does not have take no room and are not multiplied:
//
//   K, K' [2][kBc][D] | V, V' [2][kBc][Dv] | Q, Q' [kStages][2][kBr][D] | dO, dO' [kStages][2][kBr][Dv] |
//   lse, lse' [kStages][kBr][2] | delta, delta' [kStages][kBr][2] | barriers
//
// The barriers are as in the backward. dK' and dV' are stored by TMA from the memory of K and V.
#pragma once
#include "sm90/dkdv_jvp_consumer.cuh"
#include "sm90/dkdv_jvp_producer.cuh"

namespace fa2::sm90 {

template <class Spec>
struct DkdvJvp {
    using Shape = DkdvJvpShape<Spec>;

    static constexpr bool kFindsSequences = true;

    __device__ __forceinline__ static void run(const Params& launch, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, true>(launch, blockIdx.x);
        const auto& params = common::record_of_sequence<Spec>(launch, where.batch);
        // The plan has cleared the results of packed sequences, and those of lists.
        if (Spec::kVarlen && (!common::has_tile(where.tile, Shape::kBc, params.seqlen_k) || params.seqlen_q == 0))
            return;
        if constexpr (common::kListsTiles<Spec>)
            if (key_tile<Spec>(params).tiles.end == 0) return;
        const DkdvJvpMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);
        if (group == 0) {
            deallocate_registers<Shape::kProducerRegisters>();
            DkdvJvpProducer<Spec>(params, launch, memory).run();
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            if (group == 1)
                DkdvJvpConsumer<Spec, 0>(params, launch, memory).run();
            else
                DkdvJvpConsumer<Spec, 1>(params, launch, memory).run();
        }
    }
};

}  // namespace fa2::sm90
