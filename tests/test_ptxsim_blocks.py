"""The interpreter of PTX: accesses to global memory by different blocks of a launch are ordered, or reported."""

from __future__ import annotations

import numpy as np
import pytest
from ptxsim import Memory, tensor_map
from support.ptxsim_kernels import cuda_module, report_of

pytestmark = pytest.mark.simulated

#: Blocks that run together: all of them, or one after another.
batches = pytest.mark.parametrize("batch", [None, 1])

PLAIN = r"""
extern "C" __global__ void strided(int* o, int stride) { o[stride * blockIdx.x + threadIdx.x] = 5; }
// one block writes 16 bytes, the other a byte
extern "C" __global__ void widths(int4* o, int wide, int at) {
  if (blockIdx.x == wide) o[0] = int4{1, 2, 3, 4};
  else ((char*)o)[at] = 1;
}
// every block writes 32 numbers and reads those of the block that is `ahead` of it
extern "C" __global__ void exchanged(int* o, int* seen, int ahead) {
  int t = threadIdx.x, b = blockIdx.x;
  o[32 * b + t] = t;
  __syncthreads();
  seen[32 * b + t] = o[32 * ((b + ahead) % gridDim.x) + 31 - t];
}
// block 0 reads 4 bytes by cp.async, but `size` of them
extern "C" __global__ void partly(int* o, int size, int at) {
  __shared__ int s[1];
  if (blockIdx.x) { ((char*)o)[at] = 1; return; }
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2; cp.async.wait_all;"
    :: "r"((unsigned)__cvta_generic_to_shared(s)), "l"(o), "r"(size) : "memory");
}
"""


def launch_plain(name: str, *numbers: int, grid: int = 2, threads: int = 32, batch: int | None = None) -> None:
    memory = Memory()
    buffers = [memory.alloc(np.zeros(128, np.int32), "o")]
    buffers += [memory.empty(64, np.int32, "seen")] if name == "exchanged" else []
    launch = cuda_module(PLAIN).launch
    launch(name, grid, threads, [*buffers, *numbers], memory=memory, race_check=True, batch=batch)


@batches
def test_blocks_that_keep_to_their_own(batch):
    launch_plain("strided", 32, batch=batch)
    launch_plain("exchanged", 0, batch=batch)
    launch_plain("strided", 0, grid=1, threads=128)  # warps of the same block are not compared


def test_plain_writes_of_the_same_value():
    report = report_of(launch_plain, "strided", 31, batch=1)
    for part in (
        "global memory race: the write at offset 124 of o, which has 512 bytes, by block (1,0,0) is not ordered after "
        "the write of 4 bytes there by block (0,0,0)",
        "by thread (0,0,0) of block (1,0,0)",
        "in kernel strided, kernel.cu:2: st.global.u32",
    ):
        assert part in report, report
    report = report_of(launch_plain, "strided", 31)
    assert "the write at offset 124 of o" in report and "the write in the same instruction" in report, report
    assert "block (0,0,0)" in report and "block (1,0,0)" in report, report


@batches
@pytest.mark.parametrize("wide", [0, 1])
def test_bytes_are_told_apart(wide, batch):
    launch_plain("widths", wide, 16, threads=1, batch=batch)
    report = report_of(launch_plain, "widths", wide, 15, threads=1, batch=batch)
    assert "is not ordered after the write of" in report and "of o, which" in report, report
    launch_plain("partly", 3, 3, threads=1, batch=batch)
    report = report_of(launch_plain, "partly", 3, 2, threads=1, batch=batch)
    assert "race: the " in report and "at offset 2 of o, which" in report, report


@pytest.mark.parametrize(
    "batch, wanted",
    [
        (None, ("the read at offset 252 of o", "by block (0,0,0) is not ordered after the write", "by block (1,0,0)")),
        (1, ("the write at offset 128 of o", "by block (1,0,0) is not ordered after the read", "by block (0,0,0)")),
    ],
)
def test_reads_of_what_another_block_writes(batch, wanted):
    report = report_of(launch_plain, "exchanged", 1, batch=batch)
    assert all(part in report for part in wanted), report


def test_launches_are_ordered():
    memory, launch = Memory(), cuda_module(PLAIN).launch
    a, b = (memory.alloc(np.zeros(64, np.int32), name) for name in "ab")
    launch("exchanged", 2, 32, [a, b, 0], memory=memory, race_check=True)
    launch("exchanged", 2, 32, [b, a, 0], memory=memory, race_check=True)  # reads and writes arrays of the first launch
    assert "global memory race" in report_of(launch, "exchanged", 2, 32, [a, b, 1], memory=memory, race_check=True)
    launch("exchanged", 2, 32, [a, b, 1], memory=memory, race_check=True, block_races=False)


