// Online softmax: the softmax of a tile of rows, computed one key tile at a time (Milakov and Gimelshein
// 2018; FlashAttention-2, section 3.1). It is written against the fragment contract.
//
// In base 2, which most kernels use:
//
//   P_ij = 2^(scale * log2(e) * S_ij - row_shift_i)        sum_i = sum_j P_ij        O_i = sum_j P_ij V_j
//
// The row shift cancels in O / sum, so any value is correct for which P fits its type. `update` sets it to the running
// row maximum, as usual. `try_row_shift` skips the row maximum: it computes the exponentials with the current shift and
// keeps them if a vote finds that every row's share of the sum is small. On random scores that is nearly always so, and
// the row maximum, its shuffles and the rescaling of O drop out of the loop.
#pragma once
#include "common/fragment.cuh"
#include "common/math.cuh"

namespace fa2::common {

// kExp is the exponential of the base, which is 2 unless kNatural. kLaneStep: see the fragment contract. kHuge: natural
// scores may have no number in base 2; `in_base2` then limits row shifts.
template <class Real, int kRows, int kLanesPerRow, Real (*kExp)(Real), bool kNatural = false, int kLaneStep = 1,
          bool kHuge = false>
struct OnlineSoftmax {
    // The largest share of a row sum that is kept. No term is negative, so it bounds each term as well, far below the
    // largest float16 (65504).
    static constexpr float kLargestShare = 4096.0f;
    // From here on, row shifts in base 2 are rounded to multiples of 32.
    static constexpr float kHugeShift = 0x1p28f;
    Real row_shift[kRows];
    Real sum[kRows];  // of this lane's columns only

    __device__ void reset() {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            row_shift[i] = -infinity<Real>();
            sum[i] = 0;
        }
    }

    // Computes P with the current row shift, rounds it into `p`, and returns true if this lane's share of each row sum
    // is small enough to keep P. The answer is false in rows that have seen no key yet (their shift is -inf), and for
    // infinities and NaN. `to_base2` is the scale of the scores, or a function of a score and minus the row shift.
    // kChains independent sums are accumulated, so that an addition need not wait for the one before.
    template <int kChains = 1, class Fragment, class ToBase2, class Packed>
    __device__ bool attempt(const Fragment& scores, const ToBase2& to_base2, Packed& p, Real (&share)[kRows]) const {
        static_assert(kChains == 1 || kChains == 2);
        Real second[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) share[i] = second[i] = 0;
#pragma unroll
        for (int n = 0; n < Fragment::kCols / 2; ++n)
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const Real even = kExp(exponent(to_base2, scores(i, 2 * n), -row_shift[i]));
                const Real odd = kExp(exponent(to_base2, scores(i, 2 * n + 1), -row_shift[i]));
                share[i] += even;
                (kChains == 1 ? share : second)[i] += odd;
                p.set(i, n, even, odd);
            }
        bool fits = true;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (kChains == 2) share[i] += second[i];
            fits &= share[i] <= kLargestShare;
            if constexpr (kHuge) fits &= magnitude(row_shift[i]) < kHugeShift;  // as in `update_raw`
        }
        return fits;
    }
    // Accepts the P of `attempt`. All lanes that share a row must decide alike, because they share its shift.
    __device__ void keep(const Real (&share)[kRows]) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) sum[i] += share[i];
    }

    // `attempt`, a vote and `keep`, for rows that lie within one warp. If a lane votes against P, the result is false
    // and only `p` has changed.
    template <int kChains = 1, class Fragment, class ToBase2, class Packed>
    __device__ bool try_row_shift(const Fragment& scores, const ToBase2& to_base2, Packed& p) {
        Real share[kRows];
        if (!__all_sync(kFullWarp, attempt<kChains>(scores, to_base2, p, share))) return false;
        keep(share);
        return true;
    }

    // True if the row shifts of the warp can stay: P of all scores, which are in units of the base, is then below
    // kLargestShare. This takes no arithmetic of doubles, in which tensor cores may be busy: it compares high words.
    // Where a row has seen no key (its shift is -inf) and for infinities and NaN, the answer is false.
    template <class Fragment>
    __device__ bool keeps_row_shift(const Fragment& scores) const {
        constexpr Real kRoom = kNatural ? 8 : 12;  // below log(kLargestShare)
        bool keeps = true;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            int32 highest = high_word_order(scores(i, 0));
#pragma unroll
            for (int j = 1; j < Fragment::kCols; ++j) highest = max_of(highest, high_word_order(scores(i, j)));
            keeps &= highest < high_word_order(row_shift[i] + kRoom);
        }
        return __all_sync(kFullWarp, keeps);
    }
    // Replaces scores for which `keeps_row_shift` by P.
    template <class Fragment>
    __device__ void keep_row_shift(Fragment& scores) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            Real share = 0;
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) share += scores(i, j) = kExp(scores(i, j) - row_shift[i]);
            sum[i] += share;
        }
    }

    // The same for unscaled scores. P is below 2^kRawRoom, so that its products with tangents of scores fit a float16.
    static constexpr Real kRawRoom = 4;
    template <class Fragment>
    __device__ bool keeps_raw(const Fragment& scores, Real scale_log2) const {
        bool keeps = true;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            Real even = scores(i, 0), odd = scores(i, 1);
#pragma unroll
            for (int j = 2; j < Fragment::kCols; j += 2) {
                even = maximum(even, scores(i, j));
                odd = maximum(odd, scores(i, j + 1));
            }
            keeps &= maximum(even, odd) * scale_log2 < row_shift[i] + kRawRoom;
            if constexpr (kHuge) keeps &= magnitude(row_shift[i]) < kHugeShift;  // as in `update_raw`
        }
        return __all_sync(kFullWarp, keeps);
    }
    template <class Fragment>
    __device__ void keep_raw(Fragment& scores, Real scale_log2) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            Real even = 0, odd = 0;
