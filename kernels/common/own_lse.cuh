// If a backward gets an lse that other arithmetic computed (Spec::kGivenLse), its forward kernel recomputes lse in its
// own; or else the kernel of a fallback that owns queries does so, ahead of its gradients.
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// True if the forward computes O, and not lse alone.
template <class Spec>
inline constexpr bool kHasOutput = !Spec::kGivenLse;
// True if a kernel of gradients computes lse first.
template <class Spec>
inline constexpr bool kComputesLse = Spec::kGivenLse;

// The lse for P = exp(S - lse). `own` belongs to the S of this kernel; `index`: where the given lse is.
//
// The lse of kernels that multiply parts (float32_parts/parts.cuh) differs from `own` by less than 2^-20 (1 + |own|), the
// error of their S. Where they differ by more, the given lse is over more keys than those of this call, and is kept.
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
