// Base of the consumers of the kernels that own keys: the operands and units of 64 keys, the statistics of queries, and
// the results. A warp has 16 keys.
#pragma once
#include "common/mask.cuh"
#include "common/statistics.cuh"
#include "float32_parts/softmax_gradient.cuh"
#include "sm90_float32/backward_dkdv_shape.cuh"
#include "sm90_float32/multiply.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape>
class DkdvGroup {
  protected:
    using Memory = DkdvMemory<Shape>;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD, kPanels = Shape::kPanels;
    static constexpr int kDv = Shape::kDv, kPanelsV = Shape::kPanelsV;
    static constexpr int kStrips = kBr / kUnitRows;
    using Scores = QuadFragment<kBr / 8>;
    using Parts = FragmentParts<kBr / 8>;
    using Compared = Comparand<Shape::kInPieces ? kPanelsV : 1>;
    static_assert(kStrips == 1);

    // `group` counts the keys of the tile.
    __device__ DkdvGroup(const Params& params, const Memory& memory, const common::TileCoordinates& where, int32 group)
        : params_(params),
          memory_(memory),
          where_(where),
          warp_(threadIdx.x / 32 % 4),
          lane_(threadIdx.x % 32),
          first_key_(where.tile * kBc + group * kGroupRows + warp_ * 16),
          key_operand_(matrix_descriptor(memory.key() + group * kGroupRows * kPanelRowBytes, 0)),
          value_operand_(matrix_descriptor(memory.value() + group * kGroupRows * kPanelRowBytes, 0)) {
        const int32 num_heads_kv = params.num_heads / params.heads_per_group;
        const int32 head = head_with_parts<Spec>(where.batch, num_heads_kv, where.head);
        const int32 row = first_part_row<Spec, true>(params, where.batch) + where.tile * kBc + group * kGroupRows;
        key_unit_ = params.k_units[head * params.k_strips + row / kUnitRows];
        value_unit_ = params.v_units[head * params.k_strips + row / kUnitRows];
    }

    // Waits for K and V, and calls step(head, tile, masked) for each query tile.
    template <class Tiles, class Step>
    __device__ __forceinline__ void for_each_tile(const Tiles& tiles, const Step& step) const {
        if (tiles.begin < tiles.end) {
            mbarrier_wait(memory_.full_key(), 0);
            mbarrier_wait(memory_.full_value(), 0);
        }
        for_each_step(params_, where_.head, tiles, [&](int32 head, int32 tile) {
            step(head, tile, tile < tiles.full_begin || (Tiles::kLeftLimit && tile >= tiles.full_end));
        });
    }

    // The units of a query tile, and those of its products with the keys.
    struct Units {
        float query[kStrips], dout[kStrips], score[kStrips], dp[kStrips];
    };
    __device__ __forceinline__ Units units_of(int32 head, int32 tile) const {
        const int32 first_query = tile * kBr;
        const int32 first_strip = head_with_parts<Spec>(where_.batch, params_.num_heads, head) * params_.q_strips +
                                  (first_part_row<Spec, false>(params_, where_.batch) + first_query) / kUnitRows;
        Units units;
#pragma unroll
        for (int c = 0; c < kStrips; ++c) {
            units.query[c] = params_.q_units[first_strip + c];
            units.dout[c] = params_.dout_units[first_strip + c];
            units.score[c] = key_unit_ * units.query[c];
            units.dp[c] = value_unit_ * units.dout[c];
        }
        return units;
    }
    __device__ __forceinline__ common::ScoreTile score_tile(int32 head, int32 tile) const {
        return {where_.batch, head, tile * kBr, first_key_, lane_};
    }

    // A statistic of the queries of this lane's columns.
    struct Statistics {
        float x[Scores::kCols];

        __device__ __forceinline__ float operator()(int j) const { return x[j]; }
    };
    __device__ __forceinline__ Statistics statistics_at(uint32 address) const {
        Statistics of;
#pragma unroll
        for (int j = 0; j < Scores::kCols; j += 2) {
            float pair[2];
            load_shared(address + Scores::col(0, lane_) * 4 + Scores::col(j, 0) * 4, pair);
            of.x[j] = pair[0], of.x[j + 1] = pair[1];
        }
        return of;
    }
    __device__ __forceinline__ void start_dp(Scores& dp, uint32 delta, const float (&unit)[kStrips]) const {
        const Statistics of = statistics_at(delta);
        float32_parts::start_dp<true>(dp, [&](int j, int c) { return Compared(of(j), unit[c]).start; });
    }
    __device__ __forceinline__ void start_next_chain(Scores& dp, uint32 delta, const float (&unit)[kStrips]) const {
        const Statistics of = statistics_at(delta);
        float32_parts::start_next_chain<true>(dp, [&](int j, int c) { return Compared(of(j), unit[c]).start; });
    }
    __device__ __forceinline__ void take_gradients(Scores& weights, const Scores& dp, uint32 delta,
                                                   const float (&unit)[kStrips]) const {
        const Statistics of = statistics_at(delta);
        float32_parts::take_gradients<true, Spec>(
            weights, dp, unit, params_, [&](int j, int c) { return Compared(of(j), unit[c]).rest; }, of);
    }

    template <int kHeadDim, class Gradient>
    __device__ __forceinline__ void store(Gradient& gradient, float scale, float* gmem, const Strides& strides) const {
        const float factor[2] = {scale, scale};
        multiply_rows(gradient, factor);
        store_fragment<kHeadDim>(gradient, gmem + strides.offset(where_.batch, 0, where_.head), strides.row, first_key_,
                                 params_.seqlen_k, 0, lane_);
    }

    const Params& params_;
    const Memory memory_;
    const common::TileCoordinates where_;
    const int32 warp_, lane_, first_key_;
    const uint64 key_operand_, value_operand_;
    float key_unit_, value_unit_;
};

}  // namespace fa2::sm90_float32
