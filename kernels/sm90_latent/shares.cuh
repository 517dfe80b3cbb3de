// The shares of O that blocks of a cluster merge (decode/cluster.cuh), where a block has one O. Each block merges columns
// of its own, and gets those of others by bulk copies, which tell it when they have arrived: neither items nor fences take
// threads' time. They pass through the slots, whose keys nobody needs any more, 32 rows of O at a time.
//
//   slots                                  written by         read by
//   own O [block][32 rows][its columns]    the multipliers    bulk copies; its own columns, all threads
//   shares [block][32 rows][columns]       bulk copies        all threads
//   statistics [block][32 rows]            bulk copies        all threads
#pragma once
#include "decode/cluster.cuh"
#include "sm90/ptx.cuh"

namespace fa2::sm90_latent {

template <class Spec, int kD, int kSlotBytes>
struct Shares : decode::Shares<Spec, kD> {
    using Base = decode::Shares<Spec, kD>;
    using Base::kCluster, Base::kVector, Base::partials, Base::rank, Base::arrive, Base::wait;
    using typename Base::Statistic;
    static constexpr int kColumns = kD / kCluster, kItemsOfRow = kColumns / kVector;
    static constexpr int kRows = common::min_of(Spec::kBr, 32);  // of a turn
    static constexpr int kSentBytes = kRows * kColumns * 4, kStatisticBytes = kRows * 8;
    static constexpr int kFirstShare = kCluster * kSentBytes, kFirstStatistic = 2 * kFirstShare;
    static constexpr int kBytes = 16;  // an mbarrier
    static_assert(kD % (32 * kCluster) == 0 && kFirstStatistic + kCluster * kStatisticBytes <= kSlotBytes);

    // 16 rows of O. Chunks of eight columns are permuted, so that the lanes of a store reach different banks.
    struct Exchange {
        __device__ __forceinline__ static int32 offset(int32 row, int32 column) {
            return (column / kColumns * kRows + row) * kColumns + (column % kColumns ^ (row / 2 % 4 << 3));
        }
    };

    __device__ __forceinline__ static void begin(const char* smem) {
        if (threadIdx.x == 0) {
            sm90::mbarrier_init(common::shared_address(smem), 1);
            sm90::mbarrier_init_fence();
        }
    }

    // Merges as Base::merge does. `put(to, begin)` leaves 16 rows of O, and the statistics of all rows are there when the
    // block's threads have met. All threads of the block call this, behind `arrive` when they read the slots no more.
    template <class Put>
    __device__ __forceinline__ void merge(char* slots, const Statistic* statistics, int32 clusters, int32 number,
                                          const Put& put) const {
        const uint32 own = common::shared_address(slots), arrived = common::shared_address(this->smem);
#pragma unroll
        for (int32 begin = 0; begin < Spec::kBr; begin += kRows) {
            if (begin > 0) {
                arrive();
                wait();  // nobody reads shares, or O, of the turn before any more
            }
#pragma unroll
            for (int32 row = 0; row < kRows; row += 16) put(slots + row * kColumns * 4, begin + row);
            sm90::async_proxy_fence();
            if (begin == 0) wait();  // nobody reads keys of any block any more
            __syncthreads();
            if (threadIdx.x == 0)
                sm90::mbarrier_arrive_expect(arrived, (kCluster - 1) * (kSentBytes + kStatisticBytes));
            if (threadIdx.x < kCluster && threadIdx.x != rank) {  // its own share is where `put` left it
                const uint32 block = threadIdx.x, there = common::in_block(block, arrived);
                sm90::bulk_send(common::in_block(block, own + kFirstShare + rank * kSentBytes),
                                own + block * kSentBytes, kSentBytes, there);
                sm90::bulk_send(common::in_block(block, own + kFirstStatistic + rank * kStatisticBytes),
                                common::shared_address(statistics + begin), kStatisticBytes, there);
            }
            sm90::mbarrier_wait(arrived, begin / kRows % 2);
            const auto share_of = [&](int32 s) { return slots + (s == rank ? 0 : kFirstShare) + s * kSentBytes; };
            const auto arrived_statistics = reinterpret_cast<const Statistic*>(slots + kFirstStatistic);
            const auto statistics_of = [&](int32 s) {
                return s == rank ? statistics + begin : arrived_statistics + s * kRows;
            };
            const Items items{rank, begin, common::min_of(begin + kRows, partials.num_rows)};
            this->merge_cluster(
                items, clusters, [&](int32 s, int32, int32 row) { return statistics_of(s)[row - begin]; },
                [&](int32 s, int32 i) {
                    return reinterpret_cast<const float*>(share_of(s)) +
                           Exchange::offset(items.row(i) - begin, i % kItemsOfRow * kVector);
                });
        }
        arrive();
        this->merge_clusters(Items{rank, 0, partials.num_rows}, clusters, number);
        wait();  // until then, copies read this block's slots
    }

  private:
    // Items of rows from `begin_row` to `end_row`.
    struct Items {
        int32 rank, begin_row, end_row;

        __device__ __forceinline__ int32 first() const { return begin_row * kItemsOfRow; }
        __device__ __forceinline__ bool has(int32 i) const { return i < end_row * kItemsOfRow; }
        __device__ __forceinline__ static int32 row(int32 i) { return i / kItemsOfRow; }
        __device__ __forceinline__ int32 column(int32 i) const { return rank * kColumns + i % kItemsOfRow * kVector; }
    };
};

}  // namespace fa2::sm90_latent
