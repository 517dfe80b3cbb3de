// Base of the consumers of a gradient of 64 rows that two warp groups share (shared_rows_consumer.cuh): products, what the
// groups hand over, and the store. shared_gradient_shape.cuh has the operands.
//
// A group hands P or dS over in the last passing panel of its tile, which nobody reads any more: there is no room for
// another buffer beside two operands of 64 rows by 512 columns. The other group releases that panel.
//
// `Own` is the class of the consumer, which has take_probabilities or exponentiate and take_derivatives.
#pragma once
#include "common/mask.cuh"
#include "common/math.cuh"
#include "sm90/shared_gradient_shape.cuh"

namespace fa2::sm90 {

template <class Own, class Spec, class Shape>
class SharedGradientConsumer : protected SharedRowsConsumer<Own, Shape, typename Spec::Element> {
  protected:
    using Rows = SharedRowsConsumer<Own, Shape, typename Spec::Element>;
    using Memory = SharedGradientMemory<Shape>;
    using Scores = QuadFragment<Shape::kBc / 8>;
    using Rows::output_, Rows::part_;
    using typename Rows::Probabilities;
    friend Rows;
    static constexpr int kHalf = Shape::kPassingPanels / 2;  // of the passing panels of a tile

    __device__ SharedGradientConsumer(const Memory& memory, int32 part)
        : Rows(part, 0, memory.handed_over()), memory_(memory), warp_(threadIdx.x / 32 % 4), lane_(threadIdx.x % 32) {
        if (part == 0) return;
        scored_.advance();
        passing_.advance(Shape::kPassingPanels);
    }

    // -------------------------------------------------------------------------------- what SharedRowsConsumer asks for

    __device__ __forceinline__ void multiply_scores(int32) {
        if constexpr (Shape::kDerives)
            multiply_kept();
        else
            multiply_passing<0, Shape::kPassingPanels>(scores_, memory_.first());
    }
    __device__ __forceinline__ void issue_derivatives(int32) {
        mbarrier_wait(memory_.full_second(), rows_.parity());
        multiply_passing<0, kHalf>(derivatives_, memory_.second());
        wgmma_commit();
        multiply_passing<kHalf, Shape::kPassingPanels>(derivatives_, memory_.second());
        wgmma_commit();
        pin(derivatives_);
    }
    // Waits for dP. The first panels are released while the others are multiplied.
    __device__ __forceinline__ void wait_for_derivatives() {
        wgmma_wait<1>();
        pin(derivatives_);
        release_passing(0, kHalf);
        wgmma_wait<0>();
        pin(derivatives_);
        release_passing(kHalf, Shape::kPassingPanels - 1);
    }
    __device__ __forceinline__ uint64 value_operand(int32) const {
        const uint32 stage = summed_.slot();
        mbarrier_wait(memory_.full_kept(stage, part_), summed_.parity());
        return matrix_descriptor(memory_.kept(stage, part_ * Shape::kOwnPanels), Shape::kPanelBytes);
    }
    __device__ __forceinline__ void release_value(int32) {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_kept(summed_.slot(), part_));
        summed_.advance();
    }
    // The last panel is released by the other group.
    __device__ __forceinline__ void release_key(int32) const { release_passing(0, Shape::kPassingPanels - 1); }
    __device__ __forceinline__ void release_passing(int first, int end) const {
        if (first <= lane_ && lane_ < end) mbarrier_arrive(memory_.empty_passing(passing_.slot(lane_)));
    }

    // The present tile's scores are done after this.
    __device__ __forceinline__ uint32 place_to_write() {
        barrier_sync(Rows::kOwnBarrier + part_, kGroupThreads);  // the group's warps have finished reading the panel
        const uint32 place = memory_.passing(passing_.slot(Shape::kPassingPanels - 1));
        passing_.advance(2 * Shape::kPassingPanels);  // over the other group's
        scored_.advance();
        scored_.advance();
        return place;
    }
    __device__ __forceinline__ uint32 place_to_read() const { return memory_.passing(slot_before()); }
    __device__ __forceinline__ void release_exchange() const {
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(memory_.empty_passing(slot_before()));
    }

