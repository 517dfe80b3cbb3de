// single_pass: the kernel of dK and dV, which adds up dQ on the way.
#pragma once
#include "sm90/backward_dkdv.cuh"

namespace fa2::sm90 {

template <class Spec>
using Backward = BackwardDkdv<Spec, true>;

}  // namespace fa2::sm90
