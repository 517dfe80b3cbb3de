// A warp's tile of a mask in shared memory, a bit for each element.
//
// Loads of a mask's bytes in the layout of the accumulators take as many instructions as its elements are pairs, twice
// as many for S^T, whose pairs are not neighbours in memory, and their latency is exposed. Instead, a warp copies its
// tile by cp.async one step ahead, in chunks of 16 keys (16 bytes). When the tile has arrived, each lane packs the
// chunks that it copied itself into bits, so that the warp needs only to see the bits. Two loads then bring the
// elements of four accumulators.
//
// Masks whose rows are not contiguous or do not begin at 16-byte boundaries are read in global memory
// (score_arrays.cuh), and so are those for which a block's shared memory has no room (kHoldsArray).
#pragma once
#include "common/ptx.cuh"
#include "common/score_tile.cuh"

namespace fa2::common {

// True if a kernel copies the mask to shared memory where that has room for it. With other features of scores, registers
// do not suffice for both ways to read a mask.
template <class Spec>
inline constexpr bool kMayHoldMask = Spec::kMask && Spec::kScoreFeatures == 1;

// Chunk query * kChunks + chunk has 16 bytes, and 2 bytes for its bits, the lowest for the first key. All bytes come
// first, then all bits.
template <int kQueries, int kKeys>
struct MaskTile {
    static_assert(kQueries % 16 == 0 && kKeys % 16 == 0);
    static constexpr int kChunks = kKeys / 16;
    static constexpr int kBits = kQueries * kKeys;  // where they begin
    static constexpr int kBytes = kBits + kBits / 8;

    // True if all rows of the mask are contiguous and begin at 16-byte boundaries, so that chunks can be copied.
    template <class Record>
    __device__ __forceinline__ static bool takes(const Record& params) {
        const auto& strides = params.mask_strides;
        const uint64 bytes = reinterpret_cast<uint64>(params.mask) | strides.batch_bits() | strides.head | strides.row;
        return strides.column == 1 && bytes % 16 == 0;
    }

    // Starts to copy the tile at `first` into `smem`. All lanes must have finished reading what is there. Keys past the
    // end are hidden, and rows past the end are clamped to the last one; the results there are not used. The loop is
    // not unrolled because it runs while registers hold accumulators.
    template <class Record>
    __device__ __forceinline__ static void load(uint32 smem, const Record& params, const ScoreTile& first) {
        const auto [first_query, first_key, lane] = first.position;
        const int32 last_row = params.seqlen_q - 1;
        const auto* rows = params.mask + params.mask_strides.offset(first.batch, first.head, 0, 0);
#pragma unroll 1
        for (int32 index = lane; index < kQueries * kChunks; index += 32) {
            const int32 row = min_of(first_query + index / kChunks, last_row), key = first_key + index % kChunks * 16;
            const int32 existing = max_of(0, min_of(16, params.seqlen_k - key));
            cp_async_16(smem + 16 * index, rows + row * params.mask_strides.row + (existing ? key : 0), existing);
        }
    }

    // Waits until the tile has arrived, and packs it.
    __device__ __forceinline__ static void wait(uint32 smem, int32 lane) {
        cp_async_wait_all();
#pragma unroll 1
        for (int32 index = lane; index < kQueries * kChunks; index += 32)
            store_shared(smem + kBits + 2 * index, packed(load_shared_operand(smem + 16 * index)));
        __syncwarp();
    }

  private:
    // A bit for each of 16 bytes, 1 if the byte is not zero.
    __device__ __forceinline__ static uint16 packed(const OperandA& bytes) {
        uint32 bits = 0;
#pragma unroll
        for (int w = 3; w >= 0; --w) {
            // The product gathers the four top bits in its own.
            bits = __funnelshift_l(tops_of_nonzero_bytes(bytes.reg[w]) * 0x00204081, bits, 4);
        }
        return static_cast<uint16>(bits);
    }
};

// Reads a tile in the layout of the accumulators of S, 16 queries by kKeys keys.
template <int kKeys>
class MaskOfQueries {
  public:
    using Tile = MaskTile<16, kKeys>;
    static constexpr bool kInMemory = false;
    // The bits of a query's 16 keys, from the lane's first key on, for queries 0 and 8 of the lane.
    struct Elements {
        int32 row[2];
    };

    __device__ __forceinline__ MaskOfQueries(uint32 smem, int32 lane)
        : first_(smem + Tile::kBits + lane / 4 * kRowBytes), shift_(lane % 4 * 2) {}
    // The elements of accumulators 2 s and 2 s + 1.
    __device__ __forceinline__ Elements k16(int s) const {
        const uint32 address = first_ + 2 * s;
        return {load_shared<uint16>(address) >> shift_, load_shared<uint16>(address + 8 * kRowBytes) >> shift_};
    }
    template <class Term>
    __device__ __forceinline__ static void set(Term& term, const Elements& elements, int r, int e) {
        term.visible = elements.row[r % 2] >> (r / 2 * 8 + e) & 1;
    }

  private:
    static constexpr int kRowBytes = 2 * Tile::kChunks;
    const uint32 first_, shift_;
};

// Reads a tile in the layout of the accumulators of S^T, 16 keys by kQueries queries.
template <int kQueries>
class MaskOfKeys {
  public:
    using Tile = MaskTile<kQueries, 16>;
    static constexpr bool kInMemory = false;
    // The bits of two queries' 16 keys, from the lane's first key on, for accumulators 2 s and 2 s + 1.
    struct Elements {
        uint32 queries[2];
    };

    __device__ __forceinline__ MaskOfKeys(uint32 smem, int32 lane)
        : first_(smem + Tile::kBits + lane % 4 * 4), shift_(lane / 4) {}
    __device__ __forceinline__ Elements k16(int s) const {
        const uint32 address = first_ + 32 * s;
        return {load_shared<uint32>(address) >> shift_, load_shared<uint32>(address + 16) >> shift_};
    }
    template <class Term>
    __device__ __forceinline__ static void set(Term& term, const Elements& elements, int r, int e) {
        term.visible = elements.queries[r / 2] >> (16 * e + r % 2 * 8) & 1;
    }

  private:
    const uint32 first_, shift_;
};

}  // namespace fa2::common
