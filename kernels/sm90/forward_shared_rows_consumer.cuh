// The forward's consumers where two groups share their rows (shared_rows_consumer.cuh).
#pragma once
#include "sm90/forward_scores.cuh"
#include "sm90/shared_rows_shape.cuh"

namespace fa2::sm90 {

template <class Spec>
class ForwardSharedRowsConsumer
    : ForwardScores<Spec, SharedRowsShape<Spec>, SharedRowsMemory<SharedRowsShape<Spec>>>,
      SharedRowsConsumer<ForwardSharedRowsConsumer<Spec>, SharedRowsShape<Spec>, typename Spec::Element> {
    using Shape = SharedRowsShape<Spec>;
    using Memory = SharedRowsMemory<Shape>;
    using Own = ForwardScores<Spec, Shape, Memory>;
    using Rows = SharedRowsConsumer<ForwardSharedRowsConsumer, Shape, typename Spec::Element>;
    using Base = typename Own::Base;
    friend Rows;
    using Base::first_row, Base::make_positions_uniform, Base::mask;
    using Base::group_, Base::lane_, Base::memory_, Base::params_, Base::warp_;
    using Base::keys_, Base::queries_, Base::tiles_, Base::values_;
    using Base::kLeftLimit;
    using Own::scores_, Own::softmax_;
    using Rows::output_, Rows::part_;
    using typename Own::Probabilities;

  public:
    __device__ ForwardSharedRowsConsumer(const Params& params, const Memory& memory, int32 part)
        : Own(params, memory, Shape::kCluster > 1 ? rank_in_cluster() : 0),
          Rows(part, memory.exchange(), memory.handed_over()) {
        if (part > 0) keys_.advance();
    }

    // Inlined, however large the kernel is: its members are registers only then.
    __device__ __forceinline__ void run() {
        tile_ = next_tile(memory_, tiles_);
        while (tile_.key_tiles() != 0) {
            group_keys_ = Own::keys_of(tile_, 0);
            mbarrier_wait(memory_.full_query(0), queries_.parity());
            Rows::take_tiles(group_keys_.end - (kLeftLimit ? group_keys_.begin : 0));
            queries_.advance();
            store();
            tile_ = next_tile(memory_, tiles_);
            make_positions_uniform();
        }
        if (lane_ == 0) tma_store_wait();
    }

  private:
    // -------------------------------------------------------------------------------- what SharedRowsConsumer asks for

    __device__ __forceinline__ void multiply_scores(int32) {
        const uint64 q = as_if_new(matrix_descriptor(memory_.query(0), 0));
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        const uint64 k = matrix_descriptor(memory_.key(keys_.slot()), 0);
        pin(scores_);
        wgmma_fence();
        multiply_panels<Shape::kD, Shape::kQueryPanelBytes, Shape::kKeyPanelBytes>(scores_, q, k);
    }
    __device__ __forceinline__ uint64 value_operand(int32) const {
        const uint32 stage = values_.slot();
        mbarrier_wait(memory_.full_value(stage, part_), values_.parity());
        return matrix_descriptor(memory_.value(stage) + part_ * Shape::kOwnPanels * Shape::kKeyPanelBytes,
                                 Shape::kKeyPanelBytes);
    }
    __device__ __forceinline__ void release_key(int32) {
        if (lane_ == 0) release(memory_.empty_key(keys_.slot()));
        keys_.advance();
        keys_.advance();  // over the other group's
    }
    __device__ __forceinline__ void release_value(int32) {
        if (lane_ == 0) release(memory_.empty_value(values_.slot(), part_));
        values_.advance();
    }
    // Both blocks of a cluster fill the stages of both.
    __device__ __forceinline__ static void release(uint32 empty) {
        mbarrier_arrive(empty);
        if constexpr (Shape::kCluster > 1) mbarrier_arrive_there(in_block(rank_in_cluster() ^ 1, empty));
    }
    __device__ __forceinline__ bool take_probabilities(int32 t, Probabilities& p, float (&rescale)[2]) {
        const int32 block = group_keys_.end - 1 - t;
        const bool masked = Own::needs_mask(group_keys_, block);
        Own::take_distances(tile_, block);
        Own::load_padding(tile_, block);
        if (!common::kCapsLate<Spec> || masked) Own::modify(tile_, block, true);
        if (masked) mask(scores_, tile_, block);
        const bool kept = Own::exponentials(p, masked, rescale);
        Own::drop(tile_, block, p);
        return kept;
    }

    // ------------------------------------------------------------------------------------------------------- results

    // Stores the group's columns of O, and lse. Then the tile's slot and Q's buffer are free.
    __device__ __forceinline__ void store() {
        float inverse_sum[2], row_lse[2];
        common::finish_rows<Spec>(softmax_, params_, common::kFinishReadsHead<Spec> ? tile_.head() : 0,
                                  Spec::kSplit ? tile_.share() : 0, inverse_sum, row_lse);
        Rows::multiply_output(inverse_sum);
        if constexpr (Spec::kSplit)
            store_share(row_lse);
        else
            store_result(row_lse);
        if (lane_ == 0) {
            mbarrier_arrive(tile_.empty);
            mbarrier_arrive(memory_.empty_query(0));
        }
    }

    __device__ __forceinline__ void store_share(const float (&row_lse)[2]) const {
        using Shares = common::OutputShares<Spec>;
        const int32 row16 = group_ * (kGroupRows / 16) + warp_;
        float* own =
            Shares::of_tile(params_, {tile_.first_row() / Spec::kBr, tile_.head(), tile_.batch()}, tile_.share());
        if (part_ == 0) Shares::put_lse(own, row_lse, row16, lane_);
        Shares::put(own, output_, row16, part_ * (Shape::kOwnDv / 8), lane_);
        __syncwarp();
    }

    __device__ __forceinline__ void store_result(const float (&row_lse)[2]) {
        const int32 row = first_row(tile_), head = tile_.head(), batch = tile_.batch();
        const auto rows = query_tma_rows<Spec>(params_, batch);
        if (part_ == 0) Own::store_lse(record_of<Spec>(params_, tile_), rows, row, head, batch, row_lse);
        Rows::store_output(memory_.query(0), params_.o, rows, row - 16 * warp_, head, batch);
    }

    TileInSlot tile_;
    GroupKeys group_keys_;
};

}  // namespace fa2::sm90
