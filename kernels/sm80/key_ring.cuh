// A ring of kStages slots in shared memory, through which a block streams its K and V tiles, and others of the same keys,
// from last to first, with cp.async.
#pragma once
#include "common/tile_lists.cuh"
#include "sm80/smem_tile.cuh"

namespace fa2::sm80 {

// The matrix whose copies come first where K and V alternate in one slot.
enum class Turns { kTogether, kKeysFirst, kValuesFirst };

// The turns of K and V with so many columns: `alternating` where tiles are wide and have one slot.
__host__ __device__ constexpr Turns turns_of(int columns, int stages, Turns alternating) {
    return columns > 256 && stages == 1 ? alternating : Turns::kTogether;
}

// No further tiles.
struct NoOthers {
    static constexpr int kBytes = 0;
    __device__ void load(uint32, int32, int32, int32) const {}
};

// kTurns: if K and V alternate, the copy of one starts where the other is there: the one slot is then filled beside the
// products, at the cost of one more barrier.
// Tiles: a range of key tiles (common/tile_lists.cuh). The ring's tiles are numbered by their positions in it.
template <class Tiles, class Element, int kBc, int kStages, int kThreads, int kHeadDim, int kHeadDimV,
          class Others = NoOthers, Turns kTurns = Turns::kTogether>
struct KeyRing {
    using KTile = SmemTile<kBc, padded_head_dim(kHeadDim)>;
    using VTile = SmemTile<kBc, padded_head_dim(kHeadDimV)>;
    static constexpr bool kAlternates = kTurns != Turns::kTogether;
    static constexpr int kOthers = KTile::kBytes + VTile::kBytes;
    static constexpr int kSlotBytes = kOthers + Others::kBytes;  // K, V, then the others
    static constexpr int kBytes = kStages * kSlotBytes;
    static_assert(!kAlternates || (kStages == 1 && Others::kBytes == 0));

    uint32 smem;
    const Element *k, *v;
    int64 k_stride, v_stride;
    int32 seqlen_k, thread;
    Tiles tiles;
    Others others;

    // `k` and `v`: a head of them.
    template <class Record>
    __device__ __forceinline__ KeyRing(uint32 slots, const Element* k, const Element* v, const Record& params,
                                       const Tiles& tiles, int32 thread, const Others& others = {})
        : smem(slots),
          k(k),
          v(v),
          k_stride(params.k_strides.row),
          v_stride(params.v_strides.row),
          seqlen_k(params.seqlen_k),
          thread(thread),
          tiles(tiles),
          others(others) {}

    // Starts the copies of the first tiles. Copies that the caller committed before have landed by the first acquire.
    __device__ void start() const {
#pragma unroll
        for (int s = 1; s < kStages; ++s) load(tiles.end - s);
        if constexpr (kAlternates) load_one<kTurns == Turns::kKeysFirst>(tiles.end - 1);
    }

    // Waits for a tile and returns its slot. All warps of the block call this once per tile. After the barrier no warp
    // reads the slot of position + 1 any more, so it is refilled with position - (kStages - 1).
    __device__ uint32 acquire(int32 position) const {
        if constexpr (kAlternates) {
            cp_async_wait<0>();
        } else if constexpr (kStages == 1) {
            __syncthreads();
            load(position);
            cp_async_wait<0>();
        } else {
            cp_async_wait<kStages - 2>();
        }
        __syncthreads();
        if constexpr (kStages > 1) load(position - (kStages - 1));
        if constexpr (kAlternates) load_one<kTurns != Turns::kKeysFirst>(position);
        return slot(position);
    }
    // Waits for the second matrix of the tile, where they alternate. No warp reads the first one any more.
    __device__ void acquire_second(int32 position) const {
        if constexpr (kAlternates) {
            cp_async_wait<0>();
            __syncthreads();
            load_one<kTurns == Turns::kKeysFirst>(position - 1);
        }
    }

  private:
    __device__ uint32 slot(int32 position) const { return smem + position % kStages * kSlotBytes; }

    __device__ void load(int32 position) const {
        if (position >= tiles.begin) {
            int32 tile = position;
            if constexpr (Tiles::kListed) tile = tiles.at(position);
            load_tile_async<KTile, kThreads, kHeadDim>(slot(position), k, k_stride, tile * kBc, seqlen_k, thread);
            load_tile_async<VTile, kThreads, kHeadDimV>(slot(position) + KTile::kBytes, v, v_stride, tile * kBc,
                                                        seqlen_k, thread);
            others.load(slot(position) + kOthers, tile * kBc, seqlen_k, thread);
        }
        cp_async_commit();
    }
    // The same for K or V alone.
    template <bool kOfKeys>
    __device__ void load_one(int32 position) const {
        if (position >= tiles.begin) {
            int32 tile = position;
            if constexpr (Tiles::kListed) tile = tiles.at(position);
            if constexpr (kOfKeys)
                load_tile_async<KTile, kThreads, kHeadDim>(smem, k, k_stride, tile * kBc, seqlen_k, thread);
            else
                load_tile_async<VTile, kThreads, kHeadDimV>(smem + KTile::kBytes, v, v_stride, tile * kBc, seqlen_k,
                                                            thread);
        }
        cp_async_commit();
    }
};

}  // namespace fa2::sm80
