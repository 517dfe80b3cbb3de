"""The interpreter of PTX for sm_90a: mbarriers, bulk copies, TMA tiles with their swizzles, clusters and wgmma."""

from __future__ import annotations

import numpy as np
import pytest
from ptxsim import Memory, PtxError, tensor_map
from support.ptxsim_kernels import cuda_module, report_of

pytestmark = pytest.mark.simulated

PRELUDE = r"""
typedef unsigned u32; typedef unsigned long long u64; struct alignas(64) Map { u64 opaque[16]; };
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" :: "r"(bar), "r"(count)
    : "memory");
}
__device__ void expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory"); }
__device__ void wait(u32 bar, int phase) {
  u32 done = 0;
  while (!done) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
    "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(phase) : "memory");
}
__device__ void load(u32 to, const Map& map, u32 bar, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%3, %4}], [%2];"
    :: "r"(to), "l"(&map), "r"(bar), "r"(x), "r"(y) : "memory");
}
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void store_done() { asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory"); }
"""

RING = r"""
extern "C" __global__ void ring(int* o, int rounds) {            // one producer warp, two consumer warps, two slots
  __shared__ int slots[2][32]; __shared__ u64 bars[4]; int t = threadIdx.x, lane = t % 32;
  u32 full = shared(bars), empty = shared(bars + 2);
  if (t == 0) for (int i = 0; i < 2; i++) { init(full + 8 * i, 32); init(empty + 8 * i, 64); }
  __syncthreads();
  for (int r = 0; r < rounds; r++) {
    int i = r & 1, phase = r >> 1 & 1;
    if (t < 32) { wait(empty + 8 * i, phase ^ 1); slots[i][lane] = 100 * r + lane; arrive(full + 8 * i); }
    else { wait(full + 8 * i, phase); o[r * 64 + t - 32] = slots[i][31 - lane]; arrive(empty + 8 * i); }
  }
}
// the other form: arrive returns the phase that one waits for
extern "C" __global__ void tokens(int* o) {
  __shared__ u64 bar; __shared__ int s[64]; u32 b = shared(&bar); int t = threadIdx.x;
  if (t == 0) init(b, 64);
  __syncthreads();
  s[t] = t; u64 state; u32 done = 0;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
  while (!done) asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; "
    "selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(b), "l"(state) : "memory");
  o[t] = s[63 - t];
}
extern "C" __global__ void __launch_bounds__(256) registers(int* o) {
  if (threadIdx.x < 128) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  o[threadIdx.x] = threadIdx.x;
}
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_mbarriers_of_a_ring(seed):
    memory, rounds = Memory(), 7
    out = memory.empty((rounds, 2, 32), np.int32, "o")
    module = cuda_module(PRELUDE + RING, "compute_90a")
    module.launch("ring", 1, 96, [out, rounds], memory=memory, race_check=True, seed=seed)
    assert (memory.read(out) == 100 * np.arange(rounds)[:, None, None] + np.arange(32)[::-1]).all()


def test_mbarriers_with_a_state_token():
    memory = Memory()
    out = memory.empty(64, np.int32, "o")
    cuda_module(PRELUDE + RING, "compute_90a").launch("tokens", 1, 64, [out], memory=memory, race_check=True)
    assert (memory.read(out) == np.arange(64)[::-1]).all()


def test_setmaxnreg_changes_nothing():
    memory = Memory()
    out = memory.empty(256, np.int32, "o")
    cuda_module(PRELUDE + RING, "compute_90a").launch("registers", 1, 256, [out], memory=memory)
    assert (memory.read(out) == np.arange(256)).all()


SWIZZLE = r"""
// a tile as it lies in shared memory
extern "C" __global__ void dump(const __grid_constant__ Map map, unsigned short* o, int x, int y) {
  __shared__ __align__(1024) unsigned short s[TILE]; __shared__ u64 bar; int t = threadIdx.x;
  if (t == 0) { init(shared(&bar), 1); expect(shared(&bar), TILE * 2); load(shared(s), map, shared(&bar), x, y); }
  __syncthreads();
  wait(shared(&bar), 0);
  for (int i = t; i < TILE; i += 128) o[i] = s[i];
}
extern "C" __global__ void undump(const unsigned short* a, const __grid_constant__ Map map, int x, int y) {
  __shared__ __align__(1024) unsigned short s[TILE]; int t = threadIdx.x;
  for (int i = t; i < TILE; i += 128) s[i] = a[i];
  fence();
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" :: "l"(&map),
      "r"(shared(s)), "r"(x), "r"(y) : "memory");
    store_done();
  }
}
"""
ROWS = 16
# Bits of a 16-byte chunk's number that each swizzle flips in lines 0 to 7 of 128 bytes, from the PTX manual's figures.
FLIPPED = {0: [0] * 8, 32: [0, 1] * 4, 64: [0, 1, 2, 3] * 2, 128: list(range(8))}


def in_shared(tile: np.ndarray, span: int) -> np.ndarray:
    """Returns a tile of 16-bit elements as a swizzle of `span` bytes stores it in shared memory."""
    lines = tile.reshape(-1, 8, 8)  # lines of 128 bytes, chunks of 16
    result = np.empty_like(lines)
    for number, line in enumerate(lines):
        for chunk in range(8):
            result[number, chunk ^ FLIPPED[span][number % 8]] = line[chunk]
    return result.ravel()


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("x, y", [(0, 0), (16, 8), (-8, -3), (24, 30)])
def test_tma_tiles_with_every_swizzle(span, x, y):
    width = (span or 64) // 2
    module = cuda_module(f"#define TILE {ROWS * width}\n" + PRELUDE + SWIZZLE, "compute_90a")
    rng = np.random.default_rng(0)
    tensor = rng.integers(1, 2**16, (40, 72)).astype(np.uint16)
    padded = np.zeros((40 + 80, 72 + 160), np.uint16)
    padded[40:80, 80:152] = tensor
    tile = padded[40 + y : 40 + y + ROWS, 80 + x : 80 + x + width]

    def describe(address):
        return tensor_map(address, "u16", (72, 40), (144,), (width, ROWS), span)

    memory = Memory()
    out = memory.empty(ROWS * width, np.uint16, "o")
    arguments = [describe(memory.alloc(tensor, "tensor")), out, x, y]
    module.launch("dump", 1, 128, arguments, memory=memory, race_check=True)
    assert (memory.read(out) == in_shared(tile, span)).all()

    written = memory.alloc(np.zeros_like(tensor), "written")
    other = rng.integers(1, 2**16, tile.shape).astype(np.uint16)
    source = memory.alloc(in_shared(other, span), "source")
    module.launch("undump", 1, 128, [source, describe(written), x, y], memory=memory, race_check=True)
    padded[:] = 0
    padded[40 + y : 40 + y + ROWS, 80 + x : 80 + x + width] = other
    assert (memory.read(written) == padded[40:80, 80:152]).all()


BULK = r"""
// 8 x 4 x 2 floats
extern "C" __global__ void tile3d(const __grid_constant__ Map a, const __grid_constant__ Map b, int x, int y, int z) {
  __shared__ __align__(128) float s[64]; __shared__ u64 bar;
  if (threadIdx.x == 0) {
    init(shared(&bar), 1); expect(shared(&bar), 256);
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];"
      :: "r"(shared(s)), "l"(&a), "r"(shared(&bar)), "r"(x), "r"(y), "r"(z) : "memory");
    wait(shared(&bar), 0);
    for (int i = 0; i < 64; i++) s[i] += 1;
    fence();
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
      :: "l"(&b), "r"(shared(s)), "r"(x), "r"(y), "r"(z) : "memory");
    store_done();
  }
}
extern "C" __global__ void runs(const float* a, float* o, float* sums) {        // runs of bytes in, out, and added
  __shared__ __align__(128) float s[256]; __shared__ u64 bar; int t = threadIdx.x; u32 b = shared(&bar);
  if (t == 0) {
    init(b, 1); expect(b, 1024);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
      :: "r"(shared(s)), "l"(a), "r"(b) : "memory");
  }
  __syncthreads();
  wait(b, 0);
  s[t] *= 2;
  fence();
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" :: "l"(o + 256 * blockIdx.x),
      "r"(shared(s)) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 1024;" :: "l"(sums),
      "r"(shared(s)) : "memory");
    store_done();
  }
}
extern "C" __global__ void copies(const float* a, float* o) {                   // cp.async that an mbarrier waits for
  __shared__ __align__(16) float s[256]; __shared__ u64 bar; int t = threadIdx.x; u32 b = shared(&bar);
  if (t == 0) init(b, 64);
  __syncthreads();
  if (t < 64) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(shared(s + 4 * t)), "l"(a + 4 * t) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(b) : "memory");
  } else {
    wait(b, 0);
    for (int i = t - 64; i < 256; i += 32) o[i] = s[i] * 2;
  }
}
// each block loads half for both
extern "C" __global__ void __cluster_dims__(2, 1, 1) multicast(const __grid_constant__ Map map, unsigned short* o) {
  __shared__ __align__(1024) unsigned short s[1024]; __shared__ u64 bar[2]; int t = threadIdx.x;
  u32 rank, b = shared(bar), remote;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (t == 0) { init(b, 1); init(b + 8, 2); expect(b, 2048); }
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (t == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      :: "r"(shared(s + 512 * rank)), "l"(&map), "r"(b), "r"(0), "r"(8 * rank), "h"((short)3) : "memory");
  wait(b, 0);
  for (int i = t; i < 1024; i += 64) o[blockIdx.x * 1024 + i] = s[i];
  if (t < 2) {                                                    // both blocks arrive at both blocks' second barrier
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(b + 8), "r"(t));
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
  }
  wait(b + 8, 0);
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ u32 there(u32 address, u32 rank) {
  u32 result; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}
