// The partial results of a job, O and lse that warps and blocks compute over some of its keys, and their merge, by
// common/merged_row.cuh. A thread has an item, adjacent columns of a row, and computes the weights of the row's partials
// itself: it then waits for memory once, and not for other threads.
//
//   warps   leave 16 rows at a time in shared memory, [row][column], each in a slot of its own
//   blocks  leave their segments in a workspace, if jobs are cut. The partials of a job are merged in two levels: groups
//           of consecutive blocks, then the groups. Whoever arrives last at a counter merges what the others have left
//
// The workspace has three partials for each block: of the job that its stretch begins within, of the job that it begins
// and does not end, and of a group of blocks that begins with this one. A partial is O [kBr][kD], then
// the statistics of the rows.
// Counters are zero before and after a launch.
#pragma once
#include "common/merged_row.cuh"
#include "common/score_mod.cuh"
#include "common/statistics.cuh"
#include "decode/work.cuh"

namespace fa2::decode {

// The most blocks of a launch; the same number is in fa2cupy/plan/decode.py.
inline constexpr int kMostBlocks = 1024;

// 16 rows of O in shared memory. Chunks of eight columns are permuted within eight adjacent rows, so that the eight
// lanes of a store that write to the same columns reach different banks.
template <class Real, int kD>
struct ExchangeRows {
    static constexpr int kBytes = 16 * kD * sizeof(Real);
    static constexpr int kLowestBit = (kD / 8) & -(kD / 8);
    static constexpr int kMask = min_of(kLowestBit, 4) - 1;

    __device__ __forceinline__ static int32 offset(int32 row, int32 column) {
        return row * kD + (column ^ ((row & kMask) << 3));
    }
};

// Adds one to a counter and returns what it was. Whoever arrives later sees what this thread knows of.
__device__ __forceinline__ int32 arrive(int32* counter) {
#if __CUDA_ARCH__ >= 700
    int32 before;
    asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
#else
    __threadfence();
    const int32 before = atomicAdd(counter, 1);
    __threadfence();
    return before;
#endif
}

template <class Spec, int kD, class Record = Params>
struct Partials {
    using Element = typename Spec::Element;
    using Accum = typename common::ElementTraits<Element>::Accum;
    static constexpr int kVector = 16 / sizeof(Accum);                 // columns of an item
    static constexpr int kItems = ceil_div(Spec::kHeadDimV, kVector);  // of a row
    static constexpr int kPartialElements = Spec::kBr * (kD + 2);
    static constexpr int kThreads = 32 * Spec::kWarps;
    using Columns = Vector<Accum, kVector>;
    using Item = common::MergedRow<Accum, kVector>;
    using Statistic = common::RowStatistic<Accum>;

    // Shifts are natural numbers, or in base 2.
    struct Units {
        static constexpr bool kNatural = kNaturalScores<Spec>;
        __device__ __forceinline__ static Accum exp(Accum x) {
            if constexpr (kNatural)
                return common::exp_accurate(x);
            else
                return common::exp2_approx(x);
        }
        __device__ __forceinline__ static Accum natural(Accum shift) {
            return kNatural ? shift : shift * Accum(common::kLn2);
        }
    };

    const Record& params;
    const Job& job;
    int32 first_row, num_rows;  // of the job's row tile among all rows, and the rows that exist

    // The sink of a row in units of shifts, which joins the partials when the last of them are merged; -inf without one.
    __device__ __forceinline__ Accum sink_of(int32 row) const {
        if constexpr (Spec::kSink) {
            const int32 head = head_of(first_row + row);
            return params.sink[params.sink_strides.offset(0, head, 0, 0)] * Accum(common::kScoreUnit<Spec>);
        } else {
            return -common::infinity<Accum>();
        }
    }

    // The partial of the block with this index among a job's.
    __device__ __forceinline__ static int32 partial_of_block(const Contributors& blocks, int32 index) {
        return 3 * (blocks.first + index) + (index == 0);
    }

    // Merges the partials of the rows from `begin` to `end` of the tile, as results or as another partial; all threads
    // of the block call this. `statistic_of(s, row)` reads the statistic of partial s, `columns_of(s, row, column)` points
    // to an item of its O, and `store(row, column, merged)` stores one.
    template <int kAtOnce, class StatisticOf, class ColumnsOf, class Store>
    __device__ __forceinline__ void merge_rows(int32 begin, int32 end, int32 count, bool is_result,
                                               const StatisticOf& statistic_of, const ColumnsOf& columns_of,
                                               const Store& store) const {
#pragma unroll 1
        for (int32 index = threadIdx.x; index < (end - begin) * kItems; index += kThreads) {
            const int32 row = begin + index / kItems, column = index % kItems * kVector;
            store(row, column,
                  merge_item<kAtOnce>(
                      count, row, is_result, [&](int32 s) { return statistic_of(s, row); },
                      [&](int32 s) { return columns_of(s, row, column); }));
        }
    }

    // The same for one item.
    template <int kAtOnce, class StatisticOf, class ColumnsOf>
    __device__ __forceinline__ auto merge_item(int32 count, int32 row, bool is_result, const StatisticOf& statistic_of,
                                               const ColumnsOf& columns_of) const {
        const Accum sink = is_result ? sink_of(row) : -common::infinity<Accum>();
        return common::merge_row<Accum, kVector, kAtOnce, Units::exp>(
            count, sink, statistic_of, [&](int32 s) { return *reinterpret_cast<const Columns*>(columns_of(s)); });
    }

