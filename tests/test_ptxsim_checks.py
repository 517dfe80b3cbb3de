"""The interpreter of PTX: every defect it knows is reported, with its kind and its place."""

from __future__ import annotations

import numpy as np
import pytest
from ptxsim import Memory, Module, PtxError, tensor_map
from support.ptxsim_kernels import cuda_module, report_of

pytestmark = pytest.mark.simulated

PLACES = r"""
extern "C" __global__ void add(const float* a, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
#line 77 "sm80/somewhere.cuh"
  c[i] = a[i] + 1;
}
"""


def float_buffers(memory: Memory, count: int = 64) -> list[int]:
    return [memory.alloc(np.zeros(count, np.float32), "input"), memory.empty(count, np.float32, "output")]


def test_a_report_names_kernel_line_instruction_thread_and_buffer():
    memory = Memory()
    a, c = float_buffers(memory, 200)
    report = report_of(cuda_module(PLACES).launch, "add", 2, 128, [a, c, 0], memory=memory)
    for part in (
        f"global read of 4 bytes at 0x{a + 800:x} is out of bounds: at offset 800 of input, which has 800 bytes",
        "by thread (72,0,0) of block (1,0,0)",
        "in kernel add, sm80/somewhere.cuh:77: ld.global.f32 %f",
    ):
        assert part in report


GLOBAL = r"""
extern "C" __global__ void shifted(const char* a, float* c, int offset) {
  c[threadIdx.x] = *(const float*)(a + 4 * threadIdx.x + offset);
}
extern "C" __global__ void scattered(float* a, int offset) { a[threadIdx.x + offset] = 1; }
extern "C" __global__ void strided(const float4* a, float* c) { c[threadIdx.x] = a[threadIdx.x].w; }
extern "C" __global__ void called(float* c) { if (threadIdx.x == 5) asm volatile("trap;"); c[threadIdx.x] = 1; }
extern "C" __global__ void spin(volatile int* p) { while (*p == 0); }
"""


@pytest.mark.parametrize(
    "offset, wanted",
    [
        (256, ("out of bounds: at offset 256 of input, which has 256 bytes", "by thread (0,0,0)")),
        (-4, ("out of bounds, below every buffer", "by thread (0,0,0)")),
        (4, ("at offset 256 of input", "by thread (63,0,0)")),
        (2, ("misaligned global access: 4 bytes", "offset 2 of input", "by thread (0,0,0)")),
        (1 << 22, ("out of bounds: at offset",)),
    ],
)
def test_global_reads(offset, wanted):
    memory = Memory()
    report = report_of(cuda_module(GLOBAL).launch, "shifted", 1, 64, [*float_buffers(memory), offset], memory=memory)
    assert all(part in report for part in wanted), report


def test_global_writes_and_vectors():
    memory, launch = Memory(), cuda_module(GLOBAL).launch
    a, c = float_buffers(memory)
    report = report_of(launch, "scattered", 1, 64, [a, 3], memory=memory)
    assert "global write of 4 bytes" in report and "by thread (61,0,0)" in report
    report = report_of(launch, "strided", 1, 32, [a + 8, c], memory=memory)
    assert "misaligned global access" in report or "is out of bounds" in report


def test_uninitialised_global_memory():
    memory, launch = Memory(), cuda_module(GLOBAL).launch
    a = memory.empty(64, np.float32, "fresh")
    launch("scattered", 1, 40, [a, 0], memory=memory)
    assert memory.written(a).sum() == 160
    report = report_of(launch, "shifted", 1, 64, [a, memory.empty(64, np.float32, "c"), 0], memory=memory)
    assert "uninitialised global memory" in report and "offset 160 of fresh, which has 256 bytes" in report
    assert "by thread (40,0,0)" in report
    launch("shifted", 1, 64, [a, memory.empty(64, np.float32, "c"), 0], memory=memory, check_uninit=False)


def test_traps_and_endless_loops():
    memory, launch = Memory(), cuda_module(GLOBAL).launch
    _, c = float_buffers(memory)
    assert "trap executed\n  by thread (5,0,0)" in report_of(launch, "called", 1, 64, [c], memory=memory)
    flag = memory.alloc(np.zeros(1, np.int32), "flag")
    report = report_of(launch, "spin", 1, 32, [flag], memory=memory, max_rounds=500)
    assert "no end after 500 scheduling rounds" in report and "kernel.cu:8" in report


