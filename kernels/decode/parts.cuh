// Parts of a job's O and lse, which warps and blocks compute over different keys, and their merge, by the formulas of
// common/merged_row.cuh. The weights of all parts of a row are computed once, and then the columns are added up.
//
//   warps   leave 16 rows at a time in shared memory, [row][column], each in a slot of its own
//   blocks  leave their segments in a workspace, if jobs are cut. The parts of a job are merged in two levels: groups of
//           consecutive blocks, then the groups. Whoever arrives last at a counter merges what the others have left
//
// The workspace has three parts for each block: of the job that its piece begins within, of the job that it begins and
// does not end, and for a group of blocks from this one on. A part is O [kBr][kD], then lse [kBr]. Counters are zero
// before and after a launch.
#pragma once
#include "common/math.cuh"
#include "common/statistics.cuh"
#include "decode/work.cuh"

namespace fa2::decode {

// The most blocks of a launch; the same number is in fa2cupy/plan/decode.py.
inline constexpr int kMostBlocks = 1024;
// The most parts that are merged at once, in one level, and the most of a group, and the most groups.
inline constexpr int kPartsOfOneLevel = 16, kMostParts = 33;
static_assert((kMostParts - 1) * (kMostParts - 1) >= kMostBlocks);

// 16 rows of O in shared memory. Of eight adjacent rows, chunks of eight columns are permuted, so that the eight lanes
// of a store that write to the same columns reach different banks.
template <class Real, int kD>
struct ExchangeRows {
    static constexpr int kBytes = 16 * kD * sizeof(Real);
    static constexpr int kLowestBit = (kD / 8) & -(kD / 8);
    static constexpr int kMask = min_of(kLowestBit, 4) - 1;

    __device__ __forceinline__ static int32 offset(int32 row, int32 column) {
        return row * kD + (column ^ ((row & kMask) << 3));
    }
};

// The blocks that have parts of a job: `count` from `first` on.
struct Contributors {
    int32 first, count;

    // Blocks of a group, of which the last may have fewer, but at least two: the job's last block may be the first one of
    // the next job, whose first group then has the counter and the part of the groups that begin there.
    __device__ __forceinline__ int32 group_size() const {
        if (count <= kPartsOfOneLevel) return count;
        const int32 size = __float2int_ru(sqrtf(static_cast<float>(count)));
        return (count - 1) % size == 0 ? size + 1 : size;  // both cannot divide count - 1 < size (size + 1)
    }
};

template <class Spec, int kD, class Record = Params>
struct Parts {
    using Element = typename Spec::Element;
    using Accum = typename common::ElementTraits<Element>::Accum;
    static constexpr int kVector = 16 / sizeof(Accum);                // columns of an item
    static constexpr int kItems = ceil_div(Spec::kHeadDim, kVector);  // of a row
    static constexpr int kPartElements = Spec::kBr * (kD + 1);
    static constexpr int kThreads = 32 * Spec::kWarps;
    static constexpr int kInFlight = 16;  // parts of blocks that a thread waits for at once
    using Columns = Vector<Accum, kVector>;

    const Record& params;
    const Job& job;
    int32 first_row, num_rows;  // of the job's row tile among all rows, and the rows that exist

    // Calls action(row, column) for each item of some rows of the tile; all threads of the block take part.
    template <class Action>
    __device__ __forceinline__ void for_items(int32 begin, int32 end, const Action& action) const {
#pragma unroll 1
        for (int32 index = threadIdx.x; index < (end - begin) * kItems; index += kThreads)
            action(begin + index / kItems, index % kItems * kVector);
    }

    // The sink of a row, which joins the parts when the last of them are merged; -inf without one.
    __device__ __forceinline__ Accum sink_of(int32 row) const {
        if constexpr (Spec::kSink) {
            const int32 head = head_of(first_row + row);
            return params.sink[params.sink_strides.offset(0, head, 0, 0)];
        } else {
            return -common::infinity<Accum>();
        }
    }

    // The part of the block with this index among a job's.
    __device__ __forceinline__ static int32 part_of_block(const Contributors& blocks, int32 index) {
        return 3 * (blocks.first + index) + (index == 0);
    }

    // A number for each part and row in shared memory: lse, then the weight. Parts are dealt to areas, one for each warp.
    struct Weights {
        static constexpr int kBytes = ceil_div(kMostParts, Spec::kWarps) * Spec::kBr * sizeof(Accum);
        char* memory;      // of the first area
        int32 area_bytes;  // from there to the next

        __device__ __forceinline__ Accum& at(int32 part, int32 row) const {
            Accum* area = reinterpret_cast<Accum*>(memory + part % Spec::kWarps * area_bytes);
            return area[part / Spec::kWarps * Spec::kBr + row];
        }
    };

    // Makes weights of the lse of parts, and stores the lse of all of them together. A thread has a row.
    // A weight of -1 marks a part without a visible key.
    __device__ __forceinline__ void weigh(const Weights& weights, int32 count, bool is_result, int32 part) const {
        const int32 row = threadIdx.x;
        if (row >= num_rows) return;
        static_assert(Spec::kBr <= kThreads);
        const Accum none = -common::infinity<Accum>(), sink = is_result ? sink_of(row) : none;
        Accum highest = sink;
#pragma unroll 4
        for (int32 s = 0; s < count; ++s) highest = common::maximum(highest, weights.at(s, row));
        // In a row without a visible key, 0 is subtracted instead, as -inf - (-inf) is NaN.
        const Accum shift = highest == none ? Accum(0) : highest;
        Accum total = common::exp_accurate(sink - shift);
#pragma unroll 2
        for (int32 s = 0; s < count; ++s) {
            const Accum lse = weights.at(s, row), weight = common::exp_accurate(lse - shift);
            total += weight;
            weights.at(s, row) = lse == none ? Accum(-1) : weight;
        }
        const Accum inverse = Accum(1) / total;
#pragma unroll 4
        for (int32 s = 0; s < count; ++s) {
            const Accum weight = weights.at(s, row);
            if (!(weight < Accum(0))) weights.at(s, row) = weight * inverse;
        }
        store_lse(row, shift + log(total), is_result, part);
    }

