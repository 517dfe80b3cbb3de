// Attention of a few queries to a cache of keys and values. It is bound by memory: every K and V is read once for all
// query heads that share it, and each multiprocessor has many asynchronous copies under way.
//
//   block   a stretch of the line of all steps (work.cuh): segments of jobs, one after the other
//   warp    16 or 32 keys of each step, against all kBr rows of the job, with an O of its own, or, where O is wide, a part
//           of its columns beside other sharers of the keys, a group. Groups copy their keys themselves, through a ring of
//           kStages slots of their own, so that no barrier of the block is in the main loop. A single group may have
//           producers beside it, warps that only copy
//
// At the end of a segment the block merges the warps' O and statistics, and stores them as results, or in the workspace if other
// blocks have steps of the same job: the last of these merges all (partials.cuh). Meanwhile the keys of the next segment are
// on their way, into all slots but the one through which the warps exchange O.
//
//   shared memory                         written by             read by
//   Q [kQueries][kBr rows]                all warps              all warps; one of this segment, one of the next
//   slots [group][kStages][K, V][keys]    the group              the group
//   O [group][16 rows], in a free slot    the group              all warps
//   statistics [group][kBr]               the group              all warps
//
// Barriers: one at the beginning of a segment, at its end one behind every 16 rows of O and one between them, and those of
// a merge of blocks.
// The arithmetic of a warp is that of its family: DecodeWarp of sm80/decode.cuh, simt/decode.cuh and
// sm90_latent/decode.cuh.
#pragma once
#include "decode/cache.cuh"
#include "decode/cluster.cuh"
#include "decode/partials.cuh"
#include "decode/rows.cuh"

namespace fa2::decode {

template <class Spec, class Warp>
struct Decode {
    using Element = typename Spec::Element;
    using Accum = typename common::ElementTraits<Element>::Accum;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kWarps = Spec::kWarps, kStages = Spec::kStages;
    static constexpr int kThreads = 32 * kWarps, kKeys = Warp::kKeys;
    static constexpr int kGroupThreads = 32 * Warp::kSharers, kGroups = (kWarps - Warp::kProducers) / Warp::kSharers;
    static constexpr int kRowsAtOnce = min_of(kBr, 16);  // rows of O that warps exchange at once
    using Exchange = ExchangeRows<Accum, Warp::kColumns>;
    using Partials = decode::Partials<Spec, Warp::kColumns>;
    using Item = typename Partials::Item;
    using Statistic = typename Partials::Statistic;
    static constexpr int kGroupBytes = kStages * Warp::kSlotBytes + Warp::kScratchBytes;
    static constexpr int kStatisticBytes = kGroups * kBr * sizeof(Statistic);
    static constexpr bool kIsCluster = Spec::kCluster > 1;
    static constexpr bool kIsProduced = Warp::kProducers > 0;
    // Segments whose Q is there. A block of a cluster has one segment; large slots leave no room for a second Q.
    static constexpr int kQueries = kIsCluster || Warp::kRefills || Warp::kCopiesMeanwhile ? 1 : 2;
    using Shares = typename SharesOf<Spec, Warp>::Type;
    using Work = typename WorkOf<Spec>::Type;
    static constexpr int kSharedBytes =
        kQueries * Warp::kQueryBytes + kGroups * kGroupBytes + kStatisticBytes + Shares::kBytes;
    static_assert(kBc == kKeys * kGroups && kStages >= 2 && (!kIsProduced || kGroups == 1));
    static_assert(Exchange::kBytes <= Warp::kSlotBytes);
    static_assert(kSharedBytes == Spec::kSharedBytes);
    static constexpr int kFirstSlot = kQueries * Warp::kQueryBytes,
                         kFirstStatistic = kFirstSlot + kGroups * kGroupBytes,
                         kFirstShare = kFirstStatistic + kStatisticBytes;

