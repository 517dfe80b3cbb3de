// single_pass: the kernel of dQ, which also accumulates dK and dV.
#pragma once
#include "simt/backward_dq.cuh"

namespace fa2::simt {

template <class Spec>
using Backward = BackwardDq<Spec, true>;

}  // namespace fa2::simt
