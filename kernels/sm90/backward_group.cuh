// Base of the consumer warp groups of the backward by key tiles: a group computes dK and dV of 64 keys
// (backward_keys.cuh), or one of the two (backward_divided.cuh).
//
// Scores are computed transposed, keys by queries: the accumulators of S^T, and dS^T made from those of dP^T, rounded
// to 16 bits, are already laid out as the left operand of the second product, so P^T and dS^T stay in registers. The
// statistics (lse, delta) belong to queries and thus to columns, and initialise the products.
//
// For dQ every group reads all of dS, which passes through shared memory as [query][key] with the 128-byte swizzle:
// stmatrix transposes dS^T when it is stored.
#pragma once
#include "common/mask_function.cuh"
#include "common/weights.cuh"
#include "sm90/key_group.cuh"
#include "sm90/wgmma_backward.cuh.j2"

namespace fa2::sm90 {

template <class Spec, class Shape>
class BackwardGroup : protected KeyGroup<Spec, Shape, BackwardMemory<Shape>> {
  protected:
    using Memory = BackwardMemory<Shape>;
    using Base = KeyGroup<Spec, Shape, Memory>;
    using Base::arrive, Base::needs_mask, Base::kStoreBarrier;
    using Base::lane_, Base::maps_, Base::memory_, Base::own_, Base::params_, Base::warp_;
    using typename Base::Element;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD, kDv = Shape::kDv;
    static constexpr int kStartBarrier = 3;  // a named barrier for both groups

    // Of a part of the tile's queries; most kernels have one.
    static constexpr int kPartQueries = Shape::kPartQueries;
    using Scores = QuadFragment<kPartQueries / 8>;
    using Rounded = PackedFragment<Element, kPartQueries / 8>;
    using Workspace = DqWorkspace<kBr, kD>;
    // What is done to products. Those that start from a score array have no more to do with it.
    using AfterStart = typename Shape::AfterStart;
    // True if S^T starts from -lse, dP^T from -delta. S^T does not if the plain product must be capped or scaled first;
    // dP^T does not with dropout, which scales dP before delta is subtracted.
    static constexpr bool kFromLse = common::kProductsFromLse<AfterStart>,
                          kFromDelta = common::kProductsFromDelta<Spec>;
    static constexpr bool kTakesWeights = common::kTakesWeights<AfterStart>;

    __device__ BackwardGroup(const Params& params, const Params& maps, const Memory& memory, int32 group)
        : Base(params, maps, memory),
          rank_(rank_in_pair<Spec>()),
          per_score_(Shape::kStarts ? 1.0f / params.softmax_scale : 0.0f),
          hidden_(params, Base::score_tile(own_.first_step(), own_.first_key + group * kGroupRows)) {
        if constexpr (Shape::kPair) read_.turn = rank_;
    }

    __device__ __forceinline__ common::ScoreTile score_tile(const QueryStep& step, int32 first_key,
                                                            int part = 0) const {
        common::ScoreTile tile = Base::score_tile(step, first_key);
        tile.position.first_query += part * kPartQueries;
        return tile;
    }
    // The statistics of a part. kAsStep: they may be a k-step.
    template <bool kAsStep>
    __device__ __forceinline__ static uint32 statistics_of(int part, uint32 statistic) {
        return statistic + part * kPartQueries * (kAsStep && Shape::kStatisticsAsStep ? kStatisticRowBytes : 4);
    }

