// TMA coordinates of the rows of a sequence. Tensor maps have the axes column, row, head and batch.
//
// The map of a packed array has five axes: column, row, head, end and wrap. One map serves all sequences and starts
// where its array starts. Row i of a sequence of n rows that ends before row `end` of the array is element
// (kFarRow - n + i, end, kFarRow) of the axes row, end and wrap:
//
//   axis   size          stride in bytes
//   row    kFarRow       r, the distance between rows of the array
//   end    total + 1     r
//   wrap   kFarRow + 1   2^34 c - r, with the smallest integer c that makes it positive
//
// Its address is base + r (kFarRow - n + i) + r end + kFarRow (2^34 c - r) = base + r (end - n + i) + 2^64 c, and the
// last term vanishes, because addresses wrap around at 2^64. The sequence's last row is the last element of the row
// axis, so that TMA itself clips boxes there: rows after it are loaded as zeros and are not stored.
//
// cuTensorMapEncodeTiled checks that the address and the strides are multiples of 16, that strides are below 2^40, and
// that boxes have up to 256 elements along an axis. The hardware has two more requirements:
//
//   - The map's base address must be mapped memory, so no map may start outside its array. A load whose box lies
//     entirely outside the tensor (a tile of a sequence without rows, columns beyond head_dim) touches that address and
//     faults if it is not mapped; loads of other boxes, and all stores, do not. Observed on the H100 and the H200 with
//     pages mapped one by one.
//   - Elements outside an axis are never accessed, but all elements of a box inside the axes must be mapped memory.
//     Therefore the axes `end` and `wrap` have no more elements than kernels use.
#pragma once
#include "common/sequence.cuh"
#include "sm90/ptx.cuh"

namespace fa2::sm90 {

inline constexpr int32 kFarRow = 1 << 30;  // must match fa2cupy/plan/tensor_maps.py

template <bool kPacked>
struct TmaRows {
    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32 batch) const {
        tma_load(smem, map, barrier, column, row, head, batch);
    }
    __device__ __forceinline__ void load_to(uint16 blocks, uint32 smem, const TensorMap& map, uint32 barrier,
                                            int32 column, int32 row, int32 head, int32 batch) const {
        tma_load_to(blocks, smem, map, barrier, column, row, head, batch);
    }
    __device__ __forceinline__ void store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32 batch) const {
        tma_store(map, smem, column, row, head, batch);
    }
    // The position of a row in the statistics of its sequence.
    template <class Record>
    __device__ __forceinline__ static int32 position(const Record&, int32 row) {
        return row;
    }
};
template <>
struct TmaRows<true> {
    int32 first, end;  // the sequence's first coordinate on the axis row, its coordinate on the axis end

    __device__ __forceinline__ void load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32) const {
        tma_load(smem, map, barrier, column, first + row, head, end, kFarRow);
    }
    __device__ __forceinline__ void load_to(uint16 blocks, uint32 smem, const TensorMap& map, uint32 barrier,
                                            int32 column, int32 row, int32 head, int32) const {
        tma_load_to(blocks, smem, map, barrier, column, first + row, head, end, kFarRow);
    }
    __device__ __forceinline__ void store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32) const {
        tma_store(map, smem, column, first + row, head, end, kFarRow);
    }
    template <class Record>
    __device__ __forceinline__ static int32 position(const Record&, int32 row) {
        return row;
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
