// The kernel of `single_pass`: dK and dV, and the same pass adds up dQ with atomics.
#pragma once
#include "sm90/backward_dkdv.cuh"

namespace fa2::sm90 {

template <class Spec>
using Backward = BackwardDkdv<Spec, true>;

}  // namespace fa2::sm90
