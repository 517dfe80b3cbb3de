// one_tile: all three gradients of a head from one block, whose key tile has all keys. The kernel of dK and dV finds all
// of dQ in the block, and computes delta from O.
#pragma once
#include "sm80/backward_dkdv.cuh"

namespace fa2::sm80 {

template <class Spec>
using BackwardOneTile = BackwardDkdv<Spec, DqSums::kStored>;

}  // namespace fa2::sm80
