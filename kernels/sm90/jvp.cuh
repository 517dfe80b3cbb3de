// The forward and its tangent on wgmma and TMA: O and lse, and how they change along a direction (Q', K', V').
// forward.cuh introduces the family.
//
//   S = scale Q K^T                          P = exp(S - row_shift)     O = P V / rowsum(P)
//   T = scale (Q' K^T + Q K'^T)              lse' = rowsum(P o T) / rowsum(P)
//                                            O' = ((P o T) V + P V') / rowsum(P) - lse' O
//
// The online softmax carries rowsum(P o T) and (P o T) V + P V' along with the row sum and P V: all are sums over keys
// with the factor exp(-row_shift), and are rescaled and divided alike. Where O and lse are given (kGiven),
// P = exp(S - lse) is known, and the kernel computes O' and lse' alone.
//
// The kernel is persistent, and its warp groups are those of the forward. Accumulators of a consumer of 64 rows:
//
//   O, O' [64][Dv]      S, then P; T [64][kBc]      P and P o T are rounded when both are complete, and are the left
//                                                   operands of the products with V and V'
//
// Where two consumers own the same rows, as for wide rows, each has half of the columns of O and O', and all scores.
//
// Shared memory, in panels of 64 columns as in the forward. A tangent lies behind its operand, and both are loaded
// together; tangents that the call does not have are known at compile time, and have no place:
//
//   Q, Q' [1 or 2 buffers][2][kBr][D] | K, K' [kStages][2][kBc][D] | V, V' [kStages][2][kBc][Dv] | as many panels [kBr]
//   of O and O' as fit, else they use those of Q and Q' | barriers | next query tiles [4] | scratch, one word per thread
#pragma once
#include "sm90/jvp_consumer.cuh"
#include "sm90/query_loop_kernel.cuh"

namespace fa2::sm90 {

template <class Spec, bool kGiven = false>
using Jvp = QueryLoopKernel<Spec, JvpShape<Spec, kGiven>, JvpConsumer<Spec, kGiven>>;

}  // namespace fa2::sm90