STRONG = r"""
extern "C" __global__ void sums(int* o, int* seen, int kind) {
  int last = blockIdx.x == gridDim.x - 1;
  if (!last || kind == 0) { atomicAdd(o + threadIdx.x, 2); return; }
  if (kind == 1) o[threadIdx.x] = 1;
  if (kind == 2) seen[threadIdx.x] = o[threadIdx.x];
  if (kind == 3) seen[threadIdx.x] = *(volatile int*)(o + threadIdx.x);
  if (kind == 4) *(volatile int*)(o + threadIdx.x) = 1;
  if (kind == 5) atomicAdd_block(o + threadIdx.x, 2);
}
"""

VECTORS = r"""
extern "C" __global__ void vectors(float* o, int shift) {
  if (blockIdx.x) asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %1, %1, %1};" :: "l"(o), "f"(1.f));
  else if (shift < 0) atomicAdd(o + 3, 1.f);
  else o[shift] = 1;
}
"""


def launch_strong(name: str, kind: int, batch: int | None = None) -> np.ndarray:
    memory = Memory()
    out, seen = memory.alloc(np.zeros(32, np.int32), "o"), memory.empty(32, np.int32, "seen")
    if name == "sums":
        launch, grid, arguments = cuda_module(STRONG).launch, 3, [out, seen, kind]
    else:
        launch, grid, arguments = cuda_module(VECTORS, "compute_90").launch, 2, [out, kind]
    launch(name, grid, 32, arguments, memory=memory, race_check=True, batch=batch)
    return memory.read(out)


@batches
def test_strong_accesses_do_not_conflict_with_each_other(batch):
    assert (launch_strong("sums", 0, batch) == 6).all()
    launch_strong("sums", 3, batch)
    launch_strong("sums", 4, batch)
    launch_strong("vectors", -1, batch)
    launch_strong("vectors", 4, batch)


@pytest.mark.parametrize(
    "name, kind, wanted",
    [
        ("sums", 1, ("the write at offset 0", "after the atomic of 4 bytes there by block (")),
        ("sums", 2, ("the read at offset 0", "after the atomic of 4 bytes there by block (")),
        ("sums", 5, ("the atomic of scope .cta at offset 0", "after the atomic of 4 bytes there")),
        (
            "vectors",
            3,
            ("the atomic at offset 12", "by block (1,0,0)", "after the write of 4 bytes there by block (0,"),
        ),
    ],
)
def test_plain_accesses_against_atomics(name, kind, wanted):
    report = report_of(launch_strong, name, kind, 1)
    assert all(part in report for part in ("global memory race", *wanted)), report


ORDERED = r"""
// partial results; the last block to come to the counter adds them up, and resets it
extern "C" __global__ void last(int* partial, int* counter, int* o) {
  __shared__ bool is_last; int t = threadIdx.x, sum = 0, before;
  partial[blockIdx.x * 64 + t] = t + blockIdx.x;
  if (KIND != 3) __syncthreads();
  if (t == 0) {
    if (KIND == 4) __threadfence_block();
    else if (KIND != 1 && KIND < 5) __threadfence();
    if (KIND == 5) asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter)
      : "memory");
    else if (KIND == 6) asm volatile("atom.acq_rel.cta.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter)
      : "memory");
    else if (KIND == 7) asm volatile("atom.acquire.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter)
      : "memory");
    else if (KIND == 8) asm volatile("atom.release.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter)
      : "memory");
    else before = atomicAdd(counter, 1);
    if (KIND != 2 && KIND < 5) __threadfence();
    is_last = before == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  for (int b = 0; b < gridDim.x; b++) sum += partial[b * 64 + t];
  o[t] = sum;
  if (t == 0) *counter = 0;
}
// one block after another adds to a plain number: each is ordered after the one before it only
extern "C" __global__ void turns(int* number, int* turn) {
  if (threadIdx.x) return;
  while (*(volatile int*)turn != blockIdx.x) ;
  if (KIND != 1) __threadfence();
  *number += 1;
  if (KIND != 2) __threadfence();
  *(volatile int*)turn = blockIdx.x + 1;
}
// without fences, block 0 resets a counter after it has seen that block 2 came behind block 1
extern "C" __global__ void reset(int* counter) {
  volatile int* seen = counter;
  if (threadIdx.x) return;
  if (blockIdx.x == 1) atomicAdd(counter, 1);
  if (blockIdx.x == 2) {
    while (atomicAdd(counter, 0) != 1) ;
    if (KIND == 0) atomicAdd(counter, 1);                   // goes on with what it finds
    if (KIND == 1) seen[0] = 2;                             // does not
    if (KIND == 2) atomicAdd(counter + 1, 2);               // elsewhere
  }
  if (blockIdx.x) return;
  while (seen[KIND == 2] != 2) ;
  counter[0] = 0;
}
// a flag in global memory between the warps of a block
extern "C" __global__ void inside(int* flags, int* o) {
  __shared__ int s[32]; int t = threadIdx.x % 32, x = 0;
  if (threadIdx.x < 32) {
    s[t] = t;
    __syncwarp();
    if (t == 0 && KIND != 1) asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flags) : "memory");
    if (t == 0 && KIND == 1) asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(flags) : "memory");
    return;
  }
  while (!x) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flags) : "memory");
  o[t] = s[31 - t];
}
// block 1 writes what block 0 has read, once that has raised a flag
extern "C" __global__ void flag(int* a, int* flags, int* o) {
  int t = threadIdx.x, x = 0;
  if (blockIdx.x == 0) {
    o[t] = a[t];
    __syncthreads();
    if (t == 0 && KIND != 1) asm volatile("st.release.gpu.global.u32 [%0], 1;" :: "l"(flags) : "memory");
    if (t == 0 && KIND == 1) asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(flags) : "memory");
  } else {
    while (!x) {
      if (KIND != 2) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flags) : "memory");
      else asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flags) : "memory");
    }
    a[t] = -1;
  }
}
"""