__device__ void arrive_there(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(bar) : "memory");
}
// each block sends to the other, which tells when it has read
extern "C" __global__ void __cluster_dims__(2, 1, 1) sends(int* o, int kind) {
  __shared__ __align__(16) int s[64], r[64]; __shared__ u64 bar[2]; int t = threadIdx.x;
  u32 other = blockIdx.x % 2 ^ 1, b = shared(bar);
  if (t == 0) { init(b, 1); init(b + 8, 64); expect(b, 256); }
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
  s[t] = 64 * blockIdx.x + t;
  if (kind != 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];"
      :: "r"(there(shared(r), other)), "r"(shared(s)), "r"(there(b, other)) : "memory");
  if (kind != 2) wait(b, 0);
  o[64 * blockIdx.x + t] = r[t];
  if (kind == 4 && other)                                         // the other block has ended
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  arrive_there(there(b + 8, other));
  if (kind == 4) return;
  if (kind != 3) wait(b + 8, 0);
  s[t] = 0;
}
"""


@pytest.mark.parametrize("x, y, z", [(0, 0, 0), (4, 3, 1), (8, 8, 4), (-4, -2, -1), (3, 6, 2)])
def test_tma_tiles_of_three_dimensions_at_the_edges(x, y, z):
    memory, a = Memory(), np.random.default_rng(1).standard_normal((5, 10, 12)).astype(np.float32)
    out = memory.alloc(np.ones_like(a), "b")
    maps = [tensor_map(p, "f32", (12, 10, 5), (48, 480), (8, 4, 2)) for p in (memory.alloc(a, "a"), out)]
    module = cuda_module(PRELUDE + BULK, "compute_90a")
    module.launch("tile3d", 1, 32, [*maps, x, y, z], memory=memory, race_check=True)
    expected = np.ones_like(a)
    place = tuple(slice(max(start, 0), start + n) for start, n in ((z, 2), (y, 4), (x, 8)))
    expected[place] += a[place] + np.float32(1)
    np.testing.assert_allclose(memory.read(out), expected, rtol=1e-6)


def test_bulk_copies_and_their_sums():
    memory, a = Memory(), np.random.default_rng(2).standard_normal(256).astype(np.float32)
    out, sums = memory.empty((2, 256), np.float32, "o"), memory.alloc(np.ones(256, np.float32), "sums")
    arguments = [memory.alloc(a, "a"), out, sums]
    cuda_module(PRELUDE + BULK, "compute_90a").launch("runs", 2, 256, arguments, memory=memory, race_check=True)
    assert (memory.read(out) == 2 * a).all()
    np.testing.assert_allclose(memory.read(sums), 1 + 4 * a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_cp_async_that_an_mbarrier_waits_for(seed):
    memory, a = Memory(), np.random.default_rng(3).standard_normal(256).astype(np.float32)
    out = memory.empty(256, np.float32, "o")
    module = cuda_module(PRELUDE + BULK, "compute_90a")
    module.launch("copies", 1, 96, [memory.alloc(a, "a"), out], memory=memory, race_check=True, seed=seed)
    assert (memory.read(out) == 2 * a).all()


@pytest.mark.parametrize("seed", [None, 1])
def test_multicast_and_remote_arrivals_in_a_cluster(seed):
    memory, a = Memory(), np.random.default_rng(4).integers(0, 2**16, (16, 64)).astype(np.uint16)
    out = memory.empty((4, 16, 64), np.uint16, "o")
    mapped = tensor_map(memory.alloc(a, "a"), "u16", (64, 16), (128,), (64, 8))
    module = cuda_module(PRELUDE + BULK, "compute_90a")
    module.launch("multicast", 4, 64, [mapped, out], memory=memory, race_check=True, seed=seed)
    assert (memory.read(out) == a).all()


@pytest.mark.parametrize("seed", [None, 1])
def test_copies_from_one_block_of_a_cluster_to_another(seed):
    memory = Memory()
    out = memory.empty((2, 2, 64), np.int32, "o")
    module = cuda_module(PRELUDE + BULK, "compute_90a")
    module.launch("sends", 4, 64, [out, 0], memory=memory, race_check=True, seed=seed)
    assert (memory.read(out) == np.arange(256).reshape(2, 2, 64)[:, ::-1]).all()


@pytest.mark.parametrize(
    "kind, wanted",
    [
        (1, "is read through the async proxy (for warp 0) without fence.proxy.async"),
        (2, "race: the read"),
        (3, "is not ordered after the read by the bulk copy of warp"),
        (4, "an arrival at an mbarrier of a block that has ended"),
    ],
)
def test_wrong_order_of_copies_to_another_block(kind, wanted):
    memory = Memory()
    out = memory.alloc(np.zeros(128, np.int32), "o")
    launch = cuda_module(PRELUDE + BULK, "compute_90a").launch
    report = report_of(launch, "sends", 2, 64, [out, kind], memory=memory, race_check=True, check_uninit=False)
    assert wanted in report


WGMMA = r"""
// C = A B, 64 x 64 each, by one warp group. SPAN: the swizzle. TA, TB: whether A and B are MN-major.

