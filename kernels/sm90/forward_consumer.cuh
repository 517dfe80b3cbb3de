// The forward's consumers: a warp group computes 64 query rows, a warp 16 of them, from the scores to O in memory.
//
// Scores of the next key tile are computed while O takes in the present one; which wait of wgmma comes where is all
// there is to the order:
//
//   issue   S = Q K(next)^T,  O += P(present) V(present)
//   wait    S               -> K's stage is empty; P(next) = 2^(S - reference), if that fits
//   wait    O               -> V's stage is empty; O is rescaled if the reference had to move
//
// The exponentials stay between the two waits because the vote on their sums is a branch, which no compiler moves
// across a wait. Until O is there the registers of P(present) are being read, so P(next) needs registers of its own:
// two arrays that change roles by unrolling the loop twice. Where registers do not suffice (kTwoP), P follows after the
// second wait, and the warp groups take turns instead: one multiplies while another exponentiates.
//
// Over the end of a query tile it goes on like that, if there is a second buffer for Q: the first scores of the next
// tile are computed under the last output of this one. There is no vote on these exponentials, nor on those of masked
// key tiles; what keeps them above the wait is a store of their sum, which nobody reads (kPinExponentials).
#pragma once
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "common/scores.cuh"
#include "sm90/forward_shape.cuh"
#include "sm90/store_box.cuh"
#include "sm90/wgmma.cuh.j2"

namespace fa2::sm90 {

// Terms of the head are a base: where there are none, a member would still have its place.
template <class Spec>
class ForwardConsumer : common::HeadTerms<Spec> {
    using Terms = common::HeadTerms<Spec>;
    using Shape = ForwardShape<Spec>;
    using Memory = ForwardMemory<Shape>;
    using Element = typename Spec::Element;
    static constexpr bool kLeftLimit = common::kLeftLimit<Spec>, kRightLimit = common::kRightLimit<Spec>;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD, kStages = Shape::kStages;
    static constexpr bool kTwoP = Shape::kTwoP, kTakeTurns = !kTwoP && Shape::kGroups > 1, kPinExponentials = true;
    // A group that passed over more would wait for a K whose slot other groups have not emptied, and these for its turn
    // or its V.
    static constexpr int kMaxSkipped = min_of(ceil_div(kBr - kGroupRows, kBc), kTakeTurns ? 1 : 2);
    static constexpr int kTurnBarrier = 1, kOutputBarrier = kTurnBarrier + Shape::kGroups;  // one each for every group

    using Scores = QuadFragment<kBc / 8>;
    using Output = QuadFragment<kD / 8>;
    using Probabilities = PackedFragment<Element, kBc / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp2_approx>;

  public:
    __device__ ForwardConsumer(const Params& params, const Memory& memory, int32 group)
        : params_(params),
          memory_(memory),
          group_(group),
          warp_(threadIdx.x / 32 % 4),
          lane_(threadIdx.x % 32),
          query_operand_(matrix_descriptor(memory.query(0) + group * kGroupRows * kPanelRowBytes, 0)),
          key_operand_(matrix_descriptor(memory.key(0), 0)),
          value_operand_(matrix_descriptor(memory.value(0), Shape::kKeyPanelBytes)) {}

