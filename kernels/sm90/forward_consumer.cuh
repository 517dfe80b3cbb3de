// The forward's consumers: a warp group computes 64 query rows, a warp 16 of them, from the scores to O in memory.
//
// The software pipeline overlaps the scores of the next key tile with P V of the present one:
//
//   issue   S = Q K(next)^T,  O += P(present) V(present)
//   wait    S               -> release K's stage; P(next) = 2^(S - row_shift), if the present shift allows it
//   wait    O               -> release V's stage; rescale O if the shift had to change
//
// The exponentials stay between the two waits because a warp vote on their sums ends in a branch, which the compiler
// does not move across a wait. As long as P V is in flight it reads the registers of P(present), so P(next) needs
// registers of its own: the loop is unrolled twice, and two arrays alternate. Where registers do not suffice (!kTwoP),
// P(next) is computed after the second wait, and the warp groups take turns instead: one multiplies while another
// computes exponentials.
//
// If Q has a second buffer, the pipeline continues across the end of a query tile: the first scores of the next tile
// overlap with the last P V of this one. There is no vote on these exponentials; a store of their sum, which no thread
// reads, keeps them before the second wait (kPinExponentials).
#pragma once
#include "common/start_from_bias.cuh"
#include "sm90/forward_scores.cuh"
#include "sm90/forward_shape.cuh"
#include "sm90/store_box.cuh"

namespace fa2::sm90 {

template <class Spec>
class ForwardConsumer : ForwardScores<Spec, ForwardShape<Spec>, ForwardMemory<ForwardShape<Spec>>> {
    using Shape = ForwardShape<Spec>;
    using Memory = ForwardMemory<Shape>;
    using Own = ForwardScores<Spec, Shape, Memory>;
    using Base = typename Own::Base;
    using Base::first_row, Base::load_array, Base::make_positions_uniform, Base::mask, Base::multiply_keys,
        Base::output_box, Base::score_tile, Base::wait_for_box;
    using Base::group_, Base::lane_, Base::memory_, Base::params_, Base::warp_;
    using Base::kBc, Base::kBr, Base::kD, Base::kLeftLimit, Base::kPanelRowBytes, Base::kRightLimit;
    using Own::drop, Own::exponentials, Own::load_padding, Own::needs_mask, Own::score_scale, Own::scores_,
        Own::softmax_, Own::take_distances;
    using typename Own::Padding, typename Own::Probabilities, typename Own::Scores, typename Own::Softmax;
    static constexpr int kDv = Shape::kDv;
    static constexpr bool kStarts = Shape::kStarts;
    using Base::keys_, Base::queries_, Base::release_key, Base::release_value, Base::tiles_, Base::values_;
    using Element = typename Spec::Element;
    static constexpr bool kTwoP = Shape::kTwoP, kTakeTurns = Shape::kTakeTurns, kPinExponentials = true;
    static constexpr int kMaxSkipped = Shape::kMaxSkipped;
    // Key tiles that need the mask have a loop of their own where most may (kMasksMost), and where scores leave no
    // registers for the mask in the loop of all; nor for two exits of that loop, so that the last step of an odd number
    // is apart, too. (Shares count `full_end` below 0.)
    static constexpr bool kMasksApart =
        common::kMasksMost<Spec> || (common::kFillsRegisters<Spec> && kRightLimit && !Spec::kSplit);
    static constexpr bool kOddApart = kTwoP && common::kFillsRegisters<Spec> && !common::kHasBoxes<Spec>;
    static constexpr int kTurnBarrier = Base::kOwnBarrier, kBiasBarrier = Base::kOutputBarrier + Shape::kGroups;

    using Output = QuadFragment<kDv / 8>;

  public:
    __device__ ForwardConsumer(const Params& params, const Memory& memory, int32 group)
        : Own(params, memory, group),
          query_operand_(matrix_descriptor<kPanelRowBytes>(memory.query(0) + group * Shape::kGroupBytes, 0)),
          key_operand_(matrix_descriptor<kPanelRowBytes>(memory.key(0) + group * Shape::kGroupKeyBytes, 0)),
          value_operand_(matrix_descriptor<kPanelRowBytes>(memory.value(0) + group * Shape::kGroupValueBytes,
                                                           Shape::kKeyPanelBytes)),
          per_score_(kStarts ? static_cast<float>(common::kLog2e) / params.scale_log2 : 0.0f) {}