    // As in QueryTileConsumer.
    __device__ __forceinline__ void make_positions_uniform() {
        rows_.turn = __shfl_sync(common::kFullWarp, rows_.turn, 0);
        scored_.turn = __shfl_sync(common::kFullWarp, scored_.turn, 0);
        summed_.turn = __shfl_sync(common::kFullWarp, summed_.turn, 0);
        passing_.turn = __shfl_sync(common::kFullWarp, passing_.turn, 0);
    }

    // ------------------------------------------------------------------------------------------------------- products

    // Issues k-steps of a product of the block's rows and a panel.
    template <int kColumns>
    __device__ __forceinline__ static void multiply_panel(Scores& x, uint64 rows, uint32 panel_address, int panel) {
        const uint64 panels = matrix_descriptor(panel_address, 0);
#pragma unroll
        for (int s = 0; s < min_of(4, kColumns / 16 - 4 * panel); ++s) {
            const uint64 left = rows + along_columns<Shape::kRowPanelBytes>(4 * panel + s);
            const uint64 right = panels + along_columns<Shape::kPanelBytes>(s);
            if (panel + s == 0)
                wgmma_first_scores(x, left, right);
            else
                wgmma_scores(x, left, right, true);
        }
    }
    __device__ __forceinline__ void multiply_kept() {
        const uint64 rows = as_if_new(matrix_descriptor(memory_.first(), 0));
        const uint32 stage = scored_.slot();
        pin(scores_);
#pragma unroll
        for (uint32 part = 0; part < 2; ++part) {
            mbarrier_wait(memory_.full_kept(stage, part), scored_.parity());
            wgmma_fence();
#pragma unroll
            for (int panel = part * Shape::kOwnPanels; panel < (part + 1) * Shape::kOwnPanels; ++panel)
                multiply_panel<Shape::kD>(scores_, rows, memory_.kept(stage, panel), panel);
        }
    }
    // Issues that of the panels from kFirst to kEnd. Panels are awaited together: products between which there is a loop
    // end a group, and waits for the ones before would wait for most of them.
    template <int kFirst, int kEnd>
    __device__ __forceinline__ void multiply_passing(Scores& x, uint32 own) const {
        constexpr int kColumns = Shape::kDerives ? Shape::kDv : Shape::kD;
        const uint64 rows = as_if_new(matrix_descriptor(own, 0));
        pin(x);
#pragma unroll
        for (int panel = kFirst; panel < kEnd; ++panel)
            mbarrier_wait(memory_.full_passing(passing_.slot(panel)), passing_.parity(panel));
        wgmma_fence();
#pragma unroll
        for (int panel = kFirst; panel < kEnd; ++panel)
            multiply_panel<kColumns>(x, rows, memory_.passing(passing_.slot(panel)), panel);
    }

    // -------------------------------------------------------------------------------------------------------- results

    // Computes the gradient from so many tiles of the other side.
    __device__ __forceinline__ void sum_over(int32 tiles) {
        mbarrier_wait(memory_.full_first(), rows_.parity());
        Rows::take_tiles(tiles);
        rows_.advance();
    }

    // Stores the group's columns, multiplied by a factor for each of the lane's rows, by TMA. Then this warp has finished
    // with the block's rows.
    template <class TmaRows>
    __device__ __forceinline__ void store(const float (&factor)[2], const TensorMap& map, const TmaRows& rows,
                                          int32 row, int32 head, int32 batch) {
        Rows::multiply_output(factor);
        Rows::store_output(memory_.first(), map, rows, row, head, batch);
    }

    const Memory memory_;
    const int32 warp_, lane_;
    RingPosition<1> rows_;
    RingPosition<Shape::kStages> scored_, summed_;  // of the kept operand: this group's next tile, and that of sums
    PanelPosition<Shape::kSlots> passing_;          // of this group's next tile
    Scores scores_, derivatives_;

  private:
    __device__ __forceinline__ uint32 slot_before() const { return passing_.slot(2 * Shape::kSlots - 1); }
};

}  // namespace fa2::sm90
