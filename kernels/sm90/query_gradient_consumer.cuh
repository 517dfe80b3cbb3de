// Base of the consumers of the kernels that compute dQ or its tangent: what they add to query_tile_loop.cuh, namely rows
// that see no key, and the store of the result. `Own` is the class of the consumer, which has, beside its steps,
//
//   load_rows(tile)                          loads the statistics of the lane's two rows
//   hides(i)                                 true if row i of these sees no key
//   dq_, result()                            the accumulators and the tensor map of the result
#pragma once
#include "common/dbias.cuh"
#include "common/mask.cuh"
#include "common/math.cuh"
#include "sm90/backward_dq_shape.cuh"
#include "sm90/query_tile_loop.cuh"
#include "sm90/store_box.cuh"

namespace fa2::sm90 {

template <class Own, class Spec, class Shape_>
class QueryGradientConsumer : public QueryTileLoop<Own, Spec, Shape_> {
  protected:
    using Shape = Shape_;
    using Loop = QueryTileLoop<Own, Spec, Shape>;
    using Loop::first_row, Loop::load_array, Loop::output_box, Loop::score_tile, Loop::wait_for_box;
    using Loop::group_, Loop::lane_, Loop::memory_, Loop::own, Loop::params_, Loop::queries_, Loop::warp_;
    using Loop::kBc, Loop::kD;
    using typename Loop::Element, typename Loop::Scores, typename Loop::Tiles;
    using Gradient = QuadFragment<kD / 8>;
    friend Loop;

  public:
    using Loop::Loop;

  protected:
    // ------------------------------------------------------------------------------------------- what the loops call

    __device__ __forceinline__ void begin_tile(const TileInSlot& tile, const GroupKeys& keys) {
        load_array(tile, keys.end - 1);
        own().load_rows(tile);
        if constexpr (common::kClearsSkippedDbias<Spec>)
            common::clear_skipped_dbias<Spec>(params_, score_tile(tile, 0), 16, keys.begin * kBc, keys.end * kBc);
    }
    __device__ __forceinline__ void clear_sums() { own().dq_.fill(0.0f); }

    // ---------------------------------------------------------------------------------------------------------- rows

    __device__ __forceinline__ void release_query() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_query(queries_.slot()));
    }

    // Waits for the query tile's Q. If rows may see no key, it makes them zeros.
    __device__ __forceinline__ void wait_for_query(const TileInSlot& tile) {
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        if (hides_rows(tile)) clear_hidden_rows();
    }

  private:
    // True if rows may see no key. A sequence without keys has one key tile here.
    __device__ __forceinline__ bool hides_rows(const TileInSlot& tile) const {
        const auto& record = record_of<Spec>(params_, tile);
        return common::may_hide_rows<Spec>(record) || common::lacks_keys<Spec>(record);
    }

    // Stores zeros to this warp's rows of Q, dO and their tangents that see no key: they may hold NaN, which P = 0
    // would not keep out of dQ and of sums over queries.
    __device__ __forceinline__ void clear_hidden_rows() const {
        constexpr int kQueryPanels = Shape::kQueryBytes / Shape::kQueryPanelBytes,
                      kDoutPanels = Shape::kDoutBytes / Shape::kQueryPanelBytes;
        mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (own().hides(i)) {
                const uint32 row = (group_ * kGroupRows + warp_ * 16 + Scores::row(i, lane_)) * kPanelRowBytes;
#pragma unroll 1
                for (uint32 chunk = lane_ % 4; chunk < 8 * max_of(kQueryPanels, kDoutPanels); chunk += 4) {
                    const uint32 at = chunk / 8 * Shape::kQueryPanelBytes + row + chunk % 8 * 16;
                    if (chunk < 8 * kQueryPanels) store_shared(memory_.query(queries_.slot()) + at, 0, 0, 0, 0);
                    if (chunk < 8 * kDoutPanels) store_shared(memory_.dout(queries_.slot()) + at, 0, 0, 0, 0);
                }
            }
        async_proxy_fence();
        barrier_sync(Tiles::kOutputBarrier + group_, kGroupThreads);
    }

    // Stores dQ of this warp's 16 rows. Each warp stores its own boxes by TMA, asynchronously and independently of the
    // other warps. It does not read the tile's slot afterwards, and releases it.
    __device__ __forceinline__ void store(const TileInSlot& tile) {
        const auto box = output_box(memory_.dout(queries_.slot()));
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) own().dq_.value[n][e] *= params_.softmax_scale;
        store_panels<0>(box, tile);
        if (lane_ == 0) {
            mbarrier_arrive(tile.empty);
            if constexpr (!Shape::kOwnOutput) {
                tma_store_wait_read();
                mbarrier_arrive(memory_.empty_dout(queries_.slot()));
            }
        }
        queries_.advance();
    }

    // Stores the panels of dQ from kFirst on, as many at a time as the box has. (An unrolled loop over them would compile
    // to more instructions.)
    template <int kFirst>
    __device__ __forceinline__ void store_panels(const typename Tiles::Box& box, const TileInSlot& tile) {
        constexpr int kPanelsAtOnce = Shape::kOwnOutput ? Shape::kOutputPanels : Shape::kPanelsV;
        constexpr int kEnd = min_of(kFirst + kPanelsAtOnce, Shape::kPanels);
        write_box<Element>(box.address, box.panel_bytes, own().dq_, lane_, kFirst, kEnd - kFirst);
        const auto rows = query_tma_rows<Spec>(params_, tile.batch());
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
#pragma unroll
            for (int panel = kFirst; panel < kEnd; ++panel)
                rows.store(own().result(), box.address + (panel - kFirst) * box.panel_bytes, panel * kPanelColumns,
                           first_row(tile), tile.head(), tile.batch());
            tma_store_commit();
        }
        if constexpr (kEnd < Shape::kPanels) {
            wait_for_box();
            store_panels<kEnd>(box, tile);
        }
    }
};

}  // namespace fa2::sm90
