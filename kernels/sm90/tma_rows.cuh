// Where TMA finds the rows of a sequence. Tensor maps have the axes column, row, head and batch.
//
// A map of packed sequences has five axes: column, row, head, end and wrap. Row i of a sequence of n rows that ends
// before row `end` of the array is element (kFarRow - n + i, end, kFarRow) of the axes row, end and wrap:
//
//   axis   size          stride in bytes
//   row    kFarRow       r, from row to row
//   end    total + 1     r
//   wrap   kFarRow + 1   2^34 c - r, of which a multiple c makes it positive
//
// Its address is base + r (kFarRow - n + i) + r end + kFarRow (2^34 c - r) = base + r (end - n + i) + 2^64 c, the last
// term of which no address has bits for. The sequence's last row is the last of the row axis: what is loaded past it
// arrives as zeros, and what is stored there is not written. One map serves all sequences, and begins where its array
// does.
//
// What the hardware requires of a map, besides what cuTensorMapEncodeTiled checks (an address and strides that are
// multiples of 16, strides below 2^40, boxes of up to 256 elements along an axis):
//
//   - The map's own address must be mapped. A load whose box has no element inside the axes (a tile of a sequence
//     without rows, columns past head_dim) touches that address, and faults if nothing is there; loads of other boxes,
//     and all stores, do not. So no map may begin outside of its array. Seen on the H100 and the H200 with pages mapped
//     one by one.
//   - Elements outside of an axis are never accessed, but those inside must all be mapped where boxes are: `end` and
//     `wrap` have no element more than kernels ask for.
#pragma once
#include "common/sequence.cuh"
#include "sm90/ptx.cuh"

namespace fa2::sm90 {

inline constexpr int32 kFarRow = 1 << 30;  // fa2cupy/plan/tensor_maps.py has the same

template <bool kPacked>
struct TmaRows {
    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32 batch) const {
        tma_load(smem, map, barrier, column, row, head, batch);
    }
    __device__ __forceinline__ void store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32 batch) const {
        tma_store(map, smem, column, row, head, batch);
    }
};
template <>
struct TmaRows<true> {
    int32 first, end;  // of the sequence, along the axes row and end

    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32) const {
        tma_load(smem, map, barrier, column, first + row, head, end, kFarRow);
    }
    __device__ __forceinline__ void store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32) const {
        tma_store(map, smem, column, first + row, head, end, kFarRow);
    }
};

template <class Spec, bool kOfKeys, class Record>
__device__ __forceinline__ TmaRows<Spec::kVarlen> tma_rows(const Record& params, int32 number) {
    if constexpr (Spec::kVarlen) {
        const auto rows = common::packed_axis<kOfKeys>(params).rows(number);
        return {kFarRow - rows.length, rows.first + rows.length};
    } else {
        return {};
    }
}
template <class Spec, class Record>
__device__ __forceinline__ auto query_tma_rows(const Record& params, int32 number) {
    return tma_rows<Spec, false>(params, number);
}
template <class Spec, class Record>
__device__ __forceinline__ auto key_tma_rows(const Record& params, int32 number) {
    return tma_rows<Spec, true>(params, number);
}

}  // namespace fa2::sm90
