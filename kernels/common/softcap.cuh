// The cap on scores and its derivative. Calls without a cap compile to nothing.
//
// A tanh uses the special function unit twice, and the exponentials make this unit the bottleneck already. But most
// scores are far below the cap, where a polynomial is accurate enough (fa2cupy/problem/softcap.py). A warp votes, and
// takes the polynomial if none of its products is large.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

template <class Spec, class Record>
class Softcap {
    using Real = typename ElementTraits<typename Spec::Element>::Accum;
    static constexpr bool kFast = sizeof(typename Spec::Element) == 2;

  public:
    __device__ __forceinline__ explicit Softcap(const Record& params) : params_(params) {}

    // Caps the products Q K^T in place. All are checked before the first is overwritten, as there are no registers for
    // a copy.
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
    // Caps one small product by the polynomial. The result is in the polynomial's units (`tanh_unit`).
    __device__ __forceinline__ float small_capped(float product) const {
        const float square = fma(product, product, params_.tanh_shift);
        return product * fma(square, square, params_.tanh_rest);
    }
    // Caps one product by tanh: for float and double in units of the cap, for 16-bit types in the polynomial's units.
    __device__ __forceinline__ Real capped(Real product) const {
        if constexpr (Spec::kSoftcap) {
            const Real x = product * params_.scale_over_softcap;
            return kFast ? params_.tanh_limit * tanh_approx(x) : tanh_accurate(x);
        } else {
            return product;
        }
    }
    // The derivative of the score with respect to the product, without the factor softmax_scale.
    __device__ __forceinline__ Real derivative(Real capped) const {
        if constexpr (Spec::kSoftcap) {
            const Real tanh = kFast ? capped * params_.tanh_unit : capped;
            return 1 - tanh * tanh;
        } else {
            return 1;
        }
    }
    // The second derivative with respect to the scaled product.
    __device__ __forceinline__ Real second_derivative(Real capped) const {
        if constexpr (Spec::kSoftcap) {
            Real unit, cap_log2;  // of `capped`: the factors to tanh, and to the score in base 2
            if constexpr (kFast)
                unit = params_.tanh_unit, cap_log2 = params_.capped_log2 / unit;
            else
                unit = 1, cap_log2 = params_.softcap_log2;
            return -2 * unit * capped * derivative(capped) * (Real(kLog2e) / cap_log2);
        } else {
            return 0;
        }
    }

  private:
    // The largest magnitude. NaN is ignored, which is safe because both ways of capping propagate it. Four independent
    // maxima shorten the chain of dependent instructions.
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
