// What the multiplying warp groups of the backward have in common, whether a group computes dK and dV of 64 keys
// (backward_keys.cuh) or one of them (backward_divided.cuh).
//
// Scores are taken transposed, keys by queries: an accumulator of S^T or dP^T, rounded, is the left operand of the
// second product without leaving its registers. Statistics, which belong to queries, then belong to columns, and a
// product starts from them.
//
// dS crosses to all groups for dQ, as [query][key], 128-byte swizzled: transposed on the way by stmatrix.
#pragma once
#include "common/mask.cuh"
#include "common/weights.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/wgmma_backward.cuh.j2"

namespace fa2::sm90 {

template <class Spec, class Shape>
class BackwardGroup {
  protected:
    using Memory = BackwardMemory<Shape>;
    using Element = typename Spec::Element;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD, kStages = Shape::kStages;
    static constexpr int kStoreBarrier = 1, kStartBarrier = 3;  // the first has one for each group

    using Scores = QuadFragment<kBr / 8>;
    using Rounded = PackedFragment<Element, kBr / 8>;
    using Gradient = QuadFragment<kD / 8>;
    using Workspace = DqWorkspace<kBr, kD>;
    // Where scores are capped, P is not what a product from the statistic on would leave; with dropout, neither is dS.
    static constexpr bool kFromLse = common::kProductsFromLse<Spec>, kFromDelta = common::kProductsFromDelta<Spec>;

    __device__ BackwardGroup(const Params& params, const Params& maps, const Memory& memory)
        : params_(params),
          maps_(maps),
          memory_(memory),
          warp_(__shfl_sync(common::kFullWarp, threadIdx.x / 32 % 4, 0)),
          lane_(threadIdx.x % 32),
          own_(key_tile<Spec>(params)) {}

    // All steps of the block: under a right limit alone, tiles that it cuts come first. With a left limit, too, each
    // step looks whether it needs the mask: one more copy of the code would be serialised.
    template <class Group>
    static __device__ __forceinline__ void take_steps(Group& group) {
        const KeyTile<Spec>& own = group.own_;
        const int32 end = own.first_query_head + group.params_.heads_per_group;
#pragma unroll 1
        for (int32 head = own.first_query_head; head < end; ++head) {
            int32 tile = own.tiles.begin;
#pragma unroll 1
            for (; tile < (common::kLeftLimit<Spec> ? own.tiles.end : own.tiles.full_begin); ++tile)
                group.template step<true>({head, tile});
            if constexpr (!common::kLeftLimit<Spec>) {
#pragma unroll 1
                for (; tile < own.tiles.end; ++tile) group.template step<false>({head, tile});
            }
        }
    }

    template <bool kMasked>
    __device__ __forceinline__ bool needs_mask(const QueryStep& step) const {
        return kMasked &&
               (!common::kLeftLimit<Spec> || step.tile < own_.tiles.full_begin || step.tile >= own_.tiles.full_end);
    }

    // Every column of x is its query's statistic.
    __device__ __forceinline__ void start_from(Scores& x, uint32 statistic) const {
#pragma unroll
        for (int n = 0; n < kBr / 8; n += 2) {
            float y[4];
            load_shared(statistic + lane_ % 4 * 16 + n * 32, y);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x.value[n][e] = y[e % 2];
                x.value[n + 1][e] = y[2 + e % 2];
            }
        }
    }

    // A query's statistic, for the column j of this lane.
    __device__ __forceinline__ float statistic_of(uint32 statistic, int j) const {
        return load_shared<float>(statistic + lane_ % 4 * 16 + j / 4 * 64 + j / 2 % 2 * 8 + j % 2 * 4);
    }