    __device__ static void run(const Params& params, char* smem) {
        const int32 group = group_of_thread(), worker = blockIdx.x;
        const bool cuts_jobs = params.arrivals != nullptr;
        Work line(params);
        if (worker >= line.workers()) return;
        char* slots = smem + kFirstSlot + group * kGroupBytes;
        Warp state;
        typename RingOf<kIsProduced>::Type ring{params, slots};
        Segment segment{}, next = line.first(worker, cuts_jobs);
        // In one turn, the keys of a segment are on their way before the results of the segment before are stored.
        for (int32 number = 0;; ++number) {
            char* const exchange = ring.free_slot();
            char* const q = smem + number % kQueries * Warp::kQueryBytes;
            if constexpr (!kIsCluster && kQueries == 1)
                if (number > 0) __syncthreads();  // nobody reads the Q of the segment before any more
            if (next.end != 0) ring.start(next, q, line.rows());
            if constexpr (kIsCluster)
                if (number == 0 && next.end != 0) Shares::begin(smem + kFirstShare);
            if (number > 0) store(params, line, segment, worker, state, smem, exchange - slots);
            if (next.end == 0) return;
            segment = next;
            const Job& job = segment.job;
            // The block that has the last step appends rows.
            if (params.seqlen_new > 0 && job.row_tile == 0 && segment.begin < segment.end && segment.end == job.steps)
                append_rows<Spec>(params, job);

            const int32 first_row = job.row_tile * kBr, last_row = min_of(first_row + kBr, max_of(line.rows(), 1)) - 1;
            const PackedMask<Spec::kCausal, Spec::kWindow> mask{line.mask_of(job.length), params.heads_per_group};
            const auto keys = KeyRange::of(mask, first_row, last_row);
            state.begin(params, job, first_row);
            ring.wait();
            __syncthreads();  // all of Q is there, and nobody reads the slots of the exchange any more
            for (int32 step = ring.first_step(segment); step < segment.end; ++step) {
                const char* slot = ring.acquire(segment, step);
                const int32 first_key = (job.first_tile + step) * kBc + group * kKeys;
                if constexpr (Warp::kCopiesMeanwhile) {
                    const auto copy = [&] { ring.load(segment, step + kStages - 1); };
                    if (keys.sees(first_key, kKeys))
                        state.step(params, q, slot, slots + kStages * Warp::kSlotBytes, mask, first_row, first_key,
                                   keys.needs_mask(first_key, kKeys), copy);
                    else
                        copy();
                } else if (keys.sees(first_key, kKeys)) {
                    state.step(params, q, slot, slots + kStages * Warp::kSlotBytes, mask, first_row, first_key,
                               keys.needs_mask(first_key, kKeys));
                }
                ring.release(segment, step);
            }
            next = line.after(segment, cuts_jobs);
        }
    }

  private:
    // A group has no producers beside it unless it is the only one, which they belong to.
    __device__ __forceinline__ static int32 group_of_thread() { return kGroups == 1 ? 0 : threadIdx.x / kGroupThreads; }

    // The slots of a group. Steps of one segment after another pass through them; a copy starts kStages - 1 steps ahead.
    struct Ring {
        const Params& params;
        char* slots;
        int32 filled = 0, taken = 0;              // the next slots to fill and to take
        Place ahead[kKeys / kRowsTogether] = {};  // of the keys of the next copy

        // Starts the copies of a segment's first steps, and of its Q with the first of them.
        __device__ __forceinline__ void start(const Segment& segment, char* q, int32 rows) {
            if (has_steps(segment)) Warp::template copy_queries<kThreads>(q, params, segment.job, rows);
            filled = taken;
            look_up(segment, segment.begin);
#pragma unroll 1
            for (int32 s = 0; s < kStages - 1; ++s) load(segment, segment.begin + s);
        }
        // Waits for what this thread copies of the first step, if other groups than its own need it. Refilled slots have
        // one group: `acquire` waits then, when the copies of all slots are under way.
        __device__ __forceinline__ void wait() const {
            if constexpr (!Warp::kRefills) Warp::template wait<kStages - 2>();
        }
        // The first step of a segment that this thread multiplies.
        __device__ __forceinline__ int32 first_step(const Segment& segment) {
            if constexpr (Warp::kRefills) load(segment, segment.begin + kStages - 1);
            return segment.begin;
        }
        // The slot with the keys of a step, after which the slot of the step before is filled again, unless the step or
        // `release` does that.
        __device__ __forceinline__ const char* acquire(const Segment& segment, int32 step) {
            Warp::template wait<Warp::kRefills ? kStages - 1 : kStages - 2>();
            Warp::sync();
            if constexpr (!Warp::kRefills && !Warp::kCopiesMeanwhile) load(segment, step + kStages - 1);
            const char* slot = slots + taken * Warp::kSlotBytes;
            taken = taken + 1 == kStages ? 0 : taken + 1;
            return slot;
        }
        // Fills the slot of a step again as soon as its group has read it: copies of kStages steps are then under way.
        __device__ __forceinline__ void release(const Segment& segment, int32 step) {
            if constexpr (Warp::kRefills) {
                Warp::sync();
                load(segment, step + kStages);
            }
        }
        // Between two segments, the slot that the copies of the next one's first steps leave free.
        __device__ __forceinline__ char* free_slot() const {
            return slots + (taken == 0 ? kStages - 1 : taken - 1) * Warp::kSlotBytes;
        }

