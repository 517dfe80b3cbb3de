"""Functions whose values a last bit decides: random expressions with floors, comparisons and ints that follow from
quotients, in plain NumPy, in the package's evaluation on NumPy, and as kernels in the interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support import traced_kernels
from support.traced_kernels import broken_headers, run_text

from fa2cupy.functions.bounds import ANY_INT
from fa2cupy.functions.evaluation import Evaluation
from fa2cupy.functions.expressions import INT
from fa2cupy.functions.symbols import Symbol
from fa2cupy.functions.tracing import trace
from fa2cupy.jit.compiler import compile_options

pytestmark = pytest.mark.simulated

QUERIES, KEYS = 3, 40
INTS = (0, 1, 2, 3, 5, 7, 49, -1, -3, 41, 1 << 16, 1 << 30, 2**31 - 1, -(2**31))
FLOATS = (0.0, -0.0, 0.1, 0.5, 1 / 3, 2.5, 3.0, 7.0, 25.0, 41.0, 49.0, 95.0, 187.0, -49.0, 1e10)
#: An exact rewrite, an order of operations or a conversion decides each of these.
DECIDED = (
    "np.floor(s / 49)",
    "real(whole(s / 41))",
    "real(whole(real(k * 161) / 161))",
    "np.where(s / 95 == 1, s, 2 * s)",
    # Each with divisors of its own: of a quotient that two operations share, one alone would decide.
    *(
        f"np.where(real(k * {n}) / {n} {comparison} real(k), 1.0, 2.0)"
        for comparison, divisors in {"==": (41, 49), "!=": (47, 98), "<": (55, 103), "<=": (7, 75)}.items()
        for n in divisors
    ),
    *(f"np.where((real(k * {n}) / {n} - real(k)).astype(bool), 1.0, 2.0)" for n in (61, 107)),
    "np.where(np.minimum(s / 187, 3.0) <= 1, s, 2 * s)",
    "np.floor(real(k) * 0.7 - 7)",
    "np.floor(s * real(k) / 3 - s / 3 * real(k))",
    "np.where(1 / (s + 0) < 0, 1.0, 2.0)",
    "np.where(1 / (s - -0.0) < 0, 1.0, 2.0)",
    "np.where(s ** 0.5 >= 0, s, 1.0)",
    "np.where((q + 2147483647) < (k - 2147483647), 1.0, 2.0)",
    "np.where(k - 1073741824 == k + q + 1073741824, 1.0, 2.0)",
    "np.where(k + 2147483647 < 0, 1.0, 2.0)",
    "np.where(abs(k * -2147483648) <= 5, 1.0, 2.0)",
    "np.where(-(k * -2147483648) < 0, 1.0, 2.0)",
    "real((q * 0 + -2147483648) // (k - 2))",
    "real((q * 0 + -2147483648) % (k - 2))",
    "real(((k - 20) * 100000001 - 2147483647) % 3)",
    "real((k - q) ** 3 * (k + 1000000))",
    "real((q - k) // (k - 5) + (k - 5) // 3)",
    "real(np.minimum(whole(1e10 * real(q - k)), 7))",
    "real(whole(4.0 / abs(real(q - k))))",
    "real(whole(real(q - k) / abs(real(q - k))))",
    "real(whole(s * s * s))",
)


def real(x, dtype):
    return x.astype(float if isinstance(x, Symbol) else dtype)


def whole(x):
    """x cut off towards 0; the nearest int32 for one out of range, and 0 for NaN."""
    if isinstance(x, Symbol):
        return x.astype(int)
    limits = np.iinfo("int32")
    return np.clip(np.where(np.isnan(x), 0, x).astype("float64"), limits.min, limits.max).astype("int32")


class Draw:
    """Random expressions as Python text, in which no operator has two constants."""

    def __init__(self, seed: int, score: str = "s"):
        self.rng, self.score = np.random.default_rng(seed), score

    def one(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def constant(self, kind: str) -> str:
        return repr(self.one(*(INTS if kind == "int" else FLOATS)))

    def operands(self, kind: str, depth: int) -> tuple[str, str]:
        pair = [self.draw(kind, depth), self.one(self.draw, lambda kind, _: self.constant(kind))(kind, depth)]
        self.rng.shuffle(pair)
        return pair[0], pair[1]

    def draw(self, kind: str, depth: int) -> str:
        if kind == "bool":
            return self.truth(depth)
        if depth <= 0:
            return self.one(*2 * [self.score], f"real({self.one('q', 'k')})") if kind == "float" else self.one(*"qkkb")
        return (self.real if kind == "float" else self.integer)(depth - 1)

    def truth(self, depth: int) -> str:
        if depth > 1 and self.rng.random() < 0.3:
            x, y = (self.truth(depth - 1) for _ in range(2))
            return self.one(f"({x} & {y})", f"({x} | {y})", f"({x} ^ {y})", f"~{x}")
        x, y = self.operands(self.one("int", "float", "float"), depth - 1)
        return f"({x} {self.one('<', '<=', '==', '!=', '>', '>=')} {y})"

    def common(self, kind: str, depth: int) -> str:
        x, y = self.operands(kind, depth)
        return self.one(
            f"({x} + {y})", f"({x} - {y})", f"({x} * {y})", f"-({self.draw(kind, depth)})",
            f"abs({self.draw(kind, depth)})", f"np.minimum({x}, {y})", f"np.maximum({x}, {y})",
            f"np.where({self.truth(depth)}, {x}, {y})", f"({self.draw(kind, depth)}) ** 2",
        )  # fmt: skip

    def real(self, depth: int) -> str:
        if self.rng.random() < 0.4:
            return self.common("float", depth)
        x, y = self.operands("float", depth)
        return self.one(
            f"({x} / {y})", f"({self.draw('float', depth)} / {self.constant('float')})", f"np.floor({x} / {y})",
            f"real({self.draw('int', depth)})", f"np.sqrt({self.draw('float', depth)})",
        )  # fmt: skip

    def integer(self, depth: int) -> str:
        if self.rng.random() < 0.4:
            return self.common("int", depth)
        x, y = self.operands("int", depth)
        return self.one(
            f"({x} // {y})", f"({x} % {y})", f"({x} & {y})", f"({x} | {y})", f"({x} ^ {y})",
            f"~({self.draw('int', depth)})", f"whole({self.draw('float', depth)})",
            f"whole({self.draw('float', depth)} / {self.constant('float')})",
        )  # fmt: skip

    def decided(self) -> str:
        """A float whose bits are the same wherever quotients, products and sums are rounded one by one."""
        depth = int(self.rng.integers(2, 5))
        return self.one(
            f"np.floor({self.real(depth)})", f"real({self.integer(depth)})", f"np.where({self.truth(depth)}, s, 2 * s)"
        )


def function_of(texts: Sequence[str], dtype: str, role: str = "score_mod") -> Callable:
    """The function that has the i-th expression in head i."""
    body, inputs = ("s", "s, b, h, q, k") if role == "score_mod" else ("q > k", "b, h, q, k")
    for number, text in enumerate(texts):
        body = f"np.where(h == {number}, {text}, {body})"
    names = {"np": np, "whole": whole, "real": lambda x: real(x, dtype)}
    return eval(f"lambda {inputs}: {body}", names)


def grid(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The positions of all scores."""
    positions = np.meshgrid(*(np.arange(n, dtype="int32") for n in shape), indexing="ij", sparse=True)
    return dict(zip("bhqk", positions, strict=True))


