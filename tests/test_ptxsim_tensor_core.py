"""The interpreter of PTX: ldmatrix, stmatrix, mma.sync and cp.async, alone and in a matrix product."""

from __future__ import annotations

import numpy as np
import pytest
from ptxsim import Memory, Module
from ptxsim.scalars import bf16_to_f32, f32_to_bf16
from ptxsim.tensor_core_sums import AMPERE, HOPPER, add_products
from support.ptxsim_kernels import cuda_module

pytestmark = pytest.mark.simulated

LANE = np.arange(32)


def two_bytes(x: np.ndarray, ty: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bits of numbers in float16 or bfloat16, and their values."""
    if ty == "bf16":
        bits = f32_to_bf16(x.astype(np.float32))
        return bits, bf16_to_f32(bits).astype(np.float64)
    return x.astype(np.float16).view(np.uint16), x.astype(np.float16).astype(np.float64)


MATRICES = r"""
typedef unsigned u32;
extern "C" __global__ void matrices(const unsigned short* a, u32* plain, u32* transposed, unsigned short* stored) {
  __shared__ __align__(16) unsigned short s[1024];
  int l = threadIdx.x % 32, w = threadIdx.x / 32; u32 base = (u32)__cvta_generic_to_shared(s) + w * 512;
  for (int i = l; i < 256; i += 32) s[w * 256 + i] = a[w * 256 + i];
  __syncwarp();
  u32 row = base + (l & 15) * 32 + (l >> 4) * 16, r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]),
    "=r"(r[3]) : "r"(row));
  for (int k = 0; k < 4; k++) plain[(w * 4 + k) * 32 + l] = r[k];
#if __CUDA_ARCH__ >= 900
  u32 back = row + 1024;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" :: "r"(back), "r"(r[0]),
    "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  __syncwarp();
  for (int i = l; i < 256; i += 32) stored[w * 256 + i] = s[512 + w * 256 + i];
