// The sum of arrays of one shape with strides of their own, in their order.
#pragma once
#include "common/types.cuh"

namespace fa2 {

// An address, and strides in bytes.
struct SummedArray {
    int64 address, strides[4];
};

struct SummedArrays {
    uint32 count, words;
    uint32 lengths[4];  // of the axes; words of the last one
    SummedArray target;
    SummedArray terms[64];
};

namespace common {

template <class Spec>
struct SumArrays {
    using Element = typename Spec::Element;
    using Accum = typename ElementTraits<Element>::Accum;
    using Word = Vector<Element, Spec::kHeadDim>;
    static constexpr int kAtATime = Spec::kBr;  // terms whose loads are in flight together

    __device__ static Word* word_at(const SummedArray& array, const uint32 (&index)[4]) {
        int64 address = array.address;
#pragma unroll
        for (int axis = 0; axis < 4; ++axis) address += index[axis] * array.strides[axis];
        return reinterpret_cast<Word*>(address);
    }

    __device__ static void run(const SummedArrays& summed) {
        uint32 rest = blockIdx.x * (32 * Spec::kWarps) + threadIdx.x;
        if (rest >= summed.words) return;
        uint32 index[4];
#pragma unroll
        for (int axis = 3; axis >= 0; --axis) {
            index[axis] = rest % summed.lengths[axis];
            rest /= summed.lengths[axis];
        }
        Accum total[Spec::kHeadDim] = {};
        for (uint32 first = 0; first < summed.count; first += kAtATime) {
            Word held[kAtATime];
#pragma unroll
            for (uint32 i = 0; i < kAtATime; ++i)
                if (first + i < summed.count) held[i] = *word_at(summed.terms[first + i], index);
#pragma unroll
            for (uint32 i = 0; i < kAtATime; ++i) {
                if (first + i >= summed.count) break;
#pragma unroll
                for (int j = 0; j < Spec::kHeadDim; ++j) total[j] += to_accum(held[i].item[j]);
            }
        }
        Word word;
#pragma unroll
        for (int j = 0; j < Spec::kHeadDim; ++j) word.item[j] = rounded<Element>(total[j]);
        *word_at(summed.target, index) = word;
    }
};

}  // namespace common
}  // namespace fa2
