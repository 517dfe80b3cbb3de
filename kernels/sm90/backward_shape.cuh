// For the backward by key tiles: the sizes, shared-memory map, barriers and order of steps that producer and consumers
// share.
#pragma once
#include "common/held_array.cuh"
#include "common/shares.cuh"
#include "common/start_from_bias.cuh"
#include "common/tile_lists.cuh"
#include "sm90/dq_workspace.cuh"
#include "sm90/boxes.cuh"
#include "sm90/own_delta.cuh"
#include "sm90/layout.cuh"
#include "sm90/statistic.cuh"

namespace fa2::sm90 {

// Beyond head_dim 128 a group's registers hold dK or dV of 64 keys, not both.
template <class Spec>
inline constexpr bool kDividesGradients = max_of(Spec::kHeadDim, Spec::kHeadDimV) > 128;
// A pair of blocks, a cluster, has a key tile of twice the keys of a block.
template <class Spec>
inline constexpr int kBlocksOfTile = kDividesGradients<Spec> && Spec::kBc == 2 * kGroupRows ? 2 : 1;
template <class Spec>
inline constexpr int kKeysOfBlock = Spec::kBc / kBlocksOfTile<Spec>;

template <class Spec, bool kDq>
struct BackwardShape {
    static constexpr bool kWithDq = kDq;
    static constexpr int kBr = Spec::kBr, kBc = kKeysOfBlock<Spec>, kStages = Spec::kStages;
    static constexpr int kBlocks = kBlocksOfTile<Spec>;
    static constexpr bool kPair = kBlocks == 2;
    static constexpr bool kMulticast = kPair;
    // The block of a pair that loads Q or dO for both.
    template <bool kQ>
    static constexpr uint32 kLoader = kQ ? 0 : 1;
    static constexpr int kD = round_up(Spec::kHeadDim, 16), kDv = round_up(Spec::kHeadDimV, 16);
    // Two blocks of a multiprocessor hide each other's latencies. A group of theirs has too few registers for all queries
    // of a tile: it takes them in two parts. Their shared memory has no room for columns that are not there.
    static constexpr int kParts = Spec::kBlocksPerSm, kPartQueries = kBr / kParts;
    static constexpr int kPanelColumns = kParts == 1 ? sm90::kPanelColumns : 32, kPanelRowBytes = 2 * kPanelColumns;
    static constexpr int kPanels = ceil_div(kD, kPanelColumns), kPanelsV = ceil_div(kDv, kPanelColumns);
    using Shares = common::ShareWorkspace<Spec::kBc, kD, kDv, kDq>;
    static constexpr bool kDivided = kDividesGradients<Spec>;
    static constexpr int kGroups = 2;  // consumer warp groups
    static_assert(Spec::kWarps == 4 * (kGroups + 1) && kStages >= 2);
    static_assert(kBc == (kDivided ? 1 : kGroups) * kGroupRows && kBr % 16 == 0 && kBr <= 128);
    static_assert(kParts == 1 || (kParts == 2 && kBr == kGroupRows && max_of(kD, kDv) <= kPanelColumns));
    // The groups split dQ by columns: by panels, or in halves if there is only one. If it has twice the rows that a
    // group multiplies, they split it by rows, and its transpose by its rows, which are columns of K.
    static constexpr bool kDqByRows = kBr == 2 * kGroupRows;
    static constexpr bool kDqTransposed = DqWorkspace<kBr, kD>::kTransposed;
    static constexpr int kFirstDqColumns = kD > 128                  ? 128
                                           : kD > kPanelColumns      ? kPanelColumns
                                           : common::kHasBoxes<Spec> ? round_up(kD / 2, 16)
                                                                     : kD / 2;
    static_assert(kDq || !kPair);
    static_assert(!kDq || kBr == kGroupRows ||
                  (!kDivided && (kDqByRows ? kPanels == 1 : kDqTransposed && kPanels == 2)));

