// Base of the consumers of the kernels whose blocks own query tiles: a warp group computes 64 query rows, a warp 16.
#pragma once
#include "common/mask.cuh"
#include "common/statistics.cuh"
#include "sm90_float32/multiply.cuh"
#include "sm90_float32/query_tile_shape.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape>
class QueryTileConsumer {
  protected:
    using Memory = QueryTileMemory<Shape>;
    static constexpr bool kLeftLimit = common::kLeftLimit<Spec>;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD, kPanels = Shape::kPanelsOfPart;
    static constexpr int kChunks = kBc / kUnitRows;
    static constexpr int kMaxSkipped = ceil_div(kBr - kGroupRows, kBc);

    using Scores = QuadFragment<kBc / 8>;
    using Products = ColumnProducts<kD / 16, kPanels, kBr, kBc, false, Scores>;
    using Output = QuadFragment<kD / 8>;

    __device__ QueryTileConsumer(const Params& params, const Memory& memory, int32 group)
        : params_(params),
          memory_(memory),
          group_(group),
          warp_(threadIdx.x / 32 % 4),
          lane_(threadIdx.x % 32),
          query_operand_(matrix_descriptor(memory.query(0) + group * kGroupRows * kPanelRowBytes, 0)),
          key_operand_(matrix_descriptor(memory.key(0), kBc * kPanelRowBytes)),
          value_operand_(matrix_descriptor(memory.value(0), kBc * kPanelRowBytes)) {}

    // Calls `own`.begin(tile, keys), .step(tile, block, masked, is_last) for each key tile, and .end(tile), for each tile.
    template <class Consumer>
    __device__ __forceinline__ static void run(Consumer& own) {
        for (TileInSlot tile = next_tile(own.memory_, own.tiles_); tile.key_tiles() > 0;
             tile = next_tile(own.memory_, own.tiles_)) {
            const GroupKeys keys = keys_of_group<Spec>(own.params_, tile, own.group_, kMaxSkipped);
            own.begin(tile, keys);
#pragma unroll 1
            for (int32 i = 0; i < keys.skipped; ++i) own.skip_keys();
#pragma unroll 1
            for (int32 block = keys.end - 1; block >= keys.begin; --block)
                own.step(tile, block, block >= keys.full_end || (kLeftLimit && block < keys.full_begin),
                         block == keys.begin);
            own.queries_.advance();
            own.end(tile);
            __syncwarp();
            if (own.lane_ == 0) mbarrier_arrive(tile.empty);
        }
    }

    // The block of rows that share a unit, counted through all heads: of the warp group's queries, of a tile's first key.
    __device__ __forceinline__ int32 query_block(const TileInSlot& tile) const {
        const int32 head = head_with_parts<Spec>(tile.batch(), params_.num_heads, tile.head());
        const int32 row = first_part_row<Spec, false>(params_, tile.batch()) + tile.first_row() + group_ * kGroupRows;
        return head * params_.q_blocks + row / kUnitRows;
    }
    __device__ __forceinline__ int32 first_key_block(const TileInSlot& tile) const {
        const int32 num_heads_kv = params_.num_heads / params_.heads_per_group;
        const int32 head = head_with_parts<Spec>(tile.batch(), num_heads_kv, tile.head() / params_.heads_per_group);
        return head * params_.k_blocks + first_part_row<Spec, true>(params_, tile.batch()) / kUnitRows;
    }

    __device__ __forceinline__ common::ScoreTile score_tile(const TileInSlot& tile, int32 block) const {
        return {tile.batch(), tile.head(), first_row(tile), block * kBc, lane_};
    }
    // The first of this warp's 16 rows.
    __device__ __forceinline__ int32 first_row(const TileInSlot& tile) const {
        return tile.first_row() + group_ * kGroupRows + warp_ * 16;
    }

    // Issues S = Q K^T when K has arrived.
    __device__ __forceinline__ void issue_scores(Products& products) const {
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        products.issue(query_operand_, key_stage());
    }
    __device__ __forceinline__ uint64 key_stage() const {
        return key_operand_ + keys_.slot() * (Shape::kKeyBytes / 16);
    }
    __device__ __forceinline__ uint64 value_stage() const {
        return value_operand_ + values_.slot() * (Shape::kKeyBytes / 16);
    }
    __device__ __forceinline__ void release_key() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_key(keys_.slot()));
        keys_.advance();
    }
    __device__ __forceinline__ void release_value() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_value(values_.slot()));
        values_.advance();
    }
    // Keys that only the other warp groups see.
    __device__ __forceinline__ void skip_keys() {
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        release_key();
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        release_value();
    }

    // Stores this warp's rows of a result of the record `own`, which may have any strides.
    template <class Record>
    __device__ __forceinline__ void store_rows(const Output& x, float* gmem, const Strides& strides,
                                               const TileInSlot& tile, const Record& own) const {
        store_fragment<Spec::kHeadDim>(x, gmem + strides.offset(tile.batch(), 0, tile.head()), strides.row,
                                       first_row(tile), own.seqlen_q, 0, lane_);
    }

    const Params& params_;
    const Memory memory_;
    const int32 group_, warp_, lane_;
    const uint64 query_operand_, key_operand_, value_operand_;
    RingPosition<1> queries_;
    RingPosition<Shape::kStages> keys_;
    RingPosition<Shape::kValueStages> values_;
    RingPosition<kTileSlots> tiles_;
};

}  // namespace fa2::sm90_float32
