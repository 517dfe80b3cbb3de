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

// x += a b for 16 columns. kLeftLowFirst: the first product is that of the left operand's low part. kFromMinusHalf: x is
// about minus half of the sum, and the small products of parts are added where it is near zero.
template <bool kLeftLowFirst, bool kFromMinusHalf, int kSteps>
__device__ __forceinline__ void add_blocks(QuadFragment<2>& x, const Blocks<kSteps>& a, const Blocks<kSteps>& b) {
    constexpr int kLargest = kProducts - 1, kAhead = kFromMinusHalf ? kSteps / 2 : 0;
    const auto add = [&](int t, int begin, int end) {
#pragma unroll
        for (int s = begin; s < end; ++s) {
            const OperandA& left = a.of[part_of_product<kLeftLowFirst>(t)][s];
            const OperandA& right = b.of[part_of_product<!kLeftLowFirst>(t)][s];
            mma_m16n8k16<float16>(x.value[0], left, right.reg[0], right.reg[1]);
            mma_m16n8k16<float16>(x.value[1], left, right.reg[2], right.reg[3]);
        }
    };
    add(kLargest, 0, kAhead);
#pragma unroll
    for (int t = 0; t < kLargest; ++t) add(t, 0, kSteps);
    add(kLargest, kAhead, kSteps);
}

// Where most chains start on the tensor core.
struct FromZero {
    __device__ __forceinline__ void operator()(int, float (&x)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = 0.0f;
    }
};

// sum += factor left right, a chain of kSteps k-steps from `first` on. It is summed on the tensor core, from what
// start(n8, x) sets x to, and then added in float32 arithmetic. Only 16 columns of it are in registers at a time.
template <int kSteps, bool kLeftLowFirst, bool kFromMinusHalf = false, int kN8, class Left, class Right,
          class Start = FromZero>
__device__ __forceinline__ void add_chain(QuadFragment<kN8>& sum, const Left& left, const Right& right, int first,
                                          const float (&factor)[2], const Start& start = {}) {
    const Blocks<kSteps> a([&](int part, int s) { return left(part, first + s); });
#pragma unroll
    for (int n = 0; n < kN8 / 2; ++n) {
        const Blocks<kSteps> b([&](int part, int s) { return right(part, n, first + s); });
        QuadFragment<2> product;
#pragma unroll
        for (int h = 0; h < 2; ++h) start(2 * n + h, product.value[h]);
        add_blocks<kLeftLowFirst, kFromMinusHalf>(product, a, b);
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

// x = left right^T over kSteps k-steps of columns, in chains. kRowsAreKeys: the left operand is K or V. The order of the
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

// The same from what start(n8, x) sets the elements to: about minus half of the product. Each chain starts from a
// fraction of that, a power of two, so that the fractions add up exactly.
template <int kSteps, bool kRowsAreKeys, int kN8, class Left, class Right, class Start>
__device__ __forceinline__ void multiply_columns_from(QuadFragment<kN8>& x, const Left& left, const Right& right,
                                                      const Start& start) {
    constexpr int kChains = ceil_div(kSteps, kChainSteps), kLast = kSteps % kChainSteps;
    constexpr float kShare = kChains == 1 ? 1.0f : kChains == 2 ? 0.5f : 0.25f;
    constexpr float kFirstShare = 1.0f - (kChains - 1) * kShare;
    static_assert(kFirstShare >= kShare);
    const float one[2] = {1.0f, 1.0f};
    const auto start_of = [&](int s) {
        const float share = s == 0 ? kFirstShare : kShare;
        return [=, &start](int n8, float (&y)[4]) {
            start(n8, y);
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] *= share;
        };
    };
    x.fill(0.0f);
#pragma unroll 1
    for (int s = 0; s < kSteps - kLast; s += kChainSteps)
        add_chain<kChainSteps, !kRowsAreKeys, true>(x, left, right, s, one, start_of(s));
    if constexpr (kLast > 0)
        add_chain<kLast, !kRowsAreKeys, true>(x, left, right, kSteps - kLast, one, start_of(kSteps - kLast));
}

}  // namespace fa2::sm80_float32
