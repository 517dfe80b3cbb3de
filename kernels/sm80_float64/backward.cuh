// single_pass: the kernel of dK and dV, which also adds to dQ.
#pragma once
#include "sm80_float64/backward_dkdv.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
using Backward = BackwardDkdv<Spec, true>;

}  // namespace fa2::sm80_float64