    // The statistic of a row, and an item of O, of a partial in the workspace.
    __device__ __forceinline__ Statistic statistic(int32 partial, int32 row) const {
        return statistics_of(static_cast<const Accum*>(partial_at(partial)))[row];
    }
    __device__ __forceinline__ const Accum* columns(int32 partial, int32 row, int32 column) const {
        return partial_at(partial) + row * kD + column;
    }

    // Stores an item as a result, or in a partial in the workspace.
    __device__ __forceinline__ void store_result(int32 row, int32 column, Item merged) const {
        merged.divide();
        store_columns(row, column, merged.column);
        const int32 packed = first_row + row;
        if (column == 0)
            params.lse[common::first_statistic<Spec>(params, job.batch, head_of(packed)) +
                       quotient(packed, params.heads_per_group)] =
                Units::natural(merged.statistic.shift) + log(merged.statistic.sum);
    }
    __device__ __forceinline__ void store_partial(int32 partial, int32 row, int32 column, const Item& merged) const {
        Columns columns;
#pragma unroll
        for (int c = 0; c < kVector; ++c) columns.item[c] = merged.column[c];
        *reinterpret_cast<Columns*>(partial_at(partial) + row * kD + column) = columns;
        if (column == 0) statistics_of(partial_at(partial))[row] = merged.statistic;
    }
    __device__ __forceinline__ void store(bool is_result, int32 partial, int32 row, int32 column,
                                          const Item& merged) const {
        if (is_result)
            store_result(row, column, merged);
        else
            store_partial(partial, row, column, merged);
    }

    // Called by the blocks with partials of a job when theirs is in the workspace: the last ones merge all of them.
    __device__ __forceinline__ void merge(const Contributors& blocks, int32 worker) const {
        const int32 size = blocks.group_size(), groups = quotient(blocks.count + size - 1, size);
        const int32 begin = quotient(worker - blocks.first, size) * size;
        const int32 partial_of_group = 3 * (blocks.first + begin) + 2;
        int32 count = min_of(size, blocks.count - begin);
        int32* counter = params.arrivals + blocks.first + begin;
#pragma unroll 1
        for (bool of_groups = false;; of_groups = true) {
            if (!is_last(counter, count)) return;
            const bool is_all = of_groups || groups == 1;
            // They lie at equal distances, but that of a job's first block is one further.
            const Accum* partials = partial_at(3 * blocks.first + (of_groups ? 2 : 3 * begin));
            const int32 distance = (of_groups ? 3 * size : 3) * kPartialElements;
            const int32 of_first = !of_groups && begin == 0 ? kPartialElements : 0;
            if (count <= kPartialsOfOneLevel / 2)
                merge_group<kPartialsOfOneLevel / 2>(partials, of_first, distance, count, is_all, partial_of_group);
            else
                merge_group<kPartialsOfOneLevel>(partials, of_first, distance, count, is_all, partial_of_group);
            if (is_all) return;
            count = groups;
            counter = params.arrivals + kMostBlocks + blocks.first;
        }
    }

    // True for the block that arrives last at a counter: it sees what the others have written to the workspace, and
    // resets the counter. All threads of the block call this.
    __device__ __forceinline__ static bool is_last(int32* counter, int32 expected) {
        __syncthreads();  // all threads have written their items
        bool last = false;
        if (threadIdx.x == 0) {
            last = arrive(counter) == expected - 1;
            if (last) *counter = 0;  // nobody else comes to it in this launch
        }
        return __syncthreads_or(last);
    }

  private:
    template <int kAtOnce>
    __device__ __forceinline__ void merge_group(const Accum* partials, int32 of_first, int32 distance, int32 count,
                                                bool is_all, int32 target) const {
        const auto partial_of = [=](int32 s) {
            return partials + static_cast<int64>(s) * distance + (s == 0 ? of_first : 0);
        };
        merge_rows<kAtOnce>(
            0, num_rows, count, is_all, [&](int32 s, int32 row) { return statistics_of(partial_of(s))[row]; },
            [&](int32 s, int32 row, int32 column) { return partial_of(s) + row * kD + column; },
            [&](int32 row, int32 column, const Item& merged) { store(is_all, target, row, column, merged); });
    }

    __device__ __forceinline__ int32 head_of(int32 packed_row) const {
        const int32 group = params.heads_per_group;
        return job.head_kv * group + packed_row - quotient(packed_row, group) * group;
    }
    __device__ __forceinline__ static const Statistic* statistics_of(const Accum* partial) {
        return reinterpret_cast<const Statistic*>(partial + Spec::kBr * kD);
    }
    __device__ __forceinline__ static Statistic* statistics_of(Accum* partial) {
        return reinterpret_cast<Statistic*>(partial + Spec::kBr * kD);
    }
    __device__ __forceinline__ Accum* partial_at(int32 partial) const {
        return params.partials + static_cast<int64>(partial) * kPartialElements;
    }

    __device__ __forceinline__ void store_columns(int32 row, int32 column, const Accum (&x)[kVector]) const {
        const int32 packed = first_row + row, query = quotient(packed, params.heads_per_group);
        Element* o = params.o + params.o_strides.offset(job.batch, query, head_of(packed)) + column;
        if constexpr (Spec::kHeadDimV % kVector == 0 && sizeof(Element) == 2) {
            Vector<Element, kVector> rounded;
#pragma unroll
            for (int c = 0; c < kVector; ++c) rounded.item[c] = common::rounded<Element>(x[c]);
            *reinterpret_cast<Vector<Element, kVector>*>(o) = rounded;
        } else {
#pragma unroll
            for (int c = 0; c < kVector; ++c)
                if (column + c < Spec::kHeadDimV) o[c] = common::rounded<Element>(x[c]);
        }
    }
};

}  // namespace fa2::decode
