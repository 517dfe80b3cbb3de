// The producer warp group of the backward by key tiles. Jobs of its warps:
//
//   0       one thread loads K and V, by TMA; then the warp copies the score array from which products start, if they do
//   1, 2    load Q (warp 1) and dO (warp 2) of one query tile after the other, by TMA, and prepare the statistics from
//           which the tile's products start: -lse / scale (warp 1), -delta (warp 2)
//   3       one thread makes dS, which the consumers write, visible to wgmma, or sends it to the other block of a pair
//
//   P = 2^(scale log2(e) (K Q^T - lse / scale))        dS = P o (dO V^T - delta)
//
// Where features change the scores so that S^T cannot start from it, the first statistic is -lse in base 2 instead.
//
// The first statistic of a row without a visible key, or beyond the sequence, is -infinity, so that its P is zero
// whatever Q holds there. In shared memory statistics are k-steps (statistic.cuh), or fp32 in groups of 16 queries; the
// four that a lane needs, of accumulator columns 2t, 2t + 1, 2t + 8 and 2t + 9 (t = lane % 4), are then contiguous.
#pragma once
#include "common/score_mod.cuh"
#include "common/statistics.cuh"
#include "sm90/backward_shape.cuh"

namespace fa2::sm90 {

template <class Spec, class Shape>
class BackwardProducer {
    using Memory = BackwardMemory<Shape>;
    static constexpr int kBr = Shape::kBr;
    static constexpr bool kFromLse = common::kProductsFromLse<typename Shape::AfterStart>;
    template <bool kLse>
    static constexpr bool kAsStep = Shape::kStatisticsAsStep && (kLse ? kFromLse : common::kProductsFromDelta<Spec>);

  public:
    __device__ BackwardProducer(const Params& params, const Params& maps, const Memory& memory)
        : params_(params), maps_(maps), memory_(memory), own_(key_tile<Spec>(params)) {}

    __device__ void run() {
        if (common::may_hide_rows<Spec>(params_))
            run_with<true>();
        else
            run_with<false>();
    }

  private:
    // kHides: there may be rows that see no key. With one copy of the loops for both, the kernel compiles in 0.9 of the time,
    // but takes 3 % more at head_dim 64, and 6 to 12 % with ALiBi or a soft cap.
    template <bool kHides>
    __device__ void run_with() {
        const int32 warp = threadIdx.x / 32;
        if (warp == 0 && threadIdx.x == 0) load_keys();
        if constexpr (Shape::kHoldsStart)
            if (warp == 0 && Shape::Start::Tile::takes(params_)) load_starts();
        if (warp == 1) prepare<true, kHides>();
        if (warp == 2) prepare<false, kHides>();
        if (Shape::kWithDq && warp == 3 && threadIdx.x % 32 == 0) pass_ds_on();
    }
    // Where the rows of a query tile are: in a box of tokens by the first one, else by the tile's number alone.
    struct ByNumber {};
    __device__ auto place_of(const QueryStep& own) const {
        if constexpr (common::kHasBoxes<Spec>)
            return own_.queries.place(own.tile);
        else
            return ByNumber{};
    }
    __device__ __forceinline__ static int32 row_at(const ByNumber&, const QueryStep& own) { return own.tile * kBr; }
    __device__ __forceinline__ static const common::Token& row_at(const common::Token& first, const QueryStep&) {
        return first;
    }
    __device__ __forceinline__ static int32 position(const ByNumber&, const QueryStep& own, int32 query) {
        return own.tile * kBr + query;
    }
    __device__ __forceinline__ int32 position(const common::Token& first, const QueryStep&, int32 query) const {
        return own_.queries.position(params_, first, query);
    }
    __device__ bool is_valid(const QueryStep& step) const { return own_.has(step, params_); }
    __device__ void advance(QueryStep& step) const {
        if (++step.tile < own_.tiles.end) return;
        step.tile = own_.tiles.begin;
        ++step.head;
    }

