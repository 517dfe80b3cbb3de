// Products of parts on wgmma, by the rules of float32_parts/fragments.cuh.
#pragma once
#include "float32_parts/fragments.cuh"
#include "sm90_float32/load_rows.cuh"
#include "sm90_float32/wgmma.cuh.j2"

namespace fa2::sm90_float32 {

// Bytes from the high parts of a tile to the low ones. kPanels: panels of one part; 0 if both share one.
template <int kPanels, int kRows>
inline constexpr int kPartBytes = kPanels > 0 ? kPanels * kRows * kPanelRowBytes : kPanelRowBytes / kParts;

// Issues x (+)= a k-step of product t of the parts of left right^T; the descriptors point to the high parts of its
// columns. kLeftPart, kRightPart: bytes from the high parts to the low ones. kRowsAreKeys: the left operand is K or V. The
// order of the products of parts is the same for S and S^T, so that their elements have the same bits. step(x, a, b) is
// the k-step.
template <bool kRowsAreKeys, int kLeftPart, int kRightPart, class Scores, class Step>
__device__ __forceinline__ void issue_part(Scores& x, uint64 left, uint64 right, int t, const Step& step) {
    step(x, left + part_of_product<!kRowsAreKeys>(t) * (kLeftPart / 16),
         right + part_of_product<kRowsAreKeys>(t) * (kRightPart / 16));
}

// Products left right^T over columns. The operands have panels of kLeftRows and kRightRows rows; the left descriptor
// points to the warp group's 64 rows.
template <int kSteps, int kPanels, int kLeftRows, int kRightRows, bool kRowsAreKeys, class Scores>
struct ColumnProducts {
    // The k-steps of the first of two chains, or of the only one.
    static constexpr int kFirstChain = kSteps > 4 ? kSteps / 2 : kSteps;
    static constexpr bool kTwoChains = kFirstChain < kSteps;
    static constexpr int kGroups = kTwoChains ? 2 : 1;  // that `issue` commits

    // Issues the chains of left right^T, which `sum` adds when they are there.
    __device__ __forceinline__ void issue(uint64 left, uint64 right) {
        issue_chain<0, kFirstChain>(first_, left, right);
        if constexpr (kTwoChains) issue_chain<kFirstChain, kSteps>(second_, left, right);
    }
    __device__ __forceinline__ Scores& sum() {
        pin(first_);
        if constexpr (kTwoChains) {
            pin(second_);
            const float one[2] = {1.0f, 1.0f};
            add_rows(first_, second_, one);
        }
        return first_;
    }

    // Issues x += left right^T for an x that is about minus half of the product: the small products of parts are added
    // where the sum is near zero.
    __device__ __forceinline__ static void issue_from(Scores& x, uint64 left, uint64 right) {
        constexpr int kHalf = kSteps / 2, kLargest = kProducts - 1;
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kHalf; ++s) issue_step(x, left, right, kLargest, s);
#pragma unroll
        for (int t = 0; t < kLargest; ++t)
#pragma unroll
            for (int s = 0; s < kSteps; ++s) issue_step(x, left, right, t, s);
#pragma unroll
        for (int s = kHalf; s < kSteps; ++s) issue_step(x, left, right, kLargest, s);
        wgmma_commit();
        pin(x);
    }

  private:
    template <int kBegin, int kEnd>
    __device__ __forceinline__ static void issue_chain(Scores& x, uint64 left, uint64 right) {
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < kProducts; ++t)
#pragma unroll
            for (int s = kBegin; s < kEnd; ++s) issue_step(x, left, right, t, s, t == 0 && s == kBegin);
        wgmma_commit();
        pin(x);
    }
    __device__ __forceinline__ static void issue_step(Scores& x, uint64 left, uint64 right, int t, int s,
                                                      bool is_first = false) {
        constexpr int kLeftPanel = kLeftRows * kPanelRowBytes, kRightPanel = kRightRows * kPanelRowBytes;
        issue_part<kRowsAreKeys, kPartBytes<kPanels, kLeftRows>, kPartBytes<kPanels, kRightRows>>(
            x, left + along_columns<kLeftPanel>(s), right + along_columns<kRightPanel>(s), t,
            [&](Scores& y, uint64 a, uint64 b) {
                if (is_first)
                    wgmma_first_scores(y, a, b);
                else
                    wgmma_scores(y, a, b);
            });
    }

    Scores first_, second_;
};

// Issues x = p rows, for strip number `strip` of the rows of a tile of kRows; `rows` is the tile's MN-major descriptor.
// first_step(x, a, b) is the first k-step, which overwrites x.
template <int kPanels, int kRows, class Output, class Operand, class FirstStep>
__device__ __forceinline__ void multiply_strip(Output& x, const Operand& p, uint64 rows, int strip,
                                               const FirstStep& first_step) {
    constexpr int kSteps = kUnitRows / 16;
    wgmma_fence();
#pragma unroll
    for (int t = 0; t < kProducts; ++t)
#pragma unroll
        for (int s = strip * kSteps; s < (strip + 1) * kSteps; ++s) {
            const OperandA a = p.k16(part_of_product<true>(t), s);
            const uint64 b = rows + part_of_product<false>(t) * (kPartBytes<kPanels, kRows> / 16) + along_rows(s);
            if (t == 0 && s == strip * kSteps)
                first_step(x, a, b);
            else
                wgmma_output(x, a, b);
        }
    wgmma_commit();
    pin(x);
}
template <int kPanels, int kRows, class Output, class Operand>
__device__ __forceinline__ void multiply_strip(Output& x, const Operand& p, uint64 rows, int strip) {
    multiply_strip<kPanels, kRows>(x, p, rows, strip,
                                   [](Output& y, const OperandA& a, uint64 b) { wgmma_first_output(y, a, b); });
}
// The same for one of several panels that are added up one after the other. `never`: false, which the compiler does not
// know, so that this product might start from the one before. Otherwise it would add one product while the next one is
// computed, and spill registers.
template <int kPanels, int kRows, class Panel, class Operand>
__device__ __forceinline__ void multiply_panel(Panel& x, const Operand& p, uint64 rows, int panel, bool never) {
    multiply_strip<kPanels, kRows>(x, p, rows, 0, [&](Panel& y, const OperandA& a, uint64 b) {
        if (panel > 0)
            wgmma_output_in_place(y, a, b, never);
        else
            wgmma_first_output(y, a, b);
    });
}

}  // namespace fa2::sm90_float32
