// The dQ kernel's consumers: a warp group computes 64 query rows, a warp 16 of them, from the scores to dQ in memory.
//
// Products are queued so that the tensor cores have work while the group exponentiates. From the dS of the present key
// tile to that of the next there are two orders, by kScoresFirst:
//
//   issue   S = Q K(next)^T                         issue   dQ += dS(present) K(present)
//           dQ += dS(present) K(present)                    S = Q K(next)^T
//   wait    S                                       wait    dQ            -> K's stage is empty
//                                                   wait    S
//   issue   dP = dO V(next)^T                       issue   dP = dO V(next)^T
//           P = 2^(S - lse)                                 P = 2^(S - lse)
//   wait    dQ            -> K's stage is empty
//   wait    dP            -> V's stage is empty     wait    dP            -> V's stage is empty
//           dS = P o (dP - delta)                           dS = P o (dP - delta)
//
// The first leaves no gap between dQ and dP, but holds dS while it gathers dP, in registers of their own, and needs a
// stage of K more: it hands K back late, and wants the next one at once. The second makes do with two stages.
//
// S is waited for before dP is issued because a warp can be only a few wgmmas ahead of the tensor cores: the compiler
// spreads the exponentials among those of dP. Nothing is under way where the loop closes: products that are waited for
// in the next turn would be serialised.
//
// Groups that start together would compute their exponentials together, too, and the tensor cores would wait: each
// starts when the one above it has its first dS (kStagger). From there on nothing keeps them in step.
//
// At the end of a query tile the group is on its own, and its tensor core time goes to the other groups. These are all
// free of each other: what a group holds up is the producer, and that only by the stages that it has not released. It
// takes K and V strictly in the order in which they are loaded, key tiles that it passes over included, so that no
// group can wait for what another one keeps from being loaded.
#pragma once
#include "common/dbias.cuh"
#include "common/mask.cuh"
#include "common/math.cuh"
#include "common/statistics.cuh"
#include "common/weights.cuh"
#include "sm90/backward_dq_shape.cuh"
#include "sm90/query_tile_consumer.cuh"
#include "sm90/store_box.cuh"

namespace fa2::sm90 {

// Terms of the head and saved scores are bases: empty members would still take space. In the rings, keys_ is the
// position of the present key tile, values_ that of the next one, and queries_ that of Q and of dO.
template <class Spec>
class BackwardDqConsumer : common::HeadTerms<Spec>,
                           common::SavedScores<Spec, QuadFragment<Spec::kBc / 8>>,
                           QueryTileConsumer<Spec, BackwardDqShape<Spec>, QueryTileMemory<BackwardDqShape<Spec>>> {
    using Terms = common::HeadTerms<Spec>;
    using Shape = BackwardDqShape<Spec>;
    using Memory = QueryTileMemory<Shape>;
    using Base = QueryTileConsumer<Spec, Shape, Memory>;
    using Base::first_row, Base::make_positions_uniform, Base::mask, Base::multiply_keys, Base::output_box,
        Base::score_tile;
    using Base::group_, Base::lane_, Base::memory_, Base::params_, Base::warp_;
    using Base::kBc, Base::kBr, Base::kD, Base::kLeftLimit, Base::kRightLimit;
    using Base::keys_, Base::queries_, Base::release_key, Base::release_value, Base::tiles_, Base::values_;
    using Element = typename Spec::Element;
    static constexpr int kMaxSkipped = ceil_div(kBr - kGroupRows, kBc);
    // Of three groups, the middle one may pass over key tiles whose stages the one that waits for it has not emptied.
    static constexpr bool kStagger = Shape::kGroups == 2 || (Shape::kGroups > 2 && !kRightLimit);
    static constexpr int kStartBarrier = Base::kOwnBarrier;

    using Scores = QuadFragment<kBc / 8>;
    using Gradient = QuadFragment<kD / 8>;
    using Operand = PackedFragment<Element, kBc / 8>;
    using KeyPosition = RingPosition<Shape::kStages>;

  public:
    __device__ BackwardDqConsumer(const Params& params, const Memory& memory)
        : Base(params, memory, __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0) - 1) {}

