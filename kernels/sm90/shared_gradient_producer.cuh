// Loads of the kernels whose two consumer groups share the rows of a gradient: a warp loads the block's rows, and tiles of
// the other side in the order in which the groups use them.
//
// Rows of Q and dO that see no key may hold NaN, which P = 0 would not keep out of sums over queries. The warp stores zeros
// to those of a tile, where it has any, before it signals that the tile is there.
#pragma once
#include "common/mask.cuh"
#include "common/statistics.cuh"
#include "sm90/shared_gradient_shape.cuh"

namespace fa2::sm90 {

// The maps of the operands: those of the block's rows, the kept one and the passing one.
struct SharedGradientMaps {
    const TensorMap &first, &second, &kept, &passing;
};

template <class Spec, class Shape>
class SharedGradientProducer {
    using Memory = SharedGradientMemory<Shape>;
    static constexpr int kRowsOfLane = ceil_div(Shape::kBc, 32);

  public:
    // Of the queries of a tile: lse and delta of some in each lane, and whether one of all of them sees no key.
    struct Statistics {
        float lse[kRowsOfLane], delta[kRowsOfLane];
        bool clears = false;
    };

    __device__ SharedGradientProducer(const Memory& memory, const SharedGradientMaps& maps)
        : memory_(memory), maps_(maps), lane_(threadIdx.x % 32) {}

    // Loads the block's rows from `row` on. `rows`: where they are in memory.
    template <class Rows>
    __device__ void load_rows(const Rows& rows, int32 row, int32 head, int32 batch) {
        mbarrier_wait(memory_.empty_rows(), rows_.parity() ^ 1);
        rows_.advance();
        if (lane_ > 0) return;
        load_rows<Shape::kPanels>(maps_.first, memory_.first(), memory_.full_first(), rows, row, head, batch);
        if constexpr (Shape::kDerives)
            load_rows<Shape::kPanelsV>(maps_.second, memory_.second(), memory_.full_second(), rows, row, head, batch);
    }

    // Loads the kept operand of a tile of the other side.
    template <class Rows>
    __device__ void load_kept(const Rows& rows, int32 tile, int32 head, int32 batch, const Statistics& statistics) {
        const uint32 stage = kept_.slot();
#pragma unroll
        for (uint32 part = 0; part < 2; ++part) {
            mbarrier_wait(memory_.empty_kept(stage, part), kept_.parity() ^ 1);
            load_panels<Shape::kOwnPanels>(maps_.kept, memory_.kept(stage), memory_.full_kept(stage, part),
                                           part * Shape::kOwnPanels, rows, tile, head, batch, statistics);
        }
        kept_.advance();
    }
    // Loads its passing operand.
    template <class Rows>
    __device__ void load_passing(const Rows& rows, int32 tile, int32 head, int32 batch, const Statistics& statistics) {
#pragma unroll 1
        for (int panel = 0; panel < Shape::kPassingPanels; ++panel) {
            const uint32 slot = passing_.slot();
            mbarrier_wait(memory_.empty_passing(slot), passing_.parity() ^ 1);
            load_panels<1>(maps_.passing, memory_.passing(slot) - panel * Shape::kPanelBytes,
                           memory_.full_passing(slot), panel, rows, tile, head, batch, statistics);
            passing_.advance();
        }
    }

    // Reads the statistics of a tile of queries. Unless one may see no key, nothing waits for them here. A query beyond the
    // sequence has lse = -inf, as one without a visible key.
    template <class Record>
    __device__ Statistics statistics_of(const Record& params, int32 tile, int32 head, int32 batch) const {
        Statistics x;
        const int64 first = common::first_statistic<Spec>(params, batch, head);
        bool hides = false;
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
            const int32 query = lane_ + 32 * i, row = tile * Shape::kBc + query;
            const bool is_valid = query < Shape::kBc && row < params.seqlen_q;
            x.lse[i] = is_valid ? params.lse[first + row] : -common::infinity<float>();
            x.delta[i] = is_valid ? params.delta[first + row] : 0.0f;
            hides |= is_valid && x.lse[i] == -common::infinity<float>();
        }
        if (common::may_hide_rows<Spec>(params)) x.clears = __any_sync(common::kFullWarp, hides);
        return x;
    }

    // Stores statistics, with lse = +inf, so that P is zero, and no delta for queries that see no key. Of dK, their stage is
    // free when that of the kept operand is; of dV, when the last passing panel is, from which P has been read.
    __device__ void put(const Statistics& statistics) {
        const uint32 stage = statistics_.slot();
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
            const uint32 query = lane_ + 32 * i;
            if (query >= Shape::kBc) continue;
            const bool has_none = statistics.lse[i] == -common::infinity<float>();
            store_shared(memory_.lse(stage) + 4 * query,
                         has_none ? statistics.lse[i] : -common::in_base2(statistics.lse[i]));
            store_shared(memory_.delta(stage) + 4 * query, has_none ? 0.0f : -statistics.delta[i]);
        }
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(memory_.full_statistics(stage));
        statistics_.advance();
    }

  private:
    template <int kPanels, class Rows>
    __device__ static void load_rows(const TensorMap& map, uint32 smem, uint32 full, const Rows& rows, int32 row,
                                     int32 head, int32 batch) {
        mbarrier_arrive_expect(full, kPanels * Shape::kRowPanelBytes);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel)
            rows.load(smem + panel * Shape::kRowPanelBytes, map, full, panel * kPanelColumns, row, head, batch);
    }

    // Loads panels from `first` on, of an operand whose first panel is, or would be, at `smem`.
    template <int kPanels, class Rows>
    __device__ void load_panels(const TensorMap& map, uint32 smem, uint32 full, int first, const Rows& rows, int32 tile,
                                int32 head, int32 batch, const Statistics& statistics) {
        const bool clears = Shape::kByKeys && statistics.clears;
        if (lane_ == 0) {
            const uint32 barrier = clears ? memory_.landed() : full;
            mbarrier_arrive_expect(barrier, kPanels * Shape::kPanelBytes);
#pragma unroll
            for (int panel = first; panel < first + kPanels; ++panel)
                rows.load(smem + panel * Shape::kPanelBytes, map, barrier, panel * kPanelColumns, tile * Shape::kBc,
                          head, batch);
        }
        if (!clears) return;
        mbarrier_wait(memory_.landed(), landed_.parity());
        landed_.advance();
#pragma unroll
        for (int i = 0; i < kRowsOfLane; ++i) {
            const uint32 query = lane_ + 32 * i;
            if (query >= Shape::kBc || statistics.lse[i] != -common::infinity<float>()) continue;
#pragma unroll 1
            for (uint32 chunk = 0; chunk < 8 * kPanels; ++chunk)
                store_shared(smem + (first + chunk / 8) * Shape::kPanelBytes + query * kPanelRowBytes + chunk % 8 * 16,
                             0, 0, 0, 0);
        }
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(full);
    }

    const Memory memory_;
    const SharedGradientMaps maps_;
    const int32 lane_;
    RingPosition<1> rows_, landed_;
    RingPosition<Shape::kStages> kept_, statistics_;
    RingPosition<Shape::kSlots> passing_;
};

}  // namespace fa2::sm90
