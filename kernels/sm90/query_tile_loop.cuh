// Base of the consumers of kernels whose groups need not take turns: the loops over query tiles and their key tiles. `Own`
// is the class of the consumer, which has
//
//   begin_tile(tile, keys)                   loads what belongs to a query tile
//   first_step(tile, keys, block, masked)    computes the left operands of the sums for the query tile's first key tile
//   clear_sums()                             sets the sums over key tiles to zero
//   step<kMasked>(tile, keys, block)         adds products of these operands, and computes those for the next key tile
//   issue_sums(), wait_for_sums<kPending>()  the products of the present operands, which are added to the sums; the wait
//                                            for them, and the release of the stage that they read
//   store(tile)                              stores the results, and releases the query tile's slot
//
// Groups that start together would compute their exponentials at the same time, and leave the tensor cores idle.
// Therefore group g starts when group g + 1 has its first operands (kStagger); nothing synchronises them afterwards.
//
// At the end of a query tile a group has no next product to overlap with, and the tensor cores work for the other
// groups. Apart from their start, groups do not wait for each other; a group can only delay the producer, by stages
// that it has not released. No deadlock is possible: a group consumes K and V strictly in the order in which they are
// loaded, including key tiles that it skips, so that no group can wait for a tile whose load another group prevents.
#pragma once
#include "sm90/multiply_panels.cuh"
#include "sm90/query_tile_consumer.cuh"

namespace fa2::sm90 {

// Ring positions: keys_ of the present key tile's K, values_ of the next key tile's V, queries_ of Q and dO. Groups that
// divide columns have consecutive numbers.
template <class Own, class Spec, class Shape_>
class QueryTileLoop : protected QueryTileConsumer<Spec, Shape_, QueryTileMemory<Shape_>> {
  protected:
    using Shape = Shape_;
    using Memory = QueryTileMemory<Shape>;
    using Tiles = QueryTileConsumer<Spec, Shape, Memory>;
    using Tiles::group_, Tiles::lane_, Tiles::memory_, Tiles::params_;
    using Tiles::kBc, Tiles::kBr, Tiles::kD, Tiles::kLeftLimit, Tiles::kRightLimit;
    using Tiles::keys_, Tiles::queries_, Tiles::release_key, Tiles::release_value, Tiles::tiles_, Tiles::values_;
    using Tiles::make_positions_uniform;
    using Element = typename Spec::Element;
    static constexpr int kMaxSkipped = common::kListsTiles<Spec> ? 0 : ceil_div(kBr - kGroupRows, kBc);
    // Three groups under a right limit would deadlock: the middle one may skip key tiles and then need a stage that the
    // first one, which waits for it, has not released.
    static constexpr bool kStagger =
        Shape::kMayStagger && (Shape::kGroups == 2 || (Shape::kGroups > 2 && !kRightLimit));
    static constexpr int kStartBarrier = Tiles::kOwnBarrier;

    using Scores = QuadFragment<kBc / 8>;
    using Operand = PackedFragment<Element, kBc / 8>;
    using KeyPosition = RingPosition<Shape::kStages>;

  public:
    __device__ QueryTileLoop(const Params& params, const Memory& memory)
        : QueryTileLoop(params, memory, __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0) - 1) {}

    // Inlined, however large the kernel is: its members are registers only then.
    __device__ __forceinline__ void run() {
        const int32 number = Shape::kDividers * group_ + part_;
        if (kStagger && number + 1 < Shape::kGroups) barrier_sync(kStartBarrier + number, 2 * kGroupThreads);
        TileInSlot tile = next_tile(memory_, tiles_);
        if (Spec::kVarlen && tile.key_tiles() == 0) {  // all indices of this block are unused
            if (kStagger && number > 0) barrier_arrive(kStartBarrier + number - 1, 2 * kGroupThreads);
            return;
        }
        while (true) {
            const GroupKeys keys = keys_of_group<Spec>(params_, tile, group_, kMaxSkipped);
            own().begin_tile(tile, keys);
            skip(keys);
            int32 block = keys.end - 1;
            own().first_step(tile, keys, block,
                             block >= keys.full_end || (kLeftLimit && block < (kLeftLimit ? keys.full_begin : 0)));
            if (kStagger && tiles_.turn == 1 && number > 0)
                barrier_arrive(kStartBarrier + number - 1, 2 * kGroupThreads);
            own().clear_sums();
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
            own().issue_sums();
            own().template wait_for_sums<0>();
            own().store(tile);

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
        const uint64 rows = own_rows<kColumns>(query_tile), keys = matrix_descriptor(key_tile, 0);
        wgmma_fence();
        issue_rows<kColumns, false>(x, rows, keys);
        wgmma_commit();
        pin(x);
    }
    // The descriptor of the group's rows of an operand.
    template <int kColumns>
    __device__ __forceinline__ uint64 own_rows(uint32 query_tile) const {
        const uint64 rows = matrix_descriptor(query_tile + group_ * kGroupRows * kPanelRowBytes, 0);
        return kColumns > 192 ? as_if_new(rows) : rows;  // as in the forward's issue_scores
    }
    // Issues a product of operands given by descriptors, without fence and commit. kAdds: x += the product.
    template <int kColumns, bool kAdds>
    __device__ __forceinline__ static void issue_rows(Scores& x, uint64 rows, uint64 keys) {
        multiply_panels<kColumns, Shape::kQueryPanelBytes, Shape::kKeyPanelBytes, kAdds>(x, rows, keys);
    }

    __device__ __forceinline__ Own& own() { return static_cast<Own&>(*this); }
    __device__ __forceinline__ const Own& own() const { return static_cast<const Own&>(*this); }

  private:
    __device__ QueryTileLoop(const Params& params, const Memory& memory, int32 number)
        : Tiles(params, memory, number / Shape::kDividers), part_(number % Shape::kDividers) {}

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

  protected:
    const int32 part_;  // of the columns that groups divide
};

}  // namespace fa2::sm90
