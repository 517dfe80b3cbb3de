// Decides which probabilities dropout drops, as defined in fa2cupy/problem/philox.py. One call of the generator yields
// four words, for the elements (i, j), (i, j + 8), (i + 8, j) and (i + 8, j + 8) of a 16 x 16 tile. In the quad layout
// (fragment.cuh) one lane holds all four, for S and for S^T, so that no word is computed twice.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

struct Words {
    uint32 item[4];
};

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011).
__device__ __forceinline__ Words philox4x32(uint32 c0, uint32 c1, uint32 c2, uint32 c3, uint64 seed) {
    uint32 k0 = static_cast<uint32>(seed), k1 = static_cast<uint32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64 first = static_cast<uint64>(0xD2511F53u) * c0, second = static_cast<uint64>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32>(second >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32>(second);
        c2 = static_cast<uint32>(first >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32>(first);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

struct Dropout {
    uint64 seed;
    uint32 threshold;
    int32 head, batch;

    // Bit 2 a + b of the result is set if element (query + 8 a, key + 8 b) is kept; `query` and `key` lie in the first
    // half of their group of 16.
    __device__ __forceinline__ uint32 kept_of_four(int32 query, int32 key) const {
        const Words words = philox4x32(8 * (key / 16) + key % 8, 8 * (query / 16) + query % 8, head, batch, seed);
        uint32 kept = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) kept |= static_cast<uint32>(words.item[w] >= threshold) << w;
        return kept;
    }
    __device__ __forceinline__ bool kept(int32 query, int32 key) const {
        return kept_of_four(query, key) >> (query / 8 % 2 * 2 + key / 8 % 2) & 1;
    }
};

}  // namespace fa2::common