    // Columns of a row from its parts, in their order: kAtOnce of them are loaded before any is added.
    // `columns_of(s)` points to those of part s.
    template <int kAtOnce, class ColumnsOf>
    __device__ __forceinline__ static Columns weighted_sum(const Weights& weights, int32 row, int32 count,
                                                           const ColumnsOf& columns_of) {
        Columns sum = {};
#pragma unroll 1
        for (int32 first = 0; first < count; first += kAtOnce) {
            Columns x[kAtOnce] = {};
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + i < count) x[i] = *reinterpret_cast<const Columns*>(columns_of(first + i));
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                if (first + i >= count) break;
                const Accum weight = weights.at(first + i, row);
                // V of hidden keys may have made the O of a part without a visible key NaN.
                const bool visible = !(weight < Accum(0));
#pragma unroll
                for (int c = 0; c < kVector; ++c)
                    if (visible) sum.item[c] = fma(weight, x[i].item[c], sum.item[c]);
            }
        }
        return sum;
    }

    // Called by the blocks with parts of a job when theirs is in the workspace: the last ones merge all of them.
    __device__ __forceinline__ void merge(const Contributors& blocks, int32 worker, const Weights& weights) const {
        const int32 size = blocks.group_size(), groups = ceil_div(blocks.count, size);
        const int32 begin = (worker - blocks.first) / size * size;
        const int32 part_of_group = 3 * (blocks.first + begin) + 2;
        int32 count = min_of(size, blocks.count - begin);
        int32* counter = params.arrivals + blocks.first + begin;
#pragma unroll 1
        for (bool of_groups = false;; of_groups = true) {
            if (!is_last(counter, count)) return;
            const bool is_all = of_groups || groups == 1;
            const auto part_of = [&](int32 s) {
                return part_at(of_groups ? 3 * (blocks.first + s * size) + 2 : part_of_block(blocks, begin + s));
            };
#pragma unroll 4
            for (int32 index = threadIdx.x; index < count * Spec::kBr; index += kThreads) {
                const int32 s = index / Spec::kBr, row = index % Spec::kBr;
                if (row < num_rows) weights.at(s, row) = part_of(s)[Spec::kBr * kD + row];
            }
            __syncthreads();
            weigh(weights, count, is_all, part_of_group);
            __syncthreads();
            for_items(0, num_rows, [&](int32 row, int32 column) {
                const auto columns_of = [&](int32 s) { return part_of(s) + row * kD + column; };
                store(row, column, weighted_sum<kInFlight>(weights, row, count, columns_of), is_all, part_of_group);
            });
            if (is_all) return;
            count = groups;
            counter = params.arrivals + kMostBlocks + blocks.first;
        }
    }

    // Writes an item of the results, or of a part in the workspace.
    __device__ __forceinline__ void store(int32 row, int32 column, const Columns& x, bool is_result, int32 part) const {
        if (is_result)
            store_result(row, column, x);
        else
            *reinterpret_cast<Columns*>(part_at(part) + row * kD + column) = x;
    }

  private:
    __device__ __forceinline__ int32 head_of(int32 packed_row) const {
        return job.head_kv * params.heads_per_group + packed_row % params.heads_per_group;
    }
    __device__ __forceinline__ Accum* part_at(int32 part) const {
        return params.partials + static_cast<int64>(part) * kPartElements;
    }

    __device__ __forceinline__ void store_result(int32 row, int32 column, const Columns& x) const {
        const int32 packed = first_row + row, query = packed / params.heads_per_group;
        Element* o = params.o + params.o_strides.offset(job.batch, query, head_of(packed)) + column;
        if constexpr (Spec::kHeadDim % kVector == 0 && sizeof(Element) == 2) {
            Vector<Element, kVector> rounded;
#pragma unroll
            for (int c = 0; c < kVector; ++c) rounded.item[c] = common::rounded<Element>(x.item[c]);
            *reinterpret_cast<Vector<Element, kVector>*>(o) = rounded;
        } else {
#pragma unroll
            for (int c = 0; c < kVector; ++c)
                if (column + c < Spec::kHeadDim) o[c] = common::rounded<Element>(x.item[c]);
        }
    }

    __device__ __forceinline__ void store_lse(int32 row, Accum lse, bool is_result, int32 part) const {
        const int32 packed = first_row + row, query = packed / params.heads_per_group;
        if (is_result)
            params.lse[common::first_statistic<Spec>(params, job.batch, head_of(packed)) + query] = lse;
        else
            part_at(part)[Spec::kBr * kD + row] = lse;
    }

    // True for the block that arrives last at a counter, after what the others have written to the workspace; it resets
    // the counter. All threads of the block call this.
    __device__ __forceinline__ static bool is_last(int32* counter, int32 expected) {
        __shared__ bool last;
        __syncthreads();  // all threads have written their items, and have read `last` of the call before
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(counter, 1) == expected - 1;
            if (last) atomicExch(counter, 0);
            __threadfence();
        }
        __syncthreads();
        return last;
    }
};

}  // namespace fa2::decode
