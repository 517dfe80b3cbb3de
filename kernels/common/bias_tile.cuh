// A warp's tile of a bias of 16 bits in shared memory.
//
// A load in the layout of the accumulators takes 16 bytes from each of eight rows, half of a sector; its latency is
// exposed, and elements of S^T are not even pairs. Instead, a warp copies whole rows of its tile by cp.async one step
// ahead, so that the latency overlaps with a step. ldmatrix then reads the tile in the layout of the accumulators, of S
// or of S^T. A warp reads only what it has copied, so that it waits for no other, unless a producer copies the tile of
// several warps (those of sm90).
//
// Biases whose rows are not contiguous or do not begin at 16-byte boundaries are read in global memory
// (score_arrays.cuh), and so are those for which a block's shared memory has no room (kHoldsArray).
//
// A block that keeps the bias for a series of sequences (series.cuh) has a tile for each of its key tiles, and reads no
// bias in global memory in another way: it copies one whose rows are not such element by element.
//
// Rows of the tile are queries, in chunks of 8 keys (16 bytes). Chunks are permuted, or rows padded, so that the eight
// rows of a matrix that ldmatrix reads lie in different banks.
#pragma once
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/score_tile.cuh"

namespace fa2::common {

// True if a kernel copies a bias of 16 bits to shared memory where that has room for it. With other features of scores
// (kWideBias is one), registers do not suffice for both ways to read a bias, and more of them would spill.
template <class Spec>
inline constexpr bool kMayHoldBias = Spec::kKeepsBias || (Spec::kBias && Spec::kScoreFeatures == 1);

template <class Spec>
struct WithoutBias : Spec {
    static constexpr bool kBias = false;
};

template <int kQueries, int kKeys>
struct BiasTile {
    static_assert(kQueries % 16 == 0 && kKeys % 16 == 0);
    static constexpr int kChunks = kKeys / 8;
    static constexpr bool kTwoChunks = kChunks == 2, kSwizzled = kChunks % 8 == 0;
    static constexpr int kRowBytes = 2 * kKeys + (kTwoChunks || kSwizzled ? 0 : 16);
    static constexpr int kBytes = kQueries * kRowBytes;

    __device__ __forceinline__ static uint32 offset(int32 query, int32 chunk) {
        const int32 permuted = kTwoChunks ? chunk ^ (query / 4 % 2) : kSwizzled ? chunk ^ (query % 8) : chunk;
        return query * kRowBytes + permuted * 16;
    }

    // True if all rows of the bias are contiguous and begin at 16-byte boundaries, so that chunks can be copied.
    template <class Record>
    __device__ __forceinline__ static bool takes(const Record& params) {
        const auto& strides = params.bias_strides;
        const int64 elements = strides.batch_bits() | strides.head | strides.row;
        const uint64 bytes = reinterpret_cast<uint64>(params.bias) | 2 * elements;
        return strides.column == 1 && bytes % 16 == 0;
    }

    // Starts to copy the tile at `first` into `smem`. All lanes must have finished reading what is there. Keys past the
    // end become zeros, and rows past the end are copies of others; the results there are not used. The loop is not
    // unrolled by default because it runs while registers hold accumulators. kDividesCases: whole tiles have a loop of
    // their own, of a third of the instructions, for a warp whose copies several others wait for.
    template <int kUnrolled = 1, bool kDividesCases = false, class Record>
    __device__ __forceinline__ static void load(uint32 smem, const Record& params, const ScoreTile& first) {
        const auto [first_query, first_key, lane] = first.position;
        if (kDividesCases && first_query + kQueries <= params.seqlen_q && first_key + kKeys <= params.seqlen_k)
            load_rows<kUnrolled, true>(smem, params, first);
        else
            load_rows<kUnrolled, false>(smem, params, first);
    }
    // The same for any bias, without cp.async. Keys past the end are clamped to the last one.
    template <class Record>
    __device__ __forceinline__ static void load_elements(uint32 smem, const Record& params, const ScoreTile& first) {
        const auto [first_query, first_key, lane] = first.position;
        const int32 last_row = params.seqlen_q - 1, last_key = params.seqlen_k - 1;
        const auto& strides = params.bias_strides;
        const auto* bias = params.bias + strides.offset(first.batch, first.head, 0, 0);
#pragma unroll 1
        for (int32 index = lane; index < kQueries * kChunks; index += 32) {
            const int32 row = index / kChunks, chunk = index % kChunks;
            const auto* elements = bias + min_of(first_query + row, last_row) * strides.row;
            uint32 word[4];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const uint32 bits = elements[min_of(first_key + 8 * chunk + e, last_key) * strides.column].bits;
                word[e / 2] = e % 2 ? word[e / 2] | bits << 16 : bits;
            }
            store_shared(smem + offset(row, chunk), OperandA{word[0], word[1], word[2], word[3]});
        }
    }
    // Waits until the tile has arrived.
    __device__ __forceinline__ static void wait(uint32, int32) {
        cp_async_wait_all();
        __syncwarp();
    }

