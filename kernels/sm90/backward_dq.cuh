// FlashAttention-2 backward on wgmma and TMA (Hopper), first pass of `two_pass`: blocks own query tiles and compute
// their dQ without atomics.
//
//   S = Q K^T        P = exp(scale S - lse)        dP = dO V^T        dS = P o (dP - delta)        dQ = scale dS K
//
// The kernel is persistent, like the forward: one block per multiprocessor, which processes one query tile of kBr rows
// after the other and draws them from a counter in global memory. Warp groups of a block:
//
//   0          producer: one thread loads Q, dO, K and V by TMA; the group releases most of its registers
//   1 ..       consumers: each owns 64 rows of the query tile, each of its warps 16; S, dP and dQ are in registers
//
// lse and delta of a row are in two registers. dS stays in registers, too: its accumulators, rounded to 16 bits, are
// already laid out as the left operand of dS K. One thread sums an element of dQ in a fixed order, so that results are
// deterministic.
//
// Shared memory, in panels of 64 columns with the 128-byte swizzle that TMA writes and wgmma reads:
//
//   Q [1 or 2 buffers][kBr][D] | dO [1 or 2][kBr][Dv] | K [kStages][kBc][D] | V [kValueStages][kBc][Dv] |
//   dQ [kBr][D] if it fits, else dQ uses dO's | barriers | next query tiles [4]
//
// K is read for S and, one key tile later, for dQ; V is released after dP, and therefore has one stage less.
//
// Barriers: a pair of mbarriers for each buffer of Q and of dO, stage of K, stage of V and slot of the next query
// tiles. `full` completes when TMA has written all bytes (for a slot: when the producer has), `empty` when every
// consumer warp has arrived. The producer thus runs ahead as far as the buffers allow, across the end of a query tile
// into the next.
//
// TMA loads columns beyond head_dim and rows beyond the sequence as zeros, and does not store them.
#pragma once
#include "sm90/backward_dq_consumer.cuh"
#include "sm90/query_loop_kernel.cuh"

namespace fa2::sm90 {

template <class Spec>
using BackwardDq = QueryLoopKernel<Spec, BackwardDqShape<Spec>, BackwardDqConsumer<Spec>>;

}  // namespace fa2::sm90
