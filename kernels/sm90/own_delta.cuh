// For the kernel that runs both passes of `two_pass` side by side (backward_both.cuh): its blocks compute delta of the rows
// that they read, because no kernel before them has done so. If the caller gives delta, they read that.
#pragma once
#include "common/delta.cuh"
#include "sm90/layout.cuh"

namespace fa2::sm90 {

// True in a pass of that kernel.
template <class Spec>
inline constexpr bool kIsPass = false;

// Delta of the rows of a head. Four lanes share a row; its chunks are added in the order of delta.cuh, for the same bits.
template <class Spec>
class OwnDelta {
    using Products = common::RowProducts<Spec>;
    using Load = typename Products::Load;
    static constexpr int kBarrier =
        4;  // a named barrier of the consumers of dK and dV and the warp that prepares delta
    static constexpr int kConsumers = 2 * kGroupThreads, kRowsAtOnce = 4;
    static constexpr int kChunks = Spec::kHeadDim > 32 ? 2 : 1;  // of a lane
    static_assert(Spec::kHeadDim <= 64);

  public:
    // What a lane has loaded of a row.
    struct Row {
        Load o[kChunks], dout[kChunks];
    };

    __device__ __forceinline__ OwnDelta(const Params& params, int32 batch, int32 head)
        : params_(params), batch_(batch), head_(head), lane_(threadIdx.x % 4) {}

    // Loads a row, or another one in the place of a row beyond the sequence: with a condition, loads would wait for each
    // other.
    __device__ __forceinline__ Row load(int32 row) const {
        row = min_of(row, params_.seqlen_q - 1);
        const auto* o = params_.o + params_.o_strides.offset(batch_, row, head_);
        const auto* dout = params_.dout_rows + params_.dout_rows_strides.offset(batch_, row, head_);
        Row x;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int32 column = has(i) ? column_of(i) : 0;
            x.o[i] = *reinterpret_cast<const Load*>(o + column);
            x.dout[i] = *reinterpret_cast<const Load*>(dout + column);
        }
        return x;
    }
    // Delta of a row that the four lanes have loaded; 0 unless it is needed.
    __device__ __forceinline__ float finished(const Row& x, int32 row, bool is_needed) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            sum += common::row_sum<4>(has(i) ? Products::with_products(0.0f, x.o[i], x.dout[i]) : 0.0f);
        const int64 index = common::first_statistic<Spec>(params_, batch_, head_) + row;
        if (params_.delta != nullptr && is_needed) sum = params_.delta[index];
        return is_needed ? sum - common::dlse_of<Spec>(params_, index) : 0.0f;
    }

    // Stores delta of the rows from `first` on to shared memory, by row. All consumers call it. The loads of several rows
    // are in flight at a time.
    __device__ __forceinline__ void put_from(int32 first, uint32 smem) const {
        const int32 own = (threadIdx.x - kGroupThreads) / 4;
#pragma unroll 1
        for (int32 row = first + own; row - own < params_.seqlen_q; row += kRowsAtOnce * kConsumers / 4) {
            Row x[kRowsAtOnce];
            const auto at = [&](int i) { return row + i * kConsumers / 4; };
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) x[i] = load(at(i));
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                const float sum = finished(x[i], at(i), at(i) < params_.seqlen_q);
                if (lane_ == 0 && at(i) < params_.seqlen_q) store_shared(smem + 4 * at(i), sum);
            }
        }
        barrier_arrive(kBarrier, kConsumers + 32);
    }
    // Waits until the consumers have called `put_from`.
    __device__ __forceinline__ static void wait() { barrier_sync(kBarrier, kConsumers + 32); }

  private:
    __device__ __forceinline__ int32 column_of(int i) const { return (lane_ + 4 * i) * 8; }
    __device__ __forceinline__ bool has(int i) const {
        return Spec::kHeadDim % 32 == 0 || column_of(i) < Spec::kHeadDim;
    }

    const Params& params_;
    const int32 batch_, head_, lane_;
};

}  // namespace fa2::sm90
