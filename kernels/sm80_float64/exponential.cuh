// e^x of doubles in 15 instructions of the FP64 pipe. The library's takes as many, and a branch.
#pragma once
#include "common/math.cuh"

namespace fa2::sm80_float64 {

// e^x, with an error of at most 1.21 ulp for |x| < 708; below it is 0, and above infinity.
//
// n = x log2(e), rounded by the addition of 1.5 2^52, is the low word of the sum. e^x = 2^n e^r with r = x - n ln 2, where
// ln 2 has two parts. The polynomial interpolates (e^r - 1 - r) / r^2 at the Chebyshev nodes of |r| <= ln 2 / 2. 2^n is
// added to the exponent. Everything else compares high words, because comparisons of doubles take the same pipe.
__device__ __forceinline__ double exp_polynomial(double x) {
    constexpr double kRounding = 0x1.8p52;
    const double rounded = fma(x, common::kLog2e, kRounding), n = rounded - kRounding;
    const double r = fma(n, -0x1.473de6af278edp-34, fma(n, -0x1.62e42fefp-1, x));
    double y = 0x1.af38a9b0ec855p-26;
    y = fma(y, r, 0x1.289185613a3d6p-22);
    y = fma(y, r, 0x1.71de0dae63bb3p-19);
    y = fma(y, r, 0x1.a019b90d2ae7ap-16);
    y = fma(y, r, 0x1.a01a01a7c41d5p-13);
    y = fma(y, r, 0x1.6c16c1788bd90p-10);
    y = fma(y, r, 0x1.11111111109b3p-7);
    y = fma(y, r, 0x1.5555555553d63p-5);
    y = fma(y, r, 0x1.5555555555556p-3);
    y = fma(y, r, 0.5);
    y = fma(y, r, 1.0);
    y = fma(y, r, 1.0);
    y = __hiloint2double(__double2hiint(y) + (__double2loint(rounded) << 20), __double2loint(y));
    const int32 high = __double2hiint(x), magnitude = high & 0x7fffffff;
    constexpr int32 kLargest = 0x40862000, kInfinity = 0x7ff00000;  // high words of 708 and infinity
    if (magnitude < kLargest) return y;
    if (magnitude > kInfinity || high == kInfinity) return x;  // NaN, and infinity
    return high < 0 ? 0.0 : common::infinity<double>();
}

}  // namespace fa2::sm80_float64
