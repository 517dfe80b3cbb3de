// Products of parts on mma.sync, by the rules of float32_parts/fragments.cuh. left(part, s) and right(part, n16, s) return
// the block of a part at k-step s in registers. A block of a right operand is fetched once for the three products.
#pragma once
#include "float32_parts/fragments.cuh"
#include "sm80_float32/tile.cuh"

namespace fa2::sm80_float32 {

// Both parts of an operand's blocks at kSteps k-steps.
template <int kSteps>
struct Blocks {
    OperandA of[kParts][kSteps];

    template <class Fetch>
    __device__ __forceinline__ explicit Blocks(const Fetch& fetch) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int s = 0; s < kSteps; ++s) of[part][s] = fetch(part, s);
    }
};

// x += a b for 16 columns, which begin at x.value[2 n]. kLeftLowFirst: the first product is that of the left operand's
// low part. kLargestFirst: the largest of the three comes first.
template <bool kLeftLowFirst, bool kLargestFirst, int kSteps, int kN8>
__device__ __forceinline__ void add_blocks(QuadFragment<kN8>& x, int n, const Blocks<kSteps>& a,
                                           const Blocks<kSteps>& b) {
#pragma unroll
    for (int i = 0; i < kProducts; ++i)
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const int t = kLargestFirst ? (i + kProducts - 1) % kProducts : i;
            const OperandA& left = a.of[part_of_product<kLeftLowFirst>(t)][s];
            const OperandA& right = b.of[part_of_product<!kLeftLowFirst>(t)][s];
            mma_m16n8k16<float16>(x.value[2 * n], left, right.reg[0], right.reg[1]);
            mma_m16n8k16<float16>(x.value[2 * n + 1], left, right.reg[2], right.reg[3]);
        }
}

// x += left right over kSteps k-steps from `first` on, on the tensor core.
template <int kSteps, bool kLeftLowFirst, bool kLargestFirst, int kN8, class Left, class Right>
__device__ __forceinline__ void add_products(QuadFragment<kN8>& x, const Left& left, const Right& right, int first) {
    if constexpr (kSteps > 0) {
        const Blocks<kSteps> a([&](int part, int s) { return left(part, first + s); });
#pragma unroll
        for (int n = 0; n < kN8 / 2; ++n) {
            const Blocks<kSteps> b([&](int part, int s) { return right(part, n, first + s); });
            add_blocks<kLeftLowFirst, kLargestFirst>(x, n, a, b);
        }
    }
}

// sum += factor left right over kSteps k-steps from `first` on. The product starts from zero on the tensor core, and is
// then added in float32 arithmetic. Only 16 columns of it are in registers at a time.
template <int kSteps, bool kLeftLowFirst, int kN8, class Left, class Right>
__device__ __forceinline__ void add_chain(QuadFragment<kN8>& sum, const Left& left, const Right& right, int first,
                                          const float (&factor)[2]) {
    const Blocks<kSteps> a([&](int part, int s) { return left(part, first + s); });
#pragma unroll
    for (int n = 0; n < kN8 / 2; ++n) {
        const Blocks<kSteps> b([&](int part, int s) { return right(part, n, first + s); });
        QuadFragment<2> product;
        product.fill(0.0f);
        add_blocks<kLeftLowFirst, false>(product, 0, a, b);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& own = sum.value[2 * n + h][e];
                own = fma(product.value[h][e], factor[e / 2], own);
            }
    }
}

// The k-steps of a chain of sums over columns. Longer ones would need fewer additions in float32 arithmetic, but more
// registers for the blocks of both operands. Loops over chains are not unrolled, because the compiler would load the
// blocks of all of them ahead, and spill.
inline constexpr int kChainSteps = 2;

// x = left right^T over kSteps k-steps of columns, in chains. kRowsAreKeys: the left operand is K. The order of the
// products of parts is the same for S and S^T, so that their elements have the same bits.
template <int kSteps, bool kRowsAreKeys, int kN8, class Left, class Right>
__device__ __forceinline__ void multiply_columns(QuadFragment<kN8>& x, const Left& left, const Right& right) {
    constexpr int kLast = kSteps % kChainSteps;
    const float one[2] = {1.0f, 1.0f};
    x.fill(0.0f);
#pragma unroll 1
    for (int s = 0; s < kSteps - kLast; s += kChainSteps) add_chain<kChainSteps, !kRowsAreKeys>(x, left, right, s, one);
    if constexpr (kLast > 0) add_chain<kLast, !kRowsAreKeys>(x, left, right, kSteps - kLast, one);
}

// x += left right^T over kSteps k-steps from `first` on, on the tensor core.
template <int kSteps, bool kRowsAreKeys, bool kLargestFirst, int kN8, class Left, class Right>
__device__ __forceinline__ void add_half(QuadFragment<kN8>& x, const Left& left, const Right& right, int first) {
    constexpr int kLast = kSteps % kChainSteps;
#pragma unroll 1
    for (int s = first; s < first + kSteps - kLast; s += kChainSteps)
        add_products<kChainSteps, !kRowsAreKeys, kLargestFirst>(x, left, right, s);
    add_products<kLast, !kRowsAreKeys, kLargestFirst>(x, left, right, first + kSteps - kLast);
}
// x += left right^T for an x that is about minus half of the product: the small products of parts are added where the
// sum is near zero.
template <int kSteps, bool kRowsAreKeys, int kN8, class Left, class Right>
__device__ __forceinline__ void add_columns(QuadFragment<kN8>& x, const Left& left, const Right& right) {
    add_half<kSteps / 2, kRowsAreKeys, true>(x, left, right, 0);
    add_half<kSteps - kSteps / 2, kRowsAreKeys, false>(x, left, right, kSteps / 2);
}

}  // namespace fa2::sm80_float32
