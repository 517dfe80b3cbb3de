// Products of doubles for one warp, in steps of 16 x 8 x 8. Sums and products are IEEE doubles.
#pragma once
#include "common/fragment.cuh"
#include "sm80_float64/tile.cuh"

namespace fa2::sm80_float64 {

template <int kN8>
using Fragment = common::QuadFragment<kN8, double>;

// d += a b on a 16 x 8 x 8 tile. The shape is one instruction of Hopper alone; other GPUs have that of 8 x 8 x 4, and the
// same fragments.
__device__ __forceinline__ void mma_m16n8k8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+d"(d[2 * i]), "+d"(d[2 * i + 1])
                : "d"(a[2 * k + i]), "d"(b[k]));
#endif
}

// S += Q K^T over columns 8 * `first` to 8 * `end`. Few steps are unrolled: their left operands take registers.
template <int kN8, class Left, class Right>
__device__ __forceinline__ void multiply_rows(Fragment<kN8>& scores, const Left& left, const Right& right, int first,
                                              int end) {
#pragma unroll 1
    for (int k = first; k < end; k += 2)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            double a[4];
            left.load(0, k + e, a[0], a[2]);
            left.load(1, k + e, a[1], a[3]);
#pragma unroll
            for (int n = 0; n < kN8; ++n) {
                double b[2];
                right.load(n, k + e, b[0], b[1]);
                mma_m16n8k8(scores.value[n], a, b);
            }
        }
}

// O += P V over 8 columns of P and the rows of V in step `k`, in kN8 tiles of 8 columns of O from `first8` on.
template <int kN8, class Right>
__device__ __forceinline__ void multiply_step(Fragment<kN8>& output, const double (&a)[4], int k, const Right& right,
                                              int first8 = 0) {
#pragma unroll
    for (int n = 0; n < kN8; ++n) {
        double b[2];
        right.load(first8 + n, k, b[0], b[1]);
        mma_m16n8k8(output.value[n], a, b);
    }
}
// O += P V over the 8 * kSteps columns of P, the first of which is column 8 * `first_step` of all of P, in kN8 tiles of 8
// columns of O from `first8` on.
template <int kSteps, int kN8, class Right>
__device__ __forceinline__ void multiply_columns(Fragment<kN8>& output, const Fragment<kSteps>& p, const Right& right,
                                                 int32 first_step, int first8 = 0) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        const double a[4] = {p.value[k][0], p.value[k][2], p.value[k][1], p.value[k][3]};
        multiply_step(output, a, first_step + k, right, first8);
    }
}
// O += P V with P^T in shared memory, for 16 of its columns.
template <int kSteps, int kN8, class Left, class Right>
__device__ __forceinline__ void multiply_transposed(Fragment<kN8>& output, const Left& p_transposed,
                                                    const Right& right) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
        double a[4];
        p_transposed.load(0, k, a[0], a[2]);
        p_transposed.load(1, k, a[1], a[3]);
        multiply_step(output, a, k, right);
    }
}

// Adds to O what `multiply` adds to sums of its own, which get the 8 * kGroup columns from tile `first8` on: one
// accumulator for all keys would have the rounding errors of a chain as long as they are. Groups of columns take turns, for
// want of registers.
template <int kGroup, int kN8, class Multiply>
__device__ __forceinline__ void add_sums(Fragment<kN8>& output, const Multiply& multiply) {
    static_assert(kN8 % kGroup == 0);
#pragma unroll
    for (int first8 = 0; first8 < kN8; first8 += kGroup) {
        Fragment<kGroup> sums;
        sums.fill(0.0);
        multiply(sums, first8);
#pragma unroll
        for (int n = 0; n < kGroup; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) output.value[first8 + n][e] += sums.value[n][e];
    }
}

// Row i of x times factor[i].
template <int kN8>
__device__ __forceinline__ void scale_rows(Fragment<kN8>& x, const double (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x.value[n][e] *= factor[e / 2];
}

// Stores a fragment to the rows and columns from the first ones on, 16 bytes at a time. The array has kColumns columns, all
// fragments together kPadded.
template <int kColumns, int kPadded, int kN8>
__device__ __forceinline__ void store_rows(const Fragment<kN8>& x, double* gmem, int64 row_stride, int32 first_row,
                                           int32 num_rows, int32 first_column, int32 lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int32 row = first_row + Fragment<kN8>::row(i, lane);
        if (row >= num_rows) break;
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
            const int32 column = first_column + Fragment<kN8>::col(2 * n, lane);
            if (kColumns == kPadded || column < kColumns)
                *reinterpret_cast<double2*>(gmem + row * row_stride + column) =
                    make_double2(x.value[n][2 * i], x.value[n][2 * i + 1]);
        }
    }
}
// Loads such a fragment, with zeros in the place of rows for which `exists` is false, and of columns past the array's.
template <int kColumns, int kPadded, int kN8, class Exists>
__device__ __forceinline__ void load_rows(Fragment<kN8>& x, const double* gmem, int64 row_stride, int32 first_row,
                                          int32 first_column, int32 lane, const Exists& exists) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int32 row = first_row + Fragment<kN8>::row(i, lane);
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
            const int32 column = first_column + Fragment<kN8>::col(2 * n, lane);
            double2 pair = make_double2(0.0, 0.0);
            if (exists(i) && (kColumns == kPadded || column < kColumns))
                pair = *reinterpret_cast<const double2*>(gmem + row * row_stride + column);
            x.value[n][2 * i] = pair.x;
            x.value[n][2 * i + 1] = pair.y;
        }
    }
}

}  // namespace fa2::sm80_float64
