// FlashAttention-2 backward of float32 data by query tiles, the first pass of `two_pass`: dQ on wgmma (Hopper), by products
// of float16 parts (float32_parts/parts.cuh). forward.cuh describes the structure; dO is one more operand with the query
// tile's rows.
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P o (dP - delta)     dQ = scale dS K
#pragma once
#include "sm90_float32/backward_dq_consumer.cuh"
#include "sm90_float32/query_tile_kernel.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
using BackwardDq = QueryTileKernel<Spec, PartsShape<Spec, 2>, BackwardDqConsumer<Spec>>;

}  // namespace fa2::sm90_float32