    __device__ void run() {
        if (kTakeTurns && group_ == Shape::kGroups - 1) barrier_arrive(kTurnBarrier, 2 * kGroupThreads);
        Probabilities p, other_p;
        TileInSlot tile = next_tile(memory_, tiles_);
        if (Spec::kVarlen && tile.key_tiles() == 0) return;  // nothing but indices that are nobody's
        GroupKeys keys = keys_of(tile);
        first_scores(tile, keys, softmax_);
        skip_values(keys);
        take_first(tile, keys, p);
        output_.fill(0.0f);
        while (true) {
            int32 block = keys.end - 2;
            if constexpr (kRightLimit) {
#pragma unroll 1
                for (; block >= keys.full_end; --block) masked_step(tile, keys, block, p);
            }
            if constexpr (kTwoP) {
#pragma unroll 1
                for (; block > (kLeftLimit ? keys.full_begin : 0); block -= 2) {
                    step(tile, block, p, other_p, false);
                    step(tile, block - 1, other_p, p, block - 1 == (kLeftLimit ? keys.begin : 0));
                }
                if (block == (kLeftLimit ? keys.full_begin : 0)) {
                    step(tile, block, p, other_p, block == (kLeftLimit ? keys.begin : 0));
                    p = other_p;
                    --block;
                }
            } else {
#pragma unroll 1
                for (; block >= (kLeftLimit ? keys.full_begin : 0); --block)
                    step(tile, block, p, p, block == (kLeftLimit ? keys.begin : 0));
            }
            if constexpr (kLeftLimit) {
#pragma unroll 1
                for (; block >= (kLeftLimit ? keys.begin : 0); --block) masked_step(tile, keys, block, p);
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
                issue_both(p);
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
            // After the divergent code of `store` the compiler no longer knows that these are the same in all lanes,
            // and would compute every descriptor a lane at a time.
            keys_.turn = __shfl_sync(common::kFullWarp, keys_.turn, 0);
            values_.turn = __shfl_sync(common::kFullWarp, values_.turn, 0);
            queries_.turn = __shfl_sync(common::kFullWarp, queries_.turn, 0);
            tiles_.turn = __shfl_sync(common::kFullWarp, tiles_.turn, 0);
        }
        if (lane_ == 0) tma_store_wait();
    }

  private:
    // ---------------------------------------------------------------------------------------------------------- steps

    // From P of the present key tile to that of the next, which needs no mask.
    __device__ __forceinline__ void step(const TileInSlot& tile, int32 block, Probabilities& present,
                                         Probabilities& next, bool is_last) {
        issue_both(present);
        if constexpr (!common::kCapsLate<Spec>) modify(tile, block);
        if (is_last) release_query();
        float rescale[2];
        if constexpr (!kTwoP) wait_for_output();
        const bool kept = exponentials(next, rescale);
        drop(tile, block, next);
        if constexpr (kTwoP) {
            wait_for_output();
            pin(present);
        }
        if (__builtin_expect(!kept, 0)) multiply_output(rescale);
    }

    // The same for a key tile that needs it. These are few, and take the plain way.
    __device__ __forceinline__ void masked_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                                Probabilities& p) {
        issue_both(p);
        if (block == (kLeftLimit ? keys.begin : 0)) release_query();
        modify(tile, block);
        mask(tile, block);
        float rescale[2];
        softmax_.update_raw(scores_, common::score_scale<Spec>(params_), rescale);
        pin_exponentials(softmax_);
        wait_for_output();
        multiply_output(rescale);
        p.set(scores_);
        drop(tile, block, p);
    }

    // Whether the reference stayed; else `rescale` is what O must be multiplied by.
    __device__ __forceinline__ bool exponentials(Probabilities& p, float (&rescale)[2]) {
        bool kept;
        if constexpr (common::kCapsLate<Spec>)
            kept = common::try_capped<Spec, 2>(softmax_, scores_, params_, p);
        else
            kept = softmax_.template try_reference<2>(scores_, common::score_scale<Spec>(params_), p);
        if (__builtin_expect(kept, 1)) return true;
        softmax_.update_raw(scores_, common::score_scale<Spec>(params_), rescale);
        p.set(scores_);
        return false;
    }

    // P of a tile's first key tile, in `scores_`.
    __device__ __forceinline__ void first_scores(const TileInSlot& tile, const GroupKeys& keys, Softmax& softmax) {
        skip_keys(keys);
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        issue_scores();
        wgmma_wait<0>();
        pin(scores_);
        release_key();
        begin_rows(tile, keys, softmax);
    }

    __device__ __forceinline__ void begin_rows(const TileInSlot& tile, const GroupKeys& keys, Softmax& softmax) {
        const int32 block = keys.end - 1;
        if (block == (kLeftLimit ? keys.begin : 0)) release_query();
        modify(tile, block);
        if (block >= keys.full_end || (kLeftLimit && block < (kLeftLimit ? keys.full_begin : 0))) mask(tile, block);
        float rescale[2];
        softmax.reset();
        softmax.update_raw(scores_, common::score_scale<Spec>(params_), rescale);
    }
    __device__ __forceinline__ void take_first(const TileInSlot& tile, const GroupKeys& keys, Probabilities& p) {
        p.set(scores_);
        drop(tile, keys.end - 1, p);
    }

    __device__ __forceinline__ void pin_exponentials(const Softmax& softmax) const {
        if (kPinExponentials) store_shared(memory_.scratch(threadIdx.x), softmax.sum[0] + softmax.sum[1]);
    }

    __device__ __forceinline__ void modify(const TileInSlot& tile, int32 block) {
        if constexpr (common::kModifiesScores<Spec>)
            common::modify_scores<Spec>(scores_, record_of<Spec>(params_, tile), score_tile(tile, block),
                                        static_cast<const Terms&>(*this));
    }
    __device__ __forceinline__ void drop(const TileInSlot& tile, int32 block, Probabilities& p) const {
        if constexpr (common::kDrops<Spec>)
            common::drop<Spec>(p, params_, score_tile(tile, block));
    }

    __device__ __forceinline__ void mask(const TileInSlot& tile, int32 block) {
        common::mask_scores(scores_, common::mask_of<Spec>(record_of<Spec>(params_, tile)),
                            {first_row(tile), block * kBc, lane_}, -common::infinity<float>());
    }

    // ------------------------------------------------------------------------------------------- the group's own keys