    // Inlined, however large the kernel is: its members are registers only then.
    __device__ __forceinline__ void run() {
        if (kTakeTurns && group_ == Shape::kGroups - 1) barrier_arrive(kTurnBarrier, 2 * kGroupThreads);
        Probabilities p, other_p;
        TileInSlot tile = next_tile(memory_, tiles_);
        if (Spec::kVarlen && tile.key_tiles() == 0) return;  // all indices of this block are unused
        GroupKeys keys = keys_of(tile);
        first_scores(tile, keys, softmax_);
        skip_values(keys);
        take_first(tile, keys, p);
        output_.fill(0.0f);
        while (true) {
            int32 block = keys.end - 2;
            if constexpr (kMasksApart) {
#pragma unroll 1
                for (; block >= keys.full_end; --block) masked_step(tile, keys, block, p);
            }
            const int32 begin = kLeftLimit ? (kMasksApart ? keys.full_begin : keys.begin) : 0;
#pragma unroll 1
            while (!common::kHasBoxes<Spec> && block >= begin + kOddApart) {
                step(tile, keys, block, p, kTwoP ? other_p : p);
                --block;
                if constexpr (kTwoP) {
                    if (!kOddApart && block < begin) {
                        p = other_p;
                        break;
                    }
                    step(tile, keys, block, other_p, p);
                    --block;
                }
            }
            if (kOddApart && block == begin) {
                step(tile, keys, block, p, other_p);
                p = other_p;
                --block;
            }
            if constexpr (kMasksApart && kLeftLimit) {
#pragma unroll 1
                for (; block >= keys.begin; --block) masked_step(tile, keys, block, p);
            }

            const uint32 buffer = queries_.slot();
            queries_.advance();
            const TileInSlot next = next_tile(memory_, tiles_);
            const bool is_last = next.key_tiles() == 0;
            Softmax next_softmax;
            if (!is_last) keys = keys_of(next);
            if (Shape::kQueryBuffers == 2 && !is_last) {
                skip_keys(keys);
                mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
                issue_both(p, next, keys.end - 1);
                begin_rows(next, keys, next_softmax);
                pin_exponentials(next_softmax);
                wait_for_output();
                skip_values(keys);
                take_first(next, keys, p);
            } else {
                mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
                issue_output(p);
                wait_for_output();
            }
            store(tile, buffer);
            if (is_last) break;
            if constexpr (Shape::kQueryBuffers == 1) {
                if (!Shape::kOwnOutput && lane_ == 0) {
                    tma_store_wait_read();
                    mbarrier_arrive(memory_.empty_query(buffer));
                }
                first_scores(next, keys, next_softmax);
                skip_values(keys);
                take_first(next, keys, p);
            }
            output_.fill(0.0f);
            softmax_ = next_softmax;
            tile = next;
            make_positions_uniform();
        }
        if (lane_ == 0) tma_store_wait();
    }

  private:
    // ---------------------------------------------------------------------------------------------------------- steps

    // From P of the present key tile to P of the next one, `block`. Key tiles that need the mask are few, so there the
    // shift is always updated to the row maximum, by the code for rows whose shift cannot be kept.
    __device__ __forceinline__ void step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                         Probabilities& present, Probabilities& next) {
        const bool masked = kRightLimit && !kMasksApart && needs_mask(keys, block);
        const bool is_last = is_last_of(keys, block);
        issue_both(present, tile, block);
        if (!common::kCapsLate<Spec> || masked) modify(tile, block, is_last);
        if (is_last) release_query();
        if (masked) mask(scores_, tile, block);
        float rescale[2];
        if constexpr (!kTwoP) wait_for_output();
        const bool kept = exponentials(next, masked, rescale);
        drop(tile, block, next);
        if constexpr (kTwoP) {
            wait_for_output();
            pin(present);
        }
        if (__builtin_expect(!kept, 0)) multiply_output(rescale);
    }

