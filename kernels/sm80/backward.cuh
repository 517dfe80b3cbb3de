// single_pass: the kernel of dK and dV, which also accumulates dQ.
#pragma once
#include "sm80/backward_dkdv.cuh"

namespace fa2::sm80 {

template <class Spec>
using Backward = BackwardDkdv<Spec, DqSums::kAdded>;

}  // namespace fa2::sm80
