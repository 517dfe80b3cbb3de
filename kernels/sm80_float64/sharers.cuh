// The warps that share 16 rows of scores and of a result: one, or two, where registers of one do not hold the result, or
// where warps that own rows alone would be too few to hide what they wait for. Two divide the columns, of which there are
// more than kNarrow:
//
//   S = Q K^T    each warp multiplies half of the columns of Q and K, and gets the whole sums of half of the scores
//   softmax      each has half of the scores
//   O += P V     each has half of the columns of O, and multiplies all of P
//
// One warp adds up the same two halves, so that S has the same rounding errors in all kernels of a call. Else P of the
// gradients would not be that of lse: a row whose P is 1 for one key would have another one there.
//
// If each warp multiplied whole rows of Q with half of the keys instead, every load of Q would feed half as many products,
// and shared memory would be the limit.
//
//   shared memory    written by                                          read by
//   slot of a warp   the other one: sums of its half, or row statistics  the warp
//                    then the warp: its half of P                        both
//
// A slot has 16 bytes for each lane and chunk, and a lane reads what the same lane of a warp has written. A named barrier
// stands between the writes and the reads of an exchange. None is needed behind the reads of a message: nobody but the
// warp that reads it writes over it. Both warps read P, so that a barrier must follow, for which the main loops have one.
#pragma once
#include "sm80_float64/multiply.cuh"

namespace fa2::sm80_float64 {

inline constexpr int kNarrow = 64;
// True if a warp has no registers for a result of all columns: two share rows in all kernels of the call.
template <class Spec>
inline constexpr bool kIsWide = common::max_of(Spec::kHeadDim, Spec::kHeadDimV) > 128;

// The warps that share 16 of the rows that a block owns. families/sm80_float64.py must know which columns are too few for
// two, or a call's kernels would not have the same scores.
template <class Spec, int kRows>
__host__ __device__ constexpr int sharers_of_rows() {
    constexpr int kSharers = 16 * Spec::kWarps / kRows;
    static_assert(kSharers * kRows == 16 * Spec::kWarps);
    static_assert(kSharers == 1 || kIsWide<Spec> || Spec::kHeadDim > kNarrow);
    return kSharers;
}

// kScores: the scores of a row in a tile.
template <int kWarps, int kScores>
class Sharers {
    static_assert(kWarps == 1 || kWarps == 2);
    static constexpr int kN8 = kScores / 8 / kWarps, kSlotBytes = kN8 * 2 * 32 * 16;
    static_assert(kScores % (8 * kWarps) == 0);

  public:
    using Scores = Fragment<kN8>;                                         // of this warp
    using All = Fragment<kScores / 8>;                                    // of all
    static constexpr int kBytes = kWarps == 1 ? 0 : kWarps * kSlotBytes;  // of shared memory

    // `half`: which of the warps this is. `barrier`: a named one that no other warps use.
    __device__ __forceinline__ Sharers(uint32 smem, int32 half, int32 barrier, int32 lane)
        : half_(half), barrier_(barrier), lane_(lane), slots_(smem + lane * 16) {}

    // The first column of this warp's scores.
    __device__ __forceinline__ int32 first_column() const { return half_ * 8 * kN8; }

    // This warp's loads of 16 rows of a left operand of `products`, or of all rows of a right one.
    template <class Tile>
    __device__ __forceinline__ AlongRows<Tile> along_rows(uint32 tile, int32 first_row) const {
        return {tile + half_ * (Tile::kRowBytes / kWarps), first_row, lane_};
    }
    // Those of a right operand that P multiplies.
    template <class Tile>
    __device__ __forceinline__ AcrossRows<Tile> across_rows(uint32 tile) const {
        return {tile + half_ * (Tile::kRowBytes / kWarps), lane_};
    }

    // This warp's scores. Two warps must have passed a barrier since they last read a slot.
    template <class Left, class Right>
    __device__ __forceinline__ Scores products(const AlongRows<Left>& left, const AlongRows<Right>& right) const {
        return sum_over<Left::kCols>(
            [&](All& sums, int first, int end) { multiply_rows(sums, left, right, first, end); });
    }
    // The same of what multiply(sums, first, end) adds up, over columns 8 * first to 8 * end of kColumns.
    template <int kColumns, class Multiply>
    __device__ __forceinline__ Scores sum_over(const Multiply& multiply) const {
        constexpr int kEnd = kColumns / 8 / kWarps;
        constexpr int kHalf = kWarps == 1 && kColumns > kNarrow ? common::round_up(kColumns, 32) / 16 : kEnd;
        All all;
        all.fill(0.0);
        multiply(all, 0, kHalf);
        if constexpr (kWarps == 2) {
            return sum(all);
        } else if constexpr (kHalf == kEnd) {
            return all;
        } else {
            All second;
            second.fill(0.0);
            multiply(second, kHalf, kEnd);
            add(all, second);
            return all;
        }
    }
    // This warp's scores, added to `start`.
    template <class Left, class Right>
    __device__ __forceinline__ Scores products(const AlongRows<Left>& left, const AlongRows<Right>& right,
                                               Scores start) const {
        if constexpr (kWarps == 1) {
            multiply_rows(start, left, right, 0, Left::kCols / 8);
        } else {
            add(start, products(left, right));
        }
        return start;
    }

