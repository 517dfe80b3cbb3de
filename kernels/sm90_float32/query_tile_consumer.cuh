// Base of the consumers of the kernels whose blocks own query tiles: a warp group computes 64 query rows, a warp 16. Warp
// groups that share rows take turns at their key tiles.
#pragma once
#include "common/mask.cuh"
#include "common/statistics.cuh"
#include "sm90_float32/pieces.cuh"
#include "sm90_float32/query_tile_shape.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape>
class QueryTileConsumer {
  protected:
    using Memory = QueryTileMemory<Shape>;
    static constexpr bool kLeftLimit = common::kLeftLimit<Spec>;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD, kPanels = Shape::kPanelsOfPart;
    static constexpr int kDv = Shape::kDv, kPanelsV = Shape::kPanelsOfPartV;
    static constexpr int kStrips = kBc / kUnitRows;
    static constexpr int kMaxSkipped = ceil_div(kBr - kGroupRows, kBc);

    using Scores = QuadFragment<kBc / 8>;

    __device__ QueryTileConsumer(const Params& params, const Memory& memory, int32 group)
        : params_(params),
          memory_(memory),
          group_(group / Shape::kSharers),
          turn_(group % Shape::kSharers),
          warp_(threadIdx.x / 32 % 4),
          lane_(threadIdx.x % 32),
          query_operand_(matrix_descriptor(memory.query(0) + group_ * kGroupRows * kPanelRowBytes, 0)) {}

    // Calls `own`.begin(tile, keys), .step(tile, block, masked, is_last) for each key tile, and .end(tile), for each tile.
    template <class Consumer>
    __device__ __forceinline__ static void run(Consumer& own) {
        for (TileInSlot tile = next_tile(own.memory_, own.tiles_); tile.key_tiles() > 0;
             tile = next_tile(own.memory_, own.tiles_)) {
            const GroupKeys keys = keys_of_group<Spec>(own.params_, tile, own.group_, kMaxSkipped);
            own.begin(tile, keys);
#pragma unroll 1
            for (int32 i = 0; i < keys.skipped; ++i) own.skip_keys();
            const int32 turn = Shape::kSharers > 1 ? own.turn_ : 0;  // a constant where nothing is shared
#pragma unroll 1
            for (int32 block = keys.end - 1 - turn; block >= keys.begin; block -= Shape::kSharers)
                own.step(tile, block, block >= keys.full_end || (kLeftLimit && block < keys.full_begin),
                         block == keys.begin);
            own.queries_.advance();
            own.end(tile);
            __syncwarp();
            if (own.lane_ == 0) mbarrier_arrive(tile.empty);
        }
    }

    // The strip, counted through all heads, of the warp group's queries and of a tile's first key.
    __device__ __forceinline__ int32 query_strip(const TileInSlot& tile) const {
        const int32 head = head_with_parts<Spec>(tile.batch(), params_.num_heads, tile.head());
        const int32 row = first_part_row<Spec, false>(params_, tile.batch()) + tile.first_row() + group_ * kGroupRows;
        return head * params_.q_strips + row / kUnitRows;
    }
    __device__ __forceinline__ int32 first_key_strip(const TileInSlot& tile) const {
        const int32 num_heads_kv = params_.num_heads / params_.heads_per_group;
        const int32 head = head_with_parts<Spec>(tile.batch(), num_heads_kv, tile.head() / params_.heads_per_group);
        return head * params_.k_strips + first_part_row<Spec, true>(params_, tile.batch()) / kUnitRows;
    }

    __device__ __forceinline__ common::ScoreTile score_tile(const TileInSlot& tile, int32 block) const {
        return {tile.batch(), tile.head(), first_row(tile), block * kBc, lane_};
    }
    // The first of this warp's 16 rows.
    __device__ __forceinline__ int32 first_row(const TileInSlot& tile) const {
        return tile.first_row() + group_ * kGroupRows + warp_ * 16;
    }

    // Stores this warp's rows of a result of the record `own`, which may have any strides.
    template <int kHeadDim, class Output, class Record>
    __device__ __forceinline__ void store_rows(const Output& x, float* gmem, const Strides& strides,
                                               const TileInSlot& tile, const Record& own) const {
        store_fragment<kHeadDim>(x, gmem + strides.offset(tile.batch(), 0, tile.head()), strides.row, first_row(tile),
                                 own.seqlen_q, 0, lane_);
    }

    const Params& params_;
    const Memory memory_;
    const int32 group_, turn_, warp_, lane_;  // `group_` counts rows
    const uint64 query_operand_;
    RingPosition<1> queries_;
    RingPosition<kTileSlots> tiles_;
};

}  // namespace fa2::sm90_float32