    // Starts the accumulators of S^T from the score array, if products do (common/start_from_bias.cuh): for the keys of
    // group kGroup, in step number `turn`.
    template <int kGroup, int kPart = 0>
    __device__ __forceinline__ void start_from_array(Scores& x, const QueryStep& step, uint32 turn) const {
        if constexpr (Shape::kHoldsStart) {
            using Tile = typename Shape::Start::Tile;
            if (Tile::takes(params_)) {
                if constexpr (kPart == 0) mbarrier_wait(memory_.full_start(kGroup), turn % 2);
                const uint32 smem = memory_.start(kGroup) + kPart * kPartQueries * Tile::kRowBytes;
                common::start_from(x, typename Shape::Start(smem, lane_, 2 * warp_), per_score_);
                if constexpr (kPart + 1 == Shape::kParts) {
                    __syncwarp();  // all lanes have read it
                    arrive(memory_.empty_start(kGroup));
                }
                return;
            }
        }
        if constexpr (Shape::kStarts) {
            const auto tile = score_tile(step, own_.first_key + kGroup * kGroupRows, kPart);
            const common::BiasOfKeysInMemory<Spec, Params> bias(params_, tile);
            common::start_from(x, bias, per_score_);
        }
    }

    // Sets every element of x to the statistic of its column's query, or adds it.
    template <bool kAdds>
    __device__ __forceinline__ void start_from(Scores& x, uint32 statistic) const {
#pragma unroll
        for (int n = 0; n < kPartQueries / 8; n += 2) {
            float y[4];
            load_shared(statistic + lane_ % 4 * 16 + n * 32, y);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x.value[n][e] = kAdds ? x.value[n][e] + y[e % 2] : y[e % 2];
                x.value[n + 1][e] = kAdds ? x.value[n + 1][e] + y[2 + e % 2] : y[2 + e % 2];
            }
        }
    }

    // The statistic of the query in this lane's accumulator column j.
    __device__ __forceinline__ float statistic_of(uint32 statistic, int j) const {
        return load_shared<float>(statistic + lane_ % 4 * 16 + j / 4 * 64 + j / 2 % 2 * 8 + j % 2 * 4);
    }

    // x = (64 rows of K or V) (Q or dO)^T, plus the statistic of each column with kFromStatistic. `start_scores`
    // initialises the accumulators (if the statistic is no k-step), `issue_scores` issues the product of kColumns
    // columns. kStarted: the accumulators have started from a score array.
    template <bool kFromStatistic, bool kStarted = false>
    __device__ __forceinline__ void start_scores(Scores& x, uint32 statistic) const {
        if constexpr (kFromStatistic && !Shape::kStatisticsAsStep)
            start_from<kStarted>(x, statistic);
        else if constexpr (!kFromStatistic && !kStarted)
            x.fill(0.0f);
    }
    template <bool kFromStatistic, int kColumns, bool kStarted = false>
    __device__ __forceinline__ void issue_scores(Scores& x, uint64 keys, uint64 queries, uint32 statistic) const {
        constexpr bool kAsStep = kFromStatistic && Shape::kStatisticsAsStep;
        if constexpr (!kAsStep || kStarted) pin(x);
        wgmma_fence();
        if constexpr (kAsStep && kStarted)
            wgmma_add_statistic(x, statistic_descriptor(memory_.ones()), statistic_descriptor(statistic));
        else if constexpr (kAsStep)
            wgmma_statistic(x, statistic_descriptor(memory_.ones()), statistic_descriptor(statistic));
#pragma unroll
        for (int s = 0; s < kColumns / 16; ++s)
            wgmma_scores(x, keys + along_columns<Shape::kKeyPanelBytes>(s),
                         queries + along_columns<Shape::kQueryPanelBytes>(s));
        wgmma_commit();
        pin(x);
    }

