// Few jobs, each of which has clusters of kCluster blocks: what takes time is then not the memory but what waits for
// what. The blocks of a cluster merge their partials through shared memory: each sends every block its share of the
// items of O, and merges the shares that it gets. With several clusters of a job, the blocks with the same share merge
// those through the workspace, side by side.
//
//   shared memory                           written by             read by
//   items [block][share]                    that block             this one
//   statistics [block][kBr]                 that block             this one
//
// Item i of a row tile (partials.cuh) is in the share of block i % kCluster. The workspace has the share of each block:
// items, then the statistic of each of them.
#pragma once
#include "common/ptx.cuh"
#include "decode/partials.cuh"

namespace fa2::decode {

// The work of a cluster: all of a job's clusters that have steps for all of their blocks, or else one, have the same
// number of steps, and so have their blocks, but for one step.
template <class Spec>
class ClusterWork : public Work<Spec> {
    static constexpr int kCluster = Spec::kCluster;

  public:
    __device__ __forceinline__ explicit ClusterWork(const Params& params) : Work<Spec>(params) {
        clusters_ = quotient(gridDim.x / kCluster, max_of(params.batch * this->jobs_of_sequence(), 1));
    }

    __device__ __forceinline__ int32 workers() const { return gridDim.x; }
    // The clusters of this block's job that have steps, and the number of this one among them.
    __device__ __forceinline__ int32 clusters() const { return working_; }
    __device__ __forceinline__ int32 number() const { return number_; }

    // The steps of a block, or a segment that ends at 0. In a cluster that has steps, a block may have none: its segment
    // then begins and ends behind the last.
    __device__ __forceinline__ Segment first(int32 worker, bool) {
        const int32 cluster = worker / kCluster, index = quotient(cluster, clusters_);
        const int32 batch = quotient(index, this->jobs_of_sequence());
        const Job job = this->make_job(batch, index - batch * this->jobs_of_sequence(), 0);
        number_ = cluster - index * clusters_;
        working_ = min_of(clusters_, ceil_div(job.steps, kCluster));
        if (number_ >= working_) return {job, 0, 0};
        return stretch_of(job, worker - index * clusters_ * kCluster, working_ * kCluster);
    }
    __device__ __forceinline__ Segment after(const Segment& segment, bool) const { return {segment.job, 0, 0}; }

  private:
    int32 clusters_, working_, number_;
};

template <class Spec, int kD>
struct Shares {
    using Partials = decode::Partials<Spec, kD>;
    using Item = typename Partials::Item;
    using Statistic = typename Partials::Statistic;
    static constexpr int kCluster = Spec::kCluster, kItems = Partials::kItems, kVector = Partials::kVector;
    static constexpr int kShare = ceil_div(Spec::kBr * kItems, kCluster);  // items
    static constexpr int kItemBytes = 16;
    static constexpr int kFirstStatistic = kCluster * kShare * kItemBytes;
    static constexpr int kBytes = kFirstStatistic + kCluster * Spec::kBr * sizeof(Statistic);
    static constexpr int kShareElements = kShare * (kVector + 2);
    static_assert(sizeof(typename Partials::Accum) == 4 && kShareElements <= Partials::kPartialElements);

    const Partials& partials;
    const char* smem;
    int32 rank, worker;

    // Tells the other blocks that this one runs, and waits for them: only then has their shared memory begun.
    __device__ __forceinline__ static void begin(const char*) { arrive(); }
    __device__ __forceinline__ static void arrive() {
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
    __device__ __forceinline__ static void wait() {
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }

    // Sends an item to the block in whose share it is, and the row's statistic to those with items of the row.
    __device__ __forceinline__ void send(int32 row, int32 column, const Item& merged) const {
        const int32 item = row * kItems + column / kVector;
        const uint32 own = common::shared_address(smem);
        const uint32 to = common::in_block(item % kCluster, own + (rank * kShare + item / kCluster) * kItemBytes);
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(merged.column[0]),
                     "f"(merged.column[1]), "f"(merged.column[2]), "f"(merged.column[3])
                     : "memory");
        if (column < kCluster * kVector) {
            const uint32 statistic =
                common::in_block(item % kCluster, own + kFirstStatistic + (rank * Spec::kBr + row) * 8);
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(statistic), "f"(merged.statistic.shift),
                         "f"(merged.statistic.sum)
                         : "memory");
        }
    }

