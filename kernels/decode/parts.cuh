// Parts of a job's O and lse, which warps and blocks compute over different keys, and their merge, as in merged_row.cuh.
//
//   warps   leave 16 rows at a time in shared memory, [row][column], each in a slot of its own
//   blocks  leave their segments in a workspace, if jobs are cut. The parts of a job are merged in two levels: groups of
//           consecutive blocks, then the groups. Whoever arrives last at a counter merges what the others have left: it
//           finds the weights of all parts first, so that nothing but memory is waited for while columns are added up
//
// The workspace has three parts for each block: of the job that its piece begins within, of the job that it begins and
// does not end, and for a group of blocks from this one on. A part is O [kBr][kD], then lse [kBr]. Counters are zero
// before and after a launch.
#pragma once
#include "common/merged_row.cuh"
#include "common/statistics.cuh"
#include "decode/work.cuh"

namespace fa2::decode {

// The most blocks of a launch; the same number is in fa2cupy/plan/decode.py.
inline constexpr int kMostBlocks = 1024;
// The most parts that are merged at once, in one level, and the most of a group or of groups: a lane has each.
inline constexpr int kPartsOfOneLevel = 16, kMostParts = 32;
static_assert(kMostParts * kMostParts >= kMostBlocks);

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

    // Blocks of a group, of which the last may have fewer.
    __device__ __forceinline__ int32 group_size() const {
        return count <= kPartsOfOneLevel ? count : __float2int_ru(sqrtf(static_cast<float>(count)));
    }
};

template <class Spec, int kD, class Record = Params>
struct Parts {
    using Element = typename Spec::Element;
    using Accum = typename common::ElementTraits<Element>::Accum;
    static constexpr int kVector = 16 / sizeof(Accum);                // columns of an item
    static constexpr int kItems = ceil_div(Spec::kHeadDim, kVector);  // of a row
    static constexpr int kPartElements = Spec::kBr * (kD + 1);
    static constexpr int kInFlight = 8;  // loads of a thread that it waits for at once
    using Columns = Vector<Accum, kVector>;
    using Row = common::MergedRow<Accum, kVector>;

    const Record& params;
    const Job& job;
    int32 first_row, num_rows;  // of the job's row tile among all rows, and the rows that exist

