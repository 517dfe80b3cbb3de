// The tangent of the forward where its results are given.
#pragma once
#include "sm90/jvp.cuh"

namespace fa2::sm90 {

template <class Spec>
using OutputJvp = Jvp<Spec, true>;

}  // namespace fa2::sm90