#endif
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]),
    "=r"(r[2]), "=r"(r[3]) : "r"(row));
  for (int k = 0; k < 4; k++) transposed[(w * 4 + k) * 32 + l] = r[k];
}
"""


def test_matrices_between_shared_memory_and_fragments():
    memory, a = Memory(), np.random.default_rng(0).integers(0, 2**16, (2, 16, 16)).astype(np.uint16)
    plain, transposed = (memory.empty((2, 4, 32, 2), np.uint16, name) for name in ("plain", "transposed"))
    stored = memory.empty((2, 16, 16), np.uint16, "stored")
    module = cuda_module(MATRICES, "compute_90")
    module.launch("matrices", 1, 64, [memory.alloc(a, "a"), plain, transposed, stored], memory=memory, race_check=True)
    for warp in range(2):
        for k in range(4):  # 0 top left, 1 bottom left, 2 top right, 3 bottom right
            place = (slice(8 * (k % 2), 8 * (k % 2) + 8), slice(8 * (k // 2), 8 * (k // 2) + 8))
            block = a[warp][place]
            pairs = np.stack([LANE % 4 * 2, LANE % 4 * 2 + 1], 1)
            assert (memory.read(plain)[warp, k] == block[LANE[:, None] // 4, pairs]).all()
            assert (memory.read(transposed)[warp, k] == block.T[LANE[:, None] // 4, pairs]).all()
            assert (memory.read(stored)[warp][place] == block.T).all()


MMA = r"""
typedef unsigned u32;
extern "C" __global__ void multiply(const REGISTER* a, const REGISTER* b, const SUM* c, SUM* d) {
  int l = threadIdx.x; REGISTER x[NA], y[NB]; SUM z[NC];
  for (int k = 0; k < NA; k++) x[k] = a[k * 32 + l];
  for (int k = 0; k < NB; k++) y[k] = b[k * 32 + l];
  for (int k = 0; k < NC; k++) z[k] = c[k * 32 + l];
  asm volatile("mma.sync.aligned." SHAPE ".row.col." TYPES " " LIST ";" : OUTPUTS : INPUTS);
  for (int k = 0; k < NC; k++) d[k * 32 + l] = z[k];
}
"""
# The C type of a register, and its constraint in asm.
REGISTERS = {"f16": ("u32", "r"), "f32": ("float", "f"), "f64": ("double", "d")}


def fragments(matrix: np.ndarray, width: int) -> np.ndarray:
    """Returns a matrix by register and lane: blocks of 8 rows and `width` columns in column-major order."""
    rows, columns = matrix.shape[0] // 8, matrix.shape[1] // width
    blocks = np.ascontiguousarray(matrix.reshape(rows, 8, columns, width).transpose(2, 0, 1, 3))
    return blocks.view(np.uint64 if matrix.itemsize == 8 else np.uint32).reshape(rows * columns, 32)


@pytest.mark.parametrize(
    "shape, ty, result",
    [
        ("m16n8k16", "f16", "f32"),
        ("m16n8k16", "bf16", "f32"),
        ("m16n8k16", "f16", "f16"),
        ("m16n8k8", "f16", "f32"),
        ("m16n8k8", "bf16", "f32"),
        ("m16n8k8", "tf32", "f32"),
        ("m16n8k4", "tf32", "f32"),
        ("m8n8k4", "f64", "f64"),
        ("m16n8k4", "f64", "f64"),
        ("m16n8k8", "f64", "f64"),
        ("m16n8k16", "f64", "f64"),
    ],
)
def test_matrix_products(shape, ty, result):
    rows, depth = (int(shape[1:].split(letter)[at]) for letter, at in (("n", 0), ("k", 1)))
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(extent) for extent in ((rows, depth), (8, depth), (rows, 8)))
    if ty == "f64":
        a_bits, b_bits, a_values, b_values = a, b, a, b
    elif ty == "tf32":
        a_bits, b_bits = (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000) for x in (a, b))
        a_values, b_values = (x.view(np.float32).astype(np.float64) for x in (a_bits, b_bits))
    else:
        (a_bits, a_values), (b_bits, b_values) = two_bytes(a, ty), two_bytes(b, ty)
    width = 8 if ty in ("f16", "bf16") else 4
    dtype = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[result]
    c = c.astype(dtype)
    inputs = [fragments(a_bits, width), fragments(b_bits, width)]
    if result == "f16":
        inputs.append(fragments(c, 8))
    else:
        # Pairs of columns: lane 4 g + t has elements (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
        inputs.append(c.reshape(rows // 8, 8, 4, 2).transpose(0, 3, 1, 2).reshape(rows // 4, 32))
    counts = [len(x) for x in inputs]
    names = [f"%{k}" for k in range(sum(counts))]
    c_names, a_names, b_names = names[: counts[2]], names[counts[2] : -counts[1]], names[-counts[1] :]
    lists = ", ".join("{" + ",".join(x) + "}" for x in (c_names, a_names, b_names, c_names))
    (register, kind), (sum_register, sum_kind) = REGISTERS.get(ty, REGISTERS["f16"]), REGISTERS[result]
    operands = [f'"{kind}"({name}[{k}])' for name, n in (("x", counts[0]), ("y", counts[1])) for k in range(n)]
    defines = {
        **{f"N{name}": str(count) for name, count in zip("ABC", counts, strict=True)},
        "REGISTER": register,
        "SUM": sum_register,
        "SHAPE": f'"{shape}"',
        "TYPES": f'"{result}.{ty}.{ty}.{result}"',
        "LIST": f'"{lists}"',
        "OUTPUTS": ", ".join(f'"+{sum_kind}"(z[{k}])' for k in range(counts[2])),
        "INPUTS": ", ".join(operands),
    }
    source = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + MMA
    memory = Memory()
    out = memory.empty(inputs[2].shape, inputs[2].dtype, "d")
    addresses = [memory.alloc(x) for x in inputs]
    module = cuda_module(source, *(["compute_90"] if ty == "f64" else []))
    module.launch("multiply", 1, 32, [*addresses, out], memory=memory)
    d = memory.read(out)
    if result == "f16":
        d = d.view(np.float16).reshape(rows, 8)
    else:
        d = d.reshape(rows // 8, 2, 8, 4).transpose(0, 2, 3, 1).reshape(rows, 8)
    expected = a_values @ b_values.T + c
    tolerance = {"f16": {"atol": 5e-3}, "f32": {"atol": 2e-5}, "f64": {"atol": 1e-14, "rtol": 0}}[result]
    np.testing.assert_allclose(d, expected, **tolerance)


def test_products_that_depend_on_each_other():
    """Checks successive products of one A: they are computed together, unless one needs the result of another."""
    loads = [f"ld.global.b32 %r{k}, [%rd2+{128 * k}];" for k in range(8)]
    stores = [f"st.global.f32 [%rd3+{128 * k}], %f{k};" for k in range(12)]
    zeros = [f"mov.f32 %f{k}, 0f00000000;" for k in range(12)]
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    mma += "{{%f{0},%f{1},%f{2},%f{3}}}, {{%r0,%r1,%r2,%r3}}, {b}, {c};"
    first, second = "{%r4,%r5}", "{%r6,%r7}"
    products = [
        mma.format(0, 1, 2, 3, b=first, c="{%f0,%f1,%f2,%f3}"),
        mma.format(4, 5, 6, 7, b=second, c="{%f0,%f1,%f2,%f3}"),  # adds to the first
        mma.format(4, 5, 6, 7, b=second, c="{%f4,%f5,%f6,%f7}"),  # adds to its own registers
        mma.format(8, 9, 10, 11, b=first, c="{%f8,%f9,%f10,%f11}"),
    ]
    text = "\n".join([*loads, *zeros, *products, *stores])
    module = Module(
        f""".version 8.0
        .target sm_80
        .address_size 64
        .visible .entry kernel(.param .u64 a, .param .u64 o) {{
        .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .f32 %f<12>;
        ld.param.u64 %rd1, [a]; ld.param.u64 %rd3, [o]; mov.u32 %r8, %tid.x;
        mad.wide.u32 %rd2, %r8, 4, %rd1; mad.wide.u32 %rd3, %r8, 4, %rd3;
        {text}
        ret; }}"""
    )
    memory, rng = Memory(), np.random.default_rng(3)
    a, b, c = (rng.standard_normal((n, 16)).astype(np.float16) for n in (16, 8, 8))
    out = memory.empty((3, 4, 32), np.float32, "o")
    bits = np.concatenate([fragments(x, 8) for x in (a, b, c)])
    module.launch("kernel", 1, 32, [memory.alloc(bits, "a"), out], memory=memory)
    got = memory.read(out).reshape(3, 2, 2, 8, 4).transpose(0, 1, 3, 4, 2).reshape(3, 16, 8)
    ab, ac = (a.astype(np.float64) @ x.T.astype(np.float64) for x in (b, c))
    np.testing.assert_allclose(got, [ab, ab + 2 * ac, ab], atol=2e-5)


PRODUCT = r"""
// C (128 x 64) = A (128 x K) B^T (64 x K), K a multiple of 8: two stages of cp.async with zero fill.

