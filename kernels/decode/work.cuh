// How the work of a launch is divided. Lengths are known on the device only, so each block finds its work by itself.
//
//   row      a query of a query head. The rows of a K/V head of a sequence are [query][head of its group]
//   job      a tile of kBr of these rows, against all keys that they see
//   step     a tile of kBc keys of a job
//   segment  consecutive steps of a job, which one block computes
//
// All steps of all jobs, in the order [sequence][K/V head][row tile][step], form a line of less than 2^31 steps, which is
// cut into one stretch for each working block:
//
//   sequences of one length   each job into as many stretches; or, with more jobs than blocks, stretches are whole jobs
//   fewer jobs than blocks    each job into stretches of nearly one length, the least for which there are blocks
//   others                    the line into stretches of one length: the end of a job, whole jobs, the beginning of one
//
// Cuts between jobs cost nothing. A block that ends one job within its stretch and begins another exchanges results
// twice, and the partial results of a job have to be merged: blocks that wait for that read nothing meanwhile, while
// those with a longer stretch than others have all of the memory's speed in the end.
//
// The cuts depend on the lengths and on the grid alone, so that results are bit-reproducible.
#pragma once
#include "common/mask.cuh"
#include "common/params.cuh.j2"

namespace fa2::decode {

using common::ceil_div;
using common::max_of;
using common::min_of;

struct Job {
    int32 batch, head_kv, row_tile;
    int32 cached, length;     // rows of the sequence in the cache, and with those that the call appends
    int32 first_tile, steps;  // the first key tile, and the number of steps, at least 1
    int32 start;              // the job's first step in the line
};

// a / b rounded down, for a >= 0 and b > 0. Keys wait for such numbers, most of which are small.
__device__ __forceinline__ int32 quotient(int32 a, int32 b) {
    // The distance of (a + 1/2) / b from a whole number exceeds the error of this reciprocal.
    if (a < 1 << 20) return __float2int_rz(common::divide_approx(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
    return a / b;
}

// Steps [begin, end) of a job.
struct Segment {
    Job job;
    int32 begin, end;

    __device__ __forceinline__ bool is_whole() const { return begin == 0 && end == job.steps; }
};

// One of `count` stretches of a job, the first of which have one step more than the others.
__device__ __forceinline__ Segment stretch_of(const Job& job, int32 index, int32 count) {
    const int32 stretch = quotient(job.steps, count), longer = job.steps - stretch * count;
    const int32 begin = index * stretch + min_of(index, longer);
    return {job, begin, begin + stretch + (index < longer)};
}

// The most partials of a job that are merged in one level. A thread reads as many of those of blocks at once.
inline constexpr int kPartialsOfOneLevel = 16;

// The blocks that have partials of a job: `count` from `first` on.
struct Contributors {
    int32 first, count;

    // Blocks of a group. The last group may have fewer, but at least two: the job's last block may also be the first
    // one of the next job. The counter and the partial of groups that begin there then belong to the next job.
    __device__ __forceinline__ int32 group_size() const {
        if (count <= kPartialsOfOneLevel) return count;
        const int32 size = __float2int_ru(sqrtf(static_cast<float>(count)));
        return (count - 1) % size == 0 ? size + 1 : size;  // both cannot divide count - 1 < size (size + 1)
    }
};

// What a launch has to do: jobs, in the order [sequence][K/V head][row tile].
template <class Spec>
class Work {
  public:
    __device__ __forceinline__ explicit Work(const Params& params) : params_(params) {
        rows_ = params.seqlen_q * params.heads_per_group;
        row_tiles_ = max_of(ceil_div(rows_, Spec::kBr), 1);  // without a query there may be rows to append
        heads_kv_ = quotient(params.num_heads, params.heads_per_group);
    }

    __device__ __forceinline__ int32 rows() const { return rows_; }
    // The rows of the cache that a sequence has, clamped so that nothing is read or written outside.
    __device__ __forceinline__ static int32 cached_rows(const Params& params, int32 batch) {
        const int32 room = params.seqlen_k - params.seqlen_new;
        return params.cache_seqlens ? min_of(max_of(params.cache_seqlens[batch], 0), room) : room;
    }

    __device__ __forceinline__ common::Mask<Spec::kCausal, Spec::kWindow> mask_of(int32 length) const {
        return {length, length - params_.seqlen_q, common::window_of<Spec>(params_)};
    }

  protected:
    __device__ __forceinline__ int32 jobs_of_sequence() const { return heads_kv_ * row_tiles_; }

    // The key tiles of a sequence of this length, the same for all of its jobs: its last query sees the last key.
    struct Tiles {
        int32 first, steps;
    };
    __device__ __forceinline__ Tiles tiles_of(int32 length) const {
        int32 first = 0;
        if constexpr (Spec::kWindow) first = max_of(0, mask_of(length).first_key(0)) / Spec::kBc;
        return {first, max_of(ceil_div(length, Spec::kBc) - first, 1)};
    }

    // The rows of a sequence, with those that the call appends.
    __device__ __forceinline__ int32 length_of(int32 batch) const {
        return cached_rows(params_, batch) + params_.seqlen_new;
    }

    __device__ __forceinline__ Job make_job(int32 batch, int32 index, int32 start) const {
        const int32 cached = cached_rows(params_, batch), length = cached + params_.seqlen_new;
        const Tiles tiles = tiles_of(length);
        const int32 head_kv = quotient(index, row_tiles_);
        return {batch, head_kv, index - head_kv * row_tiles_, cached, length, tiles.first, tiles.steps, start};
    }

    const Params& params_;
    int32 rows_, row_tiles_, heads_kv_;
};

// How blocks divide it: the line of all steps.
template <class Spec>
class WorkLine : public Work<Spec> {
    using Base = Work<Spec>;
    static constexpr int kReadAtOnce = 4;  // lengths of sequences, by each lane
    using Base::params_, Base::rows_, Base::row_tiles_, Base::jobs_of_sequence, Base::tiles_of, Base::length_of,
        Base::make_job;

  public:
    // All lanes of a warp construct it together.
    __device__ __forceinline__ explicit WorkLine(const Params& params) : Work<Spec>(params) {
        const int32 jobs = params.batch * jobs_of_sequence(), grid = gridDim.x;
        const int32 blocks_of_job = quotient(grid, max_of(jobs, 1));
        int32 sum = 0, steps_of_first = 0;
        is_even_ = true;  // all sequences have as many steps as the first
        for (int32 first = 0; first < params.batch; first += 32 * kReadAtOnce) {
            int32 own[kReadAtOnce];
#pragma unroll
            for (int i = 0; i < kReadAtOnce; ++i) own[i] = steps_of_lane(first + 32 * i);
            if (first == 0) steps_of_first = steps_ = __shfl_sync(common::kFullWarp, own[0], 0);
#pragma unroll
            for (int i = 0; i < kReadAtOnce; ++i) {
                sum += own[i];
                is_even_ &= own[i] == steps_of_first || own[i] == 0;
            }
        }
        is_even_ = __all_sync(common::kFullWarp, is_even_);
        if (is_even_) {
            total_ = jobs * steps_of_first;
            if (jobs <= grid) {
                span_ = steps_of_first;
                stretches_ = min_of(min_of(steps_of_first, blocks_of_job), worthwhile_partials(steps_of_first));
                workers_ = jobs * stretches_;
            } else {
                const int32 jobs_of_block = ceil_div(jobs, grid);
                span_ = jobs_of_block * steps_of_first;
                stretches_ = 1;
                workers_ = ceil_div(jobs, jobs_of_block);
            }
        } else {
            total_ = common::row_sum<32>(sum) * jobs_of_sequence();
            span_ = total_;
            stretches_ = workers_ = min_of<int32>(grid, total_);
            // A job has half a step less than a whole number of longest stretches on average.
            if (2 * jobs <= grid && params.arrivals != nullptr)
                for (longest_ = ceil_div(total_, grid - jobs / 2);; ++longest_)
                    if ((workers_ = stretches_of_all()) <= grid) break;
        }
        stretch_ = quotient(span_, stretches_);
        longer_ = span_ - stretch_ * stretches_;
    }

    // The number of working blocks; the others have no stretch.
    __device__ __forceinline__ int32 workers() const { return workers_; }
    // The blocks whose stretches have steps of a job, if jobs are cut.
    __device__ __forceinline__ Contributors blocks_of(const Job& job) const {
        if (is_even_) return {first_of_span_, stretches_};  // the span is the job
        if (longest_ != 0) return {job.start, ceil_div(job.steps, longest_)};
        const int32 first = worker_of(job.start);
        return {first, worker_of(job.start + job.steps - 1) - first + 1};
    }

    // The first segment of a block's stretch, and the one after a segment; without a step if there is none. If jobs are
    // not cut, a block has those that begin in its stretch. All lanes of a warp call these together.
    __device__ __forceinline__ Segment first(int32 worker, bool cuts_jobs) {
        if (longest_ != 0) {
            stretch_end_ = 0;
            const Job job = job_at(worker);
            return stretch_of(job, worker - job.start, ceil_div(job.steps, longest_));
        }
        const int32 span = quotient(worker, stretches_);
        first_of_span_ = span * stretches_;
        const int32 index = worker - first_of_span_;
        const int32 position = span * span_ + index * stretch_ + min_of(index, longer_);
        stretch_end_ = position + min_of(stretch_ + (index < longer_), total_ - position);
        Job job = job_at(position);
        const bool has_begun = position > job.start;
        if (has_begun && !cuts_jobs) job = job_after(job);
        return segment_of(job, has_begun && cuts_jobs ? position - job.start : 0, cuts_jobs);
    }
    __device__ __forceinline__ Segment after(const Segment& segment, bool cuts_jobs) const {
        return segment_of(job_after(segment.job), 0, cuts_jobs);
    }

  private:
    // The block whose stretch has a step of the line.
    __device__ __forceinline__ int32 worker_of(int32 position) const {
        const int32 span = position / span_, step = position - span * span_, of_longer = longer_ * (stretch_ + 1);
        const int32 index = step < of_longer ? step / (stretch_ + 1) : longer_ + (step - of_longer) / stretch_;
        return span * stretches_ + index;
    }

    __device__ __forceinline__ Segment segment_of(const Job& job, int32 begin, bool cuts_jobs) const {
        const int32 left = stretch_end_ - job.start;
        if (left <= begin) return {job, 0, 0};
        return {job, begin, cuts_jobs ? min_of(job.steps, left) : job.steps};
    }

    // The partials of a job: more take longer to merge than they save, since each has as many elements as rows of O, in
    // float32.
    __device__ __forceinline__ int32 worthwhile_partials(int32 steps) const {
        const float keys = static_cast<float>(steps) * Spec::kBc, rows = static_cast<float>(min_of(rows_, Spec::kBr));
        return max_of(__float2int_rn(common::sqrt_approx(common::divide_approx(keys, max_of(rows, 1.0f)))), 1);
    }

    // The steps of each job of the sequence that belongs to this lane, of 32 sequences.
    __device__ __forceinline__ int32 steps_of_lane(int32 first) const {
        const int32 batch = first + static_cast<int32>(threadIdx.x) % 32;
        // Without a branch, so that several lengths are read at once.
        const int32 steps = tiles_of(length_of(min_of(batch, params_.batch - 1))).steps;
        return batch < params_.batch ? steps : 0;
    }

    // The stretches of each job of the sequence that belongs to this lane, and of all jobs, of which none is cut.
    __device__ __forceinline__ int32 stretches_of_lane(int32 first) const {
        return longest_ == 0 ? steps_of_lane(first) : ceil_div(steps_of_lane(first), longest_);
    }
    __device__ __forceinline__ int32 stretches_of_all() const {
        int32 sum = 0;
        for (int32 first = 0; first < params_.batch; first += 32) sum += stretches_of_lane(first);
        return common::row_sum<32>(sum) * jobs_of_sequence();
    }

    // The job that has a step of the line, or a stretch: the job then starts at the first of its stretches.
    __device__ __forceinline__ Job job_at(int32 position) const {
        if (is_even_) {
            const int32 number = quotient(position, steps_), batch = quotient(number, jobs_of_sequence());
            return make_job(batch, number - batch * jobs_of_sequence(), number * steps_);
        }
        const int32 lane = threadIdx.x % 32;
        int32 start = 0;  // of the first of 32 sequences
        for (int32 first = 0;; first += 32) {
            const int32 steps = stretches_of_lane(first), own = steps * jobs_of_sequence();
            int32 sum = own;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int32 before = __shfl_up_sync(common::kFullWarp, sum, distance);
                if (lane >= distance) sum += before;
            }
            const uint32 behind = __ballot_sync(common::kFullWarp, position < start + sum);
            if (behind != 0) {
                const int32 found = __ffs(behind) - 1;
                const int32 of_sequence = start + __shfl_sync(common::kFullWarp, sum - own, found);
                const int32 of_job = __shfl_sync(common::kFullWarp, steps, found);
                const int32 index = (position - of_sequence) / of_job;
                return make_job(first + found, index, of_sequence + index * of_job);
            }
            start += __shfl_sync(common::kFullWarp, sum, 31);
        }
    }

    // The next job; the last one is followed by one behind the line.
    __device__ __forceinline__ Job job_after(const Job& job) const {
        const int32 index = job.head_kv * row_tiles_ + job.row_tile + 1;
        const int32 start = job.start + job.steps;
        if (index < jobs_of_sequence()) return make_job(job.batch, index, start);
        if (job.batch + 1 < params_.batch) return make_job(job.batch + 1, 0, start);
        Job none = job;
        none.start = start;
        return none;
    }

    bool is_even_;
    int32 steps_,
        first_of_span_;  // of each job, and the first block of this one's span, if all jobs have as many steps
    // The line has spans of `span_` steps (the last may have fewer), and each span `stretches_` stretches: the first
    // `longer_` of them have `stretch_` + 1 steps, the others `stretch_`.
    int32 total_, workers_, span_, stretches_, stretch_, longer_, stretch_end_;
    int32 longest_ = 0;  // steps of a stretch, if each job has stretches of its own whose number differs
};

}  // namespace fa2::decode
