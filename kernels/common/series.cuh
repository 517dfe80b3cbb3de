// Series: sequences that share the bias, and follow each other in a block that keeps it (kKeepsBias).
//
// A persistent block processes the same query tile and head of all sequences of a series. It loads the bias of these
// rows with the first of them, and the others find it in shared memory. Series are scheduled as other kernels schedule
// sequences. Every `sharers` sequences that follow each other share the bias, and are
// divided into series of `series_length`, the last of which may be shorter.
#pragma once
#include "common/math.cuh"
#include "common/schedule.cuh"

namespace fa2::common {

template <class Spec>
inline constexpr bool kHasSeries = Spec::kKeepsBias;

// Replaces the number of a series by that of its first sequence; returns how many more the series has. Record is a
// template parameter because only records of kernels that keep the bias have these members.
template <class Spec, class Record>
__device__ __forceinline__ int32 enter_series(TileCoordinates& where, const Record& params) {
    if constexpr (kHasSeries<Spec>) {
        const int32 series = ceil_div(params.sharers, params.series_length);  // of the sequences that share a bias
        const int32 bias = where.batch / series;
        const int32 first = (where.batch - bias * series) * params.series_length;
        where.batch = bias * params.sharers + first;
        return min_of(params.series_length, params.sharers - first) - 1;
    } else {
        return 0;
    }
}

}  // namespace fa2::common