#pragma unroll
            for (int j = 0; j < Fragment::kCols; j += 2) {
                even += scores(i, j) = kExp(fma(scores(i, j), scale_log2, -row_shift[i]));
                odd += scores(i, j + 1) = kExp(fma(scores(i, j + 1), scale_log2, -row_shift[i]));
            }
            sum[i] += even + odd;
        }
    }

    // True if every row of the warp has seen a key. Without, `try_row_shift` is in vain.
    __device__ bool has_shifts() const {
        bool has = true;
#pragma unroll
        for (int i = 0; i < kRows; ++i) has &= row_shift[i] != -infinity<Real>();
        return __all_sync(kFullWarp, has);
    }

    __device__ __forceinline__ static Real exponent(Real scale_log2, Real score, Real minus_row_shift) {
        return fma(score, scale_log2, minus_row_shift);
    }
    template <class Function>
    __device__ __forceinline__ static Real exponent(const Function& to_base2, Real score, Real minus_row_shift) {
        return to_base2(score, minus_row_shift);
    }

    // The new row maxima: of the current shift and of `scores`, which are in units of the base and masked with -inf.
    template <class Fragment>
    __device__ void maximum_of(const Fragment& scores, Real (&highest)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            highest[i] = row_shift[i];
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) highest[i] = maximum(highest[i], scores(i, j));
            highest[i] = row_maximum<kLanesPerRow, kLaneStep>(highest[i]);
        }
    }

    // Sets the row shift to `highest` and replaces `scores` by P. The caller must multiply row i of O by rescale[i];
    // `sum` already is.
    template <class Fragment>
    __device__ void move_row_shift(const Real (&highest)[kRows], Fragment& scores, Real (&rescale)[kRows]) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            // In a row without a visible key the shift stays -inf; 0 is subtracted instead, as -inf - (-inf) is NaN.
            const Real shift = highest[i] == -infinity<Real>() ? Real(0) : highest[i];
            rescale[i] = kExp(row_shift[i] - shift);
            row_shift[i] = highest[i];
            // A sum of its own for the tile: one chain over all keys would have the largest rounding error of all steps,
            // which all of a row's results share.
            Real share = 0;
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) share += scores(i, j) = kExp(scores(i, j) - shift);
            sum[i] = sum[i] * rescale[i] + share;
        }
    }

    // `maximum_of` and `move_row_shift`, for rows that lie within one warp.
    template <class Fragment>
    __device__ void update(Fragment& scores, Real (&rescale)[kRows]) {
        Real highest[kRows];
        maximum_of(scores, highest);
        move_row_shift(highest, scores, rescale);
    }

    // `update` for unscaled scores and a positive scale. The row maximum is taken of unscaled scores, so that the FMA
    // in front of each exponential can do the scaling.
    template <class Fragment>
    __device__ void update_raw(Fragment& scores, Real scale_log2, Real (&rescale)[kRows]) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            Real even = scores(i, 0), odd = scores(i, 1);
