// The producer warp group of the kernels that own keys. Jobs of its warps:
//
//   0       one thread copies the parts of K and V once, and then those of Q and dO of each step
//   1       prepares the statistics of each step's queries
//   2, 3    with dQ: one thread makes dS, which a consumer warp group writes, visible to wgmma
#pragma once
#include "float32_parts/softmax_gradient.cuh"
#include "sm90_float32/backward_dkdv_shape.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape>
class DkdvProducer {
    using Memory = DkdvMemory<Shape>;
    using Layout = PartsLayout<Spec::kHeadDim>;
    using LayoutV = PartsLayout<Spec::kHeadDimV>;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc;

  public:
    __device__ DkdvProducer(const Params& params, const Memory& memory, const common::TileCoordinates& where)
        : params_(params), memory_(memory), where_(where) {}

    template <class Tiles>
    __device__ __forceinline__ void run(const Tiles& tiles) const {
        const int32 warp = threadIdx.x / 32;
        if (threadIdx.x == 0) copy(tiles);
        if (warp == 1) prepare_statistics(tiles);
        if (Shape::kWithDq && warp >= 2 && threadIdx.x % 32 == 0) pass_ds_on(tiles, warp - 2);
    }

  private:
    template <class Tiles>
    __device__ __forceinline__ void copy(const Tiles& tiles) const {
        if (tiles.begin >= tiles.end) return;
        const int32 num_heads_kv = params_.num_heads / params_.heads_per_group;
        const int32 first_key = first_part_row<Spec, true>(params_, where_.batch) + where_.tile * kBc;
        const int32 head = head_with_parts<Spec>(where_.batch, num_heads_kv, where_.head);
        const int32 keys = Layout::row_of(head, params_.k_strips, first_key);
        const int32 values = LayoutV::row_of(head, params_.k_strips, first_key);
        load_rows<kBc, Spec::kHeadDim>(params_.k_parts, keys, params_.k_strips, memory_.key(), memory_.full_key());
        load_rows<kBc, Spec::kHeadDimV>(params_.v_parts, values, params_.k_strips, memory_.value(),
                                        memory_.full_value());
        if constexpr (Shape::kInPieces)
            copy_pieces(tiles);
        else
            copy_tiles(tiles);
    }

    // The row of a query tile, in the first panel of its head's high parts of Q or of dO.
    template <class LayoutOfPart>
    __device__ __forceinline__ int32 row_of(int32 head, int32 tile) const {
        return LayoutOfPart::row_of(head_with_parts<Spec>(where_.batch, params_.num_heads, head), params_.q_strips,
                                    first_part_row<Spec, false>(params_, where_.batch) + tile * kBr);
    }

    template <class Tiles>
    __device__ __forceinline__ void copy_tiles(const Tiles& tiles) const {
        RingPosition<Shape::kStages> queries;
        RingPosition<Shape::kDoutStages> douts;
        for_each_step(params_, where_.head, tiles, [&](int32 head, int32 tile) {
            const int32 row = row_of<Layout>(head, tile), row_v = row_of<LayoutV>(head, tile);
            const uint32 query = queries.slot(), dout = douts.slot();
            mbarrier_wait(memory_.empty_query(query), queries.parity() ^ 1);
            load_rows<kBr, Spec::kHeadDim>(params_.q_parts, row, params_.q_strips, memory_.query(query),
                                           memory_.full_query(query));
            mbarrier_wait(memory_.empty_dout(dout), douts.parity() ^ 1);
            load_rows<kBr, Spec::kHeadDimV>(params_.dout_parts, row_v, params_.q_strips, memory_.dout(dout),
                                            memory_.full_dout(dout));
            queries.advance();
            douts.advance();
        });
    }

    // Q, dO, and again Q for dK.
    template <class Tiles>
    __device__ __forceinline__ void copy_pieces(const Tiles& tiles) const {
        using Writer = PieceWriter<Shape::kStages>;
        Writer queries(query_ring(memory_)), douts(dout_ring(memory_));
        for_each_step(params_, where_.head, tiles, [&](int32 head, int32 tile) {
            const PanelRows rows{row_of<Layout>(head, tile), Shape::kPanels};
            const PanelRows rows_v{row_of<LayoutV>(head, tile), Shape::kPanelsV};
            const auto load = [&](Writer& ring, const float16* parts, const PanelRows& of) {
#pragma unroll 1
                for (int32 panel = 0; panel < of.num_panels; ++panel) ring.load(parts, of, params_.q_strips, panel);
            };
            load(queries, params_.q_parts, rows);
            load(douts, params_.dout_parts, rows_v);
            load(queries, params_.q_parts, rows);
        });
    }

    // The loads of a step are in flight while the warp waits for the stage to be released.
    template <class Tiles>
    __device__ __forceinline__ void prepare_statistics(const Tiles& tiles) const {
        const int32 lane = threadIdx.x % 32;
        RingPosition<Shape::kStatisticStages> ring;
        for_each_step(params_, where_.head, tiles, [&](int32 head, int32 tile) {
            const int64 first = common::first_statistic<Spec>(params_, where_.batch, head);
            RowStatistics own[kBr / 32];
#pragma unroll
            for (int n = 0; n < kBr / 32; ++n) own[n] = row_statistics(params_, first, tile * kBr + 32 * n + lane);
            const uint32 slot = ring.slot();
            const uint32 empty = Shape::kInPieces ? memory_.empty_statistics(slot) : memory_.empty_query(slot);
            mbarrier_wait(empty, ring.parity() ^ 1);
            const uint32 statistics = memory_.statistics(slot) + 4 * lane;
#pragma unroll
            for (int n = 0; n < kBr / 32; ++n) {
                store_shared(statistics + 128 * n, own[n].lse);
                store_shared(statistics + 128 * n + Shape::kStatisticBytes, own[n].delta);
            }
            mbarrier_arrive(Shape::kInPieces ? memory_.full_statistics(slot) : memory_.full_query(slot));
            ring.advance();
        });
    }

    // A fence waits for all outstanding memory operations of its thread. Consumer threads have additions to dQ in
    // flight for most of a step, so a thread of the producer fences the dS that they write.
    template <class Tiles>
    __device__ __forceinline__ void pass_ds_on(const Tiles& tiles, int32 group) const {
        RingPosition<1> ring;
        for_each_step(params_, where_.head, tiles, [&](int32, int32) {
            mbarrier_wait(memory_.written_ds(group), ring.parity());
            async_proxy_fence();
            mbarrier_arrive(memory_.full_ds(group));
            ring.advance();
        });
    }

    const Params& params_;
    const Memory memory_;
    const common::TileCoordinates& where_;
};

}  // namespace fa2::sm90_float32
