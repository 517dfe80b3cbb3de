// The lse of a backward that is given one of other arithmetic (Spec::kGivenLse), which its forward kernel computes again.
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// True if the kernel computes O, and not lse alone.
template <class Spec>
inline constexpr bool kHasOutput = !Spec::kGivenLse;

// The lse for P = exp(S - lse), where `own` belongs to the S of this kernel, and `index` is that of the given one.
//
// The lse of kernels that multiply parts (float32_parts/parts.cuh) differs from `own` by less than 2^-20 (1 + |own|), the
// error of their S. Where it is larger, the given lse is one of more keys than those of this call, and is kept.
template <class Spec, class Record, class Real>
__device__ __forceinline__ Real own_lse(const Record& params, int64 index, Real own) {
    if constexpr (Spec::kGivenLse) {
        constexpr Real kLargestError = Real(1) / (1 << 18);
        const Real given = params.given_lse[index];
        return fabs(own - given) <= kLargestError * (1 + fabs(own)) ? own : given;
    } else {
        return own;
    }
}

}  // namespace fa2::common