SHARED = r"""
extern "C" __global__ void swap(float* o, int kind) {
  __shared__ float numbers[64]; extern __shared__ float more[]; int t = threadIdx.x;
  o += 64 * blockIdx.x;
  if (kind == 1 && t >= 40) { } else numbers[t] = t;
  if (kind != 2) __syncthreads();
  if (kind == 3) ((volatile float*)more)[t] = 1;
  if (kind == 4) o[t] = *(volatile float*)((char*)numbers + 2);
  if (kind == 5 && t < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  if (kind == 5 && t >= 32) asm volatile("bar.sync 2, 64;" ::: "memory");
  if (kind == 6) asm volatile("bar.sync 1, %0;" :: "r"(t < 32 ? 64 : 96) : "memory");
  if (kind == 7) asm volatile("bar.sync 1, 33;" ::: "memory");
  if (kind == 8 && t < 16) asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
  if (kind == 8 && t >= 16 && t < 32) asm volatile("bar.sync 3, 32;" ::: "memory");
  o[t] = numbers[63 - t];
  if (kind == 9) numbers[t] = 0;
  if (kind == 10) { __syncthreads(); numbers[0] = t; }
}
extern "C" __global__ void crowded() { asm volatile("bar.sync 1, 64;" ::: "memory"); }
"""


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (1, ("uninitialised shared memory", "(offset 252 of numbers, which has 256 bytes)", "by thread (0,0,0)")),
        (2, ("shared memory race: the read of shared", "by warp 0 is not ordered after the write by warp 1")),
        (3, ("shared access out of bounds: 4 bytes at shared 0x", "the block has 0x", "st.volatile.shared.u32")),
        (4, ("misaligned shared access: 4 bytes", "(offset 2 of numbers")),
        (5, ("deadlock in kernel swap", "wait at barrier 1: 32 of 64 arrived", "wait at barrier 2: 32 of 64 arrived")),
        (6, ("barrier 1: counts 64 and 96 mixed",)),
        (7, ("barrier 1: a count of 33",)),
        (8, ("deadlock", "threads wait for other lanes of their warp", "bar.warp.sync")),
        (9, ("race: the write", "is not ordered after the read by warp 1")),
        (10, ("race: the write", "by warp 0", "write in the same instruction by warp 1")),
    ],
)
def test_shared_memory_and_barriers(kind, wanted):
    memory, launch = Memory(), cuda_module(SHARED).launch
    out = memory.empty((3, 64), np.float32, "o")
    launch("swap", 3, 64, [out, 0], memory=memory, race_check=True)
    report = report_of(launch, "swap", 3, 64, [out, kind], memory=memory, race_check=True)
    assert all(part in report for part in (*wanted, "kernel swap", "block (0,0,0)")), report


def test_more_threads_at_a_barrier_than_it_expects():
    report = report_of(cuda_module(SHARED).launch, "crowded", 1, 96, [])
    assert "barrier 1: 96 threads arrived, 64 are expected" in report


COPY = r"""
extern "C" __global__ void copy(const int* a, int* o, int kind) {
  __shared__ __align__(16) int s[256]; int t = threadIdx.x;
  unsigned to = (unsigned)__cvta_generic_to_shared(s + 4 * t);
  if (kind == 4 && t == 5) to += 4;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(a + 4 * t) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (kind == 3) asm volatile("cp.async.commit_group; cp.async.wait_group 2;" ::: "memory");
  else if (kind != 1) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (kind != 2) __syncthreads();
  for (int i = t; i < 256; i += 64) o[256 * blockIdx.x + i] = s[255 - i];
}
"""


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (1, "is not ordered after the write by the cp.async of warp"),  # no wait_group
        (2, "is not ordered after the write by the cp.async of warp 1"),  # no barrier
        (3, "is not ordered after the write by the cp.async of warp"),  # waits for one group too few
        (4, "misaligned shared access: 16 bytes"),
    ],
)
def test_missing_waits_for_cp_async(kind, wanted):
    memory, launch = Memory(), cuda_module(COPY).launch
    arguments = [memory.alloc(np.arange(256, dtype=np.int32), "a"), memory.empty((2, 256), np.int32, "o")]
    launch("copy", 2, 64, [*arguments, 0], memory=memory, race_check=True)
    assert wanted in report_of(launch, "copy", 2, 64, [*arguments, kind], memory=memory, race_check=True)


