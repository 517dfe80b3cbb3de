// P and dS of a tile, from its products.
//
//   P = exp(S - lse)        dS = P o (dP - delta)
#pragma once
#include "common/weights.cuh"
#include "float32_parts/fragments.cuh"

namespace fa2::float32_parts {

// Receives P from `take_weights` in the layout of accumulators.
template <int kN8>
struct FloatProbabilities {
    QuadFragment<kN8>& x;

    __device__ __forceinline__ void set(int i, int n8, float even, float odd) {
        x.value[n8][2 * i] = even;
        x.value[n8][2 * i + 1] = odd;
    }
    __device__ __forceinline__ void set_positive(int i, int n8, float even, float odd) {
        set(i, n8, fmaxf(even, 0.0f), fmaxf(odd, 0.0f));
    }
};

// Calls f(x(i, j), statistic(n)) for each element, with the number n of its query.
template <bool kTransposed, class Fragment, class Statistic, class Function>
__device__ __forceinline__ void for_queries(Fragment& x, const Statistic& statistic, const Function& f) {
#pragma unroll
    for (int n = 0; n < (kTransposed ? Fragment::kCols : Fragment::kRows); ++n) {
        const float own = statistic(n);
#pragma unroll
        for (int m = 0; m < (kTransposed ? Fragment::kRows : Fragment::kCols); ++m)
            f(x(kTransposed ? m : n, kTransposed ? n : m), own);
    }
}

// Replaces x by the weights of dS: scores by P itself, or products, where kTakesWeights, by what features make of P.
// `p` receives P for dV. lse(n) is that of the n-th query of a lane, which has rows of S or (kTransposed) columns of S^T;
// +inf makes P zero. All lanes of the warp call it together.
template <bool kTransposed, class Spec, int kN8, class P, class Record, class Lse>
__device__ __forceinline__ void take_probabilities(QuadFragment<kN8>& x, P&& p, bool masked, const Record& params,
                                                   const common::ScoreTile& tile, const Lse& lse) {
    using Fragment = QuadFragment<kN8>;
    constexpr int kQueries = kTransposed ? Fragment::kCols : Fragment::kRows;
    if constexpr (common::kTakesWeights<Spec>) {
        float of_query[kQueries];
#pragma unroll
        for (int n = 0; n < kQueries; ++n) of_query[n] = lse(n);
        common::take_weights<kTransposed, Spec>(x, p, masked, params, tile,
                                                [&](int i, int j) { return of_query[kTransposed ? j : i]; });
    } else {
        for_queries<kTransposed>(
            x, lse, [](float& score, float own) { score = common::exp_approx(common::at_most_zero(score - own)); });
        if (masked) {
            const auto mask = common::mask_of<Spec>(params);
            if constexpr (kTransposed)
                common::mask_transposed(x, mask, tile.position, 0.0f);
            else
                common::mask_scores(x, mask, tile.position, 0.0f);
        }
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) p.set(i, n, x.value[n][2 * i], x.value[n][2 * i + 1]);
    }
}

// What dP is compared to, in a strip of keys or queries, which has one unit:
//
//   dP - delta = unit * accumulator - rest
//
// if the accumulator has started from `start`: minus half of delta, or zero where that is far beyond all products. Each
// of kChains chains adds about delta / kChains: the first starts from minus half of that, and the accumulator is
// brought back there for the next one.
template <int kChains = 1>
struct Comparand {
    float start, rest;

    __device__ __forceinline__ Comparand(float delta, float unit) {
        const float inverse = __uint_as_float((2u * 127u << 23) - __float_as_uint(unit));
        const float half = delta * (-0.5f / kChains) * inverse;
        start = fabsf(half) < 0x1p100f ? half : 0.0f;
        rest = fma(start, (2 * kChains - 1) * unit, delta);
    }
};

// Sets the accumulators of dP to start(n, c), for the n-th query of a lane and strip c of the columns. All lanes of the
// warp call it together.
template <bool kTransposed, int kN8, class Start>
__device__ __forceinline__ void start_dp(QuadFragment<kN8>& dp, const Start& start) {
    using Fragment = QuadFragment<kN8>;
#pragma unroll
    for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) dp(i, j) = start(kTransposed ? j : i, strip_of(j));
}

// Brings the accumulators back to about start(n, c) after a chain that has added minus twice as much.
template <bool kTransposed, int kN8, class Start>
__device__ __forceinline__ void start_next_chain(QuadFragment<kN8>& dp, const Start& start) {
    using Fragment = QuadFragment<kN8>;
#pragma unroll
    for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
            dp(i, j) = fma(2.0f, start(kTransposed ? j : i, strip_of(j)), dp(i, j));
}

// Replaces weights by dS. `dp`: products of scaled parts from `start_dp` on, to be multiplied by the unit of their
// strip. rest(n, c): like start(n, c) above. delta(n): like lse(n).
template <bool kTransposed, class Spec, int kN8, int kStrips, class Record, class Rest, class Delta>
__device__ __forceinline__ void take_gradients(QuadFragment<kN8>& weights, const QuadFragment<kN8>& dp,
                                               const float (&unit)[kStrips], const Record& params, const Rest& rest,
                                               const Delta& delta) {
    using Fragment = QuadFragment<kN8>;
#pragma unroll
    for (int j = 0; j < Fragment::kCols; ++j)
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i) {
            const int n = kTransposed ? j : i, c = strip_of(j);
            const float own = common::kProductsFromDelta<Spec> ? 0.0f : delta(n);
            const float difference = fma(dp(i, j), unit[c], own - rest(n, c));  // dP - delta, or dP
            weights(i, j) = common::weighted<Spec>(weights(i, j), difference, -own, params);
        }
}

// lse and delta of a query. In rows that are not there, or that see no key, they make P zero.
struct RowStatistics {
    float lse, delta;
};
template <class Record>
__device__ __forceinline__ RowStatistics row_statistics(const Record& params, int64 first, int32 row) {
    const bool valid = row < params.seqlen_q;
    const float lse = valid ? params.lse[first + row] : -common::infinity<float>();
    if (lse == -common::infinity<float>()) return {-lse, 0.0f};
    return {lse, params.delta[first + row]};
}

}  // namespace fa2::float32_parts
