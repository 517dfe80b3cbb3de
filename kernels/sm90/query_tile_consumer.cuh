// Base of the consumers of the kernels whose blocks own query tiles: positions in the rings, the release of stages to
// the producer, the product that sums over keys, and the box in shared memory from which TMA stores a result.
#pragma once
#include "common/mask_function.cuh"
#include "common/neighborhood.cuh"
#include "sm90/query_tile_shape.cuh"
#include "sm90/wgmma.cuh.j2"

namespace fa2::sm90 {

template <class Spec, class Shape, class Memory>
class QueryTileConsumer {
  protected:
    static constexpr bool kLeftLimit = common::kLeftLimit<Spec>, kRightLimit = common::kRightLimit<Spec>;
    static constexpr int kBr = Shape::kBr, kBc = Shape::kBc, kD = Shape::kD;
    static constexpr int kPanelRowBytes = Shape::kPanelRowBytes;
    // Named barriers, one per group for each use: first those of the derived class, then those for the output.
    static constexpr int kOwnBarrier = 1, kOutputBarrier = kOwnBarrier + Shape::kGroups;

    __device__ QueryTileConsumer(const Params& params, const Memory& memory, int32 group)
        : params_(params), memory_(memory), group_(group), warp_(threadIdx.x / 32 % 4), lane_(threadIdx.x % 32) {}

    // Groups have rows of their own, or a sequence each, of which the last one of a series may stand for others.
    static constexpr bool kHaveRows = Shape::kSequences == 1;
    __device__ __forceinline__ int32 row_group() const { return kHaveRows ? group_ : 0; }
    __device__ __forceinline__ int32 batch(const TileInSlot& tile) const {
        return tile.batch() + (kHaveRows ? 0 : min_of(group_, tile.share()));
    }
    __device__ __forceinline__ bool exists(const TileInSlot& tile) const { return kHaveRows || group_ <= tile.share(); }
    // The first of this warp's 16 rows; in a box, counted from its first.
    __device__ __forceinline__ int32 first_row(const TileInSlot& tile) const {
        if constexpr (common::kHasBoxes<Spec>) return group_ * kGroupRows + warp_ * 16;
        return tile.first_row() + row_group() * kGroupRows + warp_ * 16;
    }
    // Where the tile's rows are in memory.
    __device__ __forceinline__ auto rows_of(const TileInSlot& tile, int32 batch) const {
        if constexpr (common::kHasBoxes<Spec>)
            return rows_of_boxes<Spec, false>(params_, tile.boxes()).queries;
        else
            return query_tma_rows<Spec>(params_, batch);
    }

    // This warp's scores of key tile `block` of GroupKeys.
    __device__ __forceinline__ common::ScoreTile score_tile(const TileInSlot& tile, int32 block) const {
        return score_tile_of<Spec>(params_, tile, batch(tile), row_group() * kGroupRows + warp_ * 16, block, lane_);
    }

    // The terms of these scores that depend on the distance. The tile's slot is not read if there are none.
    __device__ __forceinline__ common::QuadDistances<kBc / 8, false, float> distances_of(const TileInSlot& tile,
                                                                                         int32 block) const {
        if constexpr (common::kHasDistanceTerms)
            return {common::score_args_of(params_), score_tile(tile, block)};
        else
            return {};
    }

    using Held = common::HeldOfQueries<Spec, kBc>;
    __device__ __forceinline__ uint32 held_address(int32 block) const {
        return memory_.held() +
               ((row_group() * 4 + warp_) * Shape::kHeldTiles + (Shape::kKeepsArray ? block : 0)) * Held::Tile::kBytes;
    }
    // Starts to load the score array of this warp's scores of key tile `block`.
    __device__ __forceinline__ void load_array(const TileInSlot& tile, int32 block) const {
        if constexpr (Shape::kKeepsArray) {
            if (Held::Tile::takes(params_))
                Held::Tile::load(held_address(block), params_, score_tile(tile, block));
            else
                Held::Tile::load_elements(held_address(block), params_, score_tile(tile, block));
        } else if constexpr (Shape::kHoldsArray) {
            if (Held::Tile::takes(params_))
                Held::Tile::load(held_address(block), record_of<Spec>(params_, tile), score_tile(tile, block));
        }
    }
    // Calls `Consumer::use_array` with the array that has been loaded, or with arrays that are to be read in global
    // memory. Then loads that of the next key tile.
    template <class Consumer>
    __device__ __forceinline__ static void with_array(Consumer& own, const TileInSlot& tile, int32 block, bool masked,
                                                      bool is_last) {
        if constexpr (Shape::kKeepsArray) {
            own.use_array(Held(own.held_address(block), own.lane_), tile, block, masked);
            return;
        } else if constexpr (Shape::kHoldsArray) {
            if (Held::Tile::takes(own.params_)) {
                Held::Tile::wait(own.held_address(block), own.lane_);
                own.use_array(Held(own.held_address(block), own.lane_), tile, block, masked);
                __syncwarp();  // all lanes have read it
                if (!is_last) own.load_array(tile, block - 1);
                return;
            }
        }
        if constexpr (!Shape::kKeepsArray) own.use_array(common::ArraysInMemory{}, tile, block, masked);
    }