    __device__ void load_keys() const {
        load_keys<Shape::kPanels, Shape::kBlocks>(maps_.k, memory_.key(), memory_.full_key());
        load_keys<Shape::kPanelsV, 1>(maps_.v, memory_.value(), memory_.full_value());
    }
    // Rows of the block's own keys, and behind them, if kBlocks is two, of the other block's in the pair.
    template <int kPanels, int kBlocks>
    __device__ void load_keys(const TensorMap& map, uint32 smem, uint32 full) const {
        mbarrier_arrive_expect(full, kBlocks * kPanels * Shape::kKeyPanelBytes);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel)
                own_.keys.load(smem + (block * kPanels + panel) * Shape::kKeyPanelBytes, map, full,
                               panel * Shape::kPanelColumns, own_.first_key ^ block * Shape::kBc, own_.head,
                               own_.batch);
    }

    // Copies the score array from which products start, for one group after the other.
    __device__ void load_starts() const {
        using Tile = typename Shape::Start::Tile;
        const int32 lane = threadIdx.x % 32;
        __syncwarp();
        uint32 parity = 1;
#pragma unroll 1
        for (QueryStep step = own_.first_step(); is_valid(step); advance(step)) {
            const QueryStep own = own_.at(step);
#pragma unroll 1
            for (int32 group = 0; group < Shape::kStartGroups; ++group) {
                mbarrier_wait(memory_.empty_start(group), parity);
                Tile::template load<8>(
                    memory_.start(group), params_,
                    {own_.batch, own.head, {own.tile * kBr, own_.first_key + group * kGroupRows, lane}});
                mbarrier_arrive_with_copies(memory_.full_start(group));
            }
            parity ^= 1;
        }
    }

    // Starts to load a tile of Q or of dO. If it has rows to clear, `landed` is signalled instead of `full`. One block of a
    // pair loads other tiles for both: `landed` is of all stages, and a block late at it could get the bytes of two. That
    // block also lets both see a tile with rows to clear: the other one, if it were a tile ahead, would release it before
    // this block has released the tile that it replaces, and the barrier, which counts both, could not tell.
    template <bool kQ, class Place>
    __device__ void load_queries(uint32 stage, const QueryStep& own, const Place& place, bool clears) const {
        const uint32 full = full_of<kQ>(stage), barrier = clears ? landed<kQ>() : full;
        mbarrier_arrive_expect(barrier, kPanelsOf<kQ> * Shape::kQueryPanelBytes);
        if constexpr (Shape::kMulticast) {
            if (!clears) {
                if (loads_for_both<kQ>()) load_panels<kQ, true>(stage, own, place, full);
                return;
            }
        }
        load_panels<kQ, false>(stage, own, place, barrier);
        if (!clears || (Shape::kMulticast && !loads_for_both<kQ>())) return;
        mbarrier_arrive(full);
        if constexpr (Shape::kMulticast) mbarrier_arrive_there(in_block(1 - Shape::template kLoader<kQ>, full));
    }
    template <bool kQ>
    __device__ static bool loads_for_both() {
        return Shape::kMulticast && rank_in_pair<Spec>() == Shape::template kLoader<kQ>;
    }
    template <bool kQ, bool kForBoth, class Place>
    __device__ void load_panels(uint32 stage, const QueryStep& own, const Place& place, uint32 barrier) const {
        const TensorMap& map = kQ ? maps_.q : maps_.dout;
#pragma unroll
        for (int panel = 0; panel < kPanelsOf<kQ>; ++panel) {
            const uint32 smem = rows_of<kQ>(stage) + panel * Shape::kQueryPanelBytes;
            const int32 column = panel * Shape::kPanelColumns;
            const auto row = row_at(place, own);
            if constexpr (kForBoth)
                own_.queries.load_to(3, smem, map, barrier, column, row, own.head, own_.batch);
            else
                own_.queries.load(smem, map, barrier, column, row, own.head, own_.batch);
        }
    }
    template <bool kQ>
    static constexpr int kPanelsOf = kQ ? Shape::kPanels : Shape::kPanelsV;
    template <bool kQ>
    __device__ uint32 rows_of(uint32 stage) const {
        return kQ ? memory_.query(stage) : memory_.dout(stage);
    }
    template <bool kQ>
    __device__ uint32 full_of(uint32 stage) const {
        return kQ ? memory_.full_query(stage) : memory_.full_dout(stage);
    }
    template <bool kQ>
    __device__ uint32 landed() const {
        return kQ ? memory_.landed_query() : memory_.landed_dout();
    }