      protected:
        // False if nobody would wait for copies: only blocks of clusters have such segments.
        __device__ __forceinline__ static bool has_steps(const Segment& segment) {
            return !kIsCluster || segment.begin < segment.end;
        }
        __device__ __forceinline__ static int32 first_key(const Job& job, int32 step) {
            return (job.first_tile + step) * kBc +
                   (kGroups == 1 ? 0 : static_cast<int32>(threadIdx.x) / kGroupThreads * kKeys);
        }
        // Finds the pages of a step ahead of its copy, which would wait for them.
        __device__ __forceinline__ void look_up(const Segment& segment, int32 step) {
            const int32 first = first_key(segment.job, step);
#pragma unroll
            for (int i = 0; i < kKeys / kRowsTogether; ++i) {
                const int32 key = first + i * kRowsTogether;
                if (step < segment.end && key < segment.job.cached) ahead[i] = place_of(params, segment.job.batch, key);
            }
        }
        // Where the rows of the next copy begin, as a function of the key.
        __device__ __forceinline__ auto cached_rows(const Element* cache, const Strides& strides, int32 head) const {
            struct Rows {
                const Element* begin[kKeys / kRowsTogether];
                int64 stride;

                __device__ __forceinline__ const Element* operator()(int32 key) const {
                    const Element* row = begin[0] + key * stride;
#pragma unroll
                    for (int i = 1; i < kKeys / kRowsTogether; ++i)
                        if (key >= i * kRowsTogether) row = begin[i] + (key - i * kRowsTogether) * stride;
                    return row;
                }
            } rows;
#pragma unroll
            for (int i = 0; i < kKeys / kRowsTogether; ++i)
                rows.begin[i] = cache + ahead[i].offset(params, strides, head);
            rows.stride = strides.row;
            return rows;
        }

      public:
        __device__ __forceinline__ void load(const Segment& segment, int32 step) {
            const Job& job = segment.job;
            const int32 first = first_key(job, step);
            if (step < segment.end && first < job.length) {
                char* k = slots + filled * Warp::kSlotBytes;
                char* v = k + Warp::kKeyBytes;
                const auto k_rows = cached_rows(params.k_cache, params.k_cache_strides, job.head_kv);
                const auto v_rows = cached_rows(params.v_cache, params.v_cache_strides, job.head_kv);
                if (first + kKeys <= job.cached) {
                    Warp::copy_keys(k, k_rows);
                    if constexpr (!Warp::kValuesInKeys) Warp::copy_values(v, v_rows);
                } else {
                    const int32 cached = job.cached - first, present = job.length - first;
                    const Element* new_k = params.k + params.k_strides.offset(job.batch, -cached, job.head_kv);
                    const Element* new_v = params.v + params.v_strides.offset(job.batch, -cached, job.head_kv);
                    Warp::copy_keys(k, [=](int32 key) -> const Element* {
                        if (key < cached) return k_rows(key);
                        return key < present ? new_k + key * params.k_strides.row : nullptr;
                    });
                    if constexpr (!Warp::kValuesInKeys)
                        Warp::copy_values(v, [=](int32 key) -> const Element* {
                            if (key < cached) return v_rows(key);
                            return key < present ? new_v + key * params.v_strides.row : nullptr;
                        });
                }
                look_up(segment, step + 1);
            }
            filled = filled + 1 == kStages ? 0 : filled + 1;
            Warp::commit();
        }
    };

    // The same where producers copy the keys: they fill a slot as soon as it is free.
    struct ProducedRing : Ring {
        typename Warp::Signals signals;
        int32 turn = 0;  // the uses of the next slot before, modulo 2

        __device__ __forceinline__ ProducedRing(const Params& params, char* slots)
            : Ring{params, slots}, signals(slots + kStages * Warp::kSlotBytes) {
            signals.init();
        }

        __device__ __forceinline__ void start(const Segment& segment, char* q, int32 rows) {
            if (Warp::is_producer()) {
                this->look_up(segment, segment.begin);
                fill(segment, segment.begin, min_of(segment.begin + kStages - 1, segment.end));
            } else if (Ring::has_steps(segment)) {
                Warp::template copy_queries<kGroupThreads>(q, this->params, segment.job, rows);
                Warp::commit();
            }
        }
        // Waits for Q, not for keys: the copies of all slots are then under way together.
        __device__ __forceinline__ void wait() const {
            if (!Warp::is_producer()) Warp::template wait<0>();
        }
        // Producers copy all of the segment's other steps, and multiply none.
        __device__ __forceinline__ int32 first_step(const Segment& segment) {
            if (!Warp::is_producer()) return segment.begin;
            fill(segment, segment.begin + kStages - 1, segment.end);
            return segment.end;
        }
        __device__ __forceinline__ const char* acquire(const Segment&, int32) const {
            signals.wait_filled(this->taken, turn);
            return this->slots + this->taken * Warp::kSlotBytes;
        }
        __device__ __forceinline__ void release(const Segment&, int32) {
            signals.free(this->taken);
            advance();
        }