#: Number of blocks, sizes of the arrays, and name of the array with the result, by kernel.
ORDERED_LAUNCHES = {
    "last": (8, {"partial": 512, "counter": 1, "o": 64}, "o"),
    "turns": (5, {"number": 1, "turn": 1}, "number"),
    "reset": (3, {"counter": 2}, "counter"),
    "inside": (1, {"flags": 1, "o": 32}, "o"),
    "flag": (2, {"a": 64, "flags": 1, "o": 64}, "a"),
}


def launch_ordered(name: str, kind: int, batch: int | None = None, seed: int | None = None) -> np.ndarray:
    memory, (grid, sizes, result) = Memory(), ORDERED_LAUNCHES[name]
    buffers = {key: memory.alloc(np.zeros(size, np.int32), key) for key, size in sizes.items()}
    launch, arguments = cuda_module(f"#define KIND {kind}\n" + ORDERED).launch, list(buffers.values())
    launch(name, grid, 64, arguments, memory=memory, race_check=True, batch=batch, seed=seed)
    return memory.read(buffers[result])


@pytest.mark.parametrize("batch", [None, 3, 1])
@pytest.mark.parametrize("kind", [0, 5])  # fences; acquire and release
def test_the_last_block_reads_what_all_have_written(kind, batch):
    for seed in (None, 1):
        assert (launch_ordered("last", kind, batch, seed) == 8 * np.arange(64) + 28).all()


@pytest.mark.parametrize("batch", [None, 3, 1])
def test_chains_and_flags(batch):
    assert launch_ordered("turns", 0, batch) == [5]
    assert (launch_ordered("flag", 0, batch) == -1).all()


@pytest.mark.parametrize("batch", [None, 3, 1])
@pytest.mark.parametrize(
    "name, kind, wanted",
    [
        ("last", 1, ("the read at offset", "of partial, which", "after the write")),  # no fence ahead of the atomic
        ("last", 2, ("the read at offset", "of partial, which", "after the write")),  # no fence behind it
        ("last", 3, ("the read at offset 128 of partial", "after the write")),  # no barrier ahead of the fence
        ("last", 4, ("the read at offset", "of partial, which", "after the write")),  # a fence of scope .cta
        ("last", 6, ("the atomic of scope .cta at offset 0 of counter", "after the write")),
        ("last", 7, ("the read at offset", "of partial, which", "after the write")),  # no release
        ("last", 8, ("the read at offset", "of partial, which", "after the write")),  # no acquire
        ("turns", 1, ("the read at offset 0 of number", "by block (1,0,0)", "after the write", "by block (0,0,0)")),
        ("turns", 2, ("the read at offset 0 of number", "by block (1,0,0)", "after the write", "by block (0,0,0)")),
        ("flag", 1, ("the write at offset 0 of a", "by block (1,0,0)", "after the read", "by block (0,0,0)")),
        ("flag", 2, ("the write at offset 0 of a", "by block (1,0,0)", "after the read", "by block (0,0,0)")),
    ],
)
def test_synchronisation_with_a_part_missing(name, kind, wanted, batch):
    report = report_of(launch_ordered, name, kind, batch)
    assert all(part in report for part in ("global memory race", *wanted, f"in kernel {name}, kernel.cu:")), report


def test_flags_in_global_memory_order_shared_memory_too():
    assert (launch_ordered("inside", 0) == np.arange(32)[::-1]).all()
    report = report_of(launch_ordered, "inside", 1)
    assert "shared memory race: the read" in report and "is not ordered after the write by warp 0" in report, report


