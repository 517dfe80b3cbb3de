// Where operands are wider than 128 columns, the right operand of a product passes through shared memory in pieces. Every piece gives a
// product of 64 rows by 64 columns, so that few registers are needed beside the sums. A warp group waits for each
// product before it goes on; the products of the other group fill the gaps.
#pragma once
#include "sm90_float32/multiply.cuh"

namespace fa2::sm90_float32 {

// Reads pieces from a ring. All lanes of a warp group call its functions together, for whole tiles.
template <int kSlots>
class PieceReader {
    static constexpr int kStepsOfPanel = kPanelColumns / 16;

  public:
    __device__ PieceReader(const PieceRing<kSlots>& ring, int32 lane)
        : ring_(ring), operand_(matrix_descriptor(ring.slots, kPiecePartBytes)), lane_(lane) {}

    // x = left right^T over kHeadDim columns. The left operand has panels of kLeftRows rows. Each panel is a chain of its own. `never`: as for
    // `multiply_panel`.
    template <int kHeadDim, bool kRowsAreKeys, int kLeftRows, class Scores>
    __device__ __forceinline__ void multiply_columns(Scores& x, uint64 left, bool never) {
        Scores next;
#pragma unroll
        for (int panel = 0; panel < kPanels<kHeadDim>; ++panel) {
            Scores& chain = panel == 0 ? x : next;
            const uint64 piece = wait();
            wgmma_fence();
#pragma unroll
            for (int t = 0; t < kProducts; ++t)
                issue_product<kHeadDim, kRowsAreKeys, kLeftRows>(chain, left, piece, panel, t, 0,
                                                                 steps_of<kHeadDim>(panel),
                                                                 [&](int s, Scores& y, uint64 a, uint64 b) {
                                                                     if (t > 0 || s > 0)
                                                                         wgmma_scores(y, a, b);
                                                                     else if (panel > 1)
                                                                         wgmma_scores_in_place(y, a, b, never);
                                                                     else
                                                                         wgmma_first_scores(y, a, b);
                                                                 });
            wgmma_commit();
            pin(chain);
            wgmma_wait<0>();
            pin(chain);
            release();
            const float one[2] = {1.0f, 1.0f};
            if (panel > 0) add_rows(x, next, one);
        }
    }

    // x += left right^T, where x is about minus half of what a panel adds: the small products of parts are added where the
    // sum is about zero. start_next(x) brings it back there for the next panel.
    template <int kHeadDim, bool kRowsAreKeys, int kLeftRows, class Scores, class StartNext>
    __device__ __forceinline__ void add_columns(Scores& x, uint64 left, const StartNext& start_next) {
        constexpr int kLargest = kProducts - 1;
#pragma unroll
        for (int panel = 0; panel < kPanels<kHeadDim>; ++panel) {
            const int steps = steps_of<kHeadDim>(panel);
            if (panel > 0) start_next(x);
            pin(x);
            const uint64 piece = wait();
            wgmma_fence();
            const auto add = [](int, Scores& y, uint64 a, uint64 b) { wgmma_scores(y, a, b); };
            issue_product<kHeadDim, kRowsAreKeys, kLeftRows>(x, left, piece, panel, kLargest, 0, steps / 2, add);
#pragma unroll
            for (int t = 0; t < kLargest; ++t)
                issue_product<kHeadDim, kRowsAreKeys, kLeftRows>(x, left, piece, panel, t, 0, steps, add);
            issue_product<kHeadDim, kRowsAreKeys, kLeftRows>(x, left, piece, panel, kLargest, steps / 2, steps, add);
            wgmma_commit();
            pin(x);
            wgmma_wait<0>();
            pin(x);
            release();
        }
    }

    // sum += factor p rows, panel by panel. `never`: as for `multiply_panel`.
    template <int kNumPanels, class Operand>
    __device__ __forceinline__ void add_product(PanelFragment<kNumPanels>& sum, const Operand& p,
                                                const float (&factor)[2], bool never) {
        typename PanelFragment<kNumPanels>::Panel product;
#pragma unroll
        for (int panel = 0; panel < kNumPanels; ++panel) {
            multiply_panel<1, kUnitRows>(product, p, wait(), panel, never);
            wgmma_wait<0>();
            pin(product);
            release();
            add_rows(sum.panel[panel], product, factor);
        }
    }

    // Passes over a tile that only others read.
    template <int kHeadDim>
    __device__ __forceinline__ void skip() {
#pragma unroll 1
        for (int panel = 0; panel < kPanels<kHeadDim>; ++panel) {
            wait();
            release();
        }
    }

  private:
    template <int kHeadDim>
    static constexpr int kPanels = PartsLayout<kHeadDim>::kPanels / kParts;

    // The descriptor of the next piece, when it has arrived. The compiler would keep those of a slot's k-steps in registers
    // for the next piece in it.
    __device__ __forceinline__ uint64 wait() const {
        mbarrier_wait(ring_.full(position_.slot()), position_.parity());
        return as_if_new(operand_ + position_.slot() * (kPieceBytes / 16));
    }
    __device__ __forceinline__ void release() {
        if (lane_ == 0) mbarrier_arrive(ring_.empty(position_.slot()));
        position_.advance();
    }

    // The k-steps of a panel.
    template <int kHeadDim>
    __device__ __forceinline__ static constexpr int steps_of(int panel) {
        return min_of(kStepsOfPanel, ceil_div(kHeadDim, 16) - panel * kStepsOfPanel);
    }

    // Issues x (+)= product t of the parts of one panel; step(s, x, a, b) is its k-step s.
    template <int kHeadDim, bool kRowsAreKeys, int kLeftRows, class Scores, class Step>
    __device__ __forceinline__ static void issue_product(Scores& x, uint64 left, uint64 piece, int panel, int t,
                                                         int begin, int end, const Step& step) {
        constexpr int kLeftPanel = kLeftRows * kPanelRowBytes;
#pragma unroll
        for (int s = begin; s < end; ++s)
            issue_part<kRowsAreKeys, kPanels<kHeadDim> * kLeftPanel, kPiecePartBytes>(
                x, left + along_columns<kLeftPanel>(panel * kStepsOfPanel + s),
                piece + along_columns<kPiecePartBytes>(s), t, [&](Scores& y, uint64 a, uint64 b) { step(s, y, a, b); });
    }

    const PieceRing<kSlots> ring_;
    const uint64 operand_;
    const int32 lane_;
    RingPosition<kSlots> position_;
};

}  // namespace fa2::sm90_float32