  private:
    // kWhole: all rows and keys of the tile exist.
    template <int kUnrolled, bool kWhole, class Record>
    __device__ __forceinline__ static void load_rows(uint32 smem, const Record& params, const ScoreTile& first) {
        const auto [first_query, first_key, lane] = first.position;
        const int32 last_row = params.seqlen_q - 1;
        static_assert(kChunks <= 32);
        constexpr int kRows = 32 / kChunks;  // in one step of all lanes, or of as many as make whole rows
        const int32 chunk = lane % kChunks, existing = kWhole ? 16 : existing_bytes(params, first_key + 8 * chunk);
        const auto* column =
            params.bias + params.bias_strides.offset(first.batch, first.head, 0, existing ? first_key + 8 * chunk : 0);
        int32 row = lane / kChunks;
        const auto* from =
            column + (kWhole ? first_query + row : min_of(first_query + row, last_row)) * params.bias_strides.row;
        // Opaque: it would be loaded from the record for each row.
        const uint64 step = as_if_new(static_cast<uint64>(kRows * params.bias_strides.row));
#pragma unroll kUnrolled
        for (int i = 0; i < ceil_div(kQueries, kRows); ++i) {
            if ((32 % kChunks == 0 || lane < kRows * kChunks) && (kQueries % kRows == 0 || row < kQueries))
                cp_async_16(smem + offset(row, chunk), from, existing);
            row += kRows;
            if (kWhole || first_query + row <= last_row) from += static_cast<int64>(step);
        }
    }
    // Bytes of a chunk before the end of the keys.
    template <class Record>
    __device__ __forceinline__ static int32 existing_bytes(const Record& params, int32 key) {
        return max_of(0, min_of(16, 2 * (params.seqlen_k - key)));
    }
};

// The elements of a k-step, as ldmatrix loads them.
template <class Element>
struct BiasElements {
    static constexpr bool kInMemory = false;
    using Elements = OperandA;
    template <class Term>
    __device__ __forceinline__ static void set(Term& term, const Elements& elements, int r, int e) {
        term.bias = e == 0 ? unpack_lo<Element>(elements.reg[r]) : unpack_hi<Element>(elements.reg[r]);
    }
};

// Reads a tile in the layout of the accumulators of S, 16 queries by kKeys keys.
template <class Element, int kKeys>
class BiasOfQueries : public BiasElements<Element> {
  public:
    using Tile = BiasTile<16, kKeys>;
    __device__ __forceinline__ BiasOfQueries(uint32 smem, int32 lane)
        : smem_(smem), row_(lane % 16), chunk_(lane / 16) {}
    // The elements of accumulators 2 s and 2 s + 1.
    __device__ __forceinline__ OperandA k16(int s) const {
        return ldmatrix_x4<false>(smem_ + Tile::offset(row_, 2 * s + chunk_));
    }

  private:
    const uint32 smem_;
    const int32 row_, chunk_;
};

// Reads 16 keys of a tile, in two chunks from `chunk` on, in the layout of the accumulators of S^T, keys by queries.
template <class Element, int kQueries, int kKeys>
class BiasOfKeys : public BiasElements<Element> {
  public:
    using Tile = BiasTile<kQueries, kKeys>;
    __device__ __forceinline__ BiasOfKeys(uint32 smem, int32 lane, int32 chunk)
        : first_(smem + Tile::offset(lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2)) {}
    __device__ __forceinline__ OperandA k16(int s) const {
        return ldmatrix_x4<true>(first_ + 16 * s * Tile::kRowBytes);
    }

  private:
    const uint32 first_;
};

}  // namespace fa2::common
