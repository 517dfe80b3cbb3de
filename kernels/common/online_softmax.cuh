// The softmax of one row tile, key tile by key tile, in base 2 (Milakov and Gimelshein 2018; FlashAttention-2, section
// 3.1), on the fragment contract.
//
//   P_ij = 2^(scale * log2(e) * S_ij - reference_i)        sum_i = sum_j P_ij        O_i = sum_j P_ij V_j
//
// The reference cancels in O / sum, so any value does that lets P fit its type. `update` moves it to the running maximum,
// as everybody does. `try_reference` does not look for a maximum at all: it takes the exponentials against the reference
// at hand and keeps them if a warp vote finds that every row's share stays small; on random scores that is nearly always
// so, and the maximum, its shuffles and the rescaling of O drop out of the loop.
#pragma once
#include "common/fragment.cuh"
#include "common/math.cuh"

namespace fa2::common {

template <class Real, int kRows, int kLanesPerRow, Real (*kExp2)(Real)>
struct OnlineSoftmax {
    // All terms are positive, so a share of the row sum under this bounds each term: far inside float16 (65504).
    static constexpr float kLargestShare = 4096.0f;

    Real reference[kRows];
    Real sum[kRows];  // of this lane's columns only

    __device__ void reset() {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            reference[i] = -infinity<Real>();
            sum[i] = 0;
        }
    }

    // P against the present reference, rounded into `p`; false (and nothing changed but `p`) if a lane of the warp found
    // it too large. Rows that have seen no key yet (reference = -inf), infinities and NaN vote against, too.
    template <class Fragment, class Packed>
    __device__ bool try_reference(const Fragment& scores, Real scale_log2, Packed& p) {
        Real share[kRows] = {};
#pragma unroll
        for (int n = 0; n < Fragment::kCols / 2; ++n)
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const Real even = kExp2(fma(scores(i, 2 * n), scale_log2, -reference[i]));
                const Real odd = kExp2(fma(scores(i, 2 * n + 1), scale_log2, -reference[i]));
                share[i] += even;
                share[i] += odd;
                p.set(i, n, even, odd);
            }
        bool fits = true;
#pragma unroll
        for (int i = 0; i < kRows; ++i) fits &= share[i] <= kLargestShare;
        if (!__all_sync(kFullWarp, fits)) return false;
#pragma unroll
        for (int i = 0; i < kRows; ++i) sum[i] += share[i];
        return true;
    }

    // Moves the reference to the maximum over all keys so far and turns `scores` (already scaled to base 2 and masked
    // with -inf) into P. rescale[i] is what sums taken so far must be multiplied by; `sum` already is.
    template <class Fragment>
    __device__ void update(Fragment& scores, Real (&rescale)[kRows]) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            Real highest = reference[i];
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) highest = maximum(highest, scores(i, j));
            highest = row_maximum<kLanesPerRow>(highest);
            // A row without a visible key keeps -inf; -inf - (-inf) would be NaN.
            const Real shift = highest == -infinity<Real>() ? Real(0) : highest;
            rescale[i] = kExp2(reference[i] - shift);
            reference[i] = highest;
            sum[i] *= rescale[i];
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) {
                scores(i, j) = kExp2(scores(i, j) - shift);
                sum[i] += scores(i, j);
            }
        }
    }

    // After the last key tile: 1 / sum (0 for a row without a visible key) and the natural log-sum-exp.
    __device__ void finish(Real (&inverse_sum)[kRows], Real (&lse)[kRows]) const {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const Real total = row_sum<kLanesPerRow>(sum[i]);
            const bool empty = total == Real(0);
            inverse_sum[i] = empty ? Real(0) : Real(1) / total;
            lse[i] = empty ? -infinity<Real>() : reference[i] * Real(kLn2) + log(total);
        }
    }
};

}  // namespace fa2::common
