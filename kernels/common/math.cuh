// Scalar functions and reductions over the lanes that share a row.
#pragma once
#include "common/types.cuh"

namespace fa2::common {

inline constexpr uint32 kFullWarp = 0xffffffffu;
inline constexpr double kLn2 = 0.69314718055994530942;
inline constexpr double kLog2e = 1.44269504088896340736;

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}
template <class T>
__host__ __device__ constexpr T round_up(T a, T b) {
    return ceil_div(a, b) * b;
}
template <class T>
__host__ __device__ constexpr T min_of(T a, T b) {
    return a < b ? a : b;
}
template <class T>
__host__ __device__ constexpr T max_of(T a, T b) {
    return a > b ? a : b;
}

template <class T>
__device__ __forceinline__ T infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
    return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000ll);
}

// The 64-bit product, by one instruction. The compiler turns a product of converted integers into a 64-bit
// multiplication and one more addition if the constant's highest bit is set.
__device__ __forceinline__ uint64 multiply_wide(uint32 a, uint32 b) {
    uint64 y;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
    return y;
}

// The top bit of each byte that is not zero: the sum carries into it if another bit of the byte is set.
__device__ __forceinline__ uint32 tops_of_nonzero_bytes(uint32 x) {
    return (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) & 0x80808080;
}

// Natural numbers of 1 / log2(e) of the largest float and more have no float in base 2. `in_base2` brings finite ones to
// kLargestBase2, because only -inf hides a key, and `natural_of` brings that back to the largest float.
inline constexpr float kLargestBase2 = 3.4e38f, kLargestFloat = 0x1.fffffep127f;
__device__ __forceinline__ float in_base2(float x) {
    const float y = x * static_cast<float>(kLog2e);
    return fabsf(y) > kLargestBase2 && fabsf(x) <= kLargestFloat ? copysignf(kLargestBase2, x) : y;
}
// The same of an unscaled score. The largest float stands for scores that have none (start_from_bias.cuh).
__device__ __forceinline__ float in_base2(float x, float scale) {
    const float y = x * scale;
    return fmaxf(fabsf(x), fabsf(y)) > kLargestBase2 && fabsf(x) <= kLargestFloat ? copysignf(kLargestBase2, x) : y;
}
__device__ __forceinline__ float natural_of(float base2) {
    const float x = base2 * static_cast<float>(kLn2);
    return fabsf(base2) >= kLargestBase2 && fabsf(base2) <= kLargestFloat ? copysignf(kLargestFloat, base2) : x;
}

// 2^x by the special function unit (2 ulp). This is accurate enough for 16-bit types, whose P is then rounded to 8 or
// 11 significant bits.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Quotients and square roots by the same unit, with a relative error of 2^-22.
__device__ __forceinline__ float divide_approx(float x, float y) {
    float quotient;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(y));
    return quotient;
}
__device__ __forceinline__ float sqrt_approx(float x) {
    float root;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
}

// e^x by the unit of exp2_approx, with a relative error of 2^-22 + 2^-24 |x|.
__device__ __forceinline__ float exp_approx(float x) { return exp2_approx(x * static_cast<float>(kLog2e)); }

// The library's 2^x, for float and double, which keep all its digits.
__device__ __forceinline__ float exp2_accurate(float x) { return exp2f(x); }
__device__ __forceinline__ double exp2_accurate(double x) { return exp2(x); }

// e^x with a relative error of 2^-22: the rounding error of x log2(e), multiplied by ln 2, is added to the exponent to
// first order. Numbers below 2^-126 become zero. Where the result is zero or nearly infinite, the correction may be NaN.
__device__ __forceinline__ float exp_accurate(float x) {
    constexpr float kHigh = static_cast<float>(kLn2), kLow = static_cast<float>(kLn2 - kHigh);
    const float base2 = x * static_cast<float>(kLog2e);
    const float rest = fma(base2, -kLow, fma(base2, -kHigh, x));
    const float y = exp2_approx(base2);
    return fabsf(x) < 88.0f ? fma(y, rest, y) : y;
}

// e^x from y = e^(x - n ln 2), for x up to 708 and NaN; 0 for x below -708. It looks at high words, because comparisons
// of doubles take the pipe of their arithmetic, which binds. It is written in PTX, because of selects in C++ the compiler
// makes branches, between which it keeps one chain of dependent instructions at a time.
__device__ __forceinline__ double exp_of_parts(double x, double y, int32 n) {
    const int32 high = __double2hiint(x), magnitude = high & 0x7fffffff;
    double result;
    asm("{\n"
        ".reg .pred inside, nan;\n"
        ".reg .b32 low, high, limit;\n"
        "setp.lt.s32 inside, %2, 0x40862000;\n"  // 708
        "setp.gt.s32 nan, %2, 0x7ff00000;\n"
        "selp.b32 limit, %3, 0, nan;\n"
        "mov.b64 {low, high}, %1;\n"
        "add.s32 high, high, %4;\n"
        "selp.b32 high, high, limit, inside;\n"
        "selp.b32 low, low, 0, inside;\n"
        "mov.b64 %0, {low, high};\n"
        "}"
        : "=d"(result)
        : "d"(y), "r"(magnitude), "r"(high), "r"(n << 20));
    return result;
}

