// Copies of many matrices by one launch, inside a GPU and to others.
#pragma once
#include "common/types.cuh"

namespace fa2 {

// A matrix: addresses and pitches in bytes, and words. Matrices are divided into slices, which blocks take in turn; `end`
// is the number of slices up to the end of this one.
struct CopiedMatrix {
    int64 target, target_pitch, source, source_pitch, end;
    uint32 words_of_row, words;
};

struct CopiedMatrices {
    int64 count;
    CopiedMatrix matrices[64];
};

namespace common {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
    using Type = uint4;
};
template <>
struct WordOf<8> {
    using Type = uint64;
};
template <>
struct WordOf<4> {
    using Type = uint32;
};
template <>
struct WordOf<2> {
    using Type = uint16;
};
template <>
struct WordOf<1> {
    using Type = uint8;
};

template <class Spec>
struct CopyMatrices {
    using Word = typename WordOf<Spec::kHeadDim>::Type;
    static constexpr int kThreads = 32 * Spec::kWarps;
    static constexpr int kWordsOfThread = Spec::kBr;

    __device__ static Word* word_at(int64 address, int64 pitch, uint32 words_of_row, uint32 word) {
        return reinterpret_cast<Word*>(address + word / words_of_row * pitch) + word % words_of_row;
    }

    __device__ static void run(const CopiedMatrices& copied) {
        int32 number = 0;
        int64 begin = 0;
        for (int64 slice = blockIdx.x; slice < copied.matrices[copied.count - 1].end; slice += gridDim.x) {
            while (slice >= copied.matrices[number].end) begin = copied.matrices[number++].end;
            const CopiedMatrix& one = copied.matrices[number];
            const uint32 first = static_cast<uint32>(slice - begin) * (kThreads * kWordsOfThread) + threadIdx.x;
            Word held[kWordsOfThread];
#pragma unroll
            for (int32 i = 0; i < kWordsOfThread; ++i) {
                const uint32 word = first + i * kThreads;
                if (word < one.words) held[i] = *word_at(one.source, one.source_pitch, one.words_of_row, word);
            }
#pragma unroll
            for (int32 i = 0; i < kWordsOfThread; ++i) {
                const uint32 word = first + i * kThreads;
                if (word < one.words) *word_at(one.target, one.target_pitch, one.words_of_row, word) = held[i];
            }
        }
    }
};

}  // namespace common
}  // namespace fa2
