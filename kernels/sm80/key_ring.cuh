// A ring of kStages slots in shared memory, through which a block streams its K and V tiles, from last to first, with
// cp.async.
#pragma once
#include "sm80/smem_tile.cuh"

namespace fa2::sm80 {

template <class Element, class KeyTile, int kStages, int kThreads, int kHeadDim>
struct KeyRing {
    static constexpr int kSlotBytes = 2 * KeyTile::kBytes;  // K, then V
    static constexpr int kBytes = kStages * kSlotBytes;

    uint32 smem;
    const Element *k, *v;
    int64 k_stride, v_stride;
    int32 seqlen_k, begin, end, thread;

    // Starts the copies of the first tiles. Copies that the caller committed before have landed by the first acquire.
    __device__ void start() const {
#pragma unroll
        for (int s = 1; s < kStages; ++s) load(end - s);
    }

    // Waits for a tile and returns its slot. All warps of the block call this once per tile. After the barrier no warp
    // reads the slot of tile + 1 any more, so it is refilled with tile - (kStages - 1).
    __device__ uint32 acquire(int32 tile) const {
        if constexpr (kStages == 1) {
            __syncthreads();
            load(tile);
            cp_async_wait<0>();
        } else {
            cp_async_wait<kStages - 2>();
        }
        __syncthreads();
        if constexpr (kStages > 1) load(tile - (kStages - 1));
        return slot(tile);
    }

  private:
    __device__ uint32 slot(int32 tile) const { return smem + tile % kStages * kSlotBytes; }

    __device__ void load(int32 tile) const {
        if (tile >= begin) {
            load_tile_async<KeyTile, kThreads, kHeadDim>(slot(tile), k, k_stride, tile * KeyTile::kRows, seqlen_k,
                                                         thread);
            load_tile_async<KeyTile, kThreads, kHeadDim>(slot(tile) + KeyTile::kBytes, v, v_stride,
                                                         tile * KeyTile::kRows, seqlen_k, thread);
        }
        cp_async_commit();
    }
};

}  // namespace fa2::sm80
