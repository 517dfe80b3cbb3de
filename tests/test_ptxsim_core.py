"""The interpreter of PTX: arithmetic, control flow, memory, warps, barriers and atomics, against Python and NumPy."""

from __future__ import annotations

import math

import numpy as np
import ptxsim.compile
import pytest
from ptxsim import Memory, Module
from ptxsim.compile import compile_ptx
from ptxsim.scalars import bf16_to_f32, f32_to_bf16
from ptxsim.text import parse_constant
from support.ptxsim_kernels import cuda_module

pytestmark = pytest.mark.simulated

N = 64
EDGES = [0, 1, -1, 2**31 - 1, -(2**31), 5, -7, 64, 31, 32, 33, 0x80FF7F01]


def wrapped(value: int, bits: int, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def ptx_instruction(text: str, result: str, operands: str) -> Module:
    """Returns a module that applies one instruction to rows of operands; `result` and `operands` are register types."""
    types = [result, *operands.split()]
    size = {ty: max(int(ty[1:]) // 8, 2) for ty in types}
    loads = "\n".join(
        f"ld.param.u64 %rd1, [p{k}]; mad.wide.u32 %rd2, %r0, {size[ty]}, %rd1; ld.global.b{8 * size[ty]} %v{k}, [%rd2];"
        for k, ty in enumerate(types)
        if k
    )
    registers = "\n".join(f".reg .b{8 * size[ty]} %v{k};" for k, ty in enumerate(types))
    params = ", ".join(f".param .u64 p{k}" for k in range(len(types)))
    return Module(
        f""".version 8.0
        .target sm_80
        .address_size 64
        .visible .entry kernel({params}) {{
        .reg .b32 %r0; .reg .b64 %rd<3>; .reg .pred %p; {registers}
        mov.u32 %r0, %tid.x;
        {loads}
        {text}
        ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd2, %r0, {size[result]}, %rd1;
        st.global.b{8 * size[result]} [%rd2], %v0;
        ret;
        }}"""
    )


def applied(text: str, result: str, operands: str, *values: list[int]) -> list[int]:
    """Returns the results of one instruction as Python integers, signed or not as `result` says."""
    module, memory = ptx_instruction(text, result, operands), Memory()
    bits = {ty: max(int(ty[1:]), 16) for ty in (result, *operands.split())}
    inputs = [
        memory.alloc(np.array([v & (1 << bits[ty]) - 1 for v in row], f"u{bits[ty] // 8}"))
        for ty, row in zip(operands.split(), values, strict=True)
    ]
    out = memory.empty(len(values[0]), f"u{bits[result] // 8}", "out")
    module.launch("kernel", 1, len(values[0]), [out, *inputs], memory=memory)
    return [wrapped(int(x), int(result[1:]), result[0] == "s") for x in memory.read(out)]


def pairs(bits: int, signed: bool) -> tuple[list[int], list[int]]:
    """Returns two lists: every edge case with every other, then random numbers."""
    edges = [wrapped(e << (bits - 32) if bits > 32 and abs(e) > 2**30 else e, bits, signed) for e in EDGES]
    random = np.random.default_rng(bits).integers(-(2**63), 2**63, (2, 40)).tolist()
    a = [x for x in edges for _ in edges] + [wrapped(x, bits, signed) for x in random[0]]
    b = [y for _ in edges for y in edges] + [wrapped(y, bits, signed) for y in random[1]]
    return a, b


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else -1


BINARY = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "div": lambda a, b, w: quotient(a, b),
    "rem": lambda a, b, w: a - quotient(a, b) * b if b else a,
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("ty", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integer_arithmetic_wraps_at_its_width(name, ty):
    bits, signed = int(ty[1:]), ty[0] == "s"
    a, b = pairs(bits, signed)
    expected = [wrapped(BINARY[name](x, y, bits), bits, signed) for x, y in zip(a, b, strict=True)]
    assert applied(f"{name}.{ty} %v0, %v1, %v2;", ty, f"{ty} {ty}", a, b) == expected


@pytest.mark.parametrize("choose", [min, max])
def test_relu_makes_negative_results_of_min_and_max_zero(choose):
    a, b = pairs(32, True)
    expected = [max(choose(x, y), 0) for x, y in zip(a, b, strict=True)]
    assert applied(f"{choose.__name__}.relu.s32 %v0, %v1, %v2;", "s32", "s32 s32", a, b) == expected


#: Operations on two words of 64 bits each, t1 and t2, t3 and t4, that make the words t5 and t6 with a carry between.
WORDS = {
    "sum": ("add.cc{ty} t5, t1, t3; addc{ty} t6, t2, t4;", lambda a, b, w: a + b),
    "sum and carry": (
        "add.cc{ty} t5, t1, t3; addc.cc{ty} t5, t2, t4; addc{ty} t5, 0, 0; mov.b{w} t6, 0;",
        lambda a, b, w: a + b >> 2 * w,
    ),
    "difference": ("sub.cc{ty} t5, t1, t3; subc{ty} t6, t2, t4;", lambda a, b, w: a - b),
    "borrow": (
        "sub.cc{ty} t5, t1, t3; subc.cc{ty} t5, t2, t4; subc{ty} t5, 0, 0; mov.b{w} t6, t5;",
        lambda a, b, w: -(a < b),
    ),
    "product": (
        "mul.lo{ty} t5, t1, t3; mul.hi{ty} t6, t1, t3; mad.lo{ty} t6, t1, t4, t6; mad.lo{ty} t6, t2, t3, t6;",
        lambda a, b, w: a * b,
    ),
    "highest word of a product": (
        "mul.hi{ty} t6, t1, t3; mad.lo.cc{ty} t6, t1, t4, t6; madc.hi{ty} t5, t1, t4, 0;"
        "mad.lo.cc{ty} t6, t2, t3, t6; madc.hi.cc{ty} t5, t2, t3, t5; addc{ty} t6, 0, 0;"
        "mad.lo.cc{ty} t5, t2, t4, t5; madc.hi{ty} t6, t2, t4, t6;",
        lambda a, b, w: a * b >> 2 * w,
    ),
    "product and sum": (
        "mov.b{w} t5, t3; mov.b{w} t6, t4; mad.lo.cc{ty} t5, t1, t2, t5; madc.hi{ty} t6, t1, t2, t6;",
        lambda a, b, w: (a % 2**w) * (a >> w) + b,
    ),
    "product with a carry": (
        "mad.hi.cc{ty} t6, t1, t2, t3; madc.lo.cc{ty} t5, t1, t2, t4; addc{ty} t6, 0, 0;",
        lambda a, b, w: (a % 2**w) * (a >> w) % 2**w + (b >> w) + ((a % 2**w) * (a >> w) // 2**w + b % 2**w >> w),
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_carries_between_words_of_32_bits(name):
    template, of = WORDS[name]
    text = "{ .reg .b32 t<7>; mov.b64 {t1, t2}, %v1; mov.b64 {t3, t4}, %v2;"
    text += template.format(ty=".u32", w=32) + "mov.b64 %v0, {t5, t6}; }"
    a, b = pairs(64, False)
    assert applied(text, "u64", "u64 u64", a, b) == [of(x, y, 32) % 2**64 for x, y in zip(a, b, strict=True)]


def test_carries_of_words_of_64_bits():
    a, b = pairs(64, False)
    text = "{ .reg .b64 t; add.cc.u64 t, %v1, %v2; addc.u64 %v0, %v1, 0; }"
    assert applied(text, "u64", "u64 u64", a, b) == [(x + (x + y >> 64)) % 2**64 for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("ty", ["s16", "u16", "s32", "u32"])
def test_wide_products_keep_every_bit(ty):
    bits, wide = int(ty[1:]), f"{ty[0]}{2 * int(ty[1:])}"
    a, b = pairs(bits, ty[0] == "s")
    expected = [x * y for x, y in zip(a, b, strict=True)]
    assert applied(f"mul.wide.{ty} %v0, %v1, %v2;", wide, f"{ty} {ty}", a, b) == expected
    third = [wrapped(y << bits, 2 * bits, ty[0] == "s") for y in b]
    expected = [wrapped(p + z, 2 * bits, ty[0] == "s") for p, z in zip(expected, third, strict=True)]
    assert applied(f"mad.wide.{ty} %v0, %v1, %v2, %v3;", wide, f"{ty} {ty} {wide}", a, b, third) == expected


@pytest.mark.parametrize("ty", ["b16", "b32", "b64", "s16", "s32", "s64"])
def test_shifts_by_the_width_or_more(ty):
    bits, signed = int(ty[1:]), ty[0] == "s"
    values = [0x8123456789ABCDEF >> (64 - bits), 1, (1 << bits) - 1] * 6
    amounts = [amount for amount in (0, 1, bits - 1, bits, bits + 1, 0xFFFFFFFF) for _ in range(3)]
    right = [wrapped(v, bits, signed) >> min(n, bits) for v, n in zip(values, amounts, strict=True)]
    assert applied(f"shr.{ty} %v0, %v1, %v2;", ty, f"{ty} b32", values, amounts) == right
    if not signed:
        left = [(v << n) & (1 << bits) - 1 if n < bits else 0 for v, n in zip(values, amounts, strict=True)]
        assert applied(f"shl.{ty} %v0, %v1, %v2;", ty, f"{ty} b32", values, amounts) == left
    # The same with a constant amount.
    for amount in (3, bits):
        constant = [wrapped(v, bits, signed) >> min(amount, bits) for v in values]
        assert applied(f"shr.{ty} %v0, %v1, {amount};", ty, ty, values) == constant


def field(value: int, position: int, length: int, bits: int, signed: bool) -> int:
    """Returns the result of bfe as PTX defines it, bit by bit."""
    sign = value >> min(position + length - 1, bits - 1) & 1 if signed and length else 0
    taken = [value >> (position + i) & 1 if i < length and position + i < bits else sign for i in range(bits)]
    return sum(bit << i for i, bit in enumerate(taken))


@pytest.mark.parametrize("ty", ["u32", "s32", "u64", "s64"])
def test_bit_fields(ty):
    bits, signed = int(ty[1:]), ty[0] == "s"
    cases = [(p, n) for p in (0, 3, bits - 8, bits - 1, bits, 200) for n in (0, 1, 8, bits - 1, bits, 255)]
    position, length = ([c[k] for c in cases] for k in (0, 1))
    value, into = ([x >> (64 - bits)] * len(cases) for x in (0xF1E2D3C4B5A69788, 0x0123456789ABCDEF))
    fields = [field(v, p, n, bits, signed) for v, p, n in zip(value, position, length, strict=True)]
    expected = [wrapped(x, bits, signed) for x in fields]
    assert applied(f"bfe.{ty} %v0, %v1, %v2, %v3;", ty, f"{ty} b32 b32", value, position, length) == expected
    if not signed:
        b = f"b{bits}"
        masks = [(((1 << n) - 1) << p) & (1 << bits) - 1 for p, n in cases]
        expected = [i & ~k | v << p & k for i, v, p, k in zip(into, value, position, masks, strict=True)]
        columns = (value, into, position, length)
        assert applied(f"bfi.{b} %v0, %v1, %v2, %v3, %v4;", b, f"{b} {b} b32 b32", *columns) == expected


UNARY = {
    "popc.b32": ("u32", "b32", lambda x: bin(x).count("1")),
    "popc.b64": ("u32", "b64", lambda x: bin(x).count("1")),
    "clz.b32": ("u32", "b32", lambda x: 32 - x.bit_length()),
    "clz.b64": ("u32", "b64", lambda x: 64 - x.bit_length()),
    "brev.b32": ("b32", "b32", lambda x: int(f"{x:032b}"[::-1], 2)),
    "bfind.u32": ("u32", "u32", lambda x: x.bit_length() - 1 if x else 2**32 - 1),
    "bfind.shiftamt.u32": ("u32", "u32", lambda x: 32 - x.bit_length() if x else 2**32 - 1),
    "not.b64": ("b64", "b64", lambda x: x ^ 2**64 - 1),
    "cnot.b32": ("b32", "b32", lambda x: int(x == 0)),
    "neg.s32": ("b32", "b32", lambda x: -x % 2**32),
    "abs.s64": ("b64", "b64", lambda x: abs(wrapped(x, 64, True))),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary_operations_on_bits(name):
    result, ty, expected = UNARY[name]
    values = [x & (1 << int(ty[1:])) - 1 for x in (*EDGES, 0x8123456789ABCDEF)]
    assert applied(f"{name} %v0, %v1;", result, ty, values) == [expected(x) for x in values]


def test_permutations_funnels_and_logic_of_three():
    a, b = 0x11223344, 0x8899AABB
    low, high = [a] * 4, [b] * 4
    pool = [(b << 32 | a) >> 8 * k & 255 for k in range(8)]
    chosen = [pool[1] | pool[4] << 8 | pool[7] << 16 | 0xFF << 24]  # the last byte is the sign of byte 7
    assert applied("prmt.b32 %v0, %v1, %v2, 0xF741;", "b32", "b32 b32", low[:1], high[:1]) == chosen
    amounts = [0, 5, 31, 37]
    both = b << 32 | a
    wrapping = [both << (n & 31) >> 32 & 2**32 - 1 for n in amounts]
    assert applied("shf.l.wrap.b32 %v0, %v1, %v2, %v3;", "b32", "b32 b32 b32", low, high, amounts) == wrapping
    clamping = [both >> min(n, 32) & 2**32 - 1 for n in amounts]
    assert applied("shf.r.clamp.b32 %v0, %v1, %v2, %v3;", "b32", "b32 b32 b32", low, high, amounts) == clamping
    c = 0x0F0F5555
    expected = [(a & b | ~c) & 2**32 - 1]
    table = 0xF0 & 0xCC | ~0xAA & 0xFF
    assert applied(f"lop3.b32 %v0, %v1, %v2, %v3, {table};", "b32", "b32 b32 b32", [a], [b], [c]) == expected


FLOATS = [0.0, -0.0, 0.49, 0.5, 1.5, 2.5, -2.5, 3.7, -3.7, 300.0, -300.0, 3e9, -3e9, 1e20, -1e20]
FLOATS += [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("ty", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("mode, rounded", [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)])
def test_floats_to_integers_saturate(ty, mode, rounded):
    bits, signed = int(ty[1:]), ty[0] == "s"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    x = np.array(FLOATS, np.float32)
    register = ty if bits >= 16 else f"{ty[0]}16"

    def expected(of_nan):
        return [
            of_nan if math.isnan(v) else low if v < low else high if v > high else int(v) for v in rounded(x).tolist()
        ]

    highest = low if signed else 2 ** (bits - 1)  # of a NaN of 64 bits, or as 64 bits
    of_32 = expected(highest if bits == 64 else 0)
    assert applied(f"cvt.{mode}.{ty}.f32 %v0, %v1;", register, "b32", x.view(np.uint32).tolist()) == of_32
    x = x.astype(np.float64)
    of_64 = expected(highest)
    assert applied(f"cvt.{mode}.{ty}.f64 %v0, %v1;", register, "b64", x.view(np.uint64).tolist()) == of_64


@pytest.mark.parametrize("to, of", [("s8", "s32"), ("u8", "s32"), ("s16", "s64"), ("u32", "s64"), ("s32", "u64")])
def test_integers_to_integers(to, of):
    bits, signed = int(to[1:]), to[0] == "s"
    values = [0, 1, 127, 128, 255, 256, -1, -128, -129, 32768, 2**31 - 1]
    if of[1:] == "64":
        values += [2**31, 2**32, 2**40 + 5, -(2**40)]
    exact = [wrapped(v, int(of[1:]), of[0] == "s") for v in values]
    register = to if bits >= 16 else f"{to[0]}16"
    expected = [wrapped(v, bits, signed) for v in exact]
    assert applied(f"cvt.{to}.{of} %v0, %v1;", register, of, values) == expected
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    expected = [min(max(v, low), high) for v in exact]
    assert applied(f"cvt.sat.{to}.{of} %v0, %v1;", register, of, values) == expected


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("to", ["f16x2", "bf16x2"])
def test_two_floats_into_one_register(mode, to):
    rng = np.random.default_rng(0)
    # Also ties of both formats, numbers above the largest float16, and a subnormal one.
    special = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 7e4, -7e4, 3e-7]
    x = np.concatenate([rng.standard_normal(50) * 100, special]).astype(np.float32)
    if to == "bf16x2":
        bits = x.view(np.uint32).astype(np.int64)
        narrow = (bits >> 16 if mode == "rz" else bits + 0x7FFF + (bits >> 16 & 1) >> 16) & 0xFFFF
    else:
        with np.errstate(over="ignore"):
            nearest = x.astype(np.float16)
        beyond = np.abs(nearest.astype(np.float64)) > np.abs(x.astype(np.float64))
        towards_zero = np.where(beyond, np.nextafter(nearest, np.float16(0)), nearest)
        narrow = (nearest if mode == "rn" else towards_zero).view(np.uint16).astype(np.int64)
    words = x.view(np.uint32).tolist()
    expected = (narrow << 16 | narrow[::-1]).tolist()
    assert applied(f"cvt.{mode}.{to}.f32 %v0, %v1, %v2;", "b32", "b32 b32", words, words[::-1]) == expected


def test_bfloat16_rounds_to_even_and_keeps_nan():
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, math.inf, math.nan, -0.0, 3.4e38], np.float32)
    assert f32_to_bf16(x).tolist() == [0x3F80, 0x3F82, 0x7F80, 0x7FFF, 0x8000, 0x7F80]
    assert (bf16_to_f32(np.array([0x4049], np.uint16)) == np.float32(3.140625)).all()


@pytest.mark.parametrize(
    "name, ordered, unordered",
    [
        ("lt", np.less, False),
        ("ge", np.greater_equal, False),
        ("ne", np.not_equal, False),
        ("neu", np.not_equal, True),
        ("leu", np.less_equal, True),
    ],
)
def test_comparisons_with_nan(name, ordered, unordered):
    a, b = (np.array(v, np.float32) for v in ([1, 2, 2, math.nan, 1, math.nan], [2, 1, 2, 1, math.nan, math.nan]))
    expected = np.where(np.isnan(a) | np.isnan(b), unordered, ordered(a, b)).astype(int).tolist()
    text = f"setp.{name}.f32 %p, %v1, %v2; selp.b32 %v0, 1, 0, %p;"
    assert applied(text, "b32", "b32 b32", a.view(np.uint32).tolist(), b.view(np.uint32).tolist()) == expected


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_directed_rounding(mode):
    a, b = np.random.default_rng(1).standard_normal((2, 60)).astype(np.float32)
    exact = a.astype(np.float64) + b.astype(np.float64) * 2**-20
    step = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}[mode]
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    spacing = np.where(2.0 ** np.floor(np.log2(np.abs(exact))) * 2**-23 == spacing, spacing, spacing / 2)
    expected = (step(exact / spacing) * spacing).astype(np.float32).view(np.uint32).tolist()
    small = (b * np.float32(2**-20)).view(np.uint32).tolist()
    assert applied(f"add.{mode}.f32 %v0, %v1, %v2;", "b32", "b32 b32", a.view(np.uint32).tolist(), small) == expected


@pytest.mark.parametrize(
    "text, value",
    [
        ("0x7fU", 127),
        ("-12", -12),
        ("017", 15),
        ("0b101", 5),
        ("0f3F800000", ("f32", 0x3F800000)),
        ("0d3FF0000000000000", ("f64", 0x3FF << 52)),
    ],
)
def test_constants(text, value):
    assert parse_constant(text).value == value


MATH = r"""
#include <cuda_fp16.h>
extern "C" __global__ void functions(const float* a, float* o, int n) {
  int i = threadIdx.x; float x = a[i], y = fabsf(x);
  float r[14] = {expf(x), logf(y), sinf(x), cosf(x * 1e4f), tanhf(x), x / 3.7f, sqrtf(y), erff(x), powf(y, 1.7f),
                 rsqrtf(y), fmodf(x, 0.3f), rintf(x * 5), (float)exp((double)x),
                 __half2float(__float2half(x) * __float2half(3.f))};
  for (int k = 0; k < 14; k++) o[k * n + i] = r[k];
}
"""


def test_a_range_of_registers_in_braces_hides_that_around_them():
    kernel = Module(""".version 8.0
        .target sm_80
        .address_size 64
        .visible .entry ranges(.param .u64 o) {
        .reg .b32 %r<5000>; .reg .b64 %rd<3>;
        ld.param.u64 %rd1, [o];
        mov.b32 %r4999, 1;
        { .reg .b32 %r<5000>; mov.b32 %r4999, 2; st.global.b32 [%rd1], %r4999; }
        st.global.b32 [%rd1+4], %r4999;
        ret; }""")
    memory = Memory()
    result = memory.empty(2, np.int32)
    kernel.launch("ranges", 1, 1, [result], memory=memory)
    assert memory.read(result).tolist() == [2, 1]
    assert kernel.kernel("ranges").registers == {0: 0, 16: 0, 32: 2, 64: 1}  # none that no instruction names


def test_functions_of_the_library_against_float64():
    memory, x = Memory(), (np.random.default_rng(2).standard_normal(N) * 3).astype(np.float32)
    out = memory.empty((14, N), np.float32, "out")
    cuda_module(MATH, headers=True).launch("functions", 1, N, [memory.alloc(x), out, N], memory=memory)
    wide, y = x.astype(np.float64), np.abs(x).astype(np.float64)
    large = (x * np.float32(1e4)).astype(np.float64)
    expected = [np.exp(wide), np.log(y), np.sin(wide), np.cos(large), np.tanh(wide), wide / np.float32(3.7), np.sqrt(y)]
    expected += [[math.erf(v) for v in wide], y ** np.float64(np.float32(1.7)), 1 / np.sqrt(y)]
    expected += [np.fmod(wide, np.float64(np.float32(0.3))), np.rint(x * np.float32(5)), np.exp(wide)]
    np.testing.assert_allclose(memory.read(out)[:13], expected, rtol=5e-6, atol=1e-8)
    assert (memory.read(out)[13] == (x.astype(np.float16) * np.float16(3)).astype(np.float32)).all()


CONTROL = r"""
static __device__ __noinline__ int gcd(int a, int b) { while (b) { int t = a % b; a = b; b = t; } return a; }
struct Record { int k; float w[3]; const float* p; };
static __device__ __noinline__ float weighted(Record r, int j) { return r.w[j % 3] * r.k + r.p[j]; }
__device__ int table[4] = {1, 2, 3, 4};
__constant__ int constants[4] = {10, 20, 30, 40};
extern "C" __global__ void control(const int* a, const int* b, int* o, int n) {
  int i = threadIdx.x, x = a[i], y = b[i], sum = 0;
  for (int j = 0; j < (x & 15); j++) { if (y >> j & 1) { sum += j; continue; } if (sum > 9) break; sum += 3; }
  o[i] = sum;
  o[n + i] = gcd(x & 0xffff, y & 0xffff);
  switch (i % 7) { case 0: x += 1; break; case 1: x *= 2; break; case 2: x -= 3; break; case 3: x = -x; break;
    case 4: x ^= 7; break; case 5: x += 9; break; default: x = 0; }
  o[2 * n + i] = x;
  o[3 * n + i] = table[i & 3] + constants[i & 3];
}
extern "C" __global__ void spaces(Record r, float* o, int n) {
  __shared__ float shared[64]; float local[8]; int i = threadIdx.x;
  for (int j = 0; j < 8; j++) local[j] = r.p[(i + j) % n];
  o[i] = local[(i * 5) & 7];
  o[n + i] = weighted(r, i);
  float* either = (i & 1) ? shared + i : local;
  *either = i;
  o[2 * n + i] = *either;
  float4 q = *(const float4*)(r.p + (i & 7) * 4);
  o[3 * n + i] = q.x + 2 * q.y + 3 * q.z + 4 * q.w;
  if (i == 3) printf("not shown %d", i);
}
"""


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_divergence_calls_and_tables(seed):
    rng = np.random.default_rng(3)
    x, y = rng.integers(-(2**31), 2**31, (2, N)).astype(np.int32)
    memory = Memory()
    out = memory.empty((4, N), np.int32, "out")
    cuda_module(CONTROL).launch("control", 1, N, [memory.alloc(x), memory.alloc(y), out, N], memory=memory, seed=seed)
    sums = []
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        total = 0
        for j in range(a & 15):
            if b >> j & 1:
                total += j
                continue
            if total > 9:
                break
            total += 3
        sums.append(total)
    i = np.arange(N)
    chosen = np.choose(i % 7, [x + 1, x * np.int32(2), x - 3, -x, x ^ 7, x + 9, 0 * x])
    expected = [sums, np.gcd(x & 0xFFFF, y & 0xFFFF), chosen, np.array([11, 22, 33, 44])[i & 3]]
    assert (memory.read(out) == np.array(expected)).all()


def test_state_spaces_structs_and_vectors():
    memory, p, i = Memory(), np.random.default_rng(4).standard_normal(N).astype(np.float32), np.arange(N)
    record = np.zeros(1, np.dtype([("k", "i4"), ("w", "f4", 3), ("p", "u8")], align=True))
    record["k"], record["w"], record["p"] = 3, [1, 2, 4], memory.alloc(p, "p")
    out = memory.empty((4, N), np.float32, "out")
    cuda_module(CONTROL).launch("spaces", 1, N, [record[0], out, N], memory=memory)
    quads = p[(i & 7)[:, None] * 4 + np.arange(4)] @ np.array([1, 2, 3, 4], np.float32)
    expected = [p[(i + (i * 5 & 7)) % N], np.array([1, 2, 4])[i % 3] * 3 + p, i, quads]
    np.testing.assert_allclose(memory.read(out), expected, rtol=1e-5, atol=1e-5)
    assert memory.written(out).all()


GRID = r"""
extern "C" __global__ void indices(int* o) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int lane; asm("mov.u32 %0, %laneid;" : "=r"(lane));
  o[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread + 100000 * lane;
}
"""


@pytest.mark.parametrize("batch", [None, 1, 5])
def test_grids_and_blocks_of_three_dimensions(batch):
    memory, grid, block = Memory(), (3, 2, 2), (5, 3, 4)
    out = memory.empty((12, 60), np.int32, "out")
    stats = cuda_module(GRID).launch("indices", grid, block, [out], memory=memory, batch=batch)
    thread = np.arange(60)
    assert (memory.read(out) == np.arange(12)[:, None] * 1000 + thread + 100000 * (thread % 32)).all()
    assert stats["ctas"] == 12 and stats["thread_instructions"] > 12 * 60


WARP = r"""
extern "C" __global__ void warps(const int* a, int* o, int n) {
  int i = threadIdx.x, x = a[i]; unsigned all = ~0u;
  int r[12] = {__shfl_up_sync(all, x, 3, 16), __shfl_down_sync(all, x, 5), __shfl_xor_sync(all, x, 9),
    __shfl_sync(all, x, i * 3, 8), (int)__ballot_sync(all, x & 1), __any_sync(all, i == 33), __all_sync(all, i < 40),
    (int)__match_any_sync(all, x & 3), (int)__reduce_add_sync(all, x & 255), (int)__reduce_max_sync(all, x),
    __syncthreads_count(x & 1), __syncthreads_or(i == 70)};
  for (int k = 0; k < 12; k++) o[k * n + i] = r[k];
  if (i % 3 == 0) o[12 * n + i] = __activemask(); else o[12 * n + i] = __shfl_sync(__activemask(), x, 31);
}
"""


@pytest.mark.parametrize("seed", [None, 5])
def test_shuffles_votes_and_reductions(seed):
    n, memory, x = 96, Memory(), np.random.default_rng(5).integers(-(2**31), 2**31, 96).astype(np.int32)
    out = memory.empty((13, n), np.int32, "out")
    cuda_module(WARP).launch("warps", 1, n, [memory.alloc(x), out, n], memory=memory, seed=seed)
    got, i = memory.read(out), np.arange(n)
    warps = x.reshape(3, 32)
    bits = np.int64(1) << np.arange(32)

    def by_warp(values):
        return np.repeat(np.asarray(values, np.int64).astype(np.int32), 32)

    same = [int(bits[w & 3 == v & 3].sum()) for w in warps for v in w]
    expected = [
        np.where(i % 16 >= 3, x[np.maximum(i - 3, 0)], x),
        np.where(i % 32 < 27, x[np.minimum(i + 5, n - 1)], x),
        x[i ^ 9],
        x[i // 8 * 8 + i * 3 % 8],
        by_warp([(bits * (w & 1)).sum() for w in warps]),
        by_warp([0, 1, 0]),
        by_warp([1, 0, 0]),
        np.array(same).astype(np.int32),
        by_warp([(w & 255).sum() for w in warps]),
        by_warp([w.max() for w in warps]),
        np.full(n, (x & 1).sum()),
        np.ones(n),
    ]
    for k, row in enumerate(expected):
        assert (got[k] == row).all(), k
    if seed is None:  # with a seed, the schedule decides if diverged lanes run together
        thirds = [int(bits[(np.arange(32) + 32 * w) % 3 == 0].sum()) for w in range(3)]
        lane_31 = np.where((i // 32 * 32 + 31) % 3 == 0, x, x[i // 32 * 32 + 31])
        expected = np.where(i % 3 == 0, by_warp(thirds), lane_31)
        present = (i % 3 == 0) | ((i // 32 * 32 + 31) % 3 != 0)  # results read from an absent lane do not count
        assert (got[12] == expected)[present].all()


BARRIERS = r"""
extern "C" __global__ void reduce(const float* a, float* out, int n) {
  __shared__ float partial[8]; float v = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) v += a[blockIdx.x * n + i];
  for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
    v = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
    for (int m = 4; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    if (threadIdx.x == 0) out[blockIdx.x] = v;
  }
}
extern "C" __global__ void pipeline(int* o, int rounds) {   // warp 0 fills, warps 1 and 2 use it and hand it back
  __shared__ int slot[32];
  if (threadIdx.x < 32) {
    for (int r = 0; r < rounds; r++) {
      if (r) asm volatile("bar.sync 2, 96;" ::: "memory");
      slot[threadIdx.x] = r * 100 + threadIdx.x;
      asm volatile("bar.arrive 1, 96;" ::: "memory");
    }
  } else {
    for (int r = 0; r < rounds; r++) {
      asm volatile("bar.sync 1, 96;" ::: "memory");
      o[r * 64 + threadIdx.x - 32] = slot[threadIdx.x % 32];
      if (r + 1 < rounds) asm volatile("bar.arrive 2, 96;" ::: "memory");
    }
  }
}
extern "C" __global__ void early(int* o) {                  // a barrier does not wait for those who have left
  __shared__ int s[64];
  if (threadIdx.x >= 64) return;
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  o[64 * blockIdx.x + threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_block_barriers(batch):
    memory, a = Memory(), np.random.default_rng(6).standard_normal((7, 250)).astype(np.float32)
    out = memory.empty(7, np.float32, "out")
    arguments = [memory.alloc(a, "a"), out, 250]
    cuda_module(BARRIERS).launch("reduce", 7, 256, arguments, memory=memory, race_check=True, batch=batch)
    np.testing.assert_allclose(memory.read(out), a.sum(1, dtype=np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_named_barriers_between_roles(seed):
    memory = Memory()
    out = memory.empty((4, 64), np.int32, "out")
    cuda_module(BARRIERS).launch("pipeline", 1, 96, [out, 4], memory=memory, race_check=True, seed=seed)
    assert (memory.read(out) == np.arange(4)[:, None] * 100 + np.arange(64) % 32).all()


def test_barrier_after_threads_have_left():
    memory = Memory()
    out = memory.empty((2, 64), np.int32, "out")
    cuda_module(BARRIERS).launch("early", 2, 128, [out], memory=memory, race_check=True)
    assert (memory.read(out) == np.arange(64)[::-1]).all()


ATOMICS = r"""
extern "C" __global__ void atomics(float* f, double* d, unsigned* h, unsigned* b, unsigned* u,
  unsigned long long* l, int* order) {
  __shared__ int counter; int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  atomicAdd(f, 1.0f); atomicAdd(d, 0.5);  // and pairs of 16-bit numbers, (1, 2) and (1, 0.5), without their headers
  asm volatile("{ .reg .b32 old; atom.global.add.noftz.f16x2 old, [%0], %1; }" :: "l"(h), "r"(0x40003c00));
  asm volatile("{ .reg .b32 old; atom.global.add.noftz.bf16x2 old, [%0], %1; }" :: "l"(b), "r"(0x3f003f80));
  atomicMax(u, i); atomicInc(u + 1, 9); atomicXor(u + 2, i); atomicMin((int*)u + 5, -i); atomicAdd(l, 1ull << 33);
  unsigned old = u[3], assumed;
  do { assumed = old; old = atomicCAS(u + 3, assumed, assumed + 3); } while (old != assumed);
  atomicExch(u + 6 + i, atomicAdd(&counter, 1));
  if (threadIdx.x == 0) {
    while (atomicAdd(u + 4, 0) != blockIdx.x) ;
    order[blockIdx.x] = u[4]; __threadfence(); atomicAdd(u + 4, 1);
  }
}
"""


def test_atomics_lose_nothing():
    memory = Memory()
    names = {"f": np.float32, "d": np.float64, "l": np.uint64}
    a = {name: memory.alloc(np.zeros(1, dtype), name) for name, dtype in names.items()}
    a |= {"h": memory.alloc(np.zeros(2, np.float16)), "b": memory.alloc(np.zeros(2, np.uint16))}
    a |= {"u": memory.alloc(np.zeros(6 + 256, np.uint32), "u"), "order": memory.empty(4, np.int32, "order")}
    arguments = [a[name] for name in ("f", "d", "h", "b", "u", "l", "order")]
    cuda_module(ATOMICS).launch("atomics", 4, 64, arguments, memory=memory)
    u = memory.read(a["u"])
    assert memory.read(a["f"])[0] == 256 and memory.read(a["d"])[0] == 128 and memory.read(a["l"])[0] == 256 << 33
    assert memory.read(a["h"]).tolist() == [256, 512]
    assert bf16_to_f32(memory.read(a["b"])).tolist() == [256, 128]
    assert u[:6].view(np.int32).tolist() == [255, 256 % 10, 0, 768, 4, -255]
    assert (np.sort(u[6:].reshape(4, 64)) == np.arange(64)).all()  # each block has its own counters
    assert memory.read(a["order"]).tolist() == [0, 1, 2, 3]


LAUNCHES = r"""
__device__ int total = 5;
extern "C" __global__ void shape(int* o, int value) { o[blockIdx.x] = 1000 * gridDim.x + value; }
extern "C" __global__ void count() { atomicAdd(&total, 1); }
extern "C" __global__ void left(int* o) { asm volatile("{ .reg .b32 r; mov.b32 %0, r; mov.b32 r, 7; }" : "=r"(o[0])); }
"""


def test_a_launch_knows_nothing_of_the_one_before():
    module = cuda_module(LAUNCHES)
    for grid, value in ((2, 1), (5, 2), (300, 3), (1, 4)):
        memory = Memory()
        out = memory.empty(grid, np.int32, "o")
        module.launch("shape", grid, 32, [out, value], memory=memory)
        assert (memory.read(out) == 1000 * grid + value).all()
    for _ in range(2):
        memory = Memory()
        module.launch("count", 1, 3, [], memory=memory)
        assert memory.read(module.global_address("total", memory)).view(np.int32)[0] == 8
    for _ in range(2):
        memory = Memory()
        out = memory.empty(1, np.int32, "o")
        module.launch("left", 1, 1, [out], memory=memory)
        assert memory.read(out)[0] == 0


def test_ptx_is_kept_where_the_cache_is(tmp_path, monkeypatch):
    source = 'extern "C" __global__ void kept() {}'
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path))
    ptx = compile_ptx(source)
    monkeypatch.setattr(ptxsim.compile, "_compile", lambda source, arch, options: f"compiled anew: {options}")
    assert compile_ptx(source) == ptx
    assert compile_ptx(source, options=("-G",)) == "compiled anew: ('-G',)"
    monkeypatch.setattr(ptxsim.compile, "nvrtc_build", lambda: "the next patch release")
    assert compile_ptx(source).startswith("compiled anew")
    compile_ptx(source, options=("-I/somewhere",))
    assert len(list((tmp_path / "ptx").iterdir())) == 3
    monkeypatch.delenv("FA2CUPY_CACHE_DIR")
    assert compile_ptx(source).startswith("compiled anew")
