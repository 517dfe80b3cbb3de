// A row of O and its lse, merged from partial results that were computed over different keys. Each has the sum of its
// exponentials after a shift, and O that was not divided by it:
//
//   shift = max_s shift_s    sum = sum_s exp(shift_s - shift) sum_s    O = sum_s exp(shift_s - shift) O_s
//
// The row is then O / sum, and its lse is shift + log(sum). Partials that were divided have lse as their shift, and 1 as
// their sum.
//
// Partials are summed in their order, so that the result is bit-reproducible.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

// The shift of a row's exponentials, and their sum. Without a visible key the shift is -inf.
template <class Real>
struct alignas(2 * sizeof(Real)) RowStatistic {
    Real shift, sum;
};

template <class Real, int kColumns>
struct MergedRow {
    RowStatistic<Real> statistic;
    Real column[kColumns];

    // Divides the columns by the sum.
    __device__ __forceinline__ void divide() {
        const Real inverse = statistic.sum == Real(0) ? Real(0) : Real(1) / statistic.sum;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) column[c] *= inverse;
    }
};

// Merges kColumns adjacent columns of a row. `statistic_of(s)` and `columns_of(s)`, a Vector, read partial s: kAtOnce of
// them are read before any is used. `without_values` is the shift of one more partial whose sum is 1 and whose O is
// zero: a sink, or -inf for none. kExp is the exponential in whose base the shifts are.
template <class Real, int kColumns, int kAtOnce, Real (*kExp)(Real), class StatisticOf, class ColumnsOf>
__device__ __forceinline__ MergedRow<Real, kColumns> merge_row(int32 num_parts, Real without_values,
                                                               const StatisticOf& statistic_of,
                                                               const ColumnsOf& columns_of) {
    RowStatistic<Real> statistic[kAtOnce];
    Vector<Real, kColumns> x[kAtOnce] = {};
    const auto read = [&](int32 first) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const bool exists = first + i < num_parts;
            statistic[i] = exists ? statistic_of(first + i) : RowStatistic<Real>{-infinity<Real>(), Real(0)};
            if (exists) x[i] = columns_of(first + i);
        }
    };
    read(0);
    Real highest = without_values;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) highest = maximum(highest, statistic[i].shift);
#pragma unroll 4
    for (int32 s = kAtOnce; s < num_parts; ++s) highest = maximum(highest, statistic_of(s).shift);
    // In a row without a visible key, 0 is subtracted instead, as -inf - (-inf) is NaN.
    const Real shift = highest == -infinity<Real>() ? Real(0) : highest;
    MergedRow<Real, kColumns> row = {{highest, kExp(without_values - shift)}};
#pragma unroll 1
    for (int32 first = 0;;) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const Real weight = kExp(statistic[i].shift - shift);
            row.statistic.sum = fma(weight, statistic[i].sum, row.statistic.sum);
            // A partial without a visible key is left out: V of hidden keys may have made its O NaN.
            const bool visible = statistic[i].shift != -infinity<Real>();
#pragma unroll
            for (int c = 0; c < kColumns; ++c)
                if (visible) row.column[c] = fma(weight, x[i].item[c], row.column[c]);
        }
        first += kAtOnce;
        if (first >= num_parts) break;
        read(first);
    }
    return row;
}

}  // namespace fa2::common
