// The producer of the dK and dV kernel: one thread copies the parts of K and V, and then those of Q and dO of each step.
#pragma once
#include "sm90_float32/backward_dkdv_shape.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Record, class Tiles>
__device__ __forceinline__ void produce_queries(const Record& params, const DkdvMemory<DkdvShape<Spec>>& memory,
                                                const common::TileCoordinates& where, const Tiles& tiles) {
    using Shape = DkdvShape<Spec>;
    using Layout = PartsLayout<Spec::kHeadDim>;
    if (tiles.begin >= tiles.end) return;
    const int32 num_heads_kv = params.num_heads / params.heads_per_group;
    const int32 first_key = first_part_row<Spec, true>(params, where.batch) + where.tile * Shape::kBc;
    const int32 keys =
        Layout::row_of(head_with_parts<Spec>(where.batch, num_heads_kv, where.head), params.k_blocks, first_key);
    load_rows<Shape::kBc, Spec::kHeadDim>(params.k_parts, keys, params.k_blocks, memory.key(), memory.full_key());
    load_rows<Shape::kBc, Spec::kHeadDim>(params.v_parts, keys, params.k_blocks, memory.value(), memory.full_value());
    RingPosition<Shape::kStages> queries;
    RingPosition<Shape::kDoutStages> douts;
    for_each_step(params, where.head, tiles, [&](int32 head, int32 tile) {
        const int32 first_query = first_part_row<Spec, false>(params, where.batch) + tile * Shape::kBr;
        const int32 row =
            Layout::row_of(head_with_parts<Spec>(where.batch, params.num_heads, head), params.q_blocks, first_query);
        const uint32 query = queries.slot(), dout = douts.slot();
        mbarrier_wait(memory.empty_query(query), queries.parity() ^ 1);
        load_rows<Shape::kBr, Spec::kHeadDim>(params.q_parts, row, params.q_blocks, memory.query(query),
                                              memory.full_query(query));
        mbarrier_wait(memory.empty_dout(dout), douts.parity() ^ 1);
        load_rows<Shape::kBr, Spec::kHeadDim>(params.dout_parts, row, params.q_blocks, memory.dout(dout),
                                              memory.full_dout(dout));
        queries.advance();
        douts.advance();
    });
}

}  // namespace fa2::sm90_float32
