// Proof that every row, or every column, of a mask has at most two intervals, and their ends, without the mask itself.
//
// A rise is at the first visible position of an interval, a fall at the position behind its last. Blocks count the rises
// of a row, and find the first and last rise and fall, each in its own tile, by atomic operations on integers whose
// results do not depend on their order. If a row has one rise or two, its first rise and fall are the ends of the first
// interval, and its last ones those of the second.
#pragma once
#include "common/params.cuh.j2"
#include "common/ptx.cuh"

namespace fa2::common {

inline constexpr int32 kMostIntervals = 2;

// The edges of a row or a column. Each member is the largest of its values, and 0 without one: first positions are
// counted down from kEnd.
struct MapEdges {
    static constexpr int32 kEnd = 0x7fffffff;

    int32 rises = 0, first_rise = 0, first_fall = 0, last_rise = 0, last_fall = 0;

    __device__ __forceinline__ void fall(int32 position) {
        first_fall = max_of(first_fall, kEnd - position);
        last_fall = max_of(last_fall, position);
    }
    __device__ __forceinline__ void step(bool before, bool visible, int32 position) {
        if (visible == before) return;
        if (before) {
            fall(position);
        } else {
            ++rises;
            first_rise = max_of(first_rise, kEnd - position);
            last_rise = max_of(last_rise, position);
        }
    }
    // The same for 32 positions from `first` on.
    __device__ __forceinline__ void add_rises(uint32 bits, int32 first) {
        if (!bits) return;
        rises += __popc(bits);
        first_rise = max_of(first_rise, kEnd - (first + __ffs(bits) - 1));
        last_rise = max_of(last_rise, first + 31 - __clz(bits));
    }
    __device__ __forceinline__ void add_falls(uint32 bits, int32 first) {
        if (!bits) return;
        first_fall = max_of(first_fall, kEnd - (first + __ffs(bits) - 1));
        last_fall = max_of(last_fall, first + 31 - __clz(bits));
    }

    // Adds the edges of a tile to those of the whole row, number `index`.
    __device__ __forceinline__ void add_to(int32* intervals, int32* counts, int64 index) const {
        intervals += 4 * index;
        if (rises) {
            atomicAdd(counts + index, rises);
            atomicMax(intervals, first_rise);
            atomicMax(intervals + 2, last_rise);
        }
        if (first_fall) {
            atomicMax(intervals + 1, first_fall);
            atomicMax(intervals + 3, last_fall);
        }
    }
};

// Replaces the edges of all rows and columns by their intervals, and finds the most intervals of a row and of a column.
template <class Spec, class Params = fa2::Params>
struct CloseIntervals {
    __device__ static void run(const Params& params) {
        int32 index = blockIdx.x * 32 * Spec::kWarps + threadIdx.x;
        const bool is_row = index < params.num_rows,
                   is_column = !is_row && index - params.num_rows < params.num_columns;
        int32 rises = 0;
        if (is_row) rises = close(params.row_intervals, params.row_rises, index);
        if (is_column) rises = close(params.column_intervals, params.column_rises, index - params.num_rows);
        for (int32 count = kMostIntervals + 1; count > 0; --count) {
            const bool is_of_row = __syncthreads_or(is_row && rises >= count);
            const bool is_of_column = __syncthreads_or(is_column && rises >= count);
            if (threadIdx.x == 0 && is_of_row) atomicMax(params.most_intervals, count);
            if (threadIdx.x == 0 && is_of_column) atomicMax(params.most_intervals + 1, count);
        }
    }

  private:
    __device__ static int32 close(int32* intervals, const int32* counts, int32 index) {
        const int32 rises = counts[index];
        auto& ends = reinterpret_cast<int4*>(intervals)[index];
        const int4 edges = ends;
        ends = {rises ? MapEdges::kEnd - edges.x : 0, rises ? MapEdges::kEnd - edges.y : 0, rises > 1 ? edges.z : 0,
                rises > 1 ? edges.w : 0};
        return rises;
    }
};

}  // namespace fa2::common