    // -------------------------------------------------------------------------------------------------- shared memory
    static constexpr int kKeyPanelBytes = kBc * kPanelRowBytes;
    static constexpr int kKeyBytes = kPanels * kKeyPanelBytes, kValueBytes = kPanelsV * kKeyPanelBytes;
    static constexpr int kQueryPanelBytes = kBr * kPanelRowBytes;
    static constexpr int kQueryBytes = kPanels * kQueryPanelBytes, kDoutBytes = kPanelsV * kQueryPanelBytes;
    static constexpr int kDsPanelBytes = kBr * sm90::kPanelRowBytes;  // a panel has 64 keys
    // A block of a pair computes the dQ of every second step, for the keys of both blocks. Of its two buffers of dS, one
    // is for such steps, with a panel of the other block's keys; what is in the other one is sent to that block.
    static constexpr int kDsBytes = kDq ? Spec::kBc / kGroupRows * kDsPanelBytes : 0;
    static constexpr int kSentDsBytes = kPair ? kDsPanelBytes : kDsBytes;
    static constexpr int kPBytes = kDivided ? kBr * kBc * 2 : 0;
    // Statistics enter a product as a k-step. They initialise its accumulators instead where shared memory has no room
    // (kDivided), or where wgmma leaves shared-memory bandwidth unused (no dQ, more than 64 columns).
    static constexpr bool kStatisticsAsStep = !kDivided && (kDq || max_of(kD, kDv) <= 64);
    static constexpr int kStatisticBytes = kBr * (kStatisticsAsStep ? kStatisticRowBytes : 4);
    static constexpr int kBarrierBytes = 8 * (2 + 4 * kStages + 12);
    static constexpr int kWithoutArray =
        kAlignment + kBlocks * kKeyBytes + kValueBytes + kStages * (kQueryBytes + kDoutBytes + 2 * kStatisticBytes) +
        kDsBytes + kSentDsBytes + 2 * kPBytes + (kStatisticsAsStep ? kOnesBytes : 0) + kBarrierBytes;
    // A score array is held by each warp for itself, or loaded by the producer for a group if products start from it.
    using AfterStart = common::AfterStart<Spec>;
    static constexpr bool kStarts = common::kStartsFromBias<Spec>;
    using Start = common::BiasOfKeys<typename Spec::Element, kBr, kGroupRows>;
    static constexpr int kStartGroups = kBc / kGroupRows, kStartBytes = Start::Tile::kBytes;
    static constexpr int kHeldBytes =
        kStarts ? kStartGroups * (kStartBytes + 2 * 8) : kBc / 16 * common::HeldOfKeys<Spec, kBr>::Tile::kBytes;
    static constexpr int kMostBytes = most_shared_bytes(Spec::kBlocksPerSm);
    static constexpr bool kHasRoom =
        common::kMayHoldArray<Spec> && (kParts == 1 || kStarts) && kWithoutArray + kHeldBytes <= kMostBytes;
    static constexpr bool kHoldsArray = kHasRoom && !kStarts, kHoldsStart = kHasRoom && kStarts;
    static constexpr int kSharedBytes = kWithoutArray + (kHasRoom ? kHeldBytes : 0);
    static_assert(kIsPass<Spec> || kSharedBytes == Spec::kSharedBytes);

    // ------------------------------------------------------------------------------------------------------ registers
    // The producer that finds boxes of tokens, or copies a score array, needs more.
    static constexpr bool kProducesMore = kHoldsStart || common::kHasBoxes<Spec>;
    static constexpr int kAtEntry = registers_at_entry(Spec::kWarps * Spec::kBlocksPerSm);
    static constexpr int kProducerRegisters = kProducesMore ? 40 : 24,
                         kConsumerRegisters = (kAtEntry * (kGroups + 1) - kProducerRegisters) / kGroups / 8 * 8;
    static_assert(registers_suffice(kAtEntry, kGroups, kProducerRegisters, kConsumerRegisters));
};

using common::QueryStep;

// The first step of a share, and the one after its last.
template <bool kSplit>
struct StepLimits {};
template <>
struct StepLimits<true> {
    QueryStep first, end;
};

// The work of a block: dK and dV of a key tile, from the query tiles of all heads that share its K/V head, or from a
// share of these steps. The key tile has at least one step: without a left limit the last query sees every key; with
// one, a key tile that no query sees gets one query tile, fully masked. A share may have none. In a box of tokens, keys
// count from the first of the box.
template <class Spec>
struct KeyTile : TileRows<Spec, true> {
    int32 first_key, head, batch, first_query_head;
    common::QueryTiles<Spec> tiles;
    StepLimits<Spec::kSplit> limits;

    __device__ __forceinline__ QueryStep first_step() const {
        if constexpr (Spec::kSplit)
            return limits.first;
        else
            return {first_query_head, tiles.begin};
    }
    // The head and the query tile of a step.
    __device__ __forceinline__ QueryStep at(const QueryStep& step) const { return tiles.at(step); }
    __device__ __forceinline__ bool has(const QueryStep& step, const Params& params) const {
        if constexpr (Spec::kSplit)
            return step.head < limits.end.head || (step.head == limits.end.head && step.tile < limits.end.tile);
        else
            return step.head < first_query_head + tiles.num_heads(params.heads_per_group);
    }

    // Of boxes of tokens: the step before another one, which may be that behind the last.
    __device__ __forceinline__ QueryStep step_before(const QueryStep& step) const {
        const bool is_first = step.tile == tiles.begin;
        return {step.head - is_first, (is_first ? tiles.end : step.tile) - 1};
    }
    __device__ __forceinline__ QueryStep step_after_last(const Params& params) const {
        if constexpr (common::kHasBoxes<Spec>) return {end_head(params), tiles.begin};
        return {};
    }

