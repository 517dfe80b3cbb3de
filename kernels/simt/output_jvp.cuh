// The tangent of the forward where its results are given.
#pragma once
#include "simt/jvp.cuh"

namespace fa2::simt {

template <class Spec>
using OutputJvp = Jvp<Spec, true>;

}  // namespace fa2::simt