    // The same for a key tile that needs the mask (kMasksApart).
    __device__ __forceinline__ void masked_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                                Probabilities& p) {
        start_both(p, tile, block);
        const auto of_tile = Base::tile_mask(tile, block);
        take_distances(tile, block);
        wait_for_scores();
        const bool is_last = is_last_of(keys, block);
        if (is_last) release_query();
        modify(tile, block, is_last);
        mask(scores_, tile, of_tile);
        wait_for_output();
        float rescale[2];
        const bool kept = softmax_.has_shifts() && softmax_.template try_row_shift<2>(scores_, score_scale(), p);
        if (!kept) {
            softmax_.update_raw(scores_, score_scale(), rescale);
            p.set(scores_);
            multiply_output(rescale);
        }
        drop(tile, block, p);
    }

    // Computes P of a query tile's first key tile, in `scores_`.
    __device__ __forceinline__ void first_scores(const TileInSlot& tile, const GroupKeys& keys, Softmax& softmax) {
        skip_keys(keys);
        start(tile, keys.end - 1);
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        issue_scores();
        take_distances(tile, keys.end - 1);
        wgmma_wait<0>();
        pin(scores_);
        release_key();
        begin_rows(tile, keys, softmax);
    }

    __device__ __forceinline__ void begin_rows(const TileInSlot& tile, const GroupKeys& keys, Softmax& softmax) {
        const int32 block = keys.end - 1;
        if (is_last_of(keys, block)) release_query();
        modify(tile, block, is_last_of(keys, block));
        if (needs_mask(keys, block)) mask(scores_, tile, block);
        float rescale[2];
        softmax.reset();
        softmax.update_raw(scores_, score_scale(), rescale);
    }
    // True if `block` is the last of the group's key tiles, which are processed downwards.
    __device__ __forceinline__ static bool is_last_of(const GroupKeys& keys, int32 block) {
        return block == (kLeftLimit ? keys.begin : 0);
    }
    __device__ __forceinline__ void take_first(const TileInSlot& tile, const GroupKeys& keys, Probabilities& p) {
        p.set(scores_);
        drop(tile, keys.end - 1, p);
    }

    __device__ __forceinline__ void pin_exponentials(const Softmax& softmax) const {
        if (kPinExponentials) store_shared(memory_.scratch(threadIdx.x), softmax.sum[0] + softmax.sum[1]);
    }

    // Loads the bias with the first sequences of a series. The groups of several sequences share it, and the work.
    __device__ __forceinline__ void keep_bias(const TileInSlot& tile, const GroupKeys& keys) const {
        using Tile = typename Base::Held::Tile;
        if (tile.bias_is_kept()) return;
        const int32 begin = (kLeftLimit ? keys.begin : 0) + (Base::kHaveRows ? 0 : group_);
        wait_for_groups();  // they have read the last one
#pragma unroll 1
        for (int32 block = begin; block < keys.end; block += Shape::kSequences) load_array(tile, block);
        Tile::wait(Base::held_address(0), lane_);
        wait_for_groups();
    }
    __device__ __forceinline__ static void wait_for_groups() {
        if constexpr (!Base::kHaveRows) barrier_sync(kBiasBarrier, Shape::kGroups * kGroupThreads);
    }
    template <bool kRegular>
    using InMemory = common::BiasOfQueriesInMemory<Spec, Params, kBc / 8, kRegular>;
    // Starts S of a key tile, if it starts from the bias.
    __device__ __forceinline__ void start(const TileInSlot& tile, int32 block) {
        if constexpr (Shape::kKeepsArray && kStarts) {
            common::start_from(scores_, typename Shape::Start(Base::held_address(block), lane_), per_score_);
            return;
        }
        if constexpr (Shape::kLoadsStart) {
            if (Shape::GroupStart::takes(params_)) {
                mbarrier_wait(memory_.full_start(group_), starts_.parity());
                const uint32 own = memory_.start(group_) + warp_ * Shape::Start::Tile::kBytes;
                common::start_from(scores_, typename Shape::Start(own, lane_), per_score_);
                __syncwarp();  // all lanes have read it
                if (lane_ == 0) mbarrier_arrive(memory_.empty_start(group_));
                starts_.advance();
                return;
            }
        }
        if constexpr (kStarts && !Shape::kKeepsArray) {
            const InMemory<false> in_memory(record_of<Spec>(params_, tile), score_tile(tile, block));
            if (in_memory.is_regular())
                common::start_from(scores_, InMemory<true>(record_of<Spec>(params_, tile), score_tile(tile, block)),
                                   per_score_);
            else
                common::start_from(scores_, in_memory, per_score_);
        }
    }
    // Also loads the key padding mask of the next key tile: its latency is longer than that of the product.
    __device__ __forceinline__ void modify(const TileInSlot& tile, int32 block, bool is_last) {
        if constexpr (kStarts)
            common::hide_keys<Spec>(scores_, record_of<Spec>(params_, tile), score_tile(tile, block),
                                    static_cast<const Padding&>(*this));
        else
            Own::modify(tile, block, is_last);
        if (!is_last) load_padding(tile, block - 1);
    }

    // ------------------------------------------------------------------------------------------- the group's own keys

    // Also loads the tile's first score array and padding.
    __device__ __forceinline__ GroupKeys keys_of(const TileInSlot& tile) {
        const GroupKeys keys = Own::keys_of(tile, kMaxSkipped);
        if constexpr (Shape::kKeepsArray)
            keep_bias(tile, keys);
        else
            load_array(tile, keys.end - 1);
        load_padding(tile, keys.end - 1);
        return keys;
    }
    __device__ __forceinline__ void skip_keys(const GroupKeys& keys) {
        if constexpr (kRightLimit && kMaxSkipped > 0) {
#pragma unroll 1
            for (int32 i = 0; i < keys.skipped; ++i) {
                mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
                release_key();
            }
        }
    }
    __device__ __forceinline__ void skip_values(const GroupKeys& keys) {
        if constexpr (kRightLimit && kMaxSkipped > 0) {
#pragma unroll 1
            for (int32 i = 0; i < keys.skipped; ++i) {
                mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
                release_value();
                if constexpr (kTakeTurns) {
                    wait_for_turn();
                    pass_turn();
                }
            }
        }
    }

    // ------------------------------------------------------------------------------------------------------- products

    // On return the scores of key tile `block` are complete; the output is still in flight.
    __device__ __forceinline__ void issue_both(const Probabilities& p, const TileInSlot& tile, int32 block) {
        start_both(p, tile, block);
        take_distances(tile, block);
        wait_for_scores();
    }
    __device__ __forceinline__ void start_both(const Probabilities& p, const TileInSlot& tile, int32 block) {
        start(tile, block);
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        if constexpr (kTakeTurns) wait_for_turn();
        issue_scores();
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        issue_output(p);
        if constexpr (kTakeTurns) pass_turn();
    }
    __device__ __forceinline__ void wait_for_scores() {
        wgmma_wait<1>();
        pin(scores_);
        release_key();
    }

    __device__ __forceinline__ void wait_for_output() {
        wgmma_wait<0>();
        pin(output_);
        release_value();
    }

    __device__ __forceinline__ void wait_for_turn() { barrier_sync(kTurnBarrier + group_, 2 * kGroupThreads); }
    __device__ __forceinline__ void pass_turn() {
        barrier_arrive(kTurnBarrier + (group_ + 1 == Shape::kGroups ? 0 : group_ + 1), 2 * kGroupThreads);
    }

    __device__ __forceinline__ void issue_scores() {
        uint64 q = query_operand_ + queries_.slot() * (Shape::kQueryBytes / 16);
        // Else the descriptors of sixteen k-steps are kept, and spill; so are twelve beside O of a wide key tile.
        if constexpr (kD > 192 || (kD > 128 && Shape::kIsPair)) q = as_if_new(q);
        const uint64 k = key_operand_ + keys_.slot() * (Shape::kKeyBytes / 16);
        pin(scores_);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kD / 16; ++s)
            wgmma_scores(scores_, q + along_columns<Shape::kQueryPanelBytes>(s),
                         k + along_columns<Shape::kKeyPanelBytes>(s), kStarts || s > 0);
        wgmma_commit();
        pin(scores_);
    }

    __device__ __forceinline__ void issue_output(const Probabilities& p) {
        const uint64 v = value_operand_ + values_.slot() * (Shape::kValueBytes / 16);
        pin(output_);
        wgmma_fence();
        multiply_keys(output_, p, v);
    }

    __device__ __forceinline__ void multiply_output(const float (&factor)[2]) {
#pragma unroll
        for (int n = 0; n < kDv / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) output_.value[n][e] *= factor[e / 2];
    }

    // -------------------------------------------------------------------------------------------------------- results

    // Where O is stored through Q's buffer, the buffer is released after that store instead.
    __device__ __forceinline__ void release_query() {
        if (Shape::kOwnOutput && lane_ == 0) mbarrier_arrive(memory_.empty_query(queries_.slot()));
    }

    // Stores O and lse of this warp's 16 rows. The warp does not read the tile's slot afterwards, and releases it.
    __device__ __forceinline__ void store(const TileInSlot& tile, uint32 buffer) {
        float inverse_sum[2], row_lse[2];
        common::finish_rows<Spec>(softmax_, params_, common::kFinishReadsHead<Spec> ? tile.head() : 0,
                                  Spec::kSplit ? tile.share() : 0, inverse_sum, row_lse);
        if constexpr (Spec::kSplit)
            store_share(tile, inverse_sum, row_lse);
        else
            store_result(tile, buffer, inverse_sum, row_lse);
    }

    __device__ __forceinline__ void store_share(const TileInSlot& tile, const float (&inverse_sum)[2],
                                                const float (&row_lse)[2]) {
        using Shares = common::OutputShares<Spec>;
        float* own = Shares::of_tile(params_, {tile.first_row() / kBr, tile.head(), tile.batch()}, tile.share());
        const int32 row16 = group_ * (kGroupRows / 16) + warp_;
        Shares::put_lse(own, row_lse, row16, lane_);
        multiply_output(inverse_sum);
        Shares::put(own, output_, row16, 0, lane_);
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(tile.empty);
    }

    // Each warp stores its own boxes by TMA, asynchronously and independently of the other warps.
    __device__ __forceinline__ void store_result(const TileInSlot& tile, uint32 buffer, const float (&inverse_sum)[2],
                                                 const float (&row_lse)[2]) {
        const int32 row = first_row(tile), head = tile.head(), batch = Base::batch(tile);
        const bool exists = Base::exists(tile);
        const auto& own = record_of<Spec>(params_, tile);
        const auto rows = Base::rows_of(tile, batch);
        if (exists) Own::store_lse(own, rows, row, head, batch, row_lse);

        const auto box = output_box(memory_.query(buffer));
        multiply_output(inverse_sum);
        constexpr int kPanelsAtOnce = Shape::kOwnOutput ? Shape::kOutputPanels : Shape::kPanels;
#pragma unroll
        for (int first = 0; first < Shape::kPanelsV; first += kPanelsAtOnce) {
            const int end = min_of(first + kPanelsAtOnce, Shape::kPanelsV);
            if (first > 0) wait_for_box();
            write_box<Element, kPanelRowBytes>(box.address, box.panel_bytes, output_, lane_, first, end - first);
            async_proxy_fence();
            __syncwarp();
            if (lane_ == 0 && exists) {
#pragma unroll
                for (int panel = first; panel < end; ++panel)
                    rows.store(params_.o, box.address + (panel - first) * box.panel_bytes, panel * kPanelColumns, row,
                               head, batch);
                tma_store_commit();
            }
        }
        if (lane_ == 0) mbarrier_arrive(tile.empty);
    }

    const uint64 query_operand_, key_operand_, value_operand_;
    const float per_score_;
    RingPosition<1> starts_;
    Output output_;
};

}  // namespace fa2::sm90