    // The heads of the steps end here, and the query tiles of a head begin and end there.
    __device__ __forceinline__ int32 end_head(const Params& params) const {
        if constexpr (Spec::kSplit)
            return limits.end.head + (limits.end.tile > tiles.begin);
        else
            return first_query_head + tiles.num_heads(params.heads_per_group);
    }
    __device__ __forceinline__ int32 begin_of(int32 head) const {
        return Spec::kSplit && head == first_step().head ? first_step().tile : tiles.begin;
    }
    __device__ __forceinline__ int32 end_of(int32 head) const {
        if constexpr (Spec::kSplit)
            return head == limits.end.head ? limits.end.tile : tiles.end;
        else
            return tiles.end;
    }
};

template <class Spec, class Record>
__device__ __forceinline__ void limit_steps(KeyTile<Spec>& tile, const Record& params, int32 share) {
    if constexpr (Spec::kSplit) {
        const int32 of_head = tile.tiles.end - tile.tiles.begin;
        const auto steps =
            common::steps_of_share(of_head * tile.tiles.num_heads(params.heads_per_group), params.num_splits, share);
        const auto step = [&](int32 index) {
            const int32 heads = of_head > 0 ? index / of_head : 0;
            return QueryStep{tile.first_query_head + heads, tile.tiles.begin + index - heads * of_head};
        };
        tile.limits = {step(steps.begin), step(steps.end)};
    }
}

// The block's number in a pair, and the place of its key tile in the schedule.
template <class Spec>
__device__ __forceinline__ uint32 rank_in_pair() {
    if constexpr (kBlocksOfTile<Spec> == 2) return rank_in_cluster();
    return 0;
}
template <class Spec>
__device__ __forceinline__ int32 tile_index() {
    return blockIdx.x / kBlocksOfTile<Spec>;
}

template <class Spec>
__device__ __forceinline__ KeyTile<Spec> key_tile(const Params& params) {
    auto where = common::scheduled_tile<Spec, true>(params, tile_index<Spec>());
    const int32 share = common::take_share<Spec>(where, params);
    KeyTile<Spec> tile = {{},
                          where.tile * Spec::kBc + static_cast<int32>(rank_in_pair<Spec>()) * kKeysOfBlock<Spec>,
                          where.head,
                          where.batch,
                          where.head * params.heads_per_group,
                          common::query_tiles<Spec>(params, where)};
    using Rows = TileRows<Spec, true>;
    if constexpr (common::kHasBoxes<Spec>) {
        static_cast<Rows&>(tile) = rows_of_boxes<Spec, true>(params, pack(tile.tiles.boxes));
        tile.first_key = 0;
    } else {
        static_cast<Rows&>(tile) = {query_tma_rows<Spec>(params, where.batch), key_tma_rows<Spec>(params, where.batch)};
    }
    if constexpr (common::kLeftLimit<Spec>) tile.tiles.end = max_of(tile.tiles.end, 1);
    limit_steps<Spec>(tile, params, share);
    return tile;
}

// True if the block has no step. If its share is empty, the workspace gets zeros; if its list is, the plan has cleared dK
// and dV. Unused tile indices have no work, and clear_backward.cu zeroes dK and dV of a sequence without queries.
template <class Spec, class Shares, class Record>
__device__ bool has_no_step(const Record& params, int32 tile) {
    if (Spec::kVarlen &&
        (!common::has_tile(tile, Spec::kBc, params.seqlen_k) || (!Spec::kSplit && params.seqlen_q == 0)))
        return true;
    if constexpr (Spec::kSplit) {
        const auto own = key_tile<Spec>(params);
        if (params.seqlen_q > 0 && own.has(own.first_step(), params)) return false;
        Shares::put_zeros(Shares::template of_block<Spec>(params, tile_index<Spec>()));
        return true;
    }
    if constexpr (common::kListsTiles<Spec>) return key_tile<Spec>(params).tiles.end == 0;
    return false;
}

// Shared-memory addresses of operands, statistics and barriers.
template <class Shape>
struct BackwardMemory {
    uint32 base;

    __device__ explicit BackwardMemory(const char* dynamic_smem)
        : base((shared_address(dynamic_smem) + kAlignment - 1) & ~(kAlignment - 1u)) {}

