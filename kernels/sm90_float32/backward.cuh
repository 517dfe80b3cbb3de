// The kernel of `single_pass`: dK and dV of float32 data, and the same pass adds up dQ with atomics.
#pragma once
#include "sm90_float32/backward_dkdv.cuh"

namespace fa2::sm90_float32 {

template <class Spec>
using Backward = BackwardDkdv<Spec, true>;

}  // namespace fa2::sm90_float32