def scores(shape: tuple[int, ...], seed: int, dtype: str) -> np.ndarray:
    """Halves of integers, many of them multiples of the divisors, and odd values."""
    rng = np.random.default_rng(seed)
    found = rng.integers(-40, 40, shape) * rng.choice([0.5, 7, 24.5, 41, 49, 95, 187], shape)
    odd = found.reshape(-1)[::9]
    odd[:] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 1e-30, 3e9], odd.shape)
    return found.astype(dtype)


def check(texts: Sequence[str], seed: int, dtype: str) -> None:
    """Each head has an expression of its own."""
    shape = (1, len(texts), QUERIES, KEYS)
    function, own, positions = function_of(texts, dtype), scores(shape, seed, dtype), grid(shape)
    with np.errstate(all="ignore"):
        plain = np.broadcast_to(function(own, **positions), shape).astype(dtype)
        program = trace("score_mod", function, ())
        found = np.broadcast_to(Evaluation(program, (), dtype, np, score=own, **positions).result(), shape)
    in_kernel, *_ = run_text(program, (), own)
    for head, text in enumerate(texts):
        for values in (found, in_kernel):
            np.testing.assert_array_equal(values[:, head], plain[:, head], err_msg=text)


def test_kernels_are_compiled_with_ieee_arithmetic():
    """NVRTC's default: divisions and roots are rounded to the nearest, and products that a text rounds are no FMAs."""
    assert not [one for one in compile_options("sm_90a") if re.search("fast|prec|fmad|ftz", one)]