def test_strong_writes_come_before_what_their_observer_does_next():
    assert launch_ordered("reset", 0)[0] == 0
    for kind in (1, 2):
        report = report_of(launch_ordered, "reset", kind)
        assert "race: the write at offset 0 of counter, which has 8 bytes, by block (0,0,0) is not ordered" in report
        assert "after the atomic of 4 bytes there by block (1,0,0)" in report


ASYNC = r"""
typedef unsigned u32; typedef unsigned long long u64; struct alignas(64) Map { u64 opaque[16]; };
// every block writes, adds or reads 8 rows of 32 numbers, the later `rows` below the earlier
extern "C" __global__ void tiles(const __grid_constant__ Map map, float* o, int rows, int kind) {
  __shared__ __align__(128) float s[256]; __shared__ u64 bar; int t = threadIdx.x, y = rows * blockIdx.x;
  u32 from = (u32)__cvta_generic_to_shared(s), b = (u32)__cvta_generic_to_shared(&bar);
  for (int i = t; i < 256; i += 32) s[i] = 1;
  if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(b) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (t) return;
  if (kind == 0 || kind == 2 && blockIdx.x == 0)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
      :: "l"(&map), "r"(from), "r"(0), "r"(y) : "memory");
  else if (kind == 1)
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
      :: "l"(&map), "r"(from), "r"(0), "r"(y) : "memory");
  else if (kind == 2) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" :: "r"(b) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" :: "r"(from), "l"(&map), "r"(b), "r"(0), "r"(y) : "memory");
    asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra L; }" :: "r"(b)
      : "memory");
  } else if (kind == 3 || blockIdx.x == 0)
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;"
      :: "l"(o + 32 * y), "r"(from) : "memory");
  else if (kind == 4)
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 1024;"
      :: "l"(o + 32 * y), "r"(from) : "memory");
  else o[32 * y] = 1;
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) met(int* o, int kind) {
  o[blockIdx.x] = 1;
  if (kind == 0) asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
  o[blockIdx.x ^ 1] += 1;
}
"""


def launch_tiles(rows: int, kind: int, batch: int | None = None, columns: int = 32) -> None:
    memory = Memory()
    out = memory.alloc(np.zeros((24, 32), np.float32), "o")
    mapped = tensor_map(out, "f32", (columns, 24), (128,), (32, 8))
    module = cuda_module(ASYNC, "compute_90a")
    module.launch("tiles", 2, 32, [mapped, out, rows, kind], memory=memory, race_check=True, batch=batch)


@pytest.mark.parametrize(
    "kind, batch, wanted",
    [
        (0, None, ("the TMA store at", "by block (1,0,0) is not ordered after the write of 16 bytes", "block (0,0,0)")),
        (0, 1, ("the TMA store at", "by block (1,0,0) is not ordered after the write of 16 bytes", "block (0,0,0)")),
        (2, None, ("the TMA store at", "by block (0,0,0) is not ordered after the read of 16 bytes", "block (1,0,0)")),
        (2, 1, ("the TMA load at", "by block (1,0,0) is not ordered after the write of 16 bytes", "block (0,0,0)")),
        (3, 1, ("the bulk copy at", "by block (1,0,0) is not ordered after the write of 16 bytes", "block (0,0,0)")),
        (4, None, ("the bulk copy at", "by block (0,0,0) is not ordered after the atomic of 4 bytes", "block (1,0,0)")),
        (4, 1, ("the bulk reduction at", "by block (1,0,0) is not ordered after the write of 16 bytes", "(0,0,0)")),
        (5, 1, ("the write at", "by block (1,0,0) is not ordered after the write of 16 bytes", "block (0,0,0)")),
    ],
)
def test_copies_are_accesses_of_their_block(kind, batch, wanted):
    launch_tiles(8, kind, batch)
    report = report_of(launch_tiles, 7, kind, batch)
    assert all(part in report for part in (*wanted, " at offset 896 of o, which has 3072 bytes,")), report


@batches
def test_tiles_with_ragged_rows(batch):
    """Checks rows of 30 numbers, which are no multiple of 16 bytes."""
    launch_tiles(8, 0, batch, columns=30)
    report = report_of(launch_tiles, 7, 0, batch, columns=30)
    assert "the TMA store at offset 896 of o" in report and "after the write of 4 bytes there" in report, report


@batches
def test_reductions_of_tiles_do_not_conflict_with_each_other(batch):
    launch_tiles(0, 1, batch)


def test_blocks_of_a_cluster_meet_at_its_barrier():
    memory, module = Memory(), cuda_module(ASYNC, "compute_90a")
    out = memory.alloc(np.zeros(4, np.int32), "o")
    module.launch("met", 4, 32, [out, 0], memory=memory, race_check=True)
    report = report_of(module.launch, "met", 4, 32, [out, 1], memory=memory, race_check=True)
    assert "global memory race: the read at offset 4 of o" in report, report