    template <class Scores>
    __device__ __forceinline__ void mask(Scores& scores, const TileInSlot& tile, int32 block) const {
        if constexpr (common::kMasksMost<Spec>) {
            mask(scores, tile, tile_mask(tile, block));
        } else {  // reads neither batch nor head from the slot
            if constexpr (Spec::kSplit) block += tile.first_key_tile();
            common::mask_scores(scores, common::mask_of<Spec>(record_of<Spec>(params_, tile)),
                                {first_row(tile), block * kBc, lane_}, -common::infinity<float>());
        }
    }
    // The mask of a key tile, where most have one.
    __device__ __forceinline__ auto tile_mask(const TileInSlot& tile, int32 block) const {
        using Scores = QuadFragment<kBc / 8>;
        if constexpr (common::kHasBoxes<Spec>)
            return common::HiddenByWindows<false, Spec, Scores>(params_, unpack(tile.boxes()), block, first_row(tile),
                                                                lane_);
        else
            return common::TileMask<false, Spec, Scores, float>(params_, score_tile(tile, block));
    }
    template <class Scores, class TileMask>
    __device__ __forceinline__ void mask(Scores& scores, const TileInSlot& tile, const TileMask& of_tile) const {
        of_tile.hide(scores, common::mask_of<Spec>(record_of<Spec>(params_, tile)), -common::infinity<float>());
    }

    __device__ __forceinline__ void release_key() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_key(keys_.slot()));
        keys_.advance();
    }
    __device__ __forceinline__ void release_value() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_value(values_.slot()));
        values_.advance();
    }

    // The ring positions are equal in all lanes, but after the divergent code of a store the compiler does not know it
    // any more and would compute every descriptor one lane at a time.
    __device__ __forceinline__ void make_positions_uniform() {
        keys_.turn = __shfl_sync(common::kFullWarp, keys_.turn, 0);
        values_.turn = __shfl_sync(common::kFullWarp, values_.turn, 0);
        queries_.turn = __shfl_sync(common::kFullWarp, queries_.turn, 0);
        tiles_.turn = __shfl_sync(common::kFullWarp, tiles_.turn, 0);
    }

    // Issues x += p rows (O += P V or dQ += dS K); `rows` is the MN-major descriptor of the key tile.
    template <class Output, class Operand>
    __device__ __forceinline__ static void multiply_keys(Output& x, const Operand& p, uint64 rows) {
        add_keys(x, p, rows);
        wgmma_commit();
        pin(x);
    }
    // The same without the end of a group of products.
    template <class Output, class Operand>
    __device__ __forceinline__ static void add_keys(Output& x, const Operand& p, uint64 rows) {
#pragma unroll
        for (int s = 0; s < kBc / 16; ++s) wgmma_output(x, p.k16(s), rows + along_rows<kPanelRowBytes>(s));
    }

    // The memory to which this warp writes its 16 rows of the result, one box per panel: its part of the output buffer,
    // or else its rows of the query tile's operand at `operand`. Waits until the earlier readers (TMA stores of the
    // last result, the group's wgmmas) have finished.
    struct Box {
        uint32 address, panel_bytes;
    };
    __device__ __forceinline__ Box output_box(uint32 operand) const {
        if constexpr (Shape::kOutputPanels > 0) {
            constexpr uint32 kPanelBytes = 16 * kPanelRowBytes;
            const uint32 address = memory_.output() + (group_ * 4 + warp_) * Shape::kOutputPanels * kPanelBytes;
            wait_for_box();
            return {address, kPanelBytes};
        } else {
            const uint32 address = operand + group_ * Shape::kGroupBytes + warp_ * 16 * kPanelRowBytes;
            barrier_sync(kOutputBarrier + group_, kGroupThreads);  // all warps of the group have finished reading
            return {address, Shape::kQueryPanelBytes};
        }
    }

    // Waits until this warp's stores have read its box.
    __device__ __forceinline__ void wait_for_box() const {
        if (lane_ == 0) tma_store_wait_read();
        __syncwarp();
    }

    const Params& params_;
    const Memory memory_;
    const int32 group_, warp_, lane_;
    RingPosition<Shape::kQueryBuffers> queries_;
    RingPosition<Shape::kStages> keys_;
    RingPosition<Shape::kValueStages> values_;
    RingPosition<kTileSlots> tiles_;
};

}  // namespace fa2::sm90
