// Base of the consumers of the kernels that compute dQ or its tangent: the loops over query tiles and their key tiles,
// rows that see no key, and the store of the result. `Own` is the class of the consumer, which has
//
//   load_rows(tile)                          loads the statistics of the lane's two rows
//   hides(i)                                 true if row i of these sees no key
//   first_step(tile, keys, block, masked)    computes the left operands of dQ for the query tile's first key tile
//   step<kMasked>(tile, keys, block)         adds their products to dQ, and computes those for the next key tile
//   issue_dq(), wait_for_dq<kPending>()      the products, the wait for them and the release of K's stage
//   dq_, result()                            the accumulators and the tensor map of the result
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
#include "sm90/backward_dq_shape.cuh"
#include "sm90/query_tile_consumer.cuh"
#include "sm90/store_box.cuh"

namespace fa2::sm90 {

// Ring positions: keys_ of the present key tile's K, values_ of the next key tile's V, queries_ of both Q and dO.
template <class Own, class Spec, class Shape_>
class QueryGradientConsumer : protected QueryTileConsumer<Spec, Shape_, QueryTileMemory<Shape_>> {
  protected:
    using Shape = Shape_;
    using Memory = QueryTileMemory<Shape>;
    using Tiles = QueryTileConsumer<Spec, Shape, Memory>;
    using Tiles::first_row, Tiles::load_array, Tiles::make_positions_uniform, Tiles::output_box, Tiles::score_tile,
        Tiles::wait_for_box;
    using Tiles::group_, Tiles::lane_, Tiles::memory_, Tiles::params_, Tiles::warp_;
    using Tiles::kBc, Tiles::kBr, Tiles::kD, Tiles::kLeftLimit, Tiles::kRightLimit;
    using Tiles::keys_, Tiles::queries_, Tiles::release_key, Tiles::release_value, Tiles::tiles_, Tiles::values_;
    using Element = typename Spec::Element;
    static constexpr int kMaxSkipped = common::kListsTiles<Spec> ? 0 : ceil_div(kBr - kGroupRows, kBc);
    // Three groups under a right limit would deadlock: the middle one may skip key tiles and then need a stage that the
    // first one, which waits for it, has not released.
    static constexpr bool kStagger = Shape::kGroups == 2 || (Shape::kGroups > 2 && !kRightLimit);
    static constexpr int kStartBarrier = Tiles::kOwnBarrier;

    using Scores = QuadFragment<kBc / 8>;
    using Gradient = QuadFragment<kD / 8>;
    using Operand = PackedFragment<Element, kBc / 8>;
    using KeyPosition = RingPosition<Shape::kStages>;

  public:
    __device__ QueryGradientConsumer(const Params& params, const Memory& memory)
        : Tiles(params, memory, __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0) - 1) {}

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
            own().load_rows(tile);
            if constexpr (common::kClearsSkippedDbias<Spec>)
                common::clear_skipped_dbias<Spec>(params_, score_tile(tile, 0), 16, keys.begin * kBc, keys.end * kBc);
            skip(keys);
            int32 block = keys.end - 1;
            own().first_step(tile, keys, block,
                             block >= keys.full_end || (kLeftLimit && block < (kLeftLimit ? keys.full_begin : 0)));
            if (kStagger && tiles_.turn == 1 && group_ > 0)
                barrier_arrive(kStartBarrier + group_ - 1, 2 * kGroupThreads);
            own().dq_.fill(0.0f);
            --block;
            if constexpr (kRightLimit) {
#pragma unroll 1
                for (; block >= keys.full_end; --block) own().template step<true>(tile, keys, block);
            }
#pragma unroll 1
            for (; block >= (kLeftLimit ? keys.full_begin : 0); --block) own().template step<false>(tile, keys, block);
            if constexpr (kLeftLimit) {
#pragma unroll 1
                for (; block >= (kLeftLimit ? keys.begin : 0); --block) own().template step<true>(tile, keys, block);
            }
            own().issue_dq();
            own().template wait_for_dq<0>();
            store(tile);

