// Where TMA finds rows of a sequence. Tensor maps have the axes column, row, head and batch.
//
// The map of packed sequences begins as many rows before the array as the longest sequence may have, its third axis is
// a head still, and its last one counts rows, too. Row i of a sequence of so many rows that ends before row `end` is
// element (longest - rows + i, end): its last row is the last of the axis, so that what is loaded past it arrives as
// zeros, and what is stored there is not written. The map is the same for all sequences.
#pragma once
#include "common/sequence.cuh"

namespace fa2::sm90 {

template <bool kPacked>
struct MapPlace {
    __device__ int32 row(int32 row) const { return row; }
    __device__ int32 batch(int32 batch) const { return batch; }
};
template <>
struct MapPlace<true> {
    int32 shift, end;

    __device__ int32 row(int32 row) const { return row + shift; }
    __device__ int32 batch(int32) const { return end; }
};

template <class Spec, bool kOfKeys, class Record>
__device__ __forceinline__ MapPlace<Spec::kVarlen> map_place(const Record& params, int32 number) {
    if constexpr (Spec::kVarlen) {
        const auto axis = common::packed_axis<kOfKeys>(params);
        const auto rows = axis.rows(number);
        return {axis.longest - rows.length, rows.first + rows.length};
    } else {
        return {};
    }
}
template <class Spec, class Record>
__device__ __forceinline__ auto query_place(const Record& params, int32 number) {
    return map_place<Spec, false>(params, number);
}
template <class Spec, class Record>
__device__ __forceinline__ auto key_place(const Record& params, int32 number) {
    return map_place<Spec, true>(params, number);
}

}  // namespace fa2::sm90