    __device__ void run() {
        if (kStagger && group_ + 1 < Shape::kGroups) barrier_sync(kStartBarrier + group_, 2 * kGroupThreads);
        TileInSlot tile = next_tile(memory_, tiles_);
        if (Spec::kVarlen && tile.key_tiles() == 0) {  // no index of this block has a tile
            if (kStagger && group_ > 0) barrier_arrive(kStartBarrier + group_ - 1, 2 * kGroupThreads);
            return;
        }
        while (true) {
            const GroupKeys keys = keys_of_group<Spec>(params_, tile, group_, kMaxSkipped);
            load_rows(tile);
            skip(keys);
            int32 block = keys.end - 1;
            first_step(tile, keys, block,
                       block >= keys.full_end || (kLeftLimit && block < (kLeftLimit ? keys.full_begin : 0)));
            if (kStagger && tiles_.turn == 1 && group_ > 0)
                barrier_arrive(kStartBarrier + group_ - 1, 2 * kGroupThreads);
            dq_.fill(0.0f);
            --block;
            if constexpr (kRightLimit) {
#pragma unroll 1
                for (; block >= keys.full_end; --block) step<true>(tile, keys, block);
            }
#pragma unroll 1
            for (; block >= (kLeftLimit ? keys.full_begin : 0); --block) step<false>(tile, keys, block);
            if constexpr (kLeftLimit) {
#pragma unroll 1
                for (; block >= (kLeftLimit ? keys.begin : 0); --block) step<true>(tile, keys, block);
            }
            issue_dq();
            wait_for_dq<0>();
            store(tile);

            tile = next_tile(memory_, tiles_);
            if (tile.key_tiles() == 0) break;
            make_positions_uniform();
        }
        if (lane_ == 0) tma_store_wait();
    }

  private:
    // ---------------------------------------------------------------------------------------------------------- steps

    // A tile's first key tile, up to its dS.
    __device__ __forceinline__ void first_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                               bool masked) {
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        issue_scores_of(keys_);
        wgmma_wait<0>();
        pin(scores_);
        if (block == (kLeftLimit ? keys.begin : 0)) release_query();
        mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());
        issue_dp();
        exponentiate(tile, block, masked);
        finish_ds(tile, keys, block);
    }

    // From the dS of the present key tile to that of the next, `block`.
    template <bool kMasked>
    __device__ __forceinline__ void step(const TileInSlot& tile, const GroupKeys& keys, int32 block) {
        if constexpr (Shape::kScoresFirst) {
            issue_scores_of(keys_.next());
            issue_dq();
            wgmma_wait<1>();
            pin(scores_);
        } else {
            issue_dq();
            issue_scores_of(keys_.next());
            wait_for_dq<1>();
            wgmma_wait<0>();
            pin(scores_);
        }
        if (block == (kLeftLimit ? keys.begin : 0)) release_query();
        issue_dp();
        exponentiate(tile, block, kMasked);
        if constexpr (Shape::kScoresFirst) wait_for_dq<1>();
        finish_ds(tile, keys, block);
    }

    // P, or what weighs dP, where S was.
    __device__ __forceinline__ void exponentiate(const TileInSlot& tile, int32 block, bool masked) {
        if constexpr (common::kTakesWeights<Spec>) {
            this->save(scores_);
            common::Unused unused;
            common::take_weights<false, Spec>(
                scores_, unused, masked, record_of<Spec>(params_, tile), score_tile(tile, block),
                [&](int i, int) { return -minus_lse_[i]; }, static_cast<const Terms&>(*this));
            return;
        }
        if (masked) mask(scores_, tile, block);
#pragma unroll
        for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                scores_.value[n][e] =
                    common::exp2_approx(fma(scores_.value[n][e], params_.scale_log2, minus_lse_[e / 2]));
    }

    __device__ __forceinline__ void finish_ds(const TileInSlot& tile, const GroupKeys& keys, int32 block) {
        wgmma_wait<0>();
        pin(dp_);
        release_value();
        if (Shape::kOwnOutput && block == (kLeftLimit ? keys.begin : 0) && lane_ == 0)
            mbarrier_arrive(memory_.empty_dout(queries_.slot()));
        if constexpr (common::kAddsDbias<Spec>) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) scores_(i, j) = derivative(j / 2, i, j % 2);
            common::add_dbias<Spec>(scores_, record_of<Spec>(params_, tile), score_tile(tile, block));
            this->take_derivative(scores_, params_);
            ds_.set(scores_);
            return;
        }