#define BOX (SPAN ? SPAN : 16)                                   // bytes of a row of a tile
extern "C" __global__ void __launch_bounds__(128) product(const __grid_constant__ Map ta,
  const __grid_constant__ Map tb, const u32* A, float* C) {
  extern __shared__ __align__(1024) unsigned char sm[]; u32 s = shared(sm), bar = s + 16384;
  int t = threadIdx.x, lane = t % 32;
  if (t == 0) {
    init(bar, 1); expect(bar, 16384);
    for (int p = 0; p < 128 / BOX; p++) { load(s + p * 64 * BOX, ta, bar, p * BOX / 2, 0);
      load(s + 8192 + p * 64 * BOX, tb, bar, p * BOX / 2, 0); }
  }
  __syncthreads();
  wait(bar, 0);
  float d[32];
  const u64 swizzle = SPAN == 128 ? 1 : SPAN == 64 ? 2 : SPAN == 32 ? 3 : 0;
  const u64 mode = swizzle << 62 | (u64)(8 * BOX / 16) << 32 | (u64)(64 * BOX / 16) << 16;
  u32 a[4][4];
  for (int q = 0; q < 4; q++) for (int r = 0; r < 4; r++)
    a[q][r] = A[(t / 32 * 16 + lane / 4 + 8 * (r & 1)) * 32 + q * 8 + lane % 4 + 4 * (r >> 1)];
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int q = 0; q < 4; q++) {
    u32 k_major = q * 32 / BOX * 64 * BOX + q * 32 % BOX, mn_major = q * 16 * BOX;
    u64 da = mode | (s + (TA ? mn_major : k_major)) >> 4, db = mode | (s + 8192 + (TB ? mn_major : k_major)) >> 4;
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " WHEN ", 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" D_LIST "}, " OPERANDS "; }"
      : D_REGISTERS : A_REGISTERS, "l"(db), "r"(q));
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 32; i++)
    C[(t / 32 * 16 + lane / 4 + (i & 2) * 4) * 64 + i / 4 * 8 + (t & 3) * 2 + (i & 1)] = d[i];
}
"""
D_LIST = ",".join(f"%{k}" for k in range(32))
D_REGISTERS = ",".join(f'"+f"(d[{k}])' for k in range(32))


def wgmma_kernel(span: int, a_mn: int, b_mn: int, registers: bool, sign: int):
    if registers:
        a_registers = ",".join(f'"r"(a[q][{k}])' for k in range(4))
        operands, when = f"{{%32,%33,%34,%35}}, %36, p, {sign}, 1, {b_mn}", "%37"
    else:
        a_registers, operands, when = '"l"(da)', f"%32, %33, p, {sign}, 1, {a_mn}, {b_mn}", "%34"
    defines = {"SPAN": span, "TA": a_mn, "TB": b_mn, "D_REGISTERS": D_REGISTERS, "A_REGISTERS": a_registers}
    defines |= {"D_LIST": f'"{D_LIST}"', "OPERANDS": f'"{operands}"', "WHEN": f'"{when}"'}
    return cuda_module("".join(f"#define {k} {v}\n" for k, v in defines.items()) + PRELUDE + WGMMA, "compute_90a")


@pytest.mark.parametrize(
    "span, a_mn, b_mn, registers, sign",
    [(span, a, b, False, 1) for span in (128, 64, 32) for a in (0, 1) for b in (0, 1)]
    + [(128, 0, b, True, 1) for b in (0, 1)]
    + [(0, 0, 0, False, 1), (64, 0, 1, False, -1)],
)
def test_wgmma_in_its_descriptor_forms(span, a_mn, b_mn, registers, sign):
    memory, (a, b) = Memory(), np.random.default_rng(5).standard_normal((2, 64, 64)).astype(np.float16)
    out = memory.empty((64, 64), np.float32, "C")
    # K-major operands have rows along K: A itself, and B transposed.
    stored = np.ascontiguousarray(a.T if a_mn else a), np.ascontiguousarray(b if b_mn else b.T)
    maps = [tensor_map(memory.alloc(x), "f16", (64, 64), (128,), ((span or 16) // 2, 64), span) for x in stored]
    fragments = memory.alloc(np.ascontiguousarray(a).view(np.uint32), "A")
    module = wgmma_kernel(span, a_mn, b_mn, registers, sign)
    arguments = [*maps, fragments, out]
    module.launch("product", 1, 128, arguments, dynamic_smem=16384 + 8, memory=memory, race_check=True)
    np.testing.assert_allclose(memory.read(out), sign * (a.astype(np.float64) @ b.astype(np.float64)), atol=1e-4)


def test_a_tile_is_refused_where_the_hardware_would_refuse_it():
    with pytest.raises(PtxError, match="multiples of 16"):
        tensor_map(0x1008, "f16", (64, 64), (128,), (64, 8))
    with pytest.raises(PtxError, match="1 to 256"):
        tensor_map(0x1000, "f16", (64, 512), (128,), (64, 257))
    with pytest.raises(PtxError, match="swizzle span"):
        tensor_map(0x1000, "f16", (128, 64), (256,), (128, 8), 128)
    memory = Memory()
    wrong_rank = tensor_map(memory.alloc(np.zeros((8, 64), np.float32)), "f32", (64, 8), (256,), (8, 4))
    launch = cuda_module(PRELUDE + BULK, "compute_90a").launch
    report = report_of(launch, "tile3d", 1, 32, [wrong_rank] * 2 + [0] * 3, memory=memory)
    assert "rank 2 in an instruction of rank 3" in report
