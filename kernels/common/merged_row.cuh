// A row of O and its lse, merged from partial results that were computed over different keys:
//
//   lse = log(sum_s exp(lse_s))        O = sum_s exp(lse_s - lse) O_s
//
// Partials are summed in their order, so that the result is bit-reproducible.
#pragma once
#include "common/math.cuh"

namespace fa2::common {

template <class Real, int kColumns>
struct MergedRow {
    Real lse;
    Real column[kColumns];
};

// Merges kColumns adjacent columns of a row. `lse_of(s)` and `columns_of(s)`, a Vector, read partial s: kAtOnce of them
// are read before any is used. `without_values` is the lse of one more partial whose O is zero: a sink, or -inf for
// none.
template <class Real, int kColumns, int kAtOnce, class LseOf, class ColumnsOf>
__device__ __forceinline__ MergedRow<Real, kColumns> merge_row(int32 num_parts, Real without_values,
                                                               const LseOf& lse_of, const ColumnsOf& columns_of) {
    Real lse[kAtOnce];
    Vector<Real, kColumns> x[kAtOnce] = {};
    const auto read = [&](int32 first) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const bool exists = first + i < num_parts;
            lse[i] = exists ? lse_of(first + i) : -infinity<Real>();
            if (exists) x[i] = columns_of(first + i);
        }
    };
    read(0);
    Real highest = without_values;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) highest = maximum(highest, lse[i]);
#pragma unroll 4
    for (int32 s = kAtOnce; s < num_parts; ++s) highest = maximum(highest, lse_of(s));
    // In a row without a visible key, 0 is subtracted instead, as -inf - (-inf) is NaN.
    const Real shift = highest == -infinity<Real>() ? Real(0) : highest;
    Real total = exp_accurate(without_values - shift);
    MergedRow<Real, kColumns> row = {};
#pragma unroll 1
    for (int32 first = 0;;) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const Real weight = exp_accurate(lse[i] - shift);
            total += weight;
            // A partial without a visible key is left out: V of hidden keys may have made its O NaN.
            const bool visible = lse[i] != -infinity<Real>();
#pragma unroll
            for (int c = 0; c < kColumns; ++c)
                if (visible) row.column[c] = fma(weight, x[i].item[c], row.column[c]);
        }
        first += kAtOnce;
        if (first >= num_parts) break;
        read(first);
    }
    const Real inverse = total == Real(0) ? Real(0) : Real(1) / total;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) row.column[c] *= inverse;
    row.lse = shift + log(total);
    return row;
}

}  // namespace fa2::common