typedef unsigned u32;
extern "C" __global__ void __launch_bounds__(128) product(const unsigned short* A, const unsigned short* B, float* C,
  int K) {
  // 2 stages of A (128 x 32) and B (64 x 32), rows of 80 bytes
  extern __shared__ __align__(128) unsigned char memory[];
  A += blockIdx.x * 128ll * K; C += blockIdx.x * 128 * 64;
  const u32 s0 = (u32)__cvta_generic_to_shared(memory);
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5, nk = (K + 31) / 32;
  auto load = [&](int stage, int kb) {
    for (int i = t; i < 192 * 4; i += 128) {
      int row = i / 4, chunk = i & 3, k = kb * 32 + chunk * 8; int left = (K - k) * 2;
      left = left < 0 ? 0 : left > 16 ? 16 : left;
      const unsigned short* p = (row < 128 ? A + (long long)row * K : B + (long long)(row - 128) * K) +
        (left ? k : 0);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(s0 + stage * 192 * 80 + row * 80 + chunk * 16), "l"(p), "r"(left));
    }
    asm volatile("cp.async.commit_group;");
  };
  float acc[2][8][4] = {};
  load(0, 0);
  for (int kb = 0; kb < nk; kb++) {
    if (kb + 1 < nk) { load((kb + 1) & 1, kb + 1); asm volatile("cp.async.wait_group 1;"); }
    else asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    const u32 sa = s0 + (kb & 1) * 192 * 80, sb = sa + 128 * 80;
    for (int k = 0; k < 2; k++) {
      u32 a[2][4], b[8][2];
      for (int i = 0; i < 2; i++) { u32 p = sa + (warp * 32 + i * 16 + (lane & 15)) * 80 + k * 32 + (lane >> 4) * 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a[i][0]), "=r"(a[i][1]),
          "=r"(a[i][2]), "=r"(a[i][3]) : "r"(p)); }
      for (int j = 0; j < 8; j++) { u32 p = sb + (j * 8 + (lane & 7)) * 80 + k * 32 + ((lane >> 3) & 1) * 16;
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(b[j][0]), "=r"(b[j][1])
          : "r"(p)); }
      for (int i = 0; i < 2; i++) for (int j = 0; j < 8; j++)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, "
          "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(acc[i][j][0]), "+f"(acc[i][j][1]), "+f"(acc[i][j][2]), "+f"(acc[i][j][3]) : "r"(a[i][0]),
            "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[j][0]), "r"(b[j][1]));
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; i++) for (int j = 0; j < 8; j++) for (int r = 0; r < 2; r++)
    *(float2*)(C + (warp * 32 + i * 16 + r * 8 + lane / 4) * 64 + j * 8 + (lane & 3) * 2) =
      make_float2(acc[i][j][2 * r], acc[i][j][2 * r + 1]);
}
"""


@pytest.mark.parametrize("ty, depth", [("f16", 32), ("f16", 104), ("bf16", 256)])
def test_product_through_two_stages_of_shared_memory(ty, depth):
    rng, blocks = np.random.default_rng(2), 3
    (a_bits, a), (b_bits, b) = (two_bytes(rng.standard_normal((n, depth)), ty) for n in (128 * blocks, 64))
    module = cuda_module(f'#define TYPE "{ty}"\n' + PRODUCT)
    results = []
    for options in ({}, {"batch": 1}, {"seed": 1}, {"seed": 2}):
        memory = Memory()
        out = memory.empty((128 * blocks, 64), np.float32, "C")
        arguments = [memory.alloc(a_bits, "A"), memory.alloc(b_bits, "B"), out, depth]
        module.launch("product", blocks, 128, arguments, 2 * 192 * 80, memory, race_check=True, **options)
        results.append(memory.read(out))
    np.testing.assert_allclose(results[0], a @ b.T, atol=1e-5 * depth**0.5)
    assert all((result == results[0]).all() for result in results)


COPIES = r"""
extern "C" __global__ void copies(const int* a, int* o, int n) {
  __shared__ __align__(16) int s[128 * 4]; int t = threadIdx.x;
  unsigned to = (unsigned)__cvta_generic_to_shared(s + 4 * t);
  int left = (n - 4 * t) * 4; left = left < 0 ? 0 : left > 16 ? 16 : left;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(a + (left ? 4 * t : 0)), "r"(left)
    : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  for (int i = t; i < 512; i += 128) o[i] = s[511 - i];
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(a + t) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to + 8), "l"(a + 2 * (t / 2)) : "memory");
  asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  for (int i = t; i < 512; i += 128) o[512 + i] = s[511 - i];
}
"""


@pytest.mark.parametrize("count", [512, 510, 129, 128])
def test_copies_fill_with_zeros_behind_their_source(count):
    memory, a = Memory(), np.arange(1, count + 1).astype(np.int32)
    out = memory.empty((2, 512), np.int32, "o")
    cuda_module(COPIES).launch("copies", 1, 128, [memory.alloc(a, "a"), out, count], memory=memory, race_check=True)
    first = np.zeros(512, np.int32)
    first[:count] = a
    second, t = first.reshape(128, 4).copy(), np.arange(128)
    second[:, 0] = a[t]
    second[:, 2], second[:, 3] = a[t // 2 * 2], a[t // 2 * 2 + 1]
    assert (memory.read(out) == np.stack([first, second.ravel()])[:, ::-1]).all()


def test_sums_are_cut_towards_zero_in_blocks_of_eight():
    """Checks that a product below the last bit is lost, unless it is added to others of its block before the sum."""
    one, small = np.ones((1, 1), np.float32), np.float32(2.0**-12)
    left = np.full((1, 16), small, np.float32)
    right = np.full((1, 16), np.float32(2.0**-13), np.float32)  # products of 2**-25
    assert add_products(AMPERE, one, left, right) == 1.0
    assert add_products(HOPPER, one, left, right) == 1.0 + 2.0**-21
    right *= 2  # eight products are four of the sum's last bits
    assert add_products(AMPERE, one, left, right) == 1.0 + 2.0**-20
    assert add_products(AMPERE, -one, -left, right) == -1.0 - 2.0**-20
    right[:, 1:8] = right[:, 9:] = 0  # half of a last bit in each block
    assert add_products(AMPERE, one, left, right) == 1.0
    assert add_products(AMPERE, np.zeros_like(one), left, right) == 2.0**-23