    // Merges the items of this block's share, of the partials of its cluster and then of those of the job's `clusters`.
    // All threads of the block call this when they have sent their items.
    __device__ __forceinline__ void merge(int32 clusters, int32 number) const {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        wait();
        const auto statistics = reinterpret_cast<const Statistic*>(smem + kFirstStatistic);
        const Items items{partials, rank};
        merge_cluster(
            items, clusters, [&](int32 s, int32, int32 row) { return statistics[s * Spec::kBr + row]; },
            [&](int32 s, int32 i) { return reinterpret_cast<const float*>(smem + (s * kShare + i) * kItemBytes); });
        merge_clusters(items, clusters, number);
    }

  protected:
    // Merges items of this block's share, of the partials of its cluster.
    template <class Items, class StatisticOf, class ColumnsOf>
    __device__ __forceinline__ void merge_cluster(const Items& items, int32 clusters, const StatisticOf& statistic_of,
                                                  const ColumnsOf& columns_of) const {
        const bool is_result = clusters == 1;
        float* const own = share_at(worker);
        merge_items<kCluster>(items, kCluster, is_result, statistic_of, columns_of,
                              [&](int32 i, int32 row, int32 column, const Item& merged) {
                                  if (is_result) return partials.store_result(row, column, merged);
                                  reinterpret_cast<float4*>(own)[i] = make_float4(merged.column[0], merged.column[1],
                                                                                  merged.column[2], merged.column[3]);
                                  statistics_of(own)[i] = merged.statistic;
                              });
    }
    // Merges all of this block's share, of the job's clusters.
    template <class Items>
    __device__ __forceinline__ void merge_clusters(const Items& items, int32 clusters, int32 number) const {
        if (clusters == 1) return;
        const int32 first = worker - number * kCluster;  // the block with this share in the job's first cluster
        if (!Partials::is_last(partials.params.arrivals + first, clusters)) return;
        merge_items<kPartialsOfOneLevel>(
            items, clusters, true,
            [&](int32 s, int32 i, int32) { return statistics_of(share_at(first + s * kCluster))[i]; },
            [&](int32 s, int32 i) { return share_at(first + s * kCluster) + kVector * i; },
            [&](int32, int32 row, int32 column, const Item& merged) { partials.store_result(row, column, merged); });
    }

  private:
    __device__ __forceinline__ static Statistic* statistics_of(float* share) {
        return reinterpret_cast<Statistic*>(share + kVector * kShare);
    }
    __device__ __forceinline__ float* share_at(int32 worker) const {
        return partials.params.partials + static_cast<int64>(worker) * kShareElements;
    }

    // Items i * kCluster + rank of a row tile.
    struct Items {
        const Partials& partials;
        int32 rank;

        __device__ __forceinline__ static int32 first() { return 0; }
        __device__ __forceinline__ bool has(int32 i) const { return i * kCluster + rank < partials.num_rows * kItems; }
        __device__ __forceinline__ int32 row(int32 i) const { return (i * kCluster + rank) / kItems; }
        __device__ __forceinline__ int32 column(int32 i) const { return (i * kCluster + rank) % kItems * kVector; }
    };

    template <int kAtOnce, class Items, class StatisticOf, class ColumnsOf, class Store>
    __device__ __forceinline__ void merge_items(const Items& items, int32 count, bool is_result,
                                                const StatisticOf& statistic_of, const ColumnsOf& columns_of,
                                                const Store& store) const {
#pragma unroll 1
        for (int32 i = items.first() + threadIdx.x; items.has(i); i += Partials::kThreads) {
            const int32 row = items.row(i);
            store(i, row, items.column(i),
                  partials.template merge_item<kAtOnce>(
                      count, row, is_result, [&](int32 s) { return statistic_of(s, i, row); },
                      [&](int32 s) { return columns_of(s, i); }));
        }
    }
};

// Of a block alone.
struct NoShares {
    static constexpr int kBytes = 0;
};

// The shares of a cluster's blocks: those above, or `Warp::Shares` where warps send rows.
template <class Spec, class Warp, bool kIsCluster = (Spec::kCluster > 1), bool kSendsRows = Warp::kSendsRows>
struct SharesOf {
    using Type = NoShares;
};
template <class Spec, class Warp>
struct SharesOf<Spec, Warp, true, false> {
    using Type = Shares<Spec, Warp::kColumns>;
};
template <class Spec, class Warp>
struct SharesOf<Spec, Warp, true, true> {
    using Type = typename Warp::Shares;
};

template <class Spec, bool kIsCluster = (Spec::kCluster > 1)>
struct WorkOf {
    using Type = WorkLine<Spec>;
};
template <class Spec>
struct WorkOf<Spec, true> {
    using Type = ClusterWork<Spec>;
};

}  // namespace fa2::decode
