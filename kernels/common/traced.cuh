// The functions that the text of a traced function calls (fa2cupy/functions/text.py), and the arrays that it reads.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

// An argument of a traced function, or its gradient.
template <class Item, int kRank>
struct TracedArray {
    Item* data;
    const ArrayLayout<kRank>& layout;

    // Indices are clamped: a function is evaluated for whole tiles, also for pairs that other features hide.
    template <class... Index>
    __device__ __forceinline__ int64 offset(Index... indices) const {
        static_assert(sizeof...(Index) == kRank, "one index for each axis");
        int64 sum = 0;
        int axis = 0;
        ((sum += layout.strides[axis] *
                 static_cast<uint32>(max_of(min_of(indices, static_cast<int32>(layout.lengths[axis]) - 1), 0)),
          ++axis),
         ...);
        return sum;
    }
};
template <class Item>
struct TracedArray<Item, 0> {
    Item* data;

    __device__ __forceinline__ int64 offset() const { return 0; }
};

template <class Item>
__device__ __forceinline__ Item unpacked(Item x) {
    return x;
}
__device__ __forceinline__ float unpacked(float16 x) { return to_accum(x); }
__device__ __forceinline__ float unpacked(bfloat16 x) { return to_accum(x); }

template <class Result, class Item, int kRank, class... Index>
__device__ __forceinline__ Result element(const TracedArray<Item, kRank>& array, Index... indices) {
    return static_cast<Result>(unpacked(array.data[array.offset(indices...)]));
}

template <class Real, int kRank, class... Index>
__device__ __forceinline__ void add_element(const TracedArray<Real, kRank>& sums, Real x, Index... indices) {
    atomicAdd(sums.data + sums.offset(indices...), x);
}

// Where data have 16 bits (Arguments::kFast), functions of the special function unit are accurate enough.
template <class Arguments, class Real>
__device__ __forceinline__ Real exp_of(Real x) {
    if constexpr (Arguments::kFast)
        return exp_approx(x);
    else
        return exp(x);
}
template <class Arguments, class Real>
__device__ __forceinline__ Real exp2_of(Real x) {
    if constexpr (Arguments::kFast)
        return exp2_approx(x);
    else
        return exp2_accurate(x);
}
template <class Arguments, class Real>
__device__ __forceinline__ Real tanh_of(Real x) {
    if constexpr (Arguments::kFast)
        return tanh_approx(x);
    else
        return tanh_accurate(x);
}

// NaN in either operand gives NaN, as in NumPy; fmin and fmax would ignore it.
template <class T>
__device__ __forceinline__ T least(T a, T b) {
    return a < b || a != a ? a : b;
}
template <class T>
__device__ __forceinline__ T greatest(T a, T b) {
    return a > b || a != a ? a : b;
}

__device__ __forceinline__ int32 absolute(int32 x) { return x < 0 ? -x : x; }
__device__ __forceinline__ float absolute(float x) { return magnitude(x); }
__device__ __forceinline__ double absolute(double x) { return magnitude(x); }

// The quotient rounded down, and what it leaves, which has the sign of b; 0 if b is 0, as in NumPy. If b is a constant,
// as in most functions, the conditions on b are decided by the compiler.
__device__ __forceinline__ int32 floor_divide(int32 a, int32 b) {
    if (b > 0 && (b & (b - 1)) == 0) return a >> (31 - __clz(b));
    if (b == 0) return 0;
    const int32 quotient = a / b;
    return quotient - (quotient * b != a && (a < 0) != (b < 0));
}
__device__ __forceinline__ int32 floor_modulo(int32 a, int32 b) {
    if (b > 0 && (b & (b - 1)) == 0) return a & (b - 1);
    return b == 0 ? 0 : a - floor_divide(a, b) * b;
}

template <class Real>
__device__ __forceinline__ Real not_a_number() {
    return infinity<Real>() - infinity<Real>();
}

}  // namespace fa2::common