    // x = (64 rows of K or V) (Q or dO)^T + the statistic of each column, if it starts from that: first this, ...
    template <bool kFromStatistic>
    __device__ __forceinline__ void start_scores(Scores& x, uint32 statistic) const {
        if constexpr (!kFromStatistic)
            x.fill(0.0f);
        else if constexpr (!Shape::kStatisticsAsStep)
            start_from(x, statistic);
    }
    // ... then this.
    template <bool kFromStatistic>
    __device__ __forceinline__ void issue_scores(Scores& x, uint64 keys, uint64 queries, uint32 statistic) const {
        constexpr bool kAsStep = kFromStatistic && Shape::kStatisticsAsStep;
        if constexpr (!kAsStep) pin(x);
        wgmma_fence();
        if constexpr (kAsStep)
            wgmma_statistic(x, statistic_descriptor(memory_.ones()), statistic_descriptor(statistic));
#pragma unroll
        for (int s = 0; s < kD / 16; ++s)
            wgmma_scores(x, keys + along_columns<Shape::kKeyPanelBytes>(s),
                         queries + along_columns<Shape::kQueryPanelBytes>(s));
        wgmma_commit();
        pin(x);
    }

    // x += p (dO or Q).
    __device__ __forceinline__ static void issue_gradient(Gradient& x, Rounded& p, uint64 queries) {
        pin(x);
        pin(p);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kBr / 16; ++s) wgmma_gradient(x, p.k16(s), queries + along_rows(s));
        wgmma_commit();
        pin(x);
    }

    // P^T from what the product has left. 2^-inf is zero: so are rows without a visible key, and what the mask covers.
    template <bool kMasked>
    __device__ __forceinline__ void exponentiate(Scores& x, const QueryStep& step, int32 first_key) const {
        if (needs_mask<kMasked>(step)) {
            common::mask_transposed(x, common::mask_of<Spec>(params_), {step.tile * kBr, first_key + 16 * warp_, lane_},
                                    -common::infinity<float>());
        }
#pragma unroll
        for (int n = 0; n < kBr / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x.value[n][e] = common::exp2_approx(x.value[n][e] * params_.scale_log2);
    }

    __device__ __forceinline__ common::HeadTerms<Spec> head_terms(const QueryStep& step) const {
        return common::head_terms<Spec>(params_, own_.batch, step.head);
    }

    // P^T for dV, rounded, and what weighs dP^T, where the product was.
    template <bool kMasked>
    __device__ __forceinline__ void take_weights(Scores& x, Rounded& p, const QueryStep& step, int32 first_key,
                                                 uint32 statistic, const common::HeadTerms<Spec>& terms) const {
        common::take_weights<true, Spec>(
            x, p, needs_mask<kMasked>(step), params_,
            {own_.batch, step.head, step.tile * kBr, first_key + 16 * warp_, lane_},
            [&](int, int j) { return kFromLse ? 0.0f : -statistic_of(statistic, j); }, terms);
    }

    // This warp's 16 keys of dS, in the panel of the group's 64.
    __device__ __forceinline__ void store_ds(const Rounded& ds, int32 panel_index) {
        const uint32 buffer = written_.slot(), panel = memory_.ds(buffer) + panel_index * Shape::kDsPanelBytes;
        mbarrier_wait(memory_.empty_ds(buffer), written_.parity() ^ 1);
        const uint32 row = lane_ % 8 + lane_ / 16 * 8, chunk = (warp_ * 2 + lane_ / 8 % 2) ^ (lane_ % 8);
        const uint32 address = panel + row * kPanelRowBytes + chunk * 16;
#pragma unroll
        for (int s = 0; s < kBr / 16; ++s) stmatrix_x4_transposed(address + s * 16 * kPanelRowBytes, ds.k16(s));
        __syncwarp();
        arrive(memory_.written_ds(buffer));
        written_.advance();
    }

    // dQ of the step whose dS was written before the last, when all of that is there: of what `keys` (of K, summing
    // over rows) and `ds` say.
    template <int kN8>
    __device__ __forceinline__ void issue_dq(QuadFragment<kN8>& dq, uint64 keys, uint64 ds) const {
        const uint32 buffer = read_.slot();
        mbarrier_wait(memory_.full_ds(buffer), read_.parity());
        ds += buffer * (Shape::kDsBytes / 16);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kBc / 16; ++s) {
            const uint64 k = keys + along_rows(s), d = ds + along_columns<Shape::kDsPanelBytes>(s);
            const uint64 a = Shape::kDqTransposed ? k : d, b = Shape::kDqTransposed ? d : k;
            if (s == 0)
                wgmma_first_dq(dq, a, b);
            else
                wgmma_dq(dq, a, b);
        }
        wgmma_commit();
        pin(dq);
    }

    // Adds it to the workspace of that step, whose part from 16 rows and 8 columns of the tile on is this warp's. What
    // is added next is of the step `next`: a pointer that walks costs the loop less than a multiplication of 64 bits.
    // It walks before it is used. To change it after that would wait for all additions to have been issued.
    template <int kN8>
    __device__ __forceinline__ void add_dq(const QuadFragment<kN8>& dq, int32 row16, int32 column8,
                                           const QueryStep& next) {
        arrive(memory_.empty_ds(read_.slot()));
        read_.advance();
        workspace_ += static_cast<int64>(tiles_to_walk_) * Workspace::kTileElements;
        // Where K is transposed, a panel of it may be wider than its columns.
        constexpr bool kAllRows = !Workspace::kTransposed || kD == 2 * kPanelColumns;
        if (kAllRows || row16 < Workspace::kRows / 16) {
#pragma unroll
            for (int n = 0; n < kN8; ++n)
                if (column8 + n < Workspace::kColumns / 8)
                    add_global(workspace_ + Workspace::offset(0, n, 0), dq.value[n]);
        }
        // Past the tiles that see no key of this block.
        tiles_to_walk_ = next.tile == own_.tiles.begin ? query_tiles() - own_.tiles.end + own_.tiles.begin + 1 : 1;
    }

    // Warps speak with one lane, when all have done what it says.
    __device__ __forceinline__ void arrive(uint32 barrier) const {
        if (lane_ == 0) mbarrier_arrive(barrier);
    }

    // Until all warps have multiplied for the last time: then no warp reads K or V any more.
    __device__ __forceinline__ void wait_for_last_dq() const {
        const auto last = read_.previous();
        mbarrier_wait(memory_.empty_ds(last.slot()), last.parity());
    }

    // Where this lane adds dQ of the first step. The record has a workspace where there is dQ only, so that its type is
    // left open.
    template <class Record>
    __device__ __forceinline__ void start_adding(const Record& params, int32 row16, int32 column8) {
        const int64 first =
            Spec::kVarlen ? common::first_workspace_tile<Spec>(params, own_.batch, own_.first_query_head)
                          : (static_cast<int64>(own_.batch) * params.num_heads + own_.first_query_head) * query_tiles();
        workspace_ = params.dq_accum + (first + own_.tiles.begin) * Workspace::kTileElements +
                     Workspace::offset(row16, column8, lane_);
    }

    // Of a head in the workspace, whether they are seen here or not.
    __device__ __forceinline__ int32 query_tiles() const {
        if constexpr (Spec::kVarlen) return common::workspace_tiles<Spec>(params_);
        return common::kLeftLimit<Spec> ? ceil_div(params_.seqlen_q, kBr) : own_.tiles.end;
    }

    // 16 rows of a gradient leave by way of rows of K or V, of which this warp takes those from `row` on.
    __device__ __forceinline__ void store_gradient(const Gradient& x, float scale, const TensorMap& map, uint32 smem,
                                                   int32 row) const {
        const uint32 box = smem + row * kPanelRowBytes, lane_row = lane_ % 16;
        PackedFragment<Element, 2> packed;
#pragma unroll
        for (int n = 0; n < kD / 8; n += 2) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    packed.set(i, j, x.value[n + j][2 * i] * scale, x.value[n + j][2 * i + 1] * scale);
            const uint32 chunk = (n % 8 + lane_ / 16) ^ (lane_row & 7);
            stmatrix_x4(box + n / 8 * Shape::kKeyPanelBytes + lane_row * kPanelRowBytes + chunk * 16, packed.k16(0));
        }
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
#pragma unroll
            for (int panel = 0; panel < Shape::kPanels; ++panel)
                own_.keys.store(map, box + panel * Shape::kKeyPanelBytes, panel * kPanelColumns, own_.first_key + row,
                                own_.head, own_.batch);
            tma_store_commit();
        }
    }

    const Params &params_, &maps_;  // of the sequence; as launched, where TMA finds its maps
    const Memory memory_;
    const int32 warp_, lane_;
    const KeyTile<Spec> own_;
    RingPosition<2> written_, read_;  // of dS
    float* workspace_ = nullptr;      // of the step whose dQ was added last
    int32 tiles_to_walk_ = 0;
};

}  // namespace fa2::sm90
