// FlashAttention forward of float32 data on wgmma (Hopper): products of float16 parts (float32_parts/parts.cuh).
//
//   S = scale Q K^T        P = exp(S - row_max)        O = P V / rowsum(P)        lse = row_max + log(rowsum(P))
//
// The structure is that of sm90/forward.cuh: persistent blocks of a producer, which copies operands to shared memory, and
// of consumer warp groups, which own 64 query rows each. Every operand has two parts:
//
//   Q [part][panel][kBr] | K [kStages][part][panel][kBc] | V [kStages][part][panel][kBc] | barriers | query tiles [4]
//
// Where K or V has more than 128 columns, and two such tiles have no room beside Q, a stage of both is a piece, the parts
// of one panel.
//
// O is added up in registers, and stored from there: the results may have any strides.
#pragma once
#include "sm90_float32/forward_consumer.cuh"
#include "sm90_float32/query_tile_kernel.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
using Forward = QueryTileKernel<Spec, PartsShape<Spec, 1>, ForwardConsumer<Spec>>;

}  // namespace fa2::sm90_float32