            tile = next_tile(memory_, tiles_);
            if (tile.key_tiles() == 0) break;
            make_positions_uniform();
        }
        if (lane_ == 0) tma_store_wait();
    }

  protected:
    // True if `block` is the last of the group's key tiles, which are processed downwards.
    __device__ __forceinline__ static bool is_last(const GroupKeys& keys, int32 block) {
        return block == (kLeftLimit ? keys.begin : 0);
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

    __device__ __forceinline__ void release_query() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_query(queries_.slot()));
    }

    // Waits for the query tile's Q. If rows may see no key, it makes them zeros.
    __device__ __forceinline__ void wait_for_query(const TileInSlot& tile) {
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        if (hides_rows(tile)) clear_hidden_rows();
    }

  private:
    __device__ __forceinline__ Own& own() { return static_cast<Own&>(*this); }
    __device__ __forceinline__ const Own& own() const { return static_cast<const Own&>(*this); }

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

    // True if rows may see no key. A sequence without keys has one key tile here.
    __device__ __forceinline__ bool hides_rows(const TileInSlot& tile) const {
        const auto& record = record_of<Spec>(params_, tile);
        return common::may_hide_rows<Spec>(record) || common::lacks_keys<Spec>(record);
    }

    // Stores zeros to this warp's rows of Q, dO and their tangents that see no key: they may hold NaN, which P = 0
    // would not keep out of dQ and of sums over queries.
    __device__ __forceinline__ void clear_hidden_rows() const {
        constexpr int kQueryPanels = Shape::kQueryBytes / Shape::kQueryPanelBytes,
                      kDoutPanels = Shape::kDoutBytes / Shape::kQueryPanelBytes;
        mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (own().hides(i)) {
                const uint32 row = (group_ * kGroupRows + warp_ * 16 + Scores::row(i, lane_)) * kPanelRowBytes;
#pragma unroll 1
                for (uint32 chunk = lane_ % 4; chunk < 8 * max_of(kQueryPanels, kDoutPanels); chunk += 4) {
                    const uint32 at = chunk / 8 * Shape::kQueryPanelBytes + row + chunk % 8 * 16;
                    if (chunk < 8 * kQueryPanels) store_shared(memory_.query(queries_.slot()) + at, 0, 0, 0, 0);
                    if (chunk < 8 * kDoutPanels) store_shared(memory_.dout(queries_.slot()) + at, 0, 0, 0, 0);
                }
            }
        async_proxy_fence();
        barrier_sync(Tiles::kOutputBarrier + group_, kGroupThreads);
    }

    // Stores dQ of this warp's 16 rows. Each warp stores its own boxes by TMA, asynchronously and independently of the
    // other warps. It does not read the tile's slot afterwards, and releases it.
    __device__ __forceinline__ void store(const TileInSlot& tile) {
        const auto box = output_box(memory_.dout(queries_.slot()));
#pragma unroll
        for (int n = 0; n < kD / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) own().dq_.value[n][e] *= params_.softmax_scale;
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
    __device__ __forceinline__ void store_panels(const typename Tiles::Box& box, const TileInSlot& tile) {
        constexpr int kPanelsAtOnce = Shape::kOwnOutput ? Shape::kOutputPanels : Shape::kPanelsV;
        constexpr int kEnd = min_of(kFirst + kPanelsAtOnce, Shape::kPanels);
        write_box<Element>(box.address, box.panel_bytes, own().dq_, lane_, kFirst, kEnd - kFirst);
        const auto rows = query_tma_rows<Spec>(params_, tile.batch());
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
#pragma unroll
            for (int panel = kFirst; panel < kEnd; ++panel)
                rows.store(own().result(), box.address + (panel - kFirst) * box.panel_bytes, panel * kPanelColumns,
                           first_row(tile), tile.head(), tile.batch());
            tma_store_commit();
        }
        if constexpr (kEnd < Shape::kPanels) {
            wait_for_box();
            store_panels<kEnd>(box, tile);
        }
    }
};

}  // namespace fa2::sm90
