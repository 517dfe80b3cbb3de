// single_pass: the kernel of dQ, which adds up dK and dV on the way.
#pragma once
#include "simt/backward_dq.cuh"

namespace fa2::simt {

template <class Spec>
using Backward = BackwardDq<Spec, true>;

}  // namespace fa2::simt
