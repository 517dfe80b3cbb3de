// FlashAttention forward on wgmma and TMA (Hopper).
//
//   S = scale Q K^T        P = exp(S - row_shift)        O = P V / rowsum(P)        lse = row_shift + log(rowsum(P))
//
// The kernel is persistent: one block per multiprocessor, which processes one query tile of kBr rows after the other.
// It draws them from a counter in global memory, because under a causal mask tiles differ in length; the longest come
// first. Warp groups of a block:
//
//   0          producer: one thread loads Q, K and V by TMA, and a warp for each consumer the bias from which S starts;
//              the group releases most of its registers
//   1 ..       consumers: each owns 64 rows of the query tile, each of its warps 16; S, P and O are in registers
//
// Shared memory, in panels of 64 columns with the 128-byte swizzle that TMA writes and wgmma reads, or of 32 with the
// 64-byte swizzle:
//
//   Q [1 or 2 buffers][kBr][D] | K [kStages][kBc][D] | V [kStages][kBc][D] | O [kBr][D or 128] if it fits, else O uses
//   Q's | barriers | next query tiles [4] | scratch, one word per thread | held array (query_tile_consumer.cuh)
//
// Where many sequences share a bias, the block keeps it for the query tile's rows and all keys, and processes the tile of
// a series of these sequences (common/series.cuh), one at a time, or several: each consumer has 64 rows of another one.
//
// Barriers: a pair of mbarriers for each buffer of Q, stage of K, stage of V and slot of the next query tiles. `full`
// completes when TMA has written all bytes (for a slot: when the producer has), `empty` when every consumer warp has
// arrived. The producer thus runs ahead as far as the buffers allow, across the end of a query tile into the next.
//
// TMA loads columns beyond head_dim and rows beyond the sequence as zeros, and does not store them.
#pragma once
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_kernel.cuh"
#include "sm90/forward_producer.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape = ForwardShape<Spec>, class Memory = ForwardMemory<Shape>>
using Forward = ForwardKernel<Shape, Memory, ForwardProducer<Spec, Shape, Memory>, ForwardConsumer<Spec>,
                              ForwardBiasProducer<Spec, Shape, Memory>>;

}  // namespace fa2::sm90
