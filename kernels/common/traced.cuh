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
    __device__ __forceinline__ Item* at(Index... indices) const {
        static_assert(sizeof...(Index) == kRank, "one index for each axis");
        int64 sum = 0;
        int axis = 0;
        ((sum += layout.strides[axis] *
                 static_cast<uint32>(max_of(min_of(indices, static_cast<int32>(layout.lengths[axis]) - 1), 0)),
          ++axis),
         ...);
        return data + sum;
    }
};
template <class Item>
struct TracedArray<Item, 0> {
    Item* data;

    __device__ __forceinline__ Item* at() const { return data; }
};

// q - k in floating point: that of a fragment's first element, and a distance from it that the compiler knows. Each
// element then costs one addition. Converting each one would cost an integer addition and a conversion at half the
// rate. Exact up to 2^24 in float.
template <class Real>
struct RealDistance {
    Real first;
    int32 further;

    __device__ __forceinline__ Real plus(int32 constant) const { return first + static_cast<Real>(further + constant); }
    // The distance subtracted from a constant. A difference of 0 is not negative, as if it were an int converted.
    __device__ __forceinline__ Real from(int32 constant) const { return static_cast<Real>(constant - further) - first; }
};

template <class Item>
__device__ __forceinline__ Item unpacked(Item x) {
    return x;
}
__device__ __forceinline__ float unpacked(float16 x) { return to_accum(x); }
__device__ __forceinline__ float unpacked(bfloat16 x) { return to_accum(x); }

template <class Result, class Item, int kRank, class... Index>
__device__ __forceinline__ Result element(const TracedArray<Item, kRank>& array, Index... indices) {
    return static_cast<Result>(unpacked(*array.at(indices...)));
}

// Adds the sum over all lanes of a warp, which have the same indices.
template <class Real, int kRank, class... Index>
__device__ __forceinline__ void add_element_of_warp(const TracedArray<Real, kRank>& sums, Real x, int32 lane,
                                                    Index... indices) {
    x = row_sum<32>(x);
    if (lane == 0) atomicAdd(sums.at(indices...), x);
}

// The sum of gradients of the last scores of a lane that have read the same element; scores follow each other along the
// rows of a warp's tile.
template <class Real>
struct RunSum {
    Real* element = nullptr;
    Real sum = 0;
    bool is_of_tile = false;  // all scores of the tile read the element

    // The run of the whole tile, if elements depend on distances alone and those from `lowest` on have the same one, as
    // they often do far from the diagonal.
    template <class ElementAt>
    __device__ __forceinline__ void begin(int32 lowest, int32 distances, int32 lane, ElementAt element_at) {
        Real* const first = element_at(lowest);
        bool is_same = true;
#pragma unroll 1
        for (int32 i = lane; i < distances; i += 32) is_same &= element_at(lowest + i) == first;
        is_of_tile = __all_sync(kFullWarp, is_same);
        if (is_of_tile) element = first;
    }
    __device__ __forceinline__ void move_to(Real* next) {
        if (next == element) return;
        if (element) atomicAdd(element, sum);
        element = next;
        sum = 0;
    }
    // Adds the last runs of a warp's lanes to memory, by one atomic if they have the same element.
    __device__ __forceinline__ void end(int32 lane) const {
        const uint32 lanes = __ballot_sync(kFullWarp, element != nullptr);
        if (lanes == 0) return;
        const int first = __ffs(lanes) - 1;
        const uint64 of_first = __shfl_sync(kFullWarp, reinterpret_cast<uint64>(element), first);
        if (__all_sync(kFullWarp, !element || reinterpret_cast<uint64>(element) == of_first)) {
            const Real of_warp = row_sum<32>(sum);
            if (lane == first) atomicAdd(element, of_warp);
        } else if (element) {
            atomicAdd(element, sum);
        }
    }
};

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

// Ints wrap around, as in NumPy: in C++, signed ones must not exceed 32 bits.
__device__ __forceinline__ int32 wrapped_sum(int32 a, int32 b) {
    return static_cast<int32>(static_cast<uint32>(a) + static_cast<uint32>(b));
}
__device__ __forceinline__ int32 wrapped_difference(int32 a, int32 b) {
    return static_cast<int32>(static_cast<uint32>(a) - static_cast<uint32>(b));
}
__device__ __forceinline__ int32 wrapped_product(int32 a, int32 b) {
    return static_cast<int32>(static_cast<uint32>(a) * static_cast<uint32>(b));
}

// Cut off towards 0; the nearest int for a number out of range, and 0 for NaN. The instruction for double would convert
// NaN to the smallest int.
__device__ __forceinline__ int32 truncated(float x) { return __float2int_rz(x); }
__device__ __forceinline__ int32 truncated(double x) { return x == x ? __double2int_rz(x) : 0; }

// x to a power, by multiplications. kRounded: the compiler may not make an FMA of the last one.
template <int kExponent, bool kRounded, class Real>
__device__ __forceinline__ Real power_of(Real x) {
    constexpr int kFactors = kExponent < 0 ? -kExponent : kExponent;
    Real product = x;
#pragma unroll
    for (int i = 1; i < kFactors; ++i) product = kRounded ? rounded_product(product, x) : product * x;
    return kExponent < 0 ? Real(1) / product : product;
}

__device__ __forceinline__ int32 absolute(int32 x) { return x < 0 ? wrapped_difference(0, x) : x; }
__device__ __forceinline__ float absolute(float x) { return magnitude(x); }
__device__ __forceinline__ double absolute(double x) { return magnitude(x); }

// The quotient rounded down, and what it leaves, which has the sign of b; 0 if b is 0, as in NumPy. If b is a constant,
// as in most functions, the conditions on b are decided by the compiler.
__device__ __forceinline__ int32 floor_divide(int32 a, int32 b) {
    if (b > 0 && (b & (b - 1)) == 0) return a >> (31 - __clz(b));
    if (b == 0) return 0;
    if (b == -1) return wrapped_difference(0, a);
    const int32 quotient = a / b;
    return quotient - (quotient * b != a && (a < 0) != (b < 0));
}
__device__ __forceinline__ int32 floor_modulo(int32 a, int32 b) {
    if (b > 0 && (b & (b - 1)) == 0) return a & (b - 1);
    return b == 0 || b == -1 ? 0 : wrapped_difference(a, wrapped_product(floor_divide(a, b), b));
}

// Returns x of lane `lane % 32`.
template <class T>
__device__ __forceinline__ T from_lane(T x, int lane) {
    return __shfl_sync(0xffffffff, x, lane);
}
__device__ __forceinline__ bool from_lane(bool x, int lane) { return from_lane(static_cast<int32>(x), lane) != 0; }

// Returns x of the lane of `quad` that has this lane's place in its quad.
__device__ __forceinline__ int32 from_quad(int32 x, int quad) {
    // Segment mask 3 takes the two lowest bits of the source lane from the lane itself.
    int32 y;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x31f, 0xffffffff;" : "=r"(y) : "r"(x), "r"(4 * quad));
    return y;
}
__device__ __forceinline__ bool from_quad(bool x, int quad) { return from_quad(static_cast<int32>(x), quad) != 0; }
__device__ __forceinline__ float from_quad(float x, int quad) {
    return __int_as_float(from_quad(__float_as_int(x), quad));
}
__device__ __forceinline__ double from_quad(double x, int quad) {
    return __hiloint2double(from_quad(__double2hiint(x), quad), from_quad(__double2loint(x), quad));
}

template <class Real>
__device__ __forceinline__ Real not_a_number() {
    return infinity<Real>() - infinity<Real>();
}

}  // namespace fa2::common