    // True if the predicate, which is the same in all lanes of a warp, holds in all warps.
    __device__ __forceinline__ bool all(bool holds) const {
        return kWarps == 1 ? holds : barrier_all(barrier_, 64, holds);
    }
    // Combines a statistic of each row, which all lanes of a quad have, with that of the other warp. Both must have passed
    // a barrier since they last read a slot.
    template <class Combine>
    __device__ __forceinline__ void combine(double (&x)[2], const Combine& combined) const {
        if constexpr (kWarps == 2) {
            store_shared(other_slot(), x);
            wait();
            double y[2];
            load_shared(own_slot(), y);
#pragma unroll
            for (int i = 0; i < 2; ++i) x[i] = combined(x[i], y[i]);
        }
    }

    // Gives this warp's half of P to both, for `multiply_columns` or `whole` behind `wait` or another barrier.
    __device__ __forceinline__ void give(const Scores& p) const {
        if constexpr (kWarps == 2) store(own_slot(), p);
    }
    __device__ __forceinline__ void wait() const {
        if constexpr (kWarps == 2) common::barrier_sync(barrier_, 64);
    }
    // O += P V. `p`: this warp's half of P, which it has given.
    template <class Right, int kOutputN8>
    __device__ __forceinline__ void multiply_columns(Fragment<kOutputN8>& output, const Scores& p,
                                                     const AcrossRows<Right>& right) const {
        if constexpr (kWarps == 1) {
            sm80_float64::multiply_columns(output, p, right, 0);
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Scores part;
                load(slots_ + half * kSlotBytes, part);
                sm80_float64::multiply_columns(output, part, right, half * kN8);
            }
        }
    }
    // P of all keys, from this warp's half, which it has given.
    __device__ __forceinline__ All whole(const Scores& p) const {
        if constexpr (kWarps == 1) {
            return p;
        } else {
            All all;
#pragma unroll
            for (int half = 0; half < 2; ++half) load(slots_ + half * kSlotBytes, all, half * kN8);
            return all;
        }
    }

    // Stores zeros to this warp's share of the rows of tiles from `first_row` on whose lse is +inf. The lanes of a quad share
    // two rows.
    template <class... Tiles, class... Addresses>
    __device__ __forceinline__ void clear_hidden_rows(int32 first_row, const double (&lse)[2],
                                                      Addresses... tiles) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lse[i] == common::infinity<double>()) {
                const int32 row = first_row + Scores::row(i, lane_);
                (clear_row<Tiles, 4 * kWarps>(tiles, row, 4 * half_ + lane_ % 4), ...);
            }
        __syncwarp();
    }

  private:
    const int32 half_, barrier_, lane_;
    const uint32 slots_;

    __device__ __forceinline__ uint32 own_slot() const { return slots_ + half_ * kSlotBytes; }
    __device__ __forceinline__ uint32 other_slot() const { return slots_ + (1 - half_) * kSlotBytes; }

    // This warp's half of the scores, from each warp's sums over half of the columns.
    __device__ __forceinline__ Scores sum(const All& all) const {
        Scores own, given;
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const double first = all.value[n][e], second = all.value[kN8 + n][e];
                own.value[n][e] = half_ == 0 ? first : second;
                given.value[n][e] = half_ == 0 ? second : first;
            }
        store(other_slot(), given);
        wait();
        load(own_slot(), given);
        add(own, given);
        return own;
    }

    __device__ __forceinline__ static void add(Scores& x, const Scores& y) {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x.value[n][e] += y.value[n][e];
    }

    __device__ __forceinline__ static void store(uint32 slot, const Scores& x) {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const double pair[2] = {x.value[n][2 * i], x.value[n][2 * i + 1]};
                store_shared(slot + (2 * n + i) * 512, pair);
            }
    }
    // A slot into the scores of a fragment from column 8 * `first8` on.
    template <int kColumns8>
    __device__ __forceinline__ static void load(uint32 slot, Fragment<kColumns8>& x, int first8 = 0) {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                double pair[2];
                load_shared(slot + (2 * n + i) * 512, pair);
                x.value[first8 + n][2 * i] = pair[0];
                x.value[first8 + n][2 * i + 1] = pair[1];
            }
    }
};

}  // namespace fa2::sm80_float64