#pragma unroll
            for (int j = 2; j < Fragment::kCols; j += 2) {
                even = maximum(even, scores(i, j));
                odd = maximum(odd, scores(i, j + 1));
            }
            const Real own = row_maximum<kLanesPerRow, kLaneStep>(maximum(even, odd));
            Real scale = scale_log2, in_base = own * scale_log2;
            if constexpr (kHuge) in_base = in_base2(own, scale_log2);
            const Real highest = maximum(row_shift[i], in_base);
            Real shift = highest == -infinity<Real>() ? Real(0) : highest;
            rescale[i] = kExp(row_shift[i] - shift);
            row_shift[i] = highest;
            if constexpr (kHuge)
                if (highest == in_base && magnitude(highest) >= kHugeShift && magnitude(highest) <= kLargestBase2) {
                    // Scaling rounds the shift by up to 16 and more, so that P may overflow or vanish. Scores of this size
                    // are equal or at least 8 apart: P is 1 or close to 0, also in base 2 without a scale.
                    scale = 1;
                    shift = own;
                }
            even = odd = 0;
#pragma unroll
            for (int j = 0; j < Fragment::kCols; j += 2) {
                even += scores(i, j) = kExp(fma(scores(i, j), scale, -shift));
                odd += scores(i, j + 1) = kExp(fma(scores(i, j + 1), scale, -shift));
            }
            sum[i] = sum[i] * rescale[i] + (even + odd);
        }
    }

    // A row shift as a natural number.
    __device__ __forceinline__ static Real natural(Real shift) {
        if constexpr (kHuge)
            return natural_of(shift);
        else
            return kNatural ? shift : shift * Real(kLn2);
    }

    // The end of a row, after its last key tile: 1 / total (0 without a visible key) and the natural log-sum-exp.
    // `total` is the row sum over all lanes.
    __device__ void finish(const Real (&total)[kRows], Real (&inverse)[kRows], Real (&lse)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const bool empty = total[i] == Real(0);
            inverse[i] = empty ? Real(0) : Real(1) / total[i];
            lse[i] = empty ? -infinity<Real>() : natural(row_shift[i]) + log(total[i]);
        }
    }
    __device__ void finish(Real (&inverse)[kRows], Real (&lse)[kRows]) const {
        Real total[kRows];
        totals(total);
        finish(total, inverse, lse);
    }
    // The row sums over all lanes.
    __device__ void totals(Real (&total)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) total[i] = row_sum<kLanesPerRow, kLaneStep>(sum[i]);
    }

    // The same with a sink: one more score in the row sum, whose value vector is zero. `sink` is in units of the base.
    __device__ void finish(const Real (&total)[kRows], Real sink, Real (&inverse)[kRows], Real (&lse)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const Real highest = maximum(row_shift[i], sink);
            const Real shift = highest == -infinity<Real>() ? Real(0) : highest;
            const Real rescale = kExp(row_shift[i] - shift);
            const Real with_sink = total[i] * rescale + kExp(sink - shift);
            const bool empty = with_sink == Real(0);
            inverse[i] = empty ? Real(0) : rescale / with_sink;
            lse[i] = empty ? -infinity<Real>() : natural(shift) + log(with_sink);
        }
    }
    __device__ void finish(Real sink, Real (&inverse)[kRows], Real (&lse)[kRows]) const {
        Real total[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) total[i] = row_sum<kLanesPerRow, kLaneStep>(sum[i]);
        finish(total, sink, inverse, lse);
    }
};

}  // namespace fa2::common
