// Base of the consumer warp groups of the backward by key tiles: a group computes dK and dV of 64 keys
// (backward_keys.cuh), or one of the two (backward_divided.cuh).
//
// Scores are computed transposed, keys by queries: the accumulators of S^T, and dS^T made from those of dP^T, rounded
// to 16 bits, are already laid out as the left operand of the second product, so P^T and dS^T stay in registers. The
// statistics (lse, delta) belong to queries and thus to columns, and initialise the products.
#pragma once
#include "common/mask_function.cuh"
#include "common/weights.cuh"
#include "sm90/dq_of_keys.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape>
class BackwardGroup : protected DqOfKeys<Spec, Shape> {
  protected:
    using Base = DqOfKeys<Spec, Shape>;
    using Base::arrive, Base::needs_mask, Base::kStoreBarrier, Base::kPartQueries;
    using Base::lane_, Base::maps_, Base::memory_, Base::own_, Base::params_, Base::rank_, Base::warp_;
    using typename Base::Element, typename Base::Memory, typename Base::Rounded;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD, kDv = Shape::kDv;
    static constexpr int kStartBarrier = 3;  // a named barrier for both groups

    using Scores = QuadFragment<kPartQueries / 8>;
    // What is done to products. Those that start from a score array have no more to do with it.
    using AfterStart = typename Shape::AfterStart;
    // True if S^T starts from -lse, dP^T from -delta. S^T does not if the plain product must be capped or scaled first;
    // dP^T does not with dropout, which scales dP before delta is subtracted.
    static constexpr bool kFromLse = common::kProductsFromLse<AfterStart>,
                          kFromDelta = common::kProductsFromDelta<Spec>;
    static constexpr bool kTakesWeights = common::kTakesWeights<AfterStart>;

    __device__ BackwardGroup(const Params& params, const Params& maps, const Memory& memory, int32 group)
        : Base(params, maps, memory),
          per_score_(Shape::kStarts ? 1.0f / params.softmax_scale : 0.0f),
          hidden_(params, Base::score_tile(own_.first_step(), own_.first_key + group * kGroupRows)) {}

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

    // Releases a stage of Q or of dO, whose barrier is `empty`. In a pair, the block that loads it for both waits for both.
    template <bool kQ>
    __device__ __forceinline__ void release(uint32 empty) const {
        arrive(empty);
        constexpr uint32 kLoader = Shape::template kLoader<kQ>;
        if (Shape::kMulticast && rank_ != kLoader && lane_ == 0) mbarrier_arrive_there(in_block(kLoader, empty));
    }

    // Leaves this warp's 16 rows of dV or dK in the workspace of shares.
    template <bool kIsDv, int kN8, class Record>
    __device__ __forceinline__ void put_share(const QuadFragment<kN8>& x, const Record& params, int32 row16) const {
        using Shares = typename Shape::Shares;
        using Own = common::AccumulatorTile<Spec::kBc, 8 * kN8>;
        float* share = Shares::template of_block<Spec>(params, tile_index<Spec>()) + kIsDv * Shares::Dk::kElements;
        Shares::template put<Own>(share, x, row16 + rank_ * (kBc / 16), 0, lane_);
    }

    const float per_score_;  // what a score of 1 is in products
    const common::HiddenKeys<Spec, kPartQueries / 8> hidden_;
};

}  // namespace fa2::sm90