// e^x for x up to 708, with an error of at most 1.21 ulp, in 15 instructions of doubles. The library's takes as many, and
// a branch.
//
// n = x log2(e), rounded by the addition of 1.5 2^52, is the low word of the sum. e^x = 2^n e^r with r = x - n ln 2, where
// ln 2 has two parts. The polynomial interpolates (e^r - 1 - r) / r^2 at the Chebyshev nodes of |r| <= ln 2 / 2.
__device__ __forceinline__ double exp_accurate(double x) {
    constexpr double kRounding = 0x1.8p52;
    const double rounded = fma(x, kLog2e, kRounding), n = rounded - kRounding;
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
    return exp_of_parts(x, y, __double2loint(rounded));
}

// x where it is at most zero, otherwise zero; NaN stays NaN. As the exponent of P it bounds P by 1, which P = exp(S - lse)
// is not where lse has lost its last bits.
__device__ __forceinline__ float at_most_zero(float x) {
#if __CUDA_ARCH__ >= 800
    float y;
    asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
#else
    return x > 0.0f ? 0.0f : x;
#endif
}
__device__ __forceinline__ double at_most_zero(double x) {
    return static_cast<uint32>(__double2hiint(x)) <= 0x7ff00000u ? 0.0 : x;  // high words, as in `exp_of_parts`
}

// a * b, rounded before anything is added to it: the compiler may not make an FMA of it.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// tanh with a relative error of 4e-7. The error must be relative because the cap multiplies an absolute one.
// 1 - 2 / (e^2x + 1) has an absolute error of 1e-7, and gives 1 if the exponential overflows to infinity and -1 if it
// underflows to zero. For small x that error is too large, and a polynomial takes over (4e-8 relative, fitted like
// those of fa2cupy/problem/softcap.py).
__device__ __forceinline__ float tanh_approx(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(exp2_approx(2 * static_cast<float>(kLog2e) * x) + 1.0f));
    const float square = x * x;
    const float small = fma(x * square, fma(square, fma(square, -0.04915931f, 0.1330001f), -0.3333267f), x);
    return fabsf(x) < 0.35f ? small : fma(-2.0f, inverse, 1.0f);
}
__device__ __forceinline__ float tanh_accurate(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_accurate(double x) { return tanh(x); }

__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }

__device__ __forceinline__ bool sign_bit(float x) { return __float_as_int(x) < 0; }
__device__ __forceinline__ bool sign_bit(double x) { return __double2hiint(x) < 0; }

// x with its lowest bit set or cleared, and this bit.
__device__ __forceinline__ float with_lowest_bit(float x, bool bit) {
    return __int_as_float((__float_as_int(x) & ~1) | bit);
}
__device__ __forceinline__ double with_lowest_bit(double x, bool bit) {
    return __longlong_as_double((__double_as_longlong(x) & ~1ll) | bit);
}
__device__ __forceinline__ bool lowest_bit(float x) { return __float_as_int(x) & 1; }
__device__ __forceinline__ bool lowest_bit(double x) { return __double_as_longlong(x) & 1; }

// The high word of a double as an integer of the same order. NaN comes behind infinity, or before -infinity.
__device__ __forceinline__ int32 high_word_order(double x) {
    const int32 high = __double2hiint(x);
    return high ^ (high >> 31 & 0x7fffffff);
}

// A NaN operand is ignored, as by fmax. A NaN score still makes P NaN, because exp2 is taken of the score itself.
__device__ __forceinline__ float maximum(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double maximum(double a, double b) { return fmax(a, b); }

// Reductions over the kLanes lanes that share a row, each kStep lanes from the next. All of these lanes get the result.
template <int kLanes, int kStep = 1, class T>
__device__ __forceinline__ T row_maximum(T x) {
#pragma unroll
    for (int mask = kStep; mask < kStep * kLanes; mask *= 2) x = maximum(x, __shfl_xor_sync(kFullWarp, x, mask));
    return x;
}
template <int kLanes, int kStep = 1, class T>
__device__ __forceinline__ T row_sum(T x) {
#pragma unroll
    for (int mask = kStep; mask < kStep * kLanes; mask *= 2) x += __shfl_xor_sync(kFullWarp, x, mask);
    return x;
}
// Sum over the lanes that share a column. They differ in the bits in which the lanes of a row do not.
template <int kLanes, int kStep = 1, class T>
__device__ __forceinline__ T column_sum(T x) {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
        if (mask < kStep || mask >= kStep * kLanes) x += __shfl_xor_sync(kFullWarp, x, mask);
    return x;
}

}  // namespace fa2::common
