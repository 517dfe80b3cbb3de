// FlashAttention-2 backward of float32 data by key tiles, the second pass of `two_pass`: dK and dV on wgmma (Hopper), by
// products of float16 parts (float32_parts/parts.cuh).
//
//   S^T = scale K Q^T     P^T = exp(S^T - lse)     dP^T = V dO^T     dS^T = P^T o (dP^T - delta)
//   dV = P^T dO           dK = scale dS^T Q
//
// With kWithDq (backward.cuh) it also adds dQ = scale dS K up in a workspace. Its key tiles do so in any order. The keys
// of an exception (common/exceptions.cuh) get zeros then, to which the fallback adds.
//
// A block owns kBc keys of one K/V head and loops over the query tiles of all query heads that share it. Its producer
// copies operands to shared memory; its consumer warp groups own 64 keys each.
//
//   K [part][panel][kBc] | V [part][panel][kBc] | Q [kStages][part][panel][kBr] | dO, the same
//   dS [group][part][kBr] | barriers | statistics [stage][lse, delta][kBr] | units of dS [group][warp]
//
// Where one of them has more than 128 columns, Q and dO pass through shared memory in pieces, and the warp groups divide
// dK and dV of the same 64 keys (backward_dkdv_divided.cuh).
#pragma once
#include "common/exceptions.cuh"
#include "sm90_float32/backward_dkdv_consumer.cuh"
#include "sm90_float32/backward_dkdv_divided.cuh"
#include "sm90_float32/backward_dkdv_producer.cuh"

namespace fa2::sm90_float32 {

template <class Spec, bool kWithDq = false>
struct BackwardDkdv {
    using Shape = DkdvShape<Spec, kWithDq>;
    static constexpr bool kByKeys = true, kFindsSequences = false;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        if (common::is_exception<Spec>(params, where.batch, where.head)) {
            if constexpr (kWithDq) {
                clear<Spec::kHeadDim>(params.dk, params.dk_strides, where, params.seqlen_k);
                clear<Spec::kHeadDimV>(params.dv, params.dv_strides, where, params.seqlen_k);
            }
            return;
        }
        const auto tiles = common::query_tiles_of<Spec::kCausal, Shape::kBr, Shape::kBc>(
            where.tile, params.seqlen_q, params.seqlen_k, common::window_of<Spec>(params));
        const DkdvMemory<Shape> memory(dynamic_smem);
        if (threadIdx.x == 0) memory.init_barriers();
        __syncthreads();
        const int32 group = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);
        if (group == 0) {
            deallocate_registers<Shape::kProducerRegisters>();
            DkdvProducer<Spec, Shape>(params, memory, where).run(tiles);
        } else {
            allocate_registers<Shape::kConsumerRegisters>();
            if constexpr (!Shape::kInPieces)
                DkdvConsumer<Spec, Shape>(params, memory, where, group - 1).run(tiles);
            else if (group == 1)
                DkdvDivided<Spec, Shape, false>(params, memory, where).run(tiles);
            else
                DkdvDivided<Spec, Shape, true>(params, memory, where).run(tiles);
        }
    }

  private:
    // Stores zeros to the tile's rows of a gradient.
    template <int kColumns>
    __device__ static void clear(float* gradient, const Strides& strides, const common::TileCoordinates& where,
                                 int32 seqlen_k) {
        const int32 first = where.tile * Shape::kBc, end = common::min_of(first + Shape::kBc, seqlen_k);
#pragma unroll 1
        for (int32 key = first + threadIdx.x / 32; key < end; key += Spec::kWarps)
#pragma unroll 1
            for (int32 column = threadIdx.x % 32; column < kColumns; column += 32)
                gradient[strides.offset(where.batch, key, where.head) + column] = 0.0f;
    }
};

}  // namespace fa2::sm90_float32
