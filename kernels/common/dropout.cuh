// Decides which probabilities dropout drops, as defined in fa2cupy/problem/philox.py. One call of the generator yields
// eight draws of 16 bits: those of the elements that one lane holds of a 16 x 16 tile of S in the quad layout
// (fragment.cuh). For a tile of S^T a lane needs half of the draws of two calls, and the lane of the neighbouring key
// needs the other halves. Each of the two lanes makes one of the calls, and they exchange halves.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

struct Words {
    uint32 item[4];
};

// Philox4x32-7 (Salmon, Moraes, Dror and Shaw 2011). The compiler holds the round keys in uniform registers, and shares
// what the first three rounds compute from c0, c2 and c3 alone among calls that differ in c1, as those of a row of S do.
__device__ __forceinline__ Words philox4x32(uint32 c0, uint32 c1, uint32 c2, uint32 c3, uint64 seed) {
    uint32 k0 = static_cast<uint32>(seed), k1 = static_cast<uint32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const uint64 first = multiply_wide(0xD2511F53u, c0), second = multiply_wide(0xCD9E8D57u, c2);
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
    uint32 threshold;         // once in each half
    uint32 first_query_word;  // of the call's first query, which need not be the first of the whole problem
    int32 head, batch;

    // True if the element of column `e` of a pair is kept. `pair`: its draws, that of the even column in the lower half.
    __device__ __forceinline__ bool keeps(uint32 pair, int e) const {
        return (e == 0 ? pair << 16 : pair) <= ~(threshold & 0xffff0000u);
    }

    // The same for four pairs: bit w of the result is that of word w.
    __device__ __forceinline__ uint32 kept_of_four(const Words& pairs, int e) const {
        uint32 kept = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) kept |= static_cast<uint32>(keeps(pairs.item[w], e)) << w;
        return kept;
    }

    // All bits of a half are set if its element is dropped, which is so if the sum of draw and threshold carries.
    __device__ __forceinline__ uint32 dropped(uint32 pair) const {
        const uint32 sums = (pair & 0x7fff7fffu) + (threshold & 0x7fff7fffu);  // without a carry from half to half
        const uint32 carries = (pair & threshold) | ((pair | threshold) & sums);
        uint32 mask;
        asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(carries));  // copies of the highest bit of each half
        return mask;
    }

    // The draws of a lane's eight elements in 16 x 16 tile number `s` of S or of S^T. (query, key) is the lane's first
    // element in tile 0, which begins at multiples of 16. Word 2 a + b has those of a pair of columns, the even one's in
    // the lower half, 8 a queries and 8 b keys from the first element on. For S^T the warp must have converged.
    template <bool kTransposed>
    __device__ __forceinline__ Words draws(int32 query, int32 key, int s) const {
        if constexpr (kTransposed) {
            // This lane has two queries of one key, whose draws are the lower halves of two calls' words if the key is
            // even, and the upper halves if it is odd. It makes the call of the first query for an even key, of the
            // second for an odd one. The lane of the other key of the pair is four lanes away.
            const bool odd = key % 2;
            const Words own = call(query_word(query) + 8 * s + odd, key_word(key));
            Words result;
#pragma unroll
            for (int a = 0; a < 2; ++a) {
                const uint32 theirs = __byte_perm(own.item[2 * a], own.item[2 * a + 1], odd ? 0x5410 : 0x7632);
                const uint32 received = __shfl_xor_sync(kFullWarp, theirs, 4);
#pragma unroll
                for (int b = 0; b < 2; ++b)
                    result.item[2 * a + b] =
                        __byte_perm(own.item[2 * a + b], received, odd ? 0x3254 + 0x22 * b : 0x5410 + 0x2200 * b);
            }
            return result;
        } else {
            return call(query_word(query), key_word(key) + 4 * s);
        }
    }

    // A single element.
    __device__ __forceinline__ bool keeps_element(int32 query, int32 key) const {
        const Words words = call(query_word(query), key_word(key));
        const uint32 upper = key & 8 ? words.item[1] : words.item[0], lower = key & 8 ? words.item[3] : words.item[2];
        return keeps(query & 8 ? lower : upper, key % 2);
    }

  private:
    __device__ __forceinline__ uint32 query_word(uint32 query) const {
        return first_query_word + 8 * (query / 16) + query % 8;
    }
    __device__ static __forceinline__ uint32 key_word(uint32 key) { return 4 * (key / 16) + key % 8 / 2; }
    __device__ __forceinline__ Words call(uint32 query_word, uint32 key_word) const {
        return philox4x32(query_word, key_word, head, batch, seed);
    }
};

}  // namespace fa2::common
