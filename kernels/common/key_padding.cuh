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

    // Takes the ballots of 128 keys: bit i of ballot b is of key 4 i + b. Column 8 n + 2 c + e of lane c is in ballot
    // (2 c + e) % 4, in bit 2 n + c / 2.
    __device__ __forceinline__ void set(int w, const uint32 (&ballot)[4], int32 lane) {
#pragma unroll
        for (int e = 0; e < 2; ++e) bits[w][e] = (lane % 2 ? ballot[2 + e] : ballot[e]) >> (lane % 4 / 2);
    }

    __device__ __forceinline__ bool at(int n8, int, int e) const { return bits[n8 / 16][e] >> (n8 % 16 * 2) & 1; }

    // Writes a number over the elements of the other columns.
    template <int kN8>
    __device__ __forceinline__ void fill_others(QuadFragment<kN8>& x, float number) const {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!at(n, e / 2, e % 2)) x.value[n][e] = number;
    }
};

// For kernels that name no feature: whether keys are hidden so, and a specialisation that does without.
template <class Spec>
inline constexpr bool kPadsKeys = Spec::kKeyPadding;
template <class Spec>
struct WithoutKeyPadding : Spec {
    static constexpr bool kKeyPadding = false;
};

template <class Spec, int kN8, bool kTransposed, bool kHides = Spec::kKeyPadding>
class KeyPadding {
  public:
    KeyPadding() = default;
    template <class Record>
    __device__ __forceinline__ KeyPadding(const Record&, const ScoreTile&) {}
    __device__ __forceinline__ static AllVisible visible() { return {}; }
    __device__ __forceinline__ static void hide(QuadFragment<kN8>&) {}
    __device__ __forceinline__ static void put(uint32) {}
};

// What a warp has `put` in shared memory, for others.
template <class Spec, int kN8, bool kHides = Spec::kKeyPadding>
struct SharedKeyPadding {
    static constexpr int kWords = ceil_div(kN8, 16);

    __device__ __forceinline__ SharedKeyPadding(uint32 smem, int32 lane) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const OperandA ballots = load_shared_operand(smem + 16 * w);
            const auto& of = ballots.reg;
            all_ = all_ && (of[0] & of[1] & of[2] & of[3]) == kFullWarp;
            visible_.set(w, of, lane);
        }
    }
    // Writes zeros over the weights of hidden keys.
    __device__ __forceinline__ void clear(QuadFragment<kN8>& weights) const {
        if (!all_) visible_.fill_others(weights, 0.0f);
    }

  private:
    bool all_ = true;
    VisibleColumns<kWords> visible_;
};
template <class Spec, int kN8>
struct SharedKeyPadding<Spec, kN8, false> {
    __device__ __forceinline__ SharedKeyPadding(uint32, int32) {}
    __device__ __forceinline__ static void clear(QuadFragment<kN8>&) {}
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

    __device__ __forceinline__ VisibleColumns<kWords> visible() const {
        VisibleColumns<kWords> visible;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            uint32 ballot[4];
            take_ballots(w, ballot);
            visible.set(w, ballot, lane_);
        }
        return visible;
    }
    // Leaves the ballots in shared memory, for SharedKeyPadding.
    __device__ __forceinline__ void put(uint32 smem) const {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            uint32 ballot[4];
            take_ballots(w, ballot);
            if (lane_ == 0) store_shared(smem + 16 * w, OperandA{ballot[0], ballot[1], ballot[2], ballot[3]});
        }
    }

    // Writes -infinity over the scores of hidden keys.
    __device__ __forceinline__ void hide(QuadFragment<kN8>& scores) const {
        bool all = true;
#pragma unroll
        for (int w = 0; w < kWords; ++w) all = all && top_bits(w) == kTopBits;
        if (!__all_sync(kFullWarp, all)) visible().fill_others(scores, -infinity<float>());
    }

  private:
    __device__ __forceinline__ void take_ballots(int w, uint32 (&ballot)[4]) const {
        const uint32 top = top_bits(w);
#pragma unroll
        for (int b = 0; b < 4; ++b) ballot[b] = __ballot_sync(kFullWarp, top >> (8 * b + 7) & 1);
    }
    // The top bit of each byte that is not zero.
    __device__ __forceinline__ uint32 top_bits(int w) const { return tops_of_nonzero_bytes(visible_[w]); }

    int32 lane_;
    uint32 visible_[kWords];
};

}  // namespace fa2::common
