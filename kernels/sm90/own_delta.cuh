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
    using Products = common::RowProducts<Spec, 8>;
    static constexpr int kBarrier =
        4;  // a named barrier of the consumers of dK and dV and the warp that prepares delta
    static constexpr int kConsumers = 2 * kGroupThreads, kRowsAtOnce = 4;

  public:
    // What a lane has of the sums of a row's first four chunks and of the others.
    struct Parts {
        float low, high;
    };

    __device__ __forceinline__ OwnDelta(const Params& params, int32 batch, int32 head)
        : params_(params), batch_(batch), head_(head) {}

    // The parts of lane `lane` of four; 0 unless the row is needed.
    __device__ __forceinline__ Parts parts(int32 row, int32 lane, bool is_needed) const {
        const auto* o = params_.o + params_.o_strides.offset(batch_, is_needed ? row : 0, head_);
        const auto* dout = params_.dout_rows + params_.dout_rows_strides.offset(batch_, is_needed ? row : 0, head_);
        const bool is_summed = is_needed && params_.delta == nullptr;
        return {Products::part(o, dout, lane, is_summed), Products::part(o, dout, lane + 4, is_summed)};
    }
    // Delta of a row, from the parts of its four lanes.
    __device__ __forceinline__ float finished(const Parts& x, int32 row, bool is_needed) const {
        float sum = common::row_sum<4>(x.low) + common::row_sum<4>(x.high);
        const int64 index = common::first_statistic<Spec>(params_, batch_, head_) + row;
        if (params_.delta != nullptr && is_needed) sum = params_.delta[index];
        return is_needed ? common::without_dlse<Spec>(params_, sum, index) : 0.0f;
    }

    // Stores delta of the rows from `first` on to shared memory, by row. All consumers call it. The loads of several rows
    // are in flight at a time.
    __device__ __forceinline__ void put_from(int32 first, uint32 smem) const {
        const int32 thread = threadIdx.x - kGroupThreads, lane = thread % 4;
#pragma unroll 1
        for (int32 row = first + thread / 4; row - thread / 4 < params_.seqlen_q; row += kRowsAtOnce * kConsumers / 4) {
            Parts x[kRowsAtOnce];
            const auto at = [&](int i) { return row + i * kConsumers / 4; };
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) x[i] = parts(at(i), lane, at(i) < params_.seqlen_q);
#pragma unroll
            for (int i = 0; i < kRowsAtOnce; ++i) {
                const float sum = finished(x[i], at(i), at(i) < params_.seqlen_q);
                if (lane == 0 && at(i) < params_.seqlen_q) store_shared(smem + 4 * at(i), sum);
            }
        }
        barrier_arrive(kBarrier, kConsumers + 32);
    }
    // Waits until the consumers have called `put_from`.
    __device__ __forceinline__ static void wait() { barrier_sync(kBarrier, kConsumers + 32); }

  private:
    const Params& params_;
    const int32 batch_, head_;
};

}  // namespace fa2::sm90