    // A fence waits for all outstanding memory operations of its thread. Consumer threads have atomic additions to dQ
    // in flight for most of a step, so a thread of the producer fences the dS that they write. In a pair it sends that of
    // every second step to the other block, whose `full` waits for these bytes, too.
    __device__ void pass_ds_on() const {
        RingPosition<2> ring;
        const uint32 rank = rank_in_pair<Spec>();
#pragma unroll 1
        for (QueryStep step = own_.first_step(); is_valid(step); advance(step)) {
            const uint32 buffer = ring.slot(), full = memory_.full_ds(buffer);  // in a pair: of the block with the dQ
            mbarrier_wait(memory_.written_ds(buffer), ring.parity());
            async_proxy_fence();
            if constexpr (!Shape::kPair)
                mbarrier_arrive(full);
            else if (buffer == rank)
                mbarrier_arrive_expect(full, Shape::kSentDsBytes);
            else
                bulk_send(in_block(buffer, memory_.ds(0) + Shape::kDsPanelBytes), memory_.ds(1), Shape::kSentDsBytes,
                          in_block(buffer, full));
            ring.advance();
        }
        // A block must not end before the other one has read all dS that was sent to it.
        if constexpr (Shape::kPair) {
            if (ring.slot() == rank) ring.advance();
            mbarrier_wait(memory_.empty_ds(ring.slot()), ring.parity() ^ 1);
        }
    }