#pragma unroll
        for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) ds_.set(i, n, derivative(n, i, 0), derivative(n, i, 1));
    }
    __device__ __forceinline__ float derivative(int n, int i, int column) const {
        const float p = scores_.value[n][2 * i + column], dp = dp_.value[n][2 * i + column];
        return common::weighted_from_zero<Spec>(p, dp, -minus_delta_[i], params_);
    }

    // ------------------------------------------------------------------------------------------------------- products

    __device__ __forceinline__ void issue_scores_of(const KeyPosition& at) {
        mbarrier_wait(memory_.full_key(at.slot()), at.parity());
        multiply_rows(scores_, memory_.query(queries_.slot()), memory_.key(at.slot()));
    }
    __device__ __forceinline__ void issue_dp() {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        multiply_rows(dp_, memory_.dout(queries_.slot()), memory_.value(values_.slot()));
    }

    // x = the group's rows times those of a key tile, over all columns.
    __device__ __forceinline__ void multiply_rows(Scores& x, uint32 query_tile, uint32 key_tile) {
        uint64 rows = matrix_descriptor(query_tile + group_ * kGroupRows * kPanelRowBytes, 0);
        if constexpr (kD > 192) rows = as_if_new(rows);
        const uint64 keys = matrix_descriptor(key_tile, 0);
        wgmma_fence();
        wgmma_first_scores(x, rows, keys);
#pragma unroll
        for (int s = 1; s < kD / 16; ++s)
            wgmma_scores(x, rows + along_columns<Shape::kQueryPanelBytes>(s),
                         keys + along_columns<Shape::kKeyPanelBytes>(s), true);
        wgmma_commit();
        pin(x);
    }

    __device__ __forceinline__ void issue_dq() {
        const uint64 k = matrix_descriptor(memory_.key(keys_.slot()), Shape::kKeyPanelBytes);
        pin(dq_);
        pin(ds_);
        wgmma_fence();
        multiply_keys(dq_, ds_, k);
    }
    template <int kPending>
    __device__ __forceinline__ void wait_for_dq() {
        wgmma_wait<kPending>();
        pin(dq_);
        pin(ds_);
        release_key();
    }

    // ---------------------------------------------------------------------------------------------------- the outside

    __device__ __forceinline__ void skip(const GroupKeys& keys) {
        if constexpr (kRightLimit && kMaxSkipped > 0) {
#pragma unroll 1
            for (int32 i = 0; i < keys.skipped; ++i) {
                mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
                release_key();
                mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
                release_value();
            }
        }
    }

    __device__ __forceinline__ void release_query() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_query(queries_.slot()));
    }

    // A row past the end or without a visible key gets an lse of +inf: its P is zero.
    __device__ __forceinline__ void load_rows(const TileInSlot& tile) {
        const int32 row = first_row(tile);
        const auto& own = record_of<Spec>(params_, tile);
        const int64 first = common::first_statistic<Spec>(params_, tile.batch(), tile.head());
        const float *lse = own.lse + first, *delta = own.delta + first;
        if constexpr (common::kHasHeadTerms<Spec>)
            static_cast<Terms&>(*this) = common::head_terms<Spec>(params_, tile.batch(), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 at = row + Scores::row(i, lane_);
            const bool valid = at < own.seqlen_q;
            const float natural = valid ? lse[at] : -common::infinity<float>();
            minus_lse_[i] =
                natural == -common::infinity<float>() ? natural : natural * static_cast<float>(-common::kLog2e);
            minus_delta_[i] = valid ? -delta[at] : 0.0f;
        }
    }

    // dQ of this warp's 16 rows, by a box per panel in shared memory, which the warp alone stores while it goes on.
    // With that it is through with the tile's slot, too.
    __device__ __forceinline__ void store(const TileInSlot& tile) {
        const auto box = output_box(memory_.dout(queries_.slot()));
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) dq_.value[n][e] *= params_.softmax_scale;
        write_box<Element>(box.address, box.panel_bytes, dq_, lane_);
        const auto rows = query_tma_rows<Spec>(params_, tile.batch());
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
#pragma unroll
            for (int panel = 0; panel < Shape::kPanels; ++panel)
                rows.store(params_.dq, box.address + panel * box.panel_bytes, panel * kPanelColumns, first_row(tile),
                           tile.head(), tile.batch());
            tma_store_commit();
            mbarrier_arrive(tile.empty);
            if constexpr (!Shape::kOwnOutput) {
                tma_store_wait_read();
                mbarrier_arrive(memory_.empty_dout(queries_.slot()));
            }
        }
        queries_.advance();
    }

    float minus_lse_[2], minus_delta_[2];  // lse in base 2
    Scores scores_, dp_;
    Operand ds_;
    Gradient dq_;
};

}  // namespace fa2::sm90
