// The cap on scores, and its derivative. Without the feature nothing is left of it.
//
// A tanh takes the unit of the exponentials twice, which is the busiest one as it is. But caps are far above most
// scores, and a polynomial (fa2cupy/problem/softcap.py) does if none of the warp's is large, on which it votes.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

template <class Spec, class Record>
class Softcap {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    static constexpr bool kFast = sizeof(typename Spec::Element) == 2;

  public:
    __device__ __forceinline__ explicit Softcap(const Record& params) : params_(params) {}

    // Caps products of q and k. The vote comes first: products are replaced where they are, as a copy has no registers.
    template <class Fragment>
    __device__ __forceinline__ void cap(Fragment& x) const {
        if constexpr (Spec::kSoftcap) {
            if constexpr (kFast) {
                if (are_small(x)) {
#pragma unroll
                    for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
                        for (int i = 0; i < Fragment::kRows; ++i) x(i, j) = small_capped(x(i, j));
                    return;
                }
            }
            cap_any(x);
        }
    }
    template <class Fragment>
    __device__ __forceinline__ bool are_small(const Fragment& x) const {
        return __builtin_expect(__all_sync(kFullWarp, largest(x) <= params_.tanh_largest), 1);
    }
    template <class Fragment>
    __device__ __forceinline__ void cap_any(Fragment& x) const {
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i) x(i, j) = capped(x(i, j));
    }
    // One product that is small, by the polynomial.
    __device__ __forceinline__ float small_capped(float product) const {
        const float square = fma(product, product, params_.tanh_shift);
        return product * fma(square, square, params_.tanh_rest);
    }
    // One product, by tanh itself: in units of the cap where that is accurate, else in those of the polynomial.
    __device__ __forceinline__ Real capped(Real product) const {
        if constexpr (Spec::kSoftcap) {
            const Real x = product * params_.scale_over_softcap;
            return kFast ? params_.tanh_limit * tanh_approx(x) : tanh_accurate(x);
        } else {
            return product;
        }
    }
    // Of a score by its product, but for the scale.
    __device__ __forceinline__ Real derivative(Real capped) const {
        if constexpr (Spec::kSoftcap) {
            const Real tanh = kFast ? capped * params_.tanh_unit : capped;
            return 1 - tanh * tanh;
        } else {
            return 1;
        }
    }

  private:
    // NaN aside, which every way of capping keeps. Four maxima at a time, as one would wait for the last each time.
    template <class Fragment>
    __device__ __forceinline__ static float largest(const Fragment& x) {
        float highest[4] = {};
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
            for (int i = 0; i < Fragment::kRows; ++i) {
                float& chain = highest[(j * Fragment::kRows + i) % 4];
                chain = maximum(chain, magnitude(x(i, j)));
            }
        return maximum(maximum(highest[0], highest[1]), maximum(highest[2], highest[3]));
    }

    const Record& params_;
};

}  // namespace fa2::common
