// The forward has two main loops: a warp keeps whole rows of O while its registers hold 32 of them, and two warps share
// them beyond.
#pragma once
#include "sm80/forward_rows.cuh"
#include "sm80/forward_split.cuh"

namespace fa2::sm80 {

template <class Spec, bool kWide>
struct ForwardOf : ForwardRows<Spec> {};
template <class Spec>
struct ForwardOf<Spec, true> : ForwardSplit<Spec> {};

template <class Spec>
using Forward = ForwardOf<Spec, (Spec::kHeadDim > 128)>;

}  // namespace fa2::sm80