    // The loads of the next tile's statistics are in flight while the warp waits for the stage to be released. The warp
    // also clears the rows of Q (kLse) or dO that see no key: what they hold may be NaN, which P = 0 would not keep out
    // of the sums over queries.
    template <bool kLse, bool kHides>
    __device__ void prepare() const {
        const int32 lane = threadIdx.x % 32;
        constexpr bool kInBase2 = kLse && !kFromLse;
        const float factor = kLse && !kInBase2 ? -1.0f / params_.softmax_scale : -1.0f;
        QueryStep step = own_.first_step(), own = own_.at(step);
        RingPosition<Shape::kStages> ring;
        if constexpr (kIsPass<Spec> && !kLse) OwnDelta<Spec>::wait();
        float x[4];
        auto place = place_of(own);
        bool clears = load_rows<kLse, kHides>(own, place, lane, x);
        uint32 landed_parity = 0;
#pragma unroll 1
        while (true) {
            const uint32 stage = ring.slot();
            mbarrier_wait(kLse ? memory_.empty_query(stage) : memory_.empty_dout(stage), ring.parity() ^ 1);
            if (lane == 0) load_queries<kLse>(stage, own, place, clears);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (kInBase2) x[i] = common::in_base2(x[i]);
                x[i] = kLse && x[i] == -common::infinity<float>() ? x[i] : times<kLse>(x[i], factor);
            }
            const uint32 statistic = kLse ? memory_.lse(stage) : memory_.delta(stage);
            if constexpr (kAsStep<kLse>) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (query_of<kLse>(lane, i) < kBr) store_statistic(statistic, query_of<kLse>(lane, i), x[i]);
                async_proxy_fence();
            } else {
                if (lane < kBr / 4) store_shared(statistic + lane * 16, x);
            }
            if (kHides && clears) {
                mbarrier_wait(landed<kLse>(), landed_parity);
                landed_parity ^= 1;
                if constexpr (!kLse) mbarrier_wait(memory_.full_query(stage), ring.parity());  // its lse is there
                __syncwarp();                                                                  // and these statistics
                clear_hidden<kLse>(stage, lane);
            }
            mbarrier_arrive(full_of<kLse>(stage));
            advance(step);
            if (!is_valid(step)) break;
            own = own_.at(step);
            place = place_of(own);
            clears = load_rows<kLse, kHides>(own, place, lane, x);
            ring.advance();
        }
        // A block must not end before the other one has released all that it loads for both.
        if (loads_for_both<kLse>()) {
#pragma unroll 1
            for (int i = 0; i < Shape::kStages; ++i) {
                ring.advance();
                const uint32 stage = ring.slot(), empty = kLse ? memory_.empty_query(stage) : memory_.empty_dout(stage);
                mbarrier_wait(empty, ring.parity() ^ 1);
            }
        }
    }

    template <bool kLse>
    __device__ __forceinline__ static float times(float statistic, float factor) {
        if constexpr (kLse && Shape::kStarts) return common::finite_product(statistic, factor);
        return statistic * factor;
    }

    // Loads the statistics of four queries of a tile. With kHides, the result is true if a query of the tile sees no key.
    template <bool kLse, bool kHides, class Place>
    __device__ bool load_rows(const QueryStep& own, const Place& place, int32 lane, float (&x)[4]) const {
        const int64 first = common::first_statistic<Spec>(params_, own_.batch, own.head);
        const float* lse = params_.lse + first;
        bool hides = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int32 query = query_of<kLse>(lane, i), row = position(place, own, query);
            x[i] = kLse ? -common::infinity<float>() : 0.0f;
            if (query < kBr && row < params_.seqlen_q) {
                if constexpr (kLse)
                    x[i] = lse[row];
                else if constexpr (kIsPass<Spec>)
                    x[i] = load_shared<float>(memory_.held() + 4 * row);
                else
                    x[i] = params_.delta[first + row];
                if constexpr (kHides) hides |= (kLse ? x[i] : lse[row]) == -common::infinity<float>();
            }
        }
        return kHides && __any_sync(common::kFullWarp, hides);
    }

    // Stores zeros to the rows of Q (kLse) or dO that see no key, and in the place of their delta: they may hold NaN,
    // which P = 0 would not keep out of sums over queries. Rows beyond the sequence are zero already.
    template <bool kLse>
    __device__ void clear_hidden(uint32 stage, int32 lane) const {
        constexpr uint32 kChunks = Shape::kPanelRowBytes / 16;
#pragma unroll 1
        for (int32 query = lane; query < kBr; query += 32) {
            if (!has_no_key(memory_.lse(stage), query)) continue;
            if constexpr (!kLse && kAsStep<false>)
                store_statistic(memory_.delta(stage), query, 0.0f);
            else if constexpr (!kLse)
                store_shared(memory_.delta(stage) + place_of(query), 0);
            // Lanes begin with different chunks, so that they do not all wait for the same banks.
            const uint32 row = rows_of<kLse>(stage) + query * Shape::kPanelRowBytes;
#pragma unroll 1
            for (uint32 i = 0; i < kChunks * kPanelsOf<kLse>; ++i)
                store_shared(row + i / kChunks * Shape::kQueryPanelBytes + (i + query) % kChunks * 16, 0, 0, 0, 0);
        }
        async_proxy_fence();
    }
    // True if a query's first statistic is -infinity.
    __device__ static bool has_no_key(uint32 lse, int32 query) {
        constexpr uint16 kMinusInfinity = 0xff80;  // a bfloat16
        if constexpr (kAsStep<true>)
            return load_shared<uint16>(lse + query * kStatisticRowBytes) == kMinusInfinity;
        else
            return load_shared<float>(lse + place_of(query)) == -common::infinity<float>();
    }

    // The i-th of the four queries whose statistics a lane prepares.
    template <bool kLse>
    __device__ static int32 query_of(int32 lane, int i) {
        return kAsStep<kLse> ? 32 * i + lane : lane / 4 * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2;
    }
    // The offset of a query's statistic in groups of 16.
    __device__ static int32 place_of(int32 query) {
        return 4 * (query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2);
    }

    const Params &params_, &maps_;  // the sequence's record; the kernel's parameter, where TMA reads its maps
    const Memory memory_;
    const KeyTile<Spec> own_;
};

}  // namespace fa2::sm90