TMA = r"""
typedef unsigned u32; typedef unsigned long long u64; struct alignas(64) Map { u64 opaque[16]; };
// two rounds through one slot
extern "C" __global__ void tiles(const __grid_constant__ Map in, const __grid_constant__ Map out,
  float* o, int kind) {
  __shared__ __align__(128) float s[256]; __shared__ u64 bars[2]; int t = threadIdx.x;
  u32 slot = (u32)__cvta_generic_to_shared(s), full = (u32)__cvta_generic_to_shared(bars), empty = full + 8;
  auto wait = [](u32 bar, int phase) {
    asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra L; }"
      :: "r"(bar), "r"(phase) : "memory");
  };
  if (t == 0 && kind != 6) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(full) : "memory");
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(empty), "r"(kind == 8 ? 40 : 64) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  for (int r = 0; r < 2; r++) {
    if (t == 0) {
      if (r && kind != 1) wait(empty, 0);
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(full), "r"(kind == 3 ? 1040 : 1024)
        : "memory");
      asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];"
        :: "r"(slot + (kind == 7 ? 64 : 0)), "l"(&in), "r"(full), "r"(0), "r"(r * 8) : "memory");
    }
    if (kind != 2 || t < 32) wait(full, r);
    o[r * 256 + t] = s[4 * (t % 64)];
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(empty) : "memory");
  }
  __syncthreads();
  s[t] = t; s[t + 64] = t; s[t + 128] = t; s[t + 192] = t;
  if (kind != 4) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1]; "
      "cp.async.bulk.commit_group;" :: "l"(&out), "r"(slot), "r"(0), "r"(0) : "memory");
    if (kind != 5) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  __syncthreads();
  s[t] = 0;
}
"""


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (1, ("race: the asynchronous write", "is not ordered after the read by warp")),  # slot overwritten too early
        (2, ("race: the read", "by warp 1 is not ordered after the write by a TMA load")),  # no wait for full
        (3, ("deadlock", "wait for the mbarrier at shared", "0 of 1 arrivals and 16 bytes missing")),
        (4, ("was written by warp", "is read through the async proxy", "without fence.proxy.async")),
        (5, ("race: the write", "is not ordered after the read by the bulk copy of warp 0")),
        (6, ("the mbarrier at shared", "bars, which has 16 bytes) is not initialised")),
        (7, ("TMA tile is out of bounds", "TMA: the shared address 0x40 is misaligned")),
        (8, ("more arrivals at the mbarrier", "than its count of 40")),
    ],
)
def test_tma_and_mbarriers(kind, wanted):
    memory, launch = Memory(), cuda_module(TMA, "compute_90a").launch
    a, b = (memory.alloc(np.zeros((16, 32), np.float32), name) for name in ("a", "b"))
    out = memory.empty(512, np.float32, "o")
    maps = [tensor_map(address, "f32", (32, 16), (128,), (32, 8)) for address in (a, b)]
    launch("tiles", 1, 64, [*maps, out, 0], memory=memory, race_check=True)
    report = report_of(launch, "tiles", 1, 64, [*maps, out, kind], memory=memory, race_check=True)
    if kind == 7:  # whichever defect comes first
        assert any(part in report for part in wanted), report
    else:
        assert all(part in report for part in wanted), report


def test_tma_of_what_nobody_wrote_and_of_what_is_not_there():
    memory, launch = Memory(), cuda_module(TMA, "compute_90a").launch
    b = memory.alloc(np.zeros((16, 32), np.float32), "b")
    fresh, out = memory.empty((16, 32), np.float32, "fresh"), memory.empty(512, np.float32, "o")

    def report(address, rows):
        maps = [tensor_map(x, "f32", (32, n), (128,), (32, 8)) for x, n in ((address, rows), (b, 16))]
        return report_of(launch, "tiles", 1, 64, [*maps, out, 0], memory=memory, race_check=True)

    assert "TMA load of uninitialised global memory: offset 0 of fresh" in report(fresh, 16)
    assert "a tensor map out of bounds: bytes 1536 to 2560 of b, which has 2048 bytes" in report(b + 512, 16)
    not_a_map = [np.zeros(1, "V128")[0]] * 2
    assert "no tensor map" in report_of(launch, "tiles", 1, 64, [*not_a_map, out, 0], memory=memory)


