// Instructions that several families use: optimisation barriers, shared memory accesses by address, asynchronous
// copies, ldmatrix, named barriers, stores and atomic additions to global memory.
#pragma once
#include "common/fragment.cuh"

namespace fa2::common {

// Optimisation barriers: return x as an opaque value, which the compiler neither computes ahead nor takes apart.
__device__ __forceinline__ int32 as_if_new(int32 x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}
__device__ __forceinline__ uint64 as_if_new(uint64 x) {
    asm volatile("mov.b64 %0, %0;" : "+l"(x));
    return x;
}

// ----------------------------------------------------------------------------------------------------------- clusters

// The number of a block in its cluster, and an address of its own shared memory in that of another block.
__device__ __forceinline__ uint32 rank_in_cluster() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ uint32 in_block(uint32 rank, uint32 address) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// ------------------------------------------------------------------------------------------------------ shared memory

__device__ __forceinline__ uint32 shared_address(const void* p) {
    return static_cast<uint32>(__cvta_generic_to_shared(p));
}

template <class T>
__device__ __forceinline__ T load_shared(uint32 address);
template <>
__device__ __forceinline__ int32 load_shared<int32>(uint32 address) {
    int32 x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
template <>
__device__ __forceinline__ uint32 load_shared<uint32>(uint32 address) {
    uint32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
template <>
__device__ __forceinline__ uint16 load_shared<uint16>(uint32 address) {
    uint16 x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}
template <>
__device__ __forceinline__ float load_shared<float>(uint32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
template <>
__device__ __forceinline__ double load_shared<double>(uint32 address) {
    double x;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void load_shared(uint32 address, double (&x)[2]) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(x[0]), "=d"(x[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(uint32 address, float (&x)[2]) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(uint32 address, float (&x)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void store_shared(uint32 address, int32 x) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, uint32 x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, uint16 x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, double x) {
    asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, const double (&x)[2]) {
    asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(address), "d"(x[0]), "d"(x[1]) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, int32 x, int32 y, int32 z, int32 w) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
__device__ __forceinline__ void store_shared(uint32 address, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

// The left operand of a k-step, 16 bytes per lane.
__device__ __forceinline__ OperandA load_shared_operand(uint32 address) {
    OperandA x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.reg[0]), "=r"(x.reg[1]), "=r"(x.reg[2]), "=r"(x.reg[3])
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(uint32 address, const OperandA& x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.reg[0]), "r"(x.reg[1]), "r"(x.reg[2]),
                 "r"(x.reg[3])
                 : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8.
template <bool kTranspose>
__device__ __forceinline__ OperandA ldmatrix_x4(uint32 address) {
    OperandA x;
    if constexpr (kTranspose)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.reg[0]), "=r"(x.reg[1]), "=r"(x.reg[2]), "=r"(x.reg[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.reg[0]), "=r"(x.reg[1]), "=r"(x.reg[2]), "=r"(x.reg[3])
                     : "r"(address)
                     : "memory");
    return x;
}

// Starts a copy of 16 bytes from global to shared memory that bypasses registers and L1. The first `existing` are read;
// the others become zeros.
__device__ __forceinline__ void cp_async_16(uint32 smem, const void* gmem, int32 existing) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(existing) : "memory");
}
// Ends a group of copies; waits until at most kPending of this thread's groups are under way.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
// Waits for all of this thread's copies.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ----------------------------------------------------------------------------------------------------- named barriers

// A named barrier synchronises some warps of the block; `threads` counts those that arrive and those that wait.
// `arrive` does not wait. Barrier 0 is the one of __syncthreads.
__device__ __forceinline__ void barrier_sync(int32 id, int32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int32 id, int32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------------------- stores to global memory

// Stores of aligned vectors. The compiler divides stores of structs into their members where these come from selections.
__device__ __forceinline__ void store_global(float* address, float x, float y) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_global(void* address, const uint32 (&x)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// ---------------------------------------------------------------------------------------- additions to global memory

// These additions return nothing, so the L2 cache performs them and no thread waits.
__device__ __forceinline__ void add_global(float* address, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void add_global(double* address, double x) {
    asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(address), "d"(x) : "memory");
}
// Adds to two neighbouring elements, in one instruction where it exists (sm_90 and newer).
__device__ __forceinline__ void add_global(float* address, float even, float odd) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(even), "f"(odd) : "memory");
#else
    atomicAdd(address, even);
    atomicAdd(address + 1, odd);
#endif
}
// Adds to four neighbouring elements in one instruction, which exists on sm_90 and newer only.
__device__ __forceinline__ void add_global(float* address, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}

// sm_90: stores four 8x8 matrices of 16-bit elements; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32 address, const OperandA& x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.reg[0]),
                 "r"(x.reg[1]), "r"(x.reg[2]), "r"(x.reg[3])
                 : "memory");
}
// The same with each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32 address, const OperandA& x) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.reg[0]),
                 "r"(x.reg[1]), "r"(x.reg[2]), "r"(x.reg[3])
                 : "memory");
}

}  // namespace fa2::common