    // Of a tile whose scores come next, so that what these need of its head is loaded, too.
    __device__ __forceinline__ GroupKeys keys_of(const TileInSlot& tile) {
        if constexpr (common::kHasHeadTerms<Spec>)
            static_cast<Terms&>(*this) = common::head_terms<Spec>(params_, tile.batch(), tile.head());
        return keys_of_group<Spec>(params_, tile, group_, kMaxSkipped);
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

    // On return the scores are there; the output is not.
    __device__ __forceinline__ void issue_both(const Probabilities& p) {
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        if constexpr (kTakeTurns) wait_for_turn();
        issue_scores();
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        issue_output(p);
        if constexpr (kTakeTurns) pass_turn();
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
        if constexpr (kD > 192) q = as_if_new(q);
        const uint64 k = key_operand_ + keys_.slot() * (Shape::kKeyBytes / 16);
        pin(scores_);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kD / 16; ++s)  // four k-steps a panel, 32 bytes each
            wgmma_scores(scores_, q + (s / 4 * Shape::kQueryPanelBytes + s % 4 * 32) / 16,
                         k + (s / 4 * Shape::kKeyPanelBytes + s % 4 * 32) / 16, s > 0);
        wgmma_commit();
        pin(scores_);
    }

    __device__ __forceinline__ void issue_output(const Probabilities& p) {
        const uint64 v = value_operand_ + values_.slot() * (Shape::kKeyBytes / 16);
        pin(output_);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kBc / 16; ++s) wgmma_output(output_, p.k16(s), v + s * (16 * kPanelRowBytes / 16));
        wgmma_commit();
        pin(output_);
    }

    __device__ __forceinline__ void multiply_output(const float (&factor)[2]) {
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) output_.value[n][e] *= factor[e / 2];
    }

    // ---------------------------------------------------------------------------------------------------- the outside

    __device__ __forceinline__ void release_key() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_key(keys_.slot()));
        keys_.advance();
    }

    __device__ __forceinline__ void release_value() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_value(values_.slot()));
        values_.advance();
    }

    // Where O leaves through Q's buffer, that is handed back later.
    __device__ __forceinline__ void release_query() {
        if (Shape::kOwnOutput && lane_ == 0) mbarrier_arrive(memory_.empty_query(queries_.slot()));
    }

    __device__ __forceinline__ int32 first_row(const TileInSlot& tile) const {
        return tile.first_row() + group_ * kGroupRows + warp_ * 16;
    }
    // This warp's scores of key tile `block`.
    __device__ __forceinline__ common::ScoreTile score_tile(const TileInSlot& tile, int32 block) const {
        return {tile.batch(), tile.head(), first_row(tile), block * kBc, lane_};
    }

    // O and lse of this warp's 16 rows. O is written to a box per panel in shared memory, 128-byte swizzled, and stored
    // from there by the warp alone, while it goes on. With that the warp is through with the tile's slot, too.
    __device__ __forceinline__ void store(const TileInSlot& tile, uint32 buffer) {
        float inverse_sum[2], row_lse[2];
        common::finish_rows<Spec>(softmax_, params_, common::kFinishReadsHead<Spec> ? tile.head() : 0, inverse_sum, row_lse);
        const int32 row = first_row(tile), head = tile.head(), batch = tile.batch();
        const auto& own = record_of<Spec>(params_, tile);
        const auto place = query_place<Spec>(params_, batch);
        float* lse =
            own.lse + (static_cast<int64>(batch) * params_.num_heads + head) * common::statistic_rows<Spec>(params_);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 at = row + Output::row(i, lane_);
            if (lane_ % 4 == 0 && at < own.seqlen_q) lse[at] = row_lse[i];
        }

        uint32 box, panel_bytes;
        if constexpr (Shape::kOwnOutput) {
            panel_bytes = 16 * kPanelRowBytes;
            box = memory_.output() + (group_ * 4 + warp_) * Shape::kPanels * panel_bytes;
            if (lane_ == 0) tma_store_wait_read();
            __syncwarp();
        } else {
            panel_bytes = Shape::kQueryPanelBytes;
            box = memory_.query(buffer) + (group_ * kGroupRows + warp_ * 16) * kPanelRowBytes;
            barrier_sync(kOutputBarrier + group_, kGroupThreads);  // the group's other warps have done with Q, too
        }
        multiply_output(inverse_sum);
        write_box<Element>(box, panel_bytes, output_, lane_);
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
#pragma unroll
            for (int panel = 0; panel < Shape::kPanels; ++panel)
                place.store(params_.o, box + panel * panel_bytes, panel * kPanelColumns, row, head, batch);
            tma_store_commit();
            mbarrier_arrive(tile.empty);
        }
    }

    const Params& params_;
    const Memory memory_;
    const int32 group_, warp_, lane_;
    const uint64 query_operand_, key_operand_, value_operand_;
    RingPosition<Shape::kQueryBuffers> queries_;
    RingPosition<kStages> keys_, values_;
    RingPosition<kTileSlots> tiles_;
    Scores scores_;
    Output output_;
    Softmax softmax_;
};

}  // namespace fa2::sm90