WGMMA = r"""
typedef unsigned u32; typedef unsigned long long u64;
extern "C" __global__ void __launch_bounds__(128) product(float* o, int kind) {
  __shared__ __align__(128) unsigned short s[64 * 16 + 8 * 16]; int t = threadIdx.x;
  u32 base = (u32)__cvta_generic_to_shared(s);
  for (int i = t; i < 64 * 16 + (kind == 1 ? 64 : 128); i += 128) s[i] = 0x3c00;
  if (kind != 2) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (kind != 3) __syncthreads();
  float d[4] = {1, 1, 1, 1};
  // stride 128 bytes, leading 1024
  const u64 mode = 8ull << 32 | (u64)(kind == 4 ? 640 : 64) << 16;
  u64 da = mode | base >> 4, db = 8ull << 32 | 8ull << 16 | (base + 2048) >> 4;
  if (kind == 5) db = 0x4ull << 47 | 0x2ull << 48 | db;                               // a base offset
  if (kind == 6) da += t / 64;
  asm volatile("" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");  // written ahead of the fence
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1, 1, 1, 0, 0;"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(da), "l"(db));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  if (kind == 7) o[t] = d[0];
  if (kind == 8) { s[t] = 0; }
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
  o[t] = d[0] + d[1] + d[2] + d[3];
}
"""


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (1, "wgmma reads uninitialised shared memory"),
        (2, "without fence.proxy.async"),
        (3, "race: the asynchronous read"),
        (4, "wgmma operand out of bounds"),
        (5, "base offset is not implemented"),
        (6, "descriptor A differs between the threads of a warp group"),
        (7, "accumulator of an unfinished wgmma"),
        (8, "is not ordered after the read by the wgmma reads of warp"),
    ],
)
def test_wgmma(kind, wanted):
    memory, launch = Memory(), cuda_module(WGMMA, "compute_90a").launch
    out = memory.empty(128, np.float32, "o")
    launch("product", 1, 128, [out, 0], memory=memory, race_check=True)
    assert (memory.read(out) == 4 * 17).all()
    assert wanted in report_of(launch, "product", 1, 128, [out, kind], memory=memory, race_check=True)


LANES = r"""
typedef unsigned u32; typedef unsigned long long u64;
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// each lane copies a number in, and takes its own or its neighbour's
extern "C" __global__ void in(const int* a, int* o, int kind) {
  __shared__ int s[32]; int t = threadIdx.x;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4; cp.async.commit_group;" :: "r"(shared(s + t)), "l"(a + t)
    : "memory");
  if (kind == 4) return;
  if (kind != 3 || t == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (kind == 1) o[t] = s[t];
  if (kind != 2) __syncwarp();
  o[t] = s[t ^ 1];
}
// a warp writes, a bulk copy takes that out, the warp writes again
extern "C" __global__ void out(int* o, int kind) {
  __shared__ __align__(16) int s[32]; int t = threadIdx.x;
  s[t] = t;
  if (kind == 1) __syncwarp();
  if (kind != 1 && kind != 2 || t == 0) fence();
  if (kind != 3) __syncwarp();
  if (t == 0)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128; cp.async.bulk.commit_group;"
      :: "l"(o), "r"(shared(s)) : "memory");
  if (kind == 6) return;
  if (t == (kind == 4)) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  if (kind != 5) __syncwarp();
  s[t] = 0;
}
// a lane takes out what it wrote itself, and writes there again
extern "C" __global__ void alone(int* o) {
  __shared__ __align__(16) int s[64]; int t = threadIdx.x;
  s[32 + t] = t;
  if (t) return;
  for (int i = 0; i < 4; i++) s[i] = i;
  fence();
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 16; cp.async.bulk.commit_group; "
    "cp.async.bulk.wait_group.read 0;" :: "l"(o), "r"(shared(s)) : "memory");
  s[0] = 5;
}
// a bulk copy over what the block wrote
extern "C" __global__ void over(const int* a, int* o, int kind) {
  __shared__ __align__(16) int s[64]; __shared__ u64 bar; int t = threadIdx.x; u32 b = shared(&bar);
  if (t == (kind == 3 ? 32 : 0)) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(b) : "memory");
    if (kind < 4) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (kind != 4) s[t] = t;
  if (kind != 1 && kind != 4) fence();
  if (kind != 3) __syncthreads();
  if (t == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" :: "r"(b) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
      :: "r"(shared(s)), "l"(a), "r"(b) : "memory");
  }
  if (kind == 2) return;
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra L; }" :: "r"(b)
    : "memory");
  o[t] = s[63 - t];
}
extern "C" __global__ void meet(int kind) {
  __shared__ u64 bar; int t = threadIdx.x; u32 b = shared(&bar);
  if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 64;" :: "r"(b) : "memory");
  if (kind == 0) __syncthreads();
  if (kind == 1) __syncwarp();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(b) : "memory");
}
"""
NO_PROXY_FENCE, UNORDERED_BULK = "without fence.proxy.async", "is not ordered after the read by the bulk copy of warp 0"


