// What float32 kernels do with fragments before and after products of parts on tensor cores.
//
// The tensor core adds the 16 products of a k-step and the accumulator exactly, then cuts the sum towards zero to
// float32: one error of up to a unit in the last place in each k-step, always of the same sign. These rules keep it at
// the level of ordinary float32 sums:
//
//   - The smallest of the three products of parts comes first, so that only D / 16 sums have the full magnitude.
//   - Sums over the sequence are cut into strips of kUnitRows rows. Each sum starts from zero on the tensor core,
//     and is then added in ordinary float32 arithmetic, by an FMA whose factor is the strip's unit.
//   - Sums over many columns are made in several chains, which are added in ordinary float32 arithmetic.
//   - dP starts from minus half of delta, which it is compared to. Where all products have one sign, the sum then passes
//     zero on half its way, and the cuts before and behind that cancel.
#pragma once
#include "common/fragment.cuh"
#include "float32_parts/parts.cuh"

namespace fa2::float32_parts {

using common::OperandA;
using common::QuadFragment;

// What probabilities, which are at most 1, are multiplied by before they are split into parts.
inline constexpr float kProbabilityScale = 1 << 14;

// A fragment of a left operand in parts. P and dS are made of float32 accumulators, which have the same layout.
template <int kN8>
struct FragmentParts {
    uint32 word[kParts][kN8][2];

    // Takes the parts of x, whose rows are multiplied by a power of two.
    __device__ __forceinline__ void set_scaled(const QuadFragment<kN8>& x, const float (&scale)[2]) {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float even = x.value[n][2 * i] * scale[i], odd = x.value[n][2 * i + 1] * scale[i];
#pragma unroll
                for (int part = 0; part < kParts; ++part) word[part][n][i] = take_part(even, odd);
            }
    }
    // x = factor times the sum of the parts. The sign of the high parts is turned twice: otherwise the compiler would
    // see the words of `set_scaled` and keep their numbers in registers in the meantime, as many as x has.
    __device__ __forceinline__ void unite(QuadFragment<kN8>& x, float factor) const {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32 minus_high = word[0][n][i] ^ 0x80008000, low = word[1][n][i];
                x.value[n][2 * i] = (common::unpack_lo<float16>(low) - common::unpack_lo<float16>(minus_high)) * factor;
                x.value[n][2 * i + 1] =
                    (common::unpack_hi<float16>(low) - common::unpack_hi<float16>(minus_high)) * factor;
            }
    }
    __device__ __forceinline__ OperandA k16(int part, int s) const {
        return {{word[part][2 * s][0], word[part][2 * s][1], word[part][2 * s + 1][0], word[part][2 * s + 1][1]}};
    }
};

// The product of two pairs of float16 numbers.
__device__ __forceinline__ uint32 multiply_halves(uint32 x, uint32 y) {
    uint32 z;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}

// The powers of two that bring the largest magnitude of each row of a warp's fragment into [2^13, 2^14).
template <int kN8>
__device__ __forceinline__ void row_scales(const QuadFragment<kN8>& x, float (&scale)[2], float (&inverse)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < kN8; ++n)
            largest = fmaxf(largest, fmaxf(fabsf(x.value[n][2 * i]), fabsf(x.value[n][2 * i + 1])));
        largest = common::row_maximum<4>(largest);
        const int32 exponent = max_of(static_cast<int32>(__float_as_uint(largest) >> 23), 14);
        scale[i] = __uint_as_float(static_cast<uint32>(2 * 127 + 13 - exponent) << 23);
        inverse[i] = __uint_as_float(static_cast<uint32>(exponent - 13) << 23);
    }
}

template <int kN8>
__device__ __forceinline__ void multiply_rows(QuadFragment<kN8>& x, const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x.value[n][e] *= factor[e / 2];
}
// sum += factor x, row by row.
template <int kN8>
__device__ __forceinline__ void add_rows(QuadFragment<kN8>& sum, const QuadFragment<kN8>& x, const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.value[n][e] = fma(x.value[n][e], factor[e / 2], sum.value[n][e]);
}
// A result in panels of 64 columns, which are multiplied one after the other.
template <int kPanels>
struct PanelFragment {
    using Panel = QuadFragment<kPanelColumns / 8>;
    Panel panel[kPanels];

    __device__ __forceinline__ void fill(float x) {
#pragma unroll
        for (int n = 0; n < kPanels; ++n) panel[n].fill(x);
    }
};
template <int kPanels>
__device__ __forceinline__ void multiply_rows(PanelFragment<kPanels>& x, const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kPanels; ++n) multiply_rows(x.panel[n], factor);
}

// The strip, kUnitRows columns of the fragment, that column j of a lane belongs to.
__device__ __forceinline__ constexpr int strip_of(int j) { return j / 2 * 8 / kUnitRows; }
// Multiplies each strip by its unit.
template <int kN8, int kStrips>
__device__ __forceinline__ void multiply_strips(QuadFragment<kN8>& x, const float (&unit)[kStrips]) {
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x.value[n][e] = __fmul_rn(x.value[n][e], unit[n * 8 / kUnitRows]);
}
// Turns products of scaled parts into products, or (kToScores) into scores. Scores are rounded before a row maximum or
// lse is subtracted: where one score dominates its row, forward and backward then both find that P is 1.
template <bool kToScores, int kN8, int kStrips, class Record>
__device__ __forceinline__ void scale_products(QuadFragment<kN8>& x, float (&unit)[kStrips], const Record& params) {
    if constexpr (kToScores)
#pragma unroll
        for (int c = 0; c < kStrips; ++c) unit[c] *= params.softmax_scale;
    multiply_strips(x, unit);
}

// Stores a warp's 16 rows of a result from column `first_column` on; the row stride is in elements.
template <int kHeadDim, int kN8>
__device__ __forceinline__ void store_fragment(const QuadFragment<kN8>& x, float* gmem, int64 row_stride,
                                               int32 first_row, int32 num_rows, int32 first_column, int32 lane) {
    using Fragment = QuadFragment<kN8>;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int32 row = first_row + Fragment::row(i, lane);
        if (row >= num_rows) continue;
        float* to = gmem + row * row_stride;
#pragma unroll
        for (int j = 0; j < Fragment::kCols; ++j)
            if (const int32 column = first_column + Fragment::col(j, lane); column < kHeadDim) to[column] = x(i, j);
    }
}

template <int kHeadDim, int kPanels>
__device__ __forceinline__ void store_fragment(const PanelFragment<kPanels>& x, float* gmem, int64 row_stride,
                                               int32 first_row, int32 num_rows, int32 first_column, int32 lane) {
#pragma unroll
    for (int n = 0; n < kPanels; ++n)
        store_fragment<kHeadDim>(x.panel[n], gmem, row_stride, first_row, num_rows, first_column + n * kPanelColumns,
                                 lane);
}

}  // namespace fa2::float32_parts
