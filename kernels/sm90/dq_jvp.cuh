// The tangent of the backward by query tiles, on wgmma and TMA (Hopper): how dQ changes along a direction (Q', K', V',
// dO'). common/tangents.cuh has the formulas of dS and dS'.
//
//   S = Q K^T     T = Q' K^T + Q K'^T     dP = dO V^T     dP' = dO' V^T + dO V'^T
//   dQ' = scale (dS' K + dS K')                                 dbias' = dS', summed to the shape of the bias
//
// The kernel is that of dQ (backward_dq.cuh) with more products: each operand lies in shared memory together with its
// tangent, and both are loaded at the same time. Panels of Q' and dO' lie behind those of Q and dO. In each panel of K
// and V, the rows of the tangent follow those of the key tile, so that one wgmma multiplies rows of Q by both.
//
//   Q, Q' [1 or 2 buffers][2][kBr][D] | dO, dO' [1 or 2][2][kBr][Dv] | K, K' [kStages][2][kBc][D] |
//   V, V' [kValueStages][2][kBc][Dv] | dQ' [kBr][D] if it fits, else dQ' uses dO's | barriers | next query tiles [4]
//
// S, T, dP, dP' and dQ' of a group's 64 rows are in registers. dS and dS', rounded to 16 bits, are the left operands of
// the last two products. Tangents that the call does not have are known at compile time: they have no place in shared
// memory, and their products are not computed.
#pragma once
#include "sm90/dq_jvp_consumer.cuh"
#include "sm90/query_loop_kernel.cuh"

namespace fa2::sm90 {

template <class Spec>
using DqJvp = QueryLoopKernel<Spec, BackwardDqShape<Spec, MovedBy<Spec>>, DqJvpConsumer<Spec>>;

}  // namespace fa2::sm90