def launch_lanes(name: str, threads: int, *kind: int) -> None:
    memory = Memory()
    buffers = [memory.alloc(np.arange(64, dtype=np.int32), "a")] if name in ("in", "over") else []
    buffers += [memory.alloc(np.zeros(64, np.int32), "o")] if name != "meet" else []
    module = cuda_module(LANES, "compute_90a")
    module.launch(name, 1, threads, [*buffers, *kind], memory=memory, race_check=True)


@pytest.mark.parametrize(
    "name, threads, kinds",
    [
        ("in", 32, (0, 1)),  # all wait and synchronise; each also takes its own number before
        ("out", 32, (0, 1)),  # all fence and synchronise; synchronise, and one fences for all
        ("alone", 32, ()),
        ("over", 64, (0, 5)),  # the initialisation published by its own fence; by the proxy's
        ("meet", 64, (0,)),
    ],
)
def test_copies_fences_and_mbarriers_of_single_lanes_in_order(name, threads, kinds):
    for kind in kinds:
        launch_lanes(name, threads, kind)
    if not kinds:
        launch_lanes(name, threads)


@pytest.mark.parametrize(
    "name, threads, kind, wanted",
    [
        ("in", 32, 2, ("by warp 0 is not ordered after the write by the cp.async of warp 0",)),  # no __syncwarp
        ("in", 32, 3, ("by warp 0 is not ordered after the write by the cp.async of warp 0",)),  # one waits for all
        ("in", 32, 4, ("the thread ends with a cp.async in flight", "by thread (0,0,0)")),
        ("out", 32, 2, ("was written by warp 0 and is read through the async proxy", NO_PROXY_FENCE)),  # lane 0 fences
        ("out", 32, 3, ("was written by lane 1 of warp 0", "async proxy by lane 0, without __syncwarp")),
        ("out", 32, 4, ("race: the write", UNORDERED_BULK)),  # another lane waits
        ("out", 32, 5, ("race: the write", UNORDERED_BULK)),  # no __syncwarp after the wait
        ("out", 32, 6, ("the thread ends with a bulk copy from shared memory in flight",)),
        ("over", 64, 1, ("was written by warp 0 and is written through the async proxy", NO_PROXY_FENCE)),
        ("over", 64, 2, ("the block ends with a TMA load in flight", "at the mbarrier at shared 0x", "of bar, which")),
        ("over", 64, 3, ("is used by warp 0 before its initialisation by warp 1 is published", "by thread (0,0,0)")),
        ("over", 64, 4, ("is signalled by the async proxy, and warp 0 initialised it without fence.mbarrier_init",)),
        ("meet", 64, 1, ("is used by warp 1 before its initialisation by warp 0 is published", "thread (32,0,0)")),
        ("meet", 32, 2, ("is used by warp 0 before its initialisation by warp 0", "thread (1,0,0)")),
    ],
)
def test_copies_fences_and_mbarriers_of_single_lanes_out_of_order(name, threads, kind, wanted):
    report = report_of(launch_lanes, name, threads, kind)
    assert all(part in report for part in (*wanted, f"in kernel {name}, kernel.cu:")), report