      private:
        __device__ __forceinline__ void fill(const Segment& segment, int32 begin, int32 end) {
#pragma unroll 1
            for (int32 step = begin; step < end; ++step) {
                signals.wait_free(this->taken, turn);
                this->load(segment, step);
                signals.filled(this->taken);
                advance();
            }
        }
        __device__ __forceinline__ void advance() {
            this->taken = this->taken + 1 == kStages ? 0 : this->taken + 1;
            turn ^= this->taken == 0;
        }
    };

    template <bool kProduced, class = void>
    struct RingOf {
        using Type = Ring;
    };
    template <class Unused>
    struct RingOf<true, Unused> {
        using Type = ProducedRing;
    };

    // Merges the O of the warps, which each leaves at `distance` from its first slot, and stores it. If the segment is not
    // all of its job, it is stored as a partial result, which may be the last one of the job.
    __device__ __forceinline__ static void store(const Params& params, const Work& line, const Segment& segment,
                                                 int32 worker, Warp& state, char* smem, int32 distance) {
        const Job& job = segment.job;
        const int32 first_row = job.row_tile * kBr;
        const Partials partials{params, job, first_row, min_of(line.rows() - first_row, kBr)};
        if constexpr (kIsCluster) {
            const Shares shares{partials, smem + kFirstShare, worker % Spec::kCluster, worker};
            if constexpr (Warp::kSendsRows) {
                Statistic* statistics = reinterpret_cast<Statistic*>(smem + kFirstStatistic);
                Shares::arrive();
                if (multiplies()) {
                    state.finish(statistics, smem + kFirstSlot + kStages * Warp::kSlotBytes);
                    Warp::sync();  // no lane reads the slot of the last step any more: O goes there
                }
                shares.merge(smem + kFirstSlot, statistics, line.clusters(), line.number(), [&](char* to, int32 begin) {
                    if (multiplies()) state.template put<typename Shares::Exchange>(to, begin);
                });
            } else {
                merge_warps(
                    partials, state, smem, distance, false,
                    [&](int32 row, int32 column, const Item& merged) { shares.send(row, column, merged); },
                    [] { Shares::wait(); });
                shares.merge(line.clusters(), line.number());
            }
        } else {
            const bool is_whole = segment.is_whole();
            const Contributors blocks = is_whole ? Contributors{} : line.blocks_of(job);
            const int32 partial = Partials::partial_of_block(blocks, worker - blocks.first);
            merge_warps(
                partials, state, smem, distance, is_whole,
                [&](int32 row, int32 column, const Item& merged) {
                    partials.store(is_whole, partial, row, column, merged);
                },
                [] {});
            if (!is_whole) partials.merge(blocks, worker);
        }
    }
    // False for producers.
    __device__ __forceinline__ static bool multiplies() {
        if constexpr (kIsProduced) return !Warp::is_producer();
        return true;
    }
    template <class Store, class Wait>
    __device__ __forceinline__ static void merge_warps(const Partials& partials, Warp& state, char* smem,
                                                       int32 distance, bool is_result, const Store& store,
                                                       const Wait& wait) {
        const int32 group = group_of_thread();
        Statistic* statistics = reinterpret_cast<Statistic*>(smem + kFirstStatistic);
        char* exchange = smem + kFirstSlot + distance;
        if (multiplies()) {
            state.finish(statistics + group * kBr,
                         smem + kFirstSlot + group * kGroupBytes + kStages * Warp::kSlotBytes);
            Warp::sync();  // no lane reads the slot of the last step any more: O goes there
        }
#pragma unroll
        for (int32 begin = 0; begin < kBr; begin += kRowsAtOnce) {
            if (multiplies()) state.template put<Exchange>(exchange + group * kGroupBytes, begin);
            __syncthreads();  // statistics of all warps and these rows of their O are there
            if (begin == 0) wait();
            const auto columns_of = [&](int32 s, int32 row, int32 column) {
                return reinterpret_cast<const Accum*>(exchange + s * kGroupBytes) +
                       Exchange::offset(row - begin, column);
            };
            partials.template merge_rows<kGroups>(
                begin, min_of(begin + kRowsAtOnce, partials.num_rows), kGroups, is_result,
                [&](int32 s, int32 row) { return statistics[s * kBr + row]; }, columns_of, store);
            if (begin + kRowsAtOnce < kBr) __syncthreads();
        }
    }
};

}  // namespace fa2::decode
