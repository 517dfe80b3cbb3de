// PTX instructions that only this family uses: mbarriers, an atomic that orders other accesses, TMA tensor copies,
// wgmma's synchronisation, register reallocation, stmatrix. wgmma itself, with its operand lists, is in wgmma.cuh.j2.
#pragma once
#include "common/math.cuh"
#include "common/ptx.cuh"

namespace fa2::sm90 {

using common::add_global, common::as_if_new, common::barrier_arrive, common::barrier_sync;
using common::in_block, common::rank_in_cluster;
using common::load_shared, common::load_shared_operand, common::shared_address, common::store_shared;
using common::OperandA;
using common::PackedFragment;
using common::QuadFragment;

// ---------------------------------------------------------------------------------------------------------- mbarriers

__device__ __forceinline__ void mbarrier_init(uint32 barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and adds `bytes` of TMA loads to what completes the phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has completed. On a fresh barrier, a wait for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(uint32 barrier, uint32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait_again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra wait_over;\nbra wait_again;\nwait_over:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Arrives when the copies that this thread has started by cp.async have arrived.
__device__ __forceinline__ void mbarrier_arrive_with_copies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The position of a producer or consumer in a ring of kSlots slots. The mbarrier phase of its n-th use (from 0) has
// parity n / kSlots % 2.
template <int kSlots>
struct RingPosition {
    static constexpr bool kPowerOfTwo = (kSlots & (kSlots - 1)) == 0;

    uint32 turn = 0;  // slots used so far; modulo 2 * kSlots unless kSlots is a power of two

    __device__ uint32 slot() const {
        if constexpr (kPowerOfTwo) return turn % kSlots;
        return turn < kSlots ? turn : turn - kSlots;
    }
    __device__ uint32 parity() const {
        if constexpr (kPowerOfTwo) return turn / kSlots % 2;
        return turn >= kSlots;
    }
    __device__ void advance() { turn = !kPowerOfTwo && turn + 1 == 2 * kSlots ? 0 : turn + 1; }
    __device__ RingPosition next() const {
        RingPosition after = *this;
        after.advance();
        return after;
    }
    __device__ RingPosition previous() const { return {turn == 0 ? 2 * kSlots - 1 : turn - 1}; }
};

// ----------------------------------------------------------------------------------------------------------- clusters

// __syncthreads of all blocks of a cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at a barrier of another block. As a release to the cluster it would wait for all of the thread's accesses to
// global memory; a thread that has read shared memory, or awaited the wgmma that does, needs no order beyond this.
__device__ __forceinline__ void mbarrier_arrive_there(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Copies `bytes` to shared memory of another block, and signals a barrier there.
__device__ __forceinline__ void bulk_send(uint32 there, uint32 smem, uint32 bytes, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(there),
        "r"(smem), "r"(bytes), "r"(barrier)
        : "memory");
}

// ------------------------------------------------------------------------------------------------------ global memory

// Adds 1 and returns the value before. The accesses of all threads ahead of their additions come before what follows.
__device__ __forceinline__ int32 increment_in_order(int32* address) {
    int32 before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(address) : "memory");
    return before;
}

// ---------------------------------------------------------------------------------------------------------------- TMA

// Loads a box of the map's shape from (column, row, head, batch) on; elements outside the tensor arrive as zeros.
__device__ __forceinline__ void tma_load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32 batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}
// The same with a five-dimensional map.
__device__ __forceinline__ void tma_load(uint32 smem, const TensorMap& map, uint32 barrier, int32 column, int32 row,
                                         int32 head, int32 batch, int32 fifth) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(fifth)
        : "memory");
}
// The same to the same place of the blocks of a cluster that `blocks` has a bit of; each of their barriers is signalled.
__device__ __forceinline__ void tma_load_to(uint16 blocks, uint32 smem, const TensorMap& map, uint32 barrier,
                                            int32 column, int32 row, int32 head, int32 batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void tma_load_to(uint16 blocks, uint32 smem, const TensorMap& map, uint32 barrier,
                                            int32 column, int32 row, int32 head, int32 batch, int32 fifth) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(fifth), "h"(blocks)
        : "memory");
}
// Copies `bytes` from global to shared memory; addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32 smem, const void* gmem, uint32 bytes, uint32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(gmem), "r"(bytes), "r"(barrier)
                 : "memory");
}
// Elements outside the tensor are not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32 batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(smem), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 smem, int32 column, int32 row, int32 head,
                                          int32 batch, int32 fifth) {
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
        "r"(smem), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(fifth)
        : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's stores have read shared memory; tma_store_wait: until they have written global memory, too.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Makes ordinary (generic proxy) writes to shared memory visible to later TMA and wgmma operations (async proxy).
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------- registers

template <int kRegisters>
__device__ __forceinline__ void deallocate_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void allocate_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// -------------------------------------------------------------------------------------------------------------- wgmma

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Optimisation barrier for registers of an asynchronous wgmma. The compiler does not know that wgmma is still in
// flight, and must not move accesses to its operands across this point.
template <int kN8>
__device__ __forceinline__ void pin(QuadFragment<kN8>& x) {
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(x.value[n][e])::"memory");
}
template <class Element, int kN8>
__device__ __forceinline__ void pin(PackedFragment<Element, kN8>& x) {
#pragma unroll
    for (int n = 0; n < kN8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) asm volatile("" : "+r"(x.word[n][i])::"memory");
}

// Descriptor of a shared-memory operand in consecutive panels, each of 64 columns (128 bytes, swizzled), or of 32, by any
// number of rows. K-major: the product sums over columns, and the leading dimension is unused. MN-major: the product sums
// over rows, and the leading dimension, `panel_bytes`, is the distance between panels.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64 matrix_descriptor(uint32 address, uint32 panel_bytes) {
    constexpr uint64 kSwizzle = (kRowBytes == 128 ? 1ull : 2ull) << 62, kEightRows = (8ull * kRowBytes >> 4) << 32;
    return kSwizzle | kEightRows | static_cast<uint64>(panel_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

}  // namespace fa2::sm90
