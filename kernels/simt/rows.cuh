// Rows of a matrix in shared memory: their layout, and the copy from global memory.
//
// Row r starts at rows[r * kRowLength]. Columns from kHeadDim to kColumns hold zeros, which add nothing to any product.
// The kVector elements behind them are padding: it moves eight consecutive rows to different banks, so that eight lanes
// can load 16 bytes each from one column of eight rows at a time.
#pragma once
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "simt/ptx.cuh"

namespace fa2::simt {

// The first element of one head's matrix (Q, K, V, O or a gradient).
template <class Real>
__device__ __forceinline__ Real* head_of(Real* x, const Strides& strides, int32 batch, int32 head) {
    return x + strides.offset(batch, 0, head);
}

// True if the GPU copies from global to shared memory without registers, while its threads do something else.
#if __CUDA_ARCH__ >= 800
inline constexpr bool kAsynchronous = true;
#else
inline constexpr bool kAsynchronous = false;
#endif

// Waits for this thread's copies. The other threads of the block see them after a barrier.
__device__ __forceinline__ void wait_for_copies() {
    if constexpr (kAsynchronous) common::cp_async_wait_all();
}

template <class Real, int kHeadDim_>
struct SharedRows {
    static constexpr int kHeadDim = kHeadDim_;
    static constexpr int kVector = 16 / sizeof(Real);  // elements of a 128-bit load
    static constexpr int kColumns = common::round_up(kHeadDim, 32);
    static constexpr int kRowLength = kColumns + kVector;

    using Vec = Vector<Real, kVector>;

    __device__ __forceinline__ static Vec load(const Real* smem) { return *reinterpret_cast<const Vec*>(smem); }

    // True if rows of global memory can be accessed 16 bytes at a time.
    __device__ __forceinline__ static bool in_vectors(const Real* gmem, int64 row_stride) {
        return kHeadDim % kVector == 0 && row_stride % kVector == 0 && reinterpret_cast<uint64>(gmem) % 16 == 0;
    }

    // Starts the copy of rows [first_row, first_row + kRows) by all threads of the block. Rows past `num_rows` become
    // zeros.
    template <int kThreads, int kRows>
    __device__ __forceinline__ static void copy(Real* rows, const Real* gmem, int64 row_stride, int32 first_row,
                                                int32 num_rows) {
        gmem += first_row * row_stride;
        num_rows -= first_row;
        if (in_vectors(gmem, row_stride))
            copy_vectors<kThreads, kRows, kVector>(rows, gmem, row_stride, num_rows);
        else
            copy_vectors<kThreads, kRows, 1>(rows, gmem, row_stride, num_rows);
    }

    // Stores zeros to the rows for which is_hidden(row), by all threads of the block.
    template <int kThreads, int kRows, class IsHidden>
    __device__ __forceinline__ static void clear(Real* rows, const IsHidden& is_hidden) {
#pragma unroll 1
        for (int32 index = threadIdx.x; index < kRows * kColumns; index += kThreads)
            if (is_hidden(index / kColumns)) rows[index / kColumns * kRowLength + index % kColumns] = 0;
    }

    // Copies kElements elements, or writes zeros if they do not exist.
    template <int kElements>
    __device__ __forceinline__ static void copy_vector(Real* smem, const Real* gmem, bool exists) {
        using Copied = Vector<Real, kElements>;
        if constexpr (kAsynchronous) {
            cp_async<sizeof(Copied)>(common::shared_address(smem), gmem, exists);
        } else {
            Copied copied = {};
            if (exists) copied = *reinterpret_cast<const Copied*>(gmem);
            *reinterpret_cast<Copied*>(smem) = copied;
        }
    }

  private:
    // The same for rows. Where copies are asynchronous, no thread waits for one, and a loop that is
    // not unrolled saves registers.
    template <int kThreads, int kRows, int kElements>
    __device__ __forceinline__ static void copy_vectors(Real* rows, const Real* gmem, int64 row_stride,
                                                        int32 num_rows) {
        constexpr int kVectors = kColumns / kElements;  // of a row
        constexpr int kUnroll = kAsynchronous ? 1 : 4;
#pragma unroll kUnroll
        for (int32 index = threadIdx.x; index < kRows * kVectors; index += kThreads) {
            const int32 row = index / kVectors, column = index % kVectors * kElements;
            copy_vector<kElements>(rows + row * kRowLength + column, gmem + row * row_stride + column,
                                   row < num_rows && column < kHeadDim);
        }
    }
};

}  // namespace fa2::simt
