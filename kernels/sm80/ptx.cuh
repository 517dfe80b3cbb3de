// Instructions that only this family uses: cp.async of whole chunks, mma.sync, barriers with a vote.
#pragma once
#include "common/ptx.cuh"

namespace fa2::sm80 {

using common::barrier_arrive, common::barrier_sync, common::ldmatrix_x4;
using common::cp_async_commit, common::cp_async_wait;
using common::load_shared, common::load_shared_operand, common::shared_address, common::store_shared;
using common::OperandA, common::stmatrix_x4;

// Starts a copy of 16 bytes from global to shared memory that bypasses registers and L1. If `valid` is false, nothing
// is read and zeros are written.
__device__ __forceinline__ void cp_async_16(uint32 smem, const void* gmem, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(valid ? 16 : 0)
                 : "memory");
}

// d += a b on a 16 x 8 x 16 tile.
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const OperandA& a, uint32 b0, uint32 b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<float16>(float (&d)[4], const OperandA& a, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat16>(float (&d)[4], const OperandA& a, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}

// Optimisation barrier: returns x as an opaque value, so that values derived from it are recomputed here instead of
// kept in registers across the loop.
__device__ __forceinline__ int32 computed_anew(int32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// __syncthreads for warps that reach it at different instructions. CUDA C++ requires all threads to reach the same
// __syncthreads; PTX only counts the warps that arrive.
__device__ __forceinline__ void block_barrier() { asm volatile("bar.sync 0;" ::: "memory"); }

// A named barrier with a vote: all its threads wait, and get true if the predicate holds in all of them.
__device__ __forceinline__ bool barrier_all(int32 id, int32 threads, bool predicate) {
    int32 all;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.s32 p, %1, 0;\nbar.red.and.pred q, %2, %3, p;\nselp.s32 %0, 1, 0, q;\n}"
                 : "=r"(all)
                 : "r"(static_cast<int32>(predicate)), "r"(id), "r"(threads)
                 : "memory");
    return all != 0;
}

}  // namespace fa2::sm80
