// Fixed-width integers, element types and their conversions. No CUDA header is included: NVRTC has no <cstdint>, and
// the kernels need only four conversions, each a single instruction.
#pragma once

namespace fa2 {

using int32 = int;
using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// Storage types only; arithmetic on 16-bit elements is done in float.
struct float16 {
    uint16 bits;
};
struct bfloat16 {
    uint16 bits;
};

// Element strides of a (batch, row, head, column) tensor whose last axis is contiguous.
struct Strides {
    int64 batch, row, head;

    __device__ int64 offset(int32 batch_index, int32 row_index, int32 head_index) const {
        return batch_index * batch + row_index * row + head_index * head;
    }
};

// Element strides of an array over scores; 0 along axes on which it is broadcast.
struct ScoreStrides {
    int64 batch, head, row, column;

    __device__ int64 offset(int32 batch_index, int32 head_index, int32 row_index, int32 column_index) const {
        return batch_index * batch + head_index * head + row_index * row + column_index * column;
    }
    // The strides inside a sequence.
    __device__ const ScoreStrides& inside() const { return *this; }
    // All bits that are set in distances between sequences.
    __device__ int64 batch_bits() const { return batch; }
};

// The same for an array that has several leading axes, or repeats some of them: sequence b begins at the sum of
// b / divisor * distance over the terms (fa2cupy/problem/strides.py). Divisions are multiplications by `factor`.
template <int kTerms>
struct NestedScoreStrides {
    struct Term {
        int64 distance;
        uint32 factor;
        int32 shift;
    };
    int64 head, row, column;
    Term terms[kTerms];

    __device__ int64 offset(int32 batch_index, int32 head_index, int32 row_index, int32 column_index) const {
        int64 first = 0;
#pragma unroll
        for (int t = 0; t < kTerms; ++t)
            first += (__umulhi(2u * batch_index, terms[t].factor) >> terms[t].shift) * terms[t].distance;
        return first + inside().offset(0, head_index, row_index, column_index);
    }
    __device__ ScoreStrides inside() const { return {0, head, row, column}; }
    __device__ int64 batch_bits() const {
        int64 bits = 0;
#pragma unroll
        for (int t = 0; t < kTerms; ++t) bits |= terms[t].distance;
        return bits;
    }
};

// A grid of tokens in which each query sees a window of keys (fa2cupy/problem/boxes.py).
struct Neighborhood {
    // Tokens along an axis, and boxes that blocks own. The window of a query has `size` keys from begin() on; those outside
    // of the axis do not exist. Windows begin in the order of their queries, so that queries that see a key, or any of
    // several that follow each other, follow each other, too; none sees a key outside of the axis.
    struct Axis {
        int32 length, boxes, before, size, first, last;

        __device__ int32 begin(int32 query) const {
            const int32 wanted = query - before;
            return wanted < first ? first : wanted > last ? last : wanted;
        }
        __device__ int32 end(int32 query) const {
            const int32 wanted = begin(query) + size;
            return wanted < length ? wanted : length;
        }
        __device__ int32 begin_of_queries(int32 key) const {
            const int32 wanted = key - size + before + 1;
            return first > key - size || wanted < 0 ? 0 : wanted;
        }
        __device__ int32 end_of_queries(int32 key) const {
            const int32 wanted = key + before + 1;
            return key >= length ? 0 : last <= key || wanted > length ? length : wanted;
        }
    };
    // Heads and sequences are one axis of tensor maps. The factors of their numbers in it.
    struct SequenceAxis {
        int32 head, batch;

        __device__ int32 at(int32 head_index, int32 batch_index) const {
            return head_index * head + batch_index * batch;
        }
    };
    Axis x, y, z;
    SequenceAxis queries, keys;
};

// Element strides and lengths of the axes of an array that the caller's function reads.
template <int kRank>
struct ArrayLayout {
    int64 strides[kRank], lengths[kRank];
};

// A TMA descriptor (CUtensorMap): 128 opaque bytes, which fa2cupy/gpu/tensor_maps.py has the driver encode.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

// kCount elements aligned as a whole, so that loads and stores can be vectorised.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
    T item[kCount];
};

namespace common {

// Accum: the type of scores, statistics and sums.
template <class Element>
struct ElementTraits {
    using Accum = float;
};
template <>
struct ElementTraits<double> {
    using Accum = double;
};

__device__ __forceinline__ float to_accum(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_accum(bfloat16 x) { return __uint_as_float(static_cast<uint32>(x.bits) << 16); }
__device__ __forceinline__ float to_accum(float x) { return x; }
__device__ __forceinline__ double to_accum(double x) { return x; }

// Rounds two floats to nearest even and packs them into one register, `lo` in the lower half.
template <class Element>
__device__ __forceinline__ uint32 pack(float lo, float hi);
template <>
__device__ __forceinline__ uint32 pack<float16>(float lo, float hi) {
    uint32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
template <>
__device__ __forceinline__ uint32 pack<bfloat16>(float lo, float hi) {
    uint32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

// The same with zeros in the place of negative numbers.
template <class Element>
__device__ __forceinline__ uint32 pack_positive(float lo, float hi);
template <>
__device__ __forceinline__ uint32 pack_positive<float16>(float lo, float hi) {
    uint32 y;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
template <>
__device__ __forceinline__ uint32 pack_positive<bfloat16>(float lo, float hi) {
    uint32 y;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

// Rounds a number of the accumulators' type to an element.
template <class Element, class Accum>
__device__ __forceinline__ Element rounded(Accum x) {
    if constexpr (sizeof(Element) == 2)
        return {static_cast<uint16>(pack<Element>(x, x))};
    else
        return x;
}

template <class Element>
__device__ __forceinline__ float unpack_lo(uint32 x) {
    return to_accum(Element{static_cast<uint16>(x)});
}
template <class Element>
__device__ __forceinline__ float unpack_hi(uint32 x) {
    return to_accum(Element{static_cast<uint16>(x >> 16)});
}

}  // namespace common
}  // namespace fa2
