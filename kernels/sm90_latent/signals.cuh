// What warps that copy keys and warps that multiply them tell each other by mbarriers: of each slot that its keys have
// arrived, and that nobody reads them any more.
#pragma once
#include "sm90/ptx.cuh"

namespace fa2::sm90_latent {

// Of kSlots slots, which kProducers warps fill and kReaders warps read. The mbarriers begin at byte kBegin of the scratch.
template <int kSlots, int kProducers, int kReaders, int kBegin>
class Signals {
  public:
    static constexpr int kEnd = kBegin + 2 * kSlots * 8;

    __device__ __forceinline__ explicit Signals(const char* scratch)
        : first_(common::shared_address(scratch) + kBegin) {}

    __device__ __forceinline__ void init() const {
        if (threadIdx.x == 0) {
            for (int32 slot = 0; slot < kSlots; ++slot) {
                sm90::mbarrier_init(filled_at(slot), 32 * kProducers);
                sm90::mbarrier_init(free_at(slot), kReaders);
            }
            sm90::mbarrier_init_fence();
        }
        __syncthreads();
    }
    __device__ __forceinline__ void filled(int32 slot) const { sm90::mbarrier_arrive_with_copies(filled_at(slot)); }
    __device__ __forceinline__ void wait_filled(int32 slot, int32 turn) const {
        sm90::mbarrier_wait(filled_at(slot), turn);
        sm90::async_proxy_fence();
    }
    __device__ __forceinline__ void free(int32 slot) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) sm90::mbarrier_arrive(free_at(slot));
    }
    __device__ __forceinline__ void wait_free(int32 slot, int32 turn) const {
        sm90::mbarrier_wait(free_at(slot), turn ^ 1);
    }

  private:
    __device__ __forceinline__ uint32 filled_at(int32 slot) const { return first_ + slot * 8; }
    __device__ __forceinline__ uint32 free_at(int32 slot) const { return first_ + (kSlots + slot) * 8; }

    uint32 first_;
};

}  // namespace fa2::sm90_latent
