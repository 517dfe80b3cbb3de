// The gradients of a warp's scores, for kernels whose warps own query rows: S and dP, and the weights of dS.
#pragma once
#include "common/dbias.cuh"
#include "common/mask.cuh"
#include "common/statistics.cuh"
#include "common/weights.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

// Loads lse in base 2, or natural where scores are, and -delta of a warp's rows. An lse of +inf makes P zero in rows past
// the end and in rows without a visible key.
template <class Spec, int kM16, class Record>
__device__ __forceinline__ void load_statistics(float (&lse)[kM16][2], float (&minus_delta)[kM16][2],
                                                const Record& params, int32 batch, int32 head, int32 first_row,
                                                int32 lane) {
    const int64 first_stat = common::first_statistic<Spec>(params, batch, head);
#pragma unroll
    for (int m = 0; m < kM16; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = first_row + 16 * m + QuadFragment<1>::row(i, lane);
            const bool valid = row < params.seqlen_q;
            const float natural = valid ? params.lse[first_stat + row] : -common::infinity<float>();
            const bool hidden = natural == -common::infinity<float>();  // delta may be NaN then
            lse[m][i] = hidden ? -natural : common::in_base2(natural);
            minus_delta[m][i] = hidden ? 0.0f : -params.delta[first_stat + row];
        }
}

// Computes the weights of a warp's scores and their dP, from which `common::weighted` makes dS. `first` is the tile of
// the first fragment; addresses are those of a warp's rows of Q and dO, and of a tile's keys. `saved` keeps the products
// Q K^T (common/dbias.cuh).
template <class Spec, int kK16, int kK16V, int kM16, int kN8, class Saved, class QRows, class DoRows, class KRows,
          class VRows, class Record>
__device__ __forceinline__ void multiply_and_weigh(QuadFragment<kN8> (&weights)[kM16], QuadFragment<kN8> (&dp)[kM16],
                                                   Saved (&saved)[kM16], const QRows& q_rows, const DoRows& do_rows,
                                                   const KRows& k_rows, const VRows& v_rows,
                                                   const float (&lse)[kM16][2], const float (&minus_delta)[kM16][2],
                                                   bool masked, const Record& params, const common::ScoreTile& first) {
    using Element = typename Spec::Element;
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
        weights[m].fill(0.0f);
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dp[m].value[n][e] = common::kProductsFromDelta<Spec> ? minus_delta[m][e / 2] : 0.0f;
    }
    multiply<Element, kK16>(
        weights, [&](int m, int kk) { return ldmatrix_x4<false>(q_rows.at(m, kk)); },
        [&](int n, int kk) { return ldmatrix_x4<false>(k_rows.at(n, kk)); });
#pragma unroll
    for (int m = 0; m < kM16; ++m) {
        const common::ScoreTile score_tile = first.shifted(16 * m, 0);
        saved[m].save(weights[m]);
        if constexpr (common::kTakesWeights<Spec>) {
            common::Unused unused;
            common::take_weights<false, Spec>(weights[m], unused, masked, params, score_tile,
                                              [&](int i, int) { return lse[m][i]; });
        } else {
#pragma unroll
            for (int n = 0; n < kN8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    weights[m].value[n][e] =
                        common::exponential<Spec>(weights[m].value[n][e], params.scale_log2, lse[m][e / 2]);
            if (masked)
                common::hide_scores<false, Spec>(weights[m], common::mask_of<Spec>(params), params, score_tile, 0.0f);
        }
    }
    multiply<Element, kK16V>(
        dp, [&](int m, int kk) { return ldmatrix_x4<false>(do_rows.at(m, kk)); },
        [&](int n, int kk) { return ldmatrix_x4<false>(v_rows.at(n, kk)); });
}

}  // namespace fa2::sm80
