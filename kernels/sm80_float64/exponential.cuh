// e^x of doubles with a table in shared memory, in 10 instructions of the FP64 pipe.
#pragma once
#include "common/math.cuh"
#include "common/ptx.cuh"

namespace fa2::sm80_float64 {

// The powers 2^(j / 64). They lie at the start of the dynamic shared memory.
inline constexpr int kPowers = 64, kPowersBytes = 8 * kPowers;

// Writes the table, for all threads of the block.
template <int kThreads>
__device__ __forceinline__ void store_powers(uint32 smem, int32 thread) {
#pragma unroll
    for (int n = 0; n < common::ceil_div(kPowers, kThreads); ++n) {
        const int32 j = thread + n * kThreads;
        if (j < kPowers) common::store_shared(smem + 8 * j, exp2(j / double(kPowers)));
    }
    __syncthreads();
}

// e^x as by `common::exp_accurate`, with an error of at most 1.3 ulp. e^x = 2^(n / 64) e^r; the polynomial interpolates
// (e^r - 1 - r - r^2 / 2) / r^3 at the Chebyshev nodes of |r| <= ln 2 / 128.
__device__ __forceinline__ double exp_by_table(double x) {
    extern __shared__ __align__(128) char smem[];
    constexpr double kRounding = 0x1.8p52;
    const double rounded = fma(x, kPowers * common::kLog2e, kRounding), n = rounded - kRounding;
    const double r = fma(n, -0x1.473de6af278edp-40, fma(n, -0x1.62e42fefp-7, x));
    const int32 low = __double2loint(rounded);
    const double power = reinterpret_cast<const double*>(smem)[low & (kPowers - 1)];
    double y = 0x1.110136031f6d0p-7;
    y = fma(y, r, 0x1.555565bb98f45p-5);
    y = fma(y, r, 0x1.55555556c3d65p-3);
    y = fma(y, r, 0.5);
    y = fma(y, r, 1.0);
    return common::exp_of_parts(x, fma(power * r, y, power), low >> 6);
}

}  // namespace fa2::sm80_float64