def test_ints_are_within_their_bounds():
    shape, found = (1, 1, QUERIES, KEYS), 0
    for seed in range(40):
        draw = Draw(seed)
        program = trace("score_mod", function_of([f"real({draw.integer(3)})"], "float64"), ())
        e = Evaluation(program, (), "float64", np, score=scores(shape, seed, "float64"), **grid(shape))
        with np.errstate(all="ignore"):
            e.result()
        for node, values in e._values.items():
            if node.kind == INT:
                assert node.bounds.low <= np.min(values) <= np.max(values) <= node.bounds.high, node
                found += not node.bounds.wraps and node.bounds != ANY_INT
    assert found > 200


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_last_bit_decides(dtype):
    check(DECIDED, 0, dtype)


#: Broken headers that the same expressions catch.
MUTANTS = {
    "products are fused": ("math.cuh", "return __fmul_rn(a, b);", "return a * b;", "float32"),
    "a NaN of 64 bits": ("traced.cuh", "x == x ? __double2int_rz(x) : 0", "__double2int_rz(x)", "float64"),
    "ints are rounded": ("traced.cuh", "__float2int_rz", "__float2int_rn", "float32"),
    "sums are signed": ("traced.cuh", "static_cast<uint32>(a) + static_cast<uint32>(b)", "a + b", "float32"),
    "a quotient is cut off": ("traced.cuh", "(quotient * b != a && (a < 0) != (b < 0))", "0", "float32"),
    "x // 0": ("traced.cuh", "if (b == 0) return 0;", "", "float32"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MUTANTS)
def test_broken_headers_are_caught(name, tmp_path, monkeypatch):
    *change, dtype = MUTANTS[name]
    check(DECIDED, 0, dtype)
    monkeypatch.setattr(traced_kernels, "HEADERS", broken_headers(tmp_path, *change))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check(DECIDED, 0, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sample(seed=(0, 1))
def test_values_are_those_of_plain_numpy(seed, dtype):
    draw = Draw(seed)
    check([draw.decided() for _ in range(6)], seed, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(100, 130))
@pytest.mark.sample(seed=(100,))
def test_masks_are_those_of_plain_numpy(seed, dtype):
    draw, shape = Draw(seed, "real(q + k - 20)"), (1, 6, QUERIES, KEYS)
    texts, positions = [draw.truth(int(draw.rng.integers(2, 5))) for _ in range(shape[1])], grid(shape)
    function = function_of(texts, dtype, "mask_mod")
    with np.errstate(all="ignore"):
        plain = np.broadcast_to(function(**positions), shape)
        program = trace("mask_mod", function, ())
        found = np.broadcast_to(Evaluation(program, (), dtype, np, **positions).result(), shape)
    _, _, in_kernel = run_text(program, (), np.zeros(shape, dtype))
    for head, text in enumerate(texts):
        for values in (found, in_kernel):
            np.testing.assert_array_equal(values[:, head], plain[:, head], err_msg=text)