    // Calls action(row, column) for each item of some rows of the tile; all threads of the block take part.
    template <class Action>
    __device__ __forceinline__ void for_items(int32 begin, int32 end, const Action& action) const {
        for (int32 index = threadIdx.x; index < (end - begin) * kItems; index += 32 * Spec::kWarps)
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

    // The weights of a row's parts, and its lse, while parts of blocks are merged. Each warp has those of some rows.
    struct Weights {
        static constexpr int kRowLength = kMostParts + 1;
        static constexpr int kBytes = ceil_div(Spec::kBr, Spec::kWarps) * kRowLength * sizeof(Accum);
        char* memory;      // of the first warp
        int32 warp_bytes;  // from there to that of the next

        __device__ __forceinline__ Accum* of_row(int32 row) const {
            Accum* own = reinterpret_cast<Accum*>(memory + row % Spec::kWarps * warp_bytes);
            return own + row / Spec::kWarps * kRowLength;
        }
    };

    // Called by the blocks with parts of a job when theirs is in the workspace: the last ones merge all of them.
    __device__ __forceinline__ void merge(const Contributors& blocks, int32 worker, const Weights& weights) const {
        const int32 size = blocks.group_size(), groups = ceil_div(blocks.count, size);
        const int32 begin = (worker - blocks.first) / size * size;
        const int32 part_of_group = 3 * (blocks.first + begin) + 2;
        int32 count = min_of(size, blocks.count - begin);
        int32* counter = params.arrivals + blocks.first + begin;
        for (bool of_groups = false;; of_groups = true) {
            if (!is_last(counter, count)) return;
            const bool is_all = of_groups || groups == 1;
            const auto part_of = [&](int32 s) {
                return part_at(of_groups ? 3 * (blocks.first + s * size) + 2 : part_of_block(blocks, begin + s));
            };
            weigh(weights, count, is_all, part_of);
            __syncthreads();
            for_items(0, num_rows, [&](int32 row, int32 column) {
                const Accum* of_row = weights.of_row(row);
                store(row, column, weighted_sum(of_row, count, [&](int32 s) { return part_of(s) + row * kD + column; }),
                      is_all, part_of_group);
            });
            if (is_all) return;
            count = groups;
            counter = params.arrivals + kMostBlocks + blocks.first;
        }
    }

    // Writes an item of the results, or of a part in the workspace.
    __device__ __forceinline__ void store(int32 row, int32 column, const Row& x, bool is_result, int32 part) const {
        if (is_result)
            store_result(row, column, x);
        else
            store_part(part, row, column, x);
    }

  private:
    // Writes the weights of all rows, and their lse. A weight of -1 marks a part without a visible key.
    template <class PartOf>
    __device__ __forceinline__ void weigh(const Weights& weights, int32 count, bool with_sink,
                                          const PartOf& part_of) const {
        const int32 lane = threadIdx.x % 32;
        for (int32 row = threadIdx.x / 32; row < num_rows; row += Spec::kWarps) {
            const Accum none = -common::infinity<Accum>(), sink = with_sink ? sink_of(row) : none;
            const Accum lse = lane < count ? part_of(lane)[Spec::kBr * kD + row] : none;
            const Accum highest = common::maximum(sink, common::row_maximum<32>(lse));
            // In a row without a visible key, 0 is subtracted instead, as -inf - (-inf) is NaN.
            const Accum shift = highest == none ? Accum(0) : highest;
            const Accum weight = common::exp_accurate(lse - shift);
            const Accum total = common::row_sum<32>(weight) + common::exp_accurate(sink - shift);
            Accum* of_row = weights.of_row(row);
            of_row[lane] = lse == none ? Accum(-1) : weight / total;
            if (lane == 0) of_row[kMostParts] = shift + log(total);
        }
    }

    // Columns of a row, merged from its parts in their order. `columns_of(s)` points to those of part s.
    template <class ColumnsOf>
    __device__ __forceinline__ static Row weighted_sum(const Accum* weights, int32 count, const ColumnsOf& columns_of) {
        Row row = {};
        for (int32 first = 0; first < count; first += kInFlight) {
            Columns x[kInFlight] = {};
#pragma unroll
            for (int i = 0; i < kInFlight; ++i)
                if (first + i < count) x[i] = *reinterpret_cast<const Columns*>(columns_of(first + i));
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const Accum weight = first + i < count ? weights[first + i] : Accum(-1);
                // V of hidden keys may have made the O of a part without a visible key NaN.
                const bool visible = !(weight < Accum(0));
#pragma unroll
                for (int c = 0; c < kVector; ++c)
                    if (visible) row.column[c] = fma(weight, x[i].item[c], row.column[c]);
            }
        }
        row.lse = weights[kMostParts];
        return row;
    }

    __device__ __forceinline__ int32 head_of(int32 packed_row) const {
        return job.head_kv * params.heads_per_group + packed_row % params.heads_per_group;
    }
    __device__ __forceinline__ Accum* part_at(int32 part) const {
        return params.partials + static_cast<int64>(part) * kPartElements;
    }

    // Writes an item of the results.
    __device__ __forceinline__ void store_result(int32 row, int32 column, const Row& x) const {
        const int32 packed = first_row + row, query = packed / params.heads_per_group, head = head_of(packed);
        Element* o = params.o + params.o_strides.offset(job.batch, query, head) + column;
        if constexpr (Spec::kHeadDim % kVector == 0 && sizeof(Element) == 2) {
            Vector<Element, kVector> rounded;
#pragma unroll
            for (int c = 0; c < kVector; ++c) rounded.item[c] = common::rounded<Element>(x.column[c]);
            *reinterpret_cast<Vector<Element, kVector>*>(o) = rounded;
        } else {
#pragma unroll
            for (int c = 0; c < kVector; ++c)
                if (column + c < Spec::kHeadDim) o[c] = common::rounded<Element>(x.column[c]);
        }
        if (column == 0) params.lse[common::first_statistic<Spec>(params, job.batch, head) + query] = x.lse;
    }

    // Writes an item of a part in the workspace.
    __device__ __forceinline__ void store_part(int32 part, int32 row, int32 column, const Row& x) const {
        Accum* to = part_at(part);
        Columns columns;
#pragma unroll
        for (int c = 0; c < kVector; ++c) columns.item[c] = x.column[c];
        *reinterpret_cast<Columns*>(to + row * kD + column) = columns;
        if (column == 0) to[Spec::kBr * kD + row] = x.lse;
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
