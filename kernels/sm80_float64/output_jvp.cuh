// The tangent of the forward where its results are given.
#pragma once
#include "sm80_float64/jvp.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
using OutputJvp = Jvp<Spec, true>;

}  // namespace fa2::sm80_float64