STRONG = r"""
// warp 0 fills s and raises a flag, for which warp 1 waits
extern "C" __global__ void flag(int* o, int kind) {
  __shared__ int s[32], flags[1];
  int t = threadIdx.x % 32, x = 0; unsigned f = (unsigned)__cvta_generic_to_shared(flags);
  if (threadIdx.x == 0) flags[0] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    s[t] = t;
    if (kind == 1 || kind == 2) __threadfence_block();
    __syncwarp();
    if (t) return;
    if (kind == 1 || kind == 4) asm volatile("st.relaxed.cta.shared.u32 [%0], 1;" :: "r"(f) : "memory");
    else if (kind == 2) asm volatile("st.volatile.shared.u32 [%0], 1;" :: "r"(f) : "memory");
    else if (kind == 3) asm volatile("red.release.cta.shared.add.u32 [%0], 1;" :: "r"(f) : "memory");
    else if (kind == 6) flags[0] = 1;
    else asm volatile("st.release.cta.shared.u32 [%0], 1;" :: "r"(f) : "memory");
  } else {
    while (!x) {
      if (kind == 1 || kind == 5) asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(x) : "r"(f) : "memory");
      else if (kind == 2) asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x) : "r"(f) : "memory");
      else if (kind == 3) asm volatile("atom.acquire.cta.shared.add.u32 %0, [%1], 0;" : "=r"(x) : "r"(f) : "memory");
      else asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(x) : "r"(f) : "memory");
    }
    if (kind == 1 || kind == 2) __threadfence_block();
    o[t] = s[31 - t];
  }
}
// all warps add to the same numbers
extern "C" __global__ void sums(int* o, int kind) {
  __shared__ int s[32]; int t = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == 0) s[t] = 0;
  if (kind != 1) __syncthreads();
  atomicAdd(s + t, warp);
  if (kind == 3 && warp == 1) s[t] = 7;
  if (kind != 2) __syncthreads();
  if (warp == 0) o[t] = s[t];
}
"""


def launch_strong(name: str, kind: int) -> np.ndarray:
    memory = Memory()
    out = memory.empty(32, np.int32, "o")
    cuda_module(STRONG).launch(name, 1, 64 if name == "flag" else 128, [out, kind], memory=memory, race_check=True)
    return memory.read(out)


@pytest.mark.parametrize("kind", range(4))  # release and acquire; fences and relaxed; fences and volatile; atomics
def test_flags_in_shared_memory_order_what_they_guard(kind):
    assert (launch_strong("flag", kind) == np.arange(32)[::-1]).all()


def test_atomics_do_not_conflict_with_each_other():
    assert (launch_strong("sums", 0) == 6).all()


@pytest.mark.parametrize(
    "name, kind, wanted",
    [
        ("flag", 4, ("race: the read", "of s, which", "is not ordered after the write by warp 0")),  # no release
        ("flag", 5, ("race: the read", "of s, which", "is not ordered after the write by warp 0")),  # no acquire
        ("flag", 6, ("of flags, which", "is not ordered after the", "by warp")),  # a weak store of the flag
        ("sums", 1, ("race: the atomic", "by warp 1 is not ordered after the write by warp 0")),
        ("sums", 2, ("race: the read", "by warp 0 is not ordered after the strong write or atomic by warp 1")),
        ("sums", 3, ("race: the write", "by warp 1 is not ordered after the strong write or atomic by warp 0")),
    ],
)
def test_strong_accesses_out_of_order(name, kind, wanted):
    report = report_of(launch_strong, name, kind)
    assert all(part in report for part in (*wanted, f"in kernel {name}, kernel.cu:")), report


FENCED = r"""
typedef unsigned u32; typedef unsigned long long u64;
#define ACCUMULATORS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
__device__ void multiply(float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
    : ACCUMULATORS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ void wait(float (&d)[8]) { asm volatile("wgmma.wait_group.sync.aligned 0;" : ACCUMULATORS :: "memory"); }
extern "C" __global__ void __launch_bounds__(128) product(float* o) {
  __shared__ __align__(128) unsigned short s[16 * 16]; int t = threadIdx.x;
  const u64 b = 16ull << 32 | 8ull << 16 | (u32)__cvta_generic_to_shared(s) >> 4;
  for (int i = t; i < 256; i += 128) s[i] = 0x3c00;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  float d[8]; u32 a[4];
  for (int i = 0; i < 8; i++) asm volatile("mov.f32 %0, 1.0;" : "=f"(d[i]));
  for (int i = 0; i < 4; i++) asm volatile("mov.b32 %0, 0x3c003c00;" : "=r"(a[i]));
  if (KIND != 1) fence();
  if (KIND == 2) asm volatile("add.f32 %0, %0, %0;" : "+f"(d[0]));
  if (KIND == 3) asm volatile("or.b32 %0, %0, %0;" : "+r"(a[0]));
  multiply(d, a, b);
  if (KIND == 4)                                             // of another shape
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, "
      "1, 1, 1, 0;" : ACCUMULATORS, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else multiply(d, a, b);
  commit();
  if (KIND == 5) return;
  if (KIND == 7) asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+f"(d[0]));
  wait(d);
  asm volatile("add.f32 %0, %0, %0;" : "+f"(d[0]));
  if (KIND != 6) fence();
  multiply(d, a, b);
  commit();
  wait(d);
  o[t] = d[0];
}
"""