    __device__ uint32 key() const { return base; }
    __device__ uint32 value() const { return key() + Shape::kBlocks * Shape::kKeyBytes; }
    __device__ uint32 query(uint32 stage) const { return value() + Shape::kValueBytes + stage * Shape::kQueryBytes; }
    __device__ uint32 dout(uint32 stage) const { return query(Shape::kStages) + stage * Shape::kDoutBytes; }
    __device__ uint32 ds(uint32 buffer) const { return dout(Shape::kStages) + buffer * Shape::kDsBytes; }
    __device__ uint32 p(uint32 buffer) const { return ds(1) + Shape::kSentDsBytes + buffer * Shape::kPBytes; }
    __device__ uint32 lse(uint32 stage) const { return p(2) + stage * Shape::kStatisticBytes; }
    __device__ uint32 delta(uint32 stage) const { return lse(Shape::kStages) + stage * Shape::kStatisticBytes; }
    __device__ uint32 ones() const { return delta(Shape::kStages); }
    __device__ uint32 barrier(uint32 index) const {
        return ones() + (Shape::kStatisticsAsStep ? kOnesBytes : 0) + 8 * index;
    }
    __device__ uint32 held() const { return barrier(0) + Shape::kBarrierBytes; }
    // From these the products of a group start.
    __device__ uint32 start(uint32 group) const { return held() + group * Shape::kStartBytes; }
    __device__ uint32 full_start(uint32 group) const { return start(Shape::kStartGroups) + 16 * group; }
    __device__ uint32 empty_start(uint32 group) const { return full_start(group) + 8; }
    // Full: the data are complete and visible to their readers. Empty: all warps that read them have finished. Landed:
    // TMA has written a tile of Q or dO with hidden rows, which have not been cleared yet; others are full then. Written:
    // the consumers have written dS, but it has not been fenced yet.
    __device__ uint32 full_key() const { return barrier(0); }
    __device__ uint32 full_value() const { return barrier(1); }
    __device__ uint32 full_query(uint32 stage) const { return barrier(2 + stage); }
    __device__ uint32 empty_query(uint32 stage) const { return barrier(2 + Shape::kStages + stage); }
    __device__ uint32 full_dout(uint32 stage) const { return barrier(2 + 2 * Shape::kStages + stage); }
    __device__ uint32 empty_dout(uint32 stage) const { return barrier(2 + 3 * Shape::kStages + stage); }
    __device__ uint32 full_ds(uint32 buffer) const { return barrier(2 + 4 * Shape::kStages + buffer); }
    __device__ uint32 empty_ds(uint32 buffer) const { return barrier(4 + 4 * Shape::kStages + buffer); }
    __device__ uint32 full_p(uint32 buffer) const { return barrier(6 + 4 * Shape::kStages + buffer); }
    __device__ uint32 empty_p(uint32 buffer) const { return barrier(8 + 4 * Shape::kStages + buffer); }
    __device__ uint32 written_ds(uint32 buffer) const { return barrier(10 + 4 * Shape::kStages + buffer); }
    __device__ uint32 landed_query() const { return barrier(12 + 4 * Shape::kStages); }
    __device__ uint32 landed_dout() const { return barrier(13 + 4 * Shape::kStages); }

    __device__ void init_barriers(uint32 rank) const {
        constexpr uint32 kWarpSize = 32, kWarpsOfGroup = 4, kConsumerWarps = Shape::kGroups * kWarpsOfGroup;
        mbarrier_init(full_key(), 1);
        mbarrier_init(full_value(), 1);
        mbarrier_init(landed_query(), 1);
        mbarrier_init(landed_dout(), 1);
        for (uint32 i = 0; i < Shape::kStages; ++i) {
            mbarrier_init(full_query(i), 1 + kWarpSize);  // the thread that issues TMA, and the lanes of the statistic
            mbarrier_init(full_dout(i), 1 + kWarpSize);
            mbarrier_init(empty_query(i), readers<true>(rank) * kConsumerWarps);
            mbarrier_init(empty_dout(i), readers<false>(rank) * kConsumerWarps);
        }
        for (uint32 i = 0; i < 2; ++i) {
            mbarrier_init(written_ds(i), Shape::kDivided ? kWarpsOfGroup : kConsumerWarps);
            mbarrier_init(full_ds(i), 1);
            mbarrier_init(empty_ds(i), kConsumerWarps);
            mbarrier_init(full_p(i), kWarpsOfGroup);
            mbarrier_init(empty_p(i), kWarpsOfGroup);
        }
        if constexpr (Shape::kHoldsStart)
            for (uint32 group = 0; group < Shape::kStartGroups; ++group) {
                mbarrier_init(full_start(group), kWarpSize);
                mbarrier_init(empty_start(group), kWarpsOfGroup);
            }
        mbarrier_init_fence();
    }
    // The blocks whose warps release the stages that this block fills.
    template <bool kQ>
    __device__ static uint32 readers(uint32 rank) {
        return Shape::kMulticast && rank == Shape::template kLoader<kQ> ? 2 : 1;
    }
};

}  // namespace fa2::sm90
