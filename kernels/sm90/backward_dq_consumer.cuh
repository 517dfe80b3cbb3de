// The dQ kernel's consumers: a warp group computes 64 query rows, a warp 16 of them, from the scores to dQ in memory.
//
// The software pipeline keeps the tensor cores busy while the group computes exponentials. There are two orders from
// dS of the present key tile to dS of the next one:
//
//   kScoresFirst                                    !kScoresFirst
//
//   issue   S = Q K(next)^T                         issue   dQ += dS(present) K(present)
//           dQ += dS(present) K(present)                    S = Q K(next)^T
//   wait    S                                       wait    dQ            -> release K's stage
//                                                   wait    S
//   issue   dP = dO V(next)^T                       issue   dP = dO V(next)^T
//           P = 2^(S - lse)                                 P = 2^(S - lse)
//   wait    dQ            -> release K's stage
//   wait    dP            -> release V's stage      wait    dP            -> release V's stage
//           dS = P o (dP - delta)                           dS = P o (dP - delta)
//
// kScoresFirst leaves no gap between dQ and dP, but needs separate registers for dS and dP, which are live at the same
// time, and a third stage of K: it releases K late and needs the next K at once. The other order works with two stages.
//
// S is waited for before dP is issued because a warp can be only a few wgmmas ahead of the tensor cores: the compiler
// interleaves the exponentials with the wgmmas of dP. No product is in flight across the loop's back edge: the compiler
// would serialise products that are waited for in the next iteration.
//
// Groups that start together would compute their exponentials at the same time, and leave the tensor cores idle.
// Therefore group g starts when group g + 1 has its first dS (kStagger); nothing synchronises them afterwards.
//
// At the end of a query tile a group has no next product to overlap with, and the tensor cores work for the other
// groups. Apart from their start, groups do not wait for each other; a group can only delay the producer, by stages
// that it has not released. No deadlock is possible: a group consumes K and V strictly in the order in which they are
// loaded, including key tiles that it skips, so that no group can wait for a tile whose load another group prevents.
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

