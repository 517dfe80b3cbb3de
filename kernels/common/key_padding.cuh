// The key padding mask of a fragment of scores in the layout of tensor cores' accumulators: the keys that no query sees.
//
// The mask has a byte for each key, which a column of S or a row of S^T shares. For S a lane loads four of every 128
// keys, in one load where they begin at a multiple of four bytes. Mostly all keys of a tile are visible, which one vote
// says. Otherwise ballots give every lane the bits of its own columns. For S^T a lane has two keys.
#pragma once
#include "common/fragment.cuh"
#include "common/score_arrays.cuh"

namespace fa2::common {

// Whether the key of a lane's element is visible: accumulator n8, row i, column e.
struct AllVisible {
    __device__ __forceinline__ static bool at(int, int, int) { return true; }
};
struct VisibleRows {
    bool row[2];

    __device__ __forceinline__ bool at(int, int i, int) const { return row[i]; }
};
template <int kWords>
struct VisibleColumns {
    uint32 bits[kWords][2];  // of columns e of 16 accumulators, each in the lower one of two bits

    __device__ __forceinline__ bool at(int n8, int, int e) const { return bits[n8 / 16][e] >> (n8 % 16 * 2) & 1; }
};

template <class Spec, int kN8, bool kTransposed, bool kHides = Spec::kKeyPadding>
class KeyPadding {
  public:
    KeyPadding() = default;
    template <class Record>
    __device__ __forceinline__ KeyPadding(const Record&, const ScoreTile&) {}
    __device__ __forceinline__ static AllVisible visible() { return {}; }
    __device__ __forceinline__ static void hide(QuadFragment<kN8>&) {}
};

// That of S^T, if kHides, or else one that hides nothing.
template <class Spec, int kN8, bool kHides>
using KeyPaddingIf = KeyPadding<Spec, kN8, true, kHides && Spec::kKeyPadding>;

template <class Record>
__device__ __forceinline__ const bool* key_padding_of(const Record& params, int32 batch) {
    return params.key_padding_mask + params.key_padding_mask_strides.offset(batch, 0, 0, 0);
}

template <class Spec, int kN8>
class KeyPadding<Spec, kN8, true, true> {
  public:
    template <class Record>
    __device__ __forceinline__ KeyPadding(const Record& params, const ScoreTile& tile) {
        const bool* keys = key_padding_of(params, tile.batch);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 key = tile.position.first_key + QuadFragment<kN8>::row(i, tile.position.lane);
            visible_.row[i] = keys[min_of(key, last_key_of<Spec>(params)) * params.key_padding_mask_strides.column];
        }
    }
    __device__ __forceinline__ const VisibleRows& visible() const { return visible_; }

    // Writes -infinity over the scores of hidden keys.
    __device__ __forceinline__ void hide(QuadFragment<kN8>& scores) const {
        if (__all_sync(kFullWarp, visible_.row[0] && visible_.row[1])) return;
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!visible_.row[e / 2]) scores.value[n][e] = -infinity<float>();
    }

  private:
    VisibleRows visible_;
};

template <class Spec, int kN8>
class KeyPadding<Spec, kN8, false, true> {
    static constexpr int kWords = ceil_div(kN8, 16);
    static constexpr uint32 kTopBits = 0x80808080;

  public:
    KeyPadding() = default;
    template <class Record>
    __device__ __forceinline__ KeyPadding(const Record& params, const ScoreTile& tile) : lane_(tile.position.lane) {
        const auto& strides = params.key_padding_mask_strides;
        const bool* keys = key_padding_of(params, tile.batch);
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const int32 in_tile = 128 * w + 4 * lane_, key = tile.position.first_key + in_tile;
            visible_[w] = kTopBits;
            if (in_tile >= 8 * kN8) continue;
            const bool* own = keys + key;
            if (strides.column == 1 && reinterpret_cast<uint64>(own) % 4 == 0 && key + 4 <= params.seqlen_k) {
                visible_[w] = *reinterpret_cast<const uint32*>(own);
                continue;
            }
#pragma unroll
            for (int b = 0; b < 4; ++b)
                if (!keys[min_of(key + b, last_key_of<Spec>(params)) * strides.column])
                    visible_[w] &= ~(0x80u << 8 * b);
        }
    }

    // Column 8 n + 2 c + e of lane c is byte (2 c + e) % 4 of the four keys that lane 2 n + c / 2 has loaded.
    __device__ __forceinline__ VisibleColumns<kWords> visible() const {
        VisibleColumns<kWords> visible;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const uint32 top = top_bits(w);
            uint32 byte[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) byte[b] = __ballot_sync(kFullWarp, top >> (8 * b + 7) & 1);
#pragma unroll
            for (int e = 0; e < 2; ++e) visible.bits[w][e] = (lane_ % 2 ? byte[2 + e] : byte[e]) >> (lane_ % 4 / 2);
        }
        return visible;
    }

    // Writes -infinity over the scores of hidden keys.
    __device__ __forceinline__ void hide(QuadFragment<kN8>& scores) const {
        bool all = true;
#pragma unroll
        for (int w = 0; w < kWords; ++w) all = all && top_bits(w) == kTopBits;
        if (__all_sync(kFullWarp, all)) return;
        const VisibleColumns<kWords> shown = visible();
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!shown.at(n, e / 2, e % 2)) scores.value[n][e] = -infinity<float>();
    }

  private:
    // The top bit of each byte that is not zero.
    __device__ __forceinline__ uint32 top_bits(int w) const { return tops_of_nonzero_bytes(visible_[w]); }

    int32 lane_;
    uint32 visible_[kWords];
};

}  // namespace fa2::common