def fenced(kind: int) -> np.ndarray:
    memory = Memory()
    out = memory.empty(128, np.float32, "o")
    module = cuda_module(f"#define KIND {kind}\n" + FENCED, "compute_90a")
    module.launch("product", 1, 128, [out], memory=memory, race_check=True)
    return memory.read(out)


def test_accumulators_go_from_one_wgmma_to_the_next_without_a_fence():
    assert (fenced(0) == 2 * 33 + 16).all()


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (1, "a wgmma's accumulators were accessed before it without wgmma.fence"),
        (2, "a wgmma's accumulators were accessed before it without wgmma.fence"),
        (3, "the registers of a wgmma's A were accessed before it without wgmma.fence"),
        (4, "a wgmma's accumulators were accessed before it without wgmma.fence"),
        (5, "the warp ends with a wgmma in flight"),
        (6, "a wgmma's accumulators were accessed before it without wgmma.fence"),
        (7, "accumulator of an unfinished wgmma is accessed before wgmma.wait_group"),
    ],
)
def test_wgmmas_without_their_fences(kind, wanted):
    report = report_of(fenced, kind)
    assert wanted in report and "in kernel product, kernel.cu:" in report, report


def kernel(body: str) -> Module:
    return Module(
        f".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry kernel()\n{{\n"
        f".reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .pred %p<3>; .reg .b16 %h<9>;\n{body}\nret;\n}}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.sat.cc.s32 %r1, %r2, %r3;",
        "add.u32.wrap %r1, %r2, %r3;",
        "mad.lo.sat.cc.u32 %r1, %r2, %r3, %r4;",
        "prmt.b32.f4e %r1, %r2, %r3, %r4;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];",
        "mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1,%r2}, {%r1,%r2}, {%r3,%r4}, {%r1,%r2}, %r5, 0;",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r1,%r2}, {%r3}, {%r4}, {%r1,%r2};",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f1,%f2,%f3,%f4}, %rd1, %rd2, 1, 1, 1;",
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2;",
        "cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 16, [%r3];",
        "cp.async.bulk.tensor.1d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r4];",
        "mbarrier.pending_count.b64 %r1, %rd1;",
        "add.rz.f64 %rd1, %rd2, %rd3;",
        "add.u64 %r1, %rd2, %rd3;",
        "mov.u32 %r1, %nosuchregister;",
        "ld.global.v8.b32 {%r1,%r2,%r3,%r4,%r5,%r6,%r7,%r8}, [%rd1];",
    ],
)
def test_what_is_not_implemented_is_refused_before_the_kernel_starts(text):
    report = report_of(kernel(f"trap;\n{text}").launch, "kernel", 1, 32, [])
    assert "cannot decode" in report and "in kernel kernel" in report and text[:40].rstrip(";") in report
    assert "trap executed" not in report


def test_launches_that_do_not_fit_the_kernel():
    launch = cuda_module(PLACES).launch
    assert "takes 3 arguments, got 2" in report_of(launch, "add", 1, 32, [0, 0])
    assert "has 4 bytes, the kernel expects 8" in report_of(launch, "add", 1, 32, [np.int32(0), 0, 0])
    assert "no kernel 'sub'" in report_of(launch, "sub", 1, 32, [])
    bounded = cuda_module('extern "C" __global__ void __launch_bounds__(64) small() {}').launch
    assert "compiled for at most 64" in report_of(bounded, "small", 1, 65, [])
    assert "shared memory, more than" in report_of(bounded, "small", 1, 32, [], dynamic_smem=240_000)
    assert "no multiple of the cluster" in report_of(bounded, "small", 3, 32, [], cluster=(2, 1, 1))


def test_addresses_belong_to_buffers():
    memory = Memory()
    address = memory.alloc(np.arange(4), "numbers")
    with pytest.raises(PtxError, match="inside of numbers, not its start"):
        memory.read(address + 8)
    with pytest.raises(PtxError, match="out of bounds: at offset 32 of numbers, which has 32 bytes"):
        memory.find(address + 32)
