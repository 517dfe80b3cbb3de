// Rows of a job (work.cuh): the query and the head of each, the keys that they see, and what features do to their scores.
#pragma once
#include "common/score_mod.cuh"
#include "decode/work.cuh"

namespace fa2::decode {

// A mask by position whose rows are those of a job.
template <bool kCausal, bool kWindow>
struct PackedMask {
    static constexpr bool kLeftLimit = kWindow;

    common::Mask<kCausal, kWindow> of_queries;
    int32 heads_per_group;

    __device__ __forceinline__ int32 end_key(int32 row) const { return of_queries.end_key(row / heads_per_group); }
    __device__ __forceinline__ int32 first_key(int32 row) const { return of_queries.first_key(row / heads_per_group); }
};

// Where the rows of a job's tile begin in q: a function of the row in the tile, null behind the last one.
template <class Spec, class Record>
struct QueryRows {
    const Record& params;
    const Job& job;
    int32 rows;  // of the job

    __device__ __forceinline__ const typename Spec::Element* operator()(int32 row) const {
        const int32 packed = job.row_tile * Spec::kBr + row, query = quotient(packed, params.heads_per_group);
        if (packed >= rows) return nullptr;
        const int32 head = job.head_kv * params.heads_per_group + packed - query * params.heads_per_group;
        return params.q + params.q_strides.offset(job.batch, query, head);
    }
};

// The keys that the rows of a job see: any of them from `first` to `end`, all of them from `full_first` to `full_end`.
struct KeyRange {
    int32 first, full_first, full_end, end;

    template <class Mask>
    __device__ __forceinline__ static KeyRange of(const Mask& mask, int32 first_row, int32 last_row) {
        KeyRange range{0, 0, mask.end_key(first_row), mask.end_key(last_row)};
        if constexpr (Mask::kLeftLimit) {
            range.first = mask.first_key(first_row);
            range.full_first = mask.first_key(last_row);
        }
        return range;
    }
    __device__ __forceinline__ bool sees(int32 first_key, int32 keys) const {
        return first_key < end && first_key + keys > first;
    }
    __device__ __forceinline__ bool needs_mask(int32 first_key, int32 keys) const {
        return first_key + keys > full_end || first_key < full_first;
    }
};

// The slopes of a lane's rows, which belong to different heads, and their distances from key 0. Only kernels with slopes
// have them.
template <class Spec, int kRows, bool kAlibi = Spec::kAlibi>
struct RowSlopes {
    template <class Record, class RowOf>
    __device__ __forceinline__ void load(const Record&, const Job&, const RowOf&) {}
};
template <class Spec, int kRows>
struct RowSlopes<Spec, kRows, true> {
    using Real = typename common::ElementTraits<typename Spec::Element>::Accum;
    Real slope[kRows];
    int32 diagonal[kRows];

    // row_of(i) is the job's row of the lane's i-th one.
    template <class Record, class RowOf>
    __device__ __forceinline__ void load(const Record& params, const Job& job, const RowOf& row_of) {
        const int32 group = params.heads_per_group;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int32 row = row_of(i), query = row / group;
            const int32 head = job.head_kv * group + row - query * group;
            slope[i] = params.alibi_slopes[params.alibi_slopes_strides.offset(job.batch, head, 0, 0)] *
                       Real(common::kScoreUnit<Spec>);
            diagonal[i] = query + job.length - params.seqlen_q;
        }
    }
};

// True if `modify` leaves scores in the kernel's units. Otherwise they are capped products, which the exponent scales.
template <class Spec>
inline constexpr bool kScalesFirst = Spec::kAlibi || kNaturalScores<Spec>;

// Turns the products in a lane's fragment into scores. Its rows have the slopes from that of `first_row` on.
template <class Spec, class Fragment, int kRows>
__device__ __forceinline__ void modify(Fragment& scores, const Params& params, const RowSlopes<Spec, kRows>& slopes,
                                       int first_row, int32 first_key, int32 lane) {
    common::Softcap<Spec, Params>(params).cap(scores);
    if constexpr (kScalesFirst<Spec>) {
        const auto scale = common::capped_scale<Spec>(params);
#pragma unroll
        for (int i = 0; i < Fragment::kRows; ++i)
#pragma unroll
            for (int j = 0; j < Fragment::kCols; ++j) {
                auto x = scores(i, j) * scale;
                if constexpr (Spec::kAlibi) {
                    const auto distance =
                        static_cast<decltype(x)>(slopes.diagonal[first_row + i] - first_key - Fragment::col(j, lane));
                    x -= slopes.slope[first_row + i] * common::magnitude(distance);
                }
                scores(i, j) = x;
            }
    }
}

}  // namespace fa2::decode
