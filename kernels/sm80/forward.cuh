// The forward has two main loops. Up to 128 columns of V a warp's registers hold 32 whole rows of O (forward_rows.cuh);
// above, two or four warps share these rows (forward_split.cuh).
#pragma once
#include "sm80/forward_rows.cuh"
#include "sm80/forward_split.cuh"

namespace fa2::sm80 {

template <class Spec, bool kWide>
struct ForwardOf : ForwardRows<Spec> {};
template <class Spec>
struct ForwardOf<Spec, true> : ForwardSplit<Spec> {};

template <class Spec>
using Forward = ForwardOf<Spec, (Spec::kHeadDimV > 128)>;

}  // namespace fa2::sm80
