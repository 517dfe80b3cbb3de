// Both passes of `two_pass` in one launch, for problems whose blocks do not fill the GPU for long: the first half of the
// blocks own key tiles, the second half own query tiles. Blocks compute delta themselves, so that nothing orders them.
//
// Both sides have as many tiles, of the same heads, and so the same schedule. The blocks of key tiles have delta of their
// head in shared memory behind all else.
#pragma once
#include "sm90/backward_dkdv.cuh"
#include "sm90/backward_dq.cuh"

namespace fa2::sm90 {

template <class Spec>
struct Pass : Spec {};
template <class Spec>
inline constexpr bool kIsPass<Pass<Spec>> = true;

template <class Spec>
struct BackwardBoth {
    using Keys = BackwardDkdv<Pass<Spec>>;
    using Queries = BackwardDq<Pass<Spec>>;
    static constexpr bool kFindsSequences = true;
    static constexpr int kMostQueries = 1024;
    static_assert(max_of(Keys::Shape::kSharedBytes + 4 * kMostQueries, BackwardDqShape<Pass<Spec>>::kSharedBytes) ==
                  Spec::kSharedBytes);
    static_assert(Spec::kHeadDim == Spec::kHeadDimV && Spec::kBr == Spec::kBc);

    __device__ __forceinline__ static void run(const Params& params, char* dynamic_smem) {
        const int32 tiles = gridDim.x / 2, block = blockIdx.x;
        if (block < tiles)
            Keys::run(params, dynamic_smem);
        else
            Queries::run(params, dynamic_smem, block - tiles);
    }
};

}  // namespace fa2::sm90