    // Issues x += p (dO or Q).
    template <int kN8>
    __device__ __forceinline__ static void issue_gradient(QuadFragment<kN8>& x, Rounded& p, uint64 queries) {
        pin(x);
        pin(p);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kPartQueries / 16; ++s)
            wgmma_gradient(x, p.k16(s), queries + along_rows<Shape::kPanelRowBytes>(s));
        wgmma_commit();
        pin(x);
    }

    // The mask of a step's scores. Where most steps have one, it is made while S^T is in flight, else where it is needed.
    static constexpr bool kMasksAhead = common::kMasksMost<Spec> && !kTakesWeights;
    struct NoMask {};
    template <bool kMasked>
    __device__ __forceinline__ auto mask_ahead(const QueryStep& step, int32 first_key, int part = 0) const {
        if constexpr (kMasked && common::kHasBoxes<Spec>)
            return common::HiddenByWindows<true, Spec, Scores>(params_, unpack(own_.queries.boxes), step.tile,
                                                               first_key + 16 * warp_, lane_);
        else if constexpr (kMasked && kMasksAhead)
            return common::TileMask<true, Spec, Scores, float>(params_, score_tile(step, first_key, part));
        else
            return NoMask{};
    }

    // Replaces S^T - lse / scale by P^T. Masked elements and queries without a visible key have -inf, and thus P = 0.
    // With large scores, rounding may leave a difference above zero. P is then 1.
    template <bool kMasked, class MaskAhead>
    __device__ __forceinline__ void exponentiate(Scores& x, const QueryStep& step, int32 first_key,
                                                 const MaskAhead& ahead, int part = 0) const {
        hidden_.hide(x);
        const auto mask = common::mask_of<Spec>(params_);
        if constexpr (kMasked && kMasksAhead)
            ahead.hide(x, mask, -common::infinity<float>());
        else if (needs_mask<kMasked>(step))
            common::hide_scores<true, Spec>(x, mask, params_, score_tile(step, first_key, part),
                                            -common::infinity<float>());
#pragma unroll
        for (int n = 0; n < kPartQueries / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x.value[n][e] = common::exp2_approx(common::at_most_zero(x.value[n][e] * params_.scale_log2));
    }

    __device__ __forceinline__ common::HeadTerms<AfterStart> head_terms(const QueryStep& step) const {
        return common::head_terms<AfterStart>(params_, own_.batch, own_.at(step).head);
    }

    // The terms of the caller's score function that depend on the distance: made while S^T is in flight.
    using Distances = common::QuadDistances<kPartQueries / 8, true, float>;
    __device__ __forceinline__ Distances distances_ahead(const QueryStep& step, int32 first_key, int part = 0) const {
        if constexpr (common::kHasDistanceTerms)
            return {common::score_args_of(params_), score_tile(step, first_key, part)};
        else
            return {};
    }

    // Replaces S^T by the factor of dP^T - delta, and writes P^T for dV, rounded, to `p` (common/weights.cuh).
    template <bool kMasked>
    __device__ __forceinline__ void take_weights(Scores& x, Rounded& p, const QueryStep& step, int32 first_key,
                                                 uint32 statistic, const common::HeadTerms<AfterStart>& terms,
                                                 const Distances& distances, int part = 0) const {
        if constexpr (Shape::kHoldsArray) {
            if (Held::Tile::takes(params_)) {
                Held::Tile::wait(held_address(first_key), lane_);
                take_weights_with<kMasked>(Held(held_address(first_key), lane_), x, p, step, first_key, statistic,
                                           terms, distances, part);
                return;
            }
        }
        take_weights_with<kMasked>(common::ArraysInMemory{}, x, p, step, first_key, statistic, terms, distances, part);
    }
    template <bool kMasked, class Held>
    __device__ __forceinline__ void take_weights_with(const Held& held, Scores& x, Rounded& p, const QueryStep& step,
                                                      int32 first_key, uint32 statistic,
                                                      const common::HeadTerms<AfterStart>& terms,
                                                      const Distances& distances, int part) const {
        common::take_weights_with<true, AfterStart>(
            held, x, p, needs_mask<kMasked>(step), params_, score_tile(step, first_key, part),
            [&](int, int j) { return kFromLse ? 0.0f : -statistic_of(statistic, j); }, distances, terms);
    }

    // Starts to load the score array of the first step for this warp's 16 keys, of the group's from `first_key` on.
    // `take_weights` reads it.
    __device__ __forceinline__ void load_first_array(int32 first_key) const {
        if constexpr (Shape::kHoldsArray)
            if (Held::Tile::takes(params_))
                Held::Tile::load(held_address(first_key), params_, score_tile(own_.first_step(), first_key));
    }
    // The same for the step after `step`, at the end of this one. Earlier, with products in flight, registers would not
    // suffice.
    __device__ __forceinline__ void load_next_array(const QueryStep& step, int32 first_key) const {
        if constexpr (Shape::kHoldsArray) {
            const bool is_last = step.tile + 1 == own_.tiles.end;
            const QueryStep next = {step.head + is_last, is_last ? own_.tiles.begin : step.tile + 1};
            if (own_.has(next, params_) && Held::Tile::takes(params_)) {
                __syncwarp();  // all lanes have read this step's
                Held::Tile::load(held_address(first_key), params_, score_tile(next, first_key));
            }
        }
    }
    using Held = common::HeldOfKeys<Spec, kBr>;
    __device__ __forceinline__ uint32 held_address(int32 first_key) const {
        return memory_.held() + ((first_key - own_.first_key) / 16 + warp_) * Held::Tile::kBytes;
    }

    // In a pair, buffer 0 is of the steps whose dQ the first block computes, and 1 of those of the second. The block's own,
    // for the keys of both, lies before that which it sends.
    __device__ __forceinline__ uint32 place_of_ds(uint32 buffer) const { return buffer ^ (Shape::kPair ? rank_ : 0); }

    // Writes this warp's 16 keys of dS to the panel of its group's 64 keys, transposed.
    template <int kPart = 0>
    __device__ __forceinline__ void store_ds(const Rounded& ds, int32 panel_index) {
        const uint32 buffer = written_.slot();
        const uint32 panel = memory_.ds(place_of_ds(buffer)) + panel_index * Shape::kDsPanelBytes;
        if constexpr (kPart == 0) mbarrier_wait(memory_.empty_ds(buffer), written_.parity() ^ 1);
        const uint32 row = kPart * kPartQueries + lane_ % 8 + lane_ / 16 * 8,
                     chunk = (warp_ * 2 + lane_ / 8 % 2) ^ (lane_ % 8);
        const uint32 address = panel + row * kPanelRowBytes + chunk * 16;
#pragma unroll
        for (int s = 0; s < kPartQueries / 16; ++s)
            stmatrix_x4_transposed(address + s * 16 * kPanelRowBytes, ds.k16(s));
        if constexpr (kPart + 1 < Shape::kParts) return;
        __syncwarp();
        arrive(memory_.written_ds(buffer));
        written_.advance();
    }

    // K from a column on, as the operand of dQ: MN-major.
    __device__ __forceinline__ uint64 columns_of_k(int32 column) const {
        const uint32 panel = column / Shape::kPanelColumns * Shape::kKeyPanelBytes;
        return matrix_descriptor<Shape::kPanelRowBytes>(memory_.key() + panel + column % Shape::kPanelColumns * 2,
                                                        Shape::kKeyPanelBytes);
    }

    // Issues dQ of the oldest dS tile not yet read (the previous step's in the loop, the last one after it) once that
    // tile is complete. `keys`: MN-major descriptor of K. `ds`: descriptor of dS buffer 0.
    template <int kN8>
    __device__ __forceinline__ void issue_dq(QuadFragment<kN8>& dq, uint64 keys, uint64 ds) const {
        const uint32 buffer = read_.slot();
        mbarrier_wait(memory_.full_ds(buffer), read_.parity());
        ds += place_of_ds(buffer) * (Shape::kDsBytes / 16);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < Spec::kBc / 16; ++s) {
            const uint64 k =
                keys + s / (kBc / 16) * (Shape::kKeyBytes / 16) + along_rows<Shape::kPanelRowBytes>(s % (kBc / 16));
            const uint64 d = ds + along_columns<Shape::kDsPanelBytes>(s);
            const uint64 a = Shape::kDqTransposed ? k : d, b = Shape::kDqTransposed ? d : k;
            if (s == 0)
                wgmma_first_dq(dq, a, b);
            else
                wgmma_dq(dq, a, b);
        }
        wgmma_commit();
        pin(dq);
    }

    // Adds the dQ of `issue_dq` to the workspace tile of its step. This warp's part of the tile starts at block `row16`
    // of 16 rows and block `column8` of 8 columns. `next`: the step whose dQ is added next. The workspace pointer
    // advances from step to step, which costs the loop less than a 64-bit multiplication. It advances before its use,
    // because advancing it afterwards would wait until all additions have been issued.
    template <int kN8>
    __device__ __forceinline__ void add_dq(const QuadFragment<kN8>& dq, int32 row16, int32 column8,
                                           const QueryStep& next) {
        arrive(memory_.empty_ds(read_.slot()));
        if constexpr (Shape::kPair) {  // the other block may send again, and write what it sends; its own step follows
            if (lane_ == 0) mbarrier_arrive_there(in_block(rank_ ^ 1, memory_.empty_ds(read_.slot())));
            read_.advance();
        }
        read_.advance();
        if constexpr (common::kHasBoxes<Spec>) {
            add_rows(dq, row16, column8, own_.step_before(next));
            return;
        }
        workspace_ += static_cast<int64>(tiles_to_walk_) * Workspace::kTileElements;
        // In dQ^T = K^T dS^T, rows are columns of K: those of a panel may exceed kD.
        constexpr bool kAllRows = !Workspace::kTransposed || kD == 2 * kPanelColumns;
        if (kAllRows || row16 < Workspace::kRows / 16) {
#pragma unroll
            for (int n = 0; n < kN8; ++n)
                if (column8 + n < Workspace::kColumns / 8)
                    add_global(workspace_ + Workspace::offset(0, n, 0), dq.value[n]);
        }
        tiles_to_walk_ = 0;
        if constexpr (!Shape::kPair) walk_to(next);
    }

    // Adds dQ of a box of tokens to the workspace of rows, two blocks of columns at a time. There are registers to find the
    // rows here, but not to keep them from step to step.
    template <int kN8>
    __device__ __forceinline__ void add_rows(const QuadFragment<kN8>& dq, int32 row16, int32 column8,
                                             const QueryStep& step) const {
        static_assert(kN8 % 2 == 0 && !Workspace::kTransposed);
        const int64 head = static_cast<int64>(own_.batch) * params_.num_heads + step.head;
        const auto place = own_.queries.place(step.tile);
        const int32 lane = as_if_new(lane_);
        float* workspace = params_.dq_accum + Workspace::offset_in_row(column8, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = own_.queries.position(params_, place, 16 * row16 + QuadFragment<kN8>::row(i, lane));
            if (row >= params_.seqlen_q) continue;
            float* to = workspace + (head * ceil_div(params_.seqlen_q, kBr) * kBr + row) * kD;
#pragma unroll
            for (int n = 0; n < kN8; n += 2)
                if (column8 + n < kD / 8)
                    add_global(to + 8 * n, {dq.value[n][2 * i], dq.value[n][2 * i + 1], dq.value[n + 1][2 * i],
                                            dq.value[n + 1][2 * i + 1]});
        }
    }

    // Walks to the step whose dQ is added next; in a pair to every step, also to those of the other block.
    __device__ __forceinline__ void walk_to(const QueryStep& step) {
        if constexpr (common::kListsTiles<Spec>) {
            tiles_to_walk_ -= added_tile_;
            tiles_to_walk_ += added_tile_ = tile_of_group(step);
        } else {
            tiles_to_walk_ += tiles_ahead_of(step);
        }
    }
    // At a head change, skip the query tiles outside this key tile's range.
    __device__ __forceinline__ int32 tiles_ahead_of(const QueryStep& step) const {
        return step.tile == own_.tiles.begin ? query_tiles() - own_.tiles.end + own_.tiles.begin + 1 : 1;
    }

    // Releases a stage of Q or of dO, whose barrier is `empty`. In a pair, the block that loads it for both waits for both.
    template <bool kQ>
    __device__ __forceinline__ void release(uint32 empty) const {
        arrive(empty);
        constexpr uint32 kLoader = Shape::template kLoader<kQ>;
        if (Shape::kMulticast && rank_ != kLoader && lane_ == 0) mbarrier_arrive_there(in_block(kLoader, empty));
    }

    // Waits until all warps have completed their last dQ; after it no warp reads K or V.
    __device__ __forceinline__ void wait_for_last_dq() const {
        if (Shape::kPair && read_.turn == rank_) return;  // all were the other block's
        const auto last = Shape::kPair ? read_.previous().previous() : read_.previous();
        mbarrier_wait(memory_.empty_ds(last.slot()), last.parity());
    }

    // Sets the workspace pointer to this lane's part of the first step's dQ. `params` is of a template type because the
    // record has a workspace only in kernels that compute dQ.
    template <class Record>
    __device__ __forceinline__ void start_adding(const Record& params, int32 row16, int32 column8) {
        if constexpr (common::kHasBoxes<Spec>) return;
        const QueryStep step = own_.at(own_.first_step());
        if constexpr (Shape::kPair && !common::kListsTiles<Spec>) tiles_to_walk_ = -tiles_ahead_of(own_.first_step());
        if constexpr (common::kListsTiles<Spec>) added_tile_ = tile_of_group(own_.first_step());
        const int64 first = Spec::kVarlen
                                ? common::first_workspace_tile<Spec>(params, own_.batch, step.head)
                                : (static_cast<int64>(own_.batch) * params.num_heads + step.head) * query_tiles();
        workspace_ =
            params.dq_accum + (first + step.tile) * Workspace::kTileElements + Workspace::offset(row16, column8, lane_);
    }

    // Query tiles of a head in the workspace, including those outside this key tile's range.
    __device__ __forceinline__ int32 query_tiles() const {
        if constexpr (Spec::kVarlen) return common::workspace_tiles<Spec>(params_);
        return common::kLeftLimit<Spec> || common::kListsTiles<Spec> ? ceil_div(params_.seqlen_q, kBr) : own_.tiles.end;
    }

    // The number of a step's query tile among those of the group in the workspace.
    __device__ __forceinline__ int32 tile_of_group(const QueryStep& step) const {
        const QueryStep own = own_.at(step);
        return (own.head - own_.first_query_head) * query_tiles() + own.tile;
    }

    // Leaves this warp's 16 rows of dV or dK in the workspace of shares.
    template <bool kIsDv, int kN8, class Record>
    __device__ __forceinline__ void put_share(const QuadFragment<kN8>& x, const Record& params, int32 row16) const {
        using Shares = typename Shape::Shares;
        using Own = common::AccumulatorTile<Spec::kBc, 8 * kN8>;
        float* share = Shares::template of_block<Spec>(params, tile_index<Spec>()) + kIsDv * Shares::Dk::kElements;
        Shares::template put<Own>(share, x, row16 + rank_ * (kBc / 16), 0, lane_);
    }

    const uint32 rank_;      // of the block in a pair
    const float per_score_;  // what a score of 1 is in products
    const common::HiddenKeys<Spec, kPartQueries / 8> hidden_;
    RingPosition<2> written_, read_;  // in the ring of dS buffers
    float* workspace_ = nullptr;      // this lane's part of the tile of the last added dQ
    int32 tiles_to_walk_ = 0;
    int32 added_tile_ = 0;  // under a sparse map, the number of that tile in the group
};

}  // namespace fa2::sm90