// HeadTerms and SavedScores are base classes so that they take no space when empty (empty-base optimisation). Ring
// positions: keys_ of the present key tile's K, values_ of the next key tile's V, queries_ of both Q and dO.
template <class Spec>
class BackwardDqConsumer : common::HeadTerms<Spec>,
                           common::SavedScores<Spec, QuadFragment<Spec::kBc / 8>>,
                           QueryTileConsumer<Spec, BackwardDqShape<Spec>, QueryTileMemory<BackwardDqShape<Spec>>> {
    using Terms = common::HeadTerms<Spec>;
    using Shape = BackwardDqShape<Spec>;
    using Memory = QueryTileMemory<Shape>;
    using Base = QueryTileConsumer<Spec, Shape, Memory>;
    using Base::first_row, Base::load_array, Base::make_positions_uniform, Base::mask, Base::multiply_keys,
        Base::output_box, Base::score_tile, Base::wait_for_box;
    using Base::group_, Base::lane_, Base::memory_, Base::params_, Base::warp_;
    using Base::kBc, Base::kBr, Base::kD, Base::kLeftLimit, Base::kRightLimit;
    using Base::keys_, Base::queries_, Base::release_key, Base::release_value, Base::tiles_, Base::values_;
    using Element = typename Spec::Element;
    friend Base;
    static constexpr int kMaxSkipped = common::kListsTiles<Spec> ? 0 : ceil_div(kBr - kGroupRows, kBc);
    // Three groups under a right limit would deadlock: the middle one may skip key tiles and then need a stage that the
    // first one, which waits for it, has not released.
    static constexpr bool kStagger = Shape::kGroups == 2 || (Shape::kGroups > 2 && !kRightLimit);
    static constexpr int kStartBarrier = Base::kOwnBarrier;
    // Bounding P by 1 takes an instruction for each score, up to 7 % of the time. P only needs it where lse is so large
    // that it has lost the bits that count: below this bound, in base 2, P exceeds 1 by less than 2^-10. With 64 columns
    // or fewer a branch costs more than it saves.
    static constexpr bool kChoosesBound = kD > 64;
    static constexpr float kLargestExactLse = 1024.0f;

    using Scores = QuadFragment<kBc / 8>;
    using Gradient = QuadFragment<kD / 8>;
    using Operand = PackedFragment<Element, kBc / 8>;
    using KeyPosition = RingPosition<Shape::kStages>;

  public:
    __device__ BackwardDqConsumer(const Params& params, const Memory& memory)
        : Base(params, memory, __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0) - 1) {}

    // Inlined, however large the kernel is: its members are registers only then.
    __device__ __forceinline__ void run() {
        if (kStagger && group_ + 1 < Shape::kGroups) barrier_sync(kStartBarrier + group_, 2 * kGroupThreads);
        TileInSlot tile = next_tile(memory_, tiles_);
        if (Spec::kVarlen && tile.key_tiles() == 0) {  // all indices of this block are unused
            if (kStagger && group_ > 0) barrier_arrive(kStartBarrier + group_ - 1, 2 * kGroupThreads);
            return;
        }
        while (true) {
            const GroupKeys keys = keys_of_group<Spec>(params_, tile, group_, kMaxSkipped);
            load_array(tile, keys.end - 1);
            load_rows(tile);
            if constexpr (common::kClearsSkippedDbias<Spec>)
                common::clear_skipped_dbias<Spec>(params_, score_tile(tile, 0), 16, keys.begin * kBc, keys.end * kBc);
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

    // Computes dS of the query tile's first key tile.
    __device__ __forceinline__ void first_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                               bool masked) {
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        if (hides_rows(tile)) clear_hidden_rows();
        issue_scores_of(keys_);
        wgmma_wait<0>();
        pin(scores_);
        if (block == (kLeftLimit ? keys.begin : 0)) release_query();
        mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());
        issue_dp();
        exponentiate(tile, keys, block, masked);
        finish_ds(tile, keys, block);
    }

    // From dS of the present key tile to dS of the next one, `block`.
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
        exponentiate(tile, keys, block, kMasked);
        if constexpr (Shape::kScoresFirst) wait_for_dq<1>();
        finish_ds(tile, keys, block);
    }

    // Replaces S by P, or by the factor of dP - delta (common/weights.cuh).
    __device__ __forceinline__ void exponentiate(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                                 bool masked) {
        if constexpr (common::kTakesWeights<Spec>) {
            this->save(scores_);
            Base::with_array(*this, tile, block, masked, block == (kLeftLimit ? keys.begin : 0));
            return;
        }
        if (masked) mask(scores_, tile, block);
        if (!kChoosesBound || lse_is_large_)
            take_exponentials<true>();
        else
            take_exponentials<false>();
    }
    template <bool kBounded>
    __device__ __forceinline__ void take_exponentials() {
#pragma unroll
        for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float x = fma(scores_.value[n][e], params_.scale_log2, minus_lse_[e / 2]);
                scores_.value[n][e] = common::exp2_approx(kBounded ? common::at_most_zero(x) : x);
            }
    }

    template <class Held>
    __device__ __forceinline__ void use_array(const Held& held, const TileInSlot& tile, int32 block, bool masked) {
        common::Unused unused;
        common::take_weights_with<false, Spec>(
            held, scores_, unused, masked, record_of<Spec>(params_, tile), score_tile(tile, block),
            [&](int i, int) { return -minus_lse_[i]; }, Base::distances_of(tile, block),
            static_cast<const Terms&>(*this));
    }

    __device__ __forceinline__ void finish_ds(const TileInSlot& tile, const GroupKeys& keys, int32 block) {
        wgmma_wait<0>();
        pin(dp_);
        release_value();
        if (Shape::kOwnOutput && block == (kLeftLimit ? keys.begin : 0) && lane_ == 0)
            mbarrier_arrive(memory_.empty_dout(queries_.slot()));
        if constexpr (common::kDerivesLater<Spec>) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j) scores_(i, j) = derivative(j / 2, i, j % 2);
            const common::ScoreTile where = score_tile(tile, block);
            const auto& own = record_of<Spec>(params_, tile);
            common::write_dbias<Spec>(scores_, own, where);
            this->take_derivative(scores_, own, where);
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
        multiply_rows<kD>(scores_, memory_.query(queries_.slot()), memory_.key(at.slot()));
    }
    __device__ __forceinline__ void issue_dp() {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        multiply_rows<Shape::kDv>(dp_, memory_.dout(queries_.slot()), memory_.value(values_.slot()));
    }

    // Issues x = (the group's rows of Q or dO) (the key tile's rows of K or V)^T.
    template <int kColumns>
    __device__ __forceinline__ void multiply_rows(Scores& x, uint32 query_tile, uint32 key_tile) {
        uint64 rows = matrix_descriptor(query_tile + group_ * kGroupRows * kPanelRowBytes, 0);
        if constexpr (kColumns > 192) rows = as_if_new(rows);  // as in the forward's issue_scores
        const uint64 keys = matrix_descriptor(key_tile, 0);
        wgmma_fence();
        wgmma_first_scores(x, rows, keys);
#pragma unroll
        for (int s = 1; s < kColumns / 16; ++s)
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

    // ----------------------------------------------------------------------------------------------- loads and stores

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

    // True if rows may see no key. A sequence without keys has one key tile here.
    __device__ __forceinline__ bool hides_rows(const TileInSlot& tile) const {
        const auto& own = record_of<Spec>(params_, tile);
        return common::may_hide_rows<Spec>(own) || common::lacks_keys<Spec>(own);
    }

    // Stores zeros to this warp's rows of Q and dO that see no key: they may hold NaN, which P = 0 would not keep out of
    // dQ and of sums over queries.
    __device__ __forceinline__ void clear_hidden_rows() const {
        mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (minus_lse_[i] == -common::infinity<float>()) {
                const uint32 row = (group_ * kGroupRows + warp_ * 16 + Scores::row(i, lane_)) * kPanelRowBytes;
#pragma unroll 1
                for (uint32 chunk = lane_ % 4; chunk < 8 * max_of(Shape::kPanels, Shape::kPanelsV); chunk += 4) {
                    const uint32 at = chunk / 8 * Shape::kQueryPanelBytes + row + chunk % 8 * 16;
                    if (chunk < 8 * Shape::kPanels) store_shared(memory_.query(queries_.slot()) + at, 0, 0, 0, 0);
                    if (chunk < 8 * Shape::kPanelsV) store_shared(memory_.dout(queries_.slot()) + at, 0, 0, 0, 0);
                }
            }
        async_proxy_fence();
        barrier_sync(Base::kOutputBarrier + group_, kGroupThreads);
    }

    // A row beyond the sequence or without a visible key gets lse = +inf, so that its P is zero. It has no delta.
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
            minus_lse_[i] = natural == -common::infinity<float>() ? natural : -common::in_base2(natural);
            minus_delta_[i] = natural == -common::infinity<float>() ? 0.0f : -delta[at];
        }
        if constexpr (kChoosesBound)
            lse_is_large_ =
                __any_sync(common::kFullWarp, max_of(fabsf(minus_lse_[0]), fabsf(minus_lse_[1])) > kLargestExactLse);
    }

    // Stores dQ of this warp's 16 rows. Each warp stores its own boxes by TMA, asynchronously and independently of the
    // other warps. It does not read the tile's slot afterwards, and releases it.
    __device__ __forceinline__ void store(const TileInSlot& tile) {
        const auto box = output_box(memory_.dout(queries_.slot()));
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) dq_.value[n][e] *= params_.softmax_scale;
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
    __device__ __forceinline__ void store_panels(const typename Base::Box& box, const TileInSlot& tile) {
        constexpr int kPanelsAtOnce = Shape::kOwnOutput ? Shape::kOutputPanels : Shape::kPanelsV;
        constexpr int kEnd = min_of(kFirst + kPanelsAtOnce, Shape::kPanels);
        write_box<Element>(box.address, box.panel_bytes, dq_, lane_, kFirst, kEnd - kFirst);
        const auto rows = query_tma_rows<Spec>(params_, tile.batch());
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
#pragma unroll
            for (int panel = kFirst; panel < kEnd; ++panel)
                rows.store(params_.dq, box.address + (panel - kFirst) * box.panel_bytes, panel * kPanelColumns,
                           first_row(tile), tile.head(), tile.batch());
            tma_store_commit();
        }
        if constexpr (kEnd < Shape::kPanels) {
            wait_for_box();
            store_panels<kEnd>(box, tile);
        }
    }

    bool lse_is_large_;                    // in one of the warp's rows, which makes it bound P
    float minus_lse_[2], minus_delta_[2];  // of this lane's two rows; lse in base 2
    Scores scores_, dp_;
    Operand ds_;
    Gradient dq_;
};

}  // namespace fa2::sm90
