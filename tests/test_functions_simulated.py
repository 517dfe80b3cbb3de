"""The CUDA C++ of traced functions, compiled with NVRTC and run in the interpreter, against values on NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support import CHECKOUT, traced_kernels
from support.ptxsim_kernels import cuda_module
from support.traced_cases import EDGES, at_edges, ready_made
from support.traced_kernels import broken_headers, run_text, source_of

from fa2cupy.functions.evaluation import Evaluation, add_elements, reduced
from fa2cupy.functions.primitives import PRIMITIVES
from fa2cupy.functions.tracing import argument_kind, trace

pytestmark = pytest.mark.simulated

SHAPE = (2, 3, 9, 14)
B, H, Q, K = np.meshgrid(*(np.arange(n, dtype="int32") for n in SHAPE), indexing="ij", sparse=True)
CASES = ready_made(*SHAPE)


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def scattered(e: Evaluation, arrays: tuple) -> dict[int, np.ndarray]:
    """Returns the sums of `run_text`: slopes times ``1 + k % 3``."""
    sums: dict[int, np.ndarray] = {}
    for part in e.gradient_parts():
        total = sums.setdefault(part.argument, np.zeros(arrays[part.argument].shape))
        tile = np.broadcast_to(part.derivative * (1 + K % 3), SHAPE)
        add_elements(total, part.indices, reduced(tile, part.indices), np)
    return sums


def check(role: str, function, arrays: tuple, dtype: str = "float32", tolerance: float = 2e-6) -> None:
    program = trace(role, function, tuple(argument_kind("array", array) for array in arrays))
    scores = numbers(*SHAPE, dtype=dtype)
    values, slopes, visible, *gradients = run_text(program, arrays, scores)
    inputs = {"b": B, "h": H, "q": Q, "k": K} | ({"score": scores} if role == "score_mod" else {})
    with np.errstate(all="ignore"):
        e = Evaluation(program, arrays, dtype, np, **inputs)
        if role == "mask_mod":
            np.testing.assert_array_equal(visible, np.broadcast_to(e.result(), SHAPE))
            return
        tolerance = 1e-13 if dtype == "float64" else tolerance
        np.testing.assert_allclose(values, np.broadcast_to(e.result(), SHAPE), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(slopes, np.broadcast_to(e.slope(), SHAPE), rtol=tolerance, atol=tolerance)
        wanted = scattered(e, arrays)
    assert len(gradients) == len(program.floats)
    for number, gradient in zip(program.floats, gradients, strict=True):
        total = wanted.get(number, np.zeros(gradient.shape))
        np.testing.assert_allclose(gradient, total, rtol=0, atol=30 * tolerance * max(1, abs(total).max()))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_ready_made_functions(name, dtype):
    case = CASES[name]
    check(case.role, case.function, case.arrays, dtype)


FUNCTIONS = {
    "operators": (lambda s, b, h, q, k: -(2 - s) * s / 3 + 1 / (4 + abs(s)) + s**3 + abs(s) ** 0.5, ()),
    "real functions": (
        lambda s, b, h, q, k: np.exp2(s) + np.log(s * s + 1) + np.log1p(s * s) + np.sin(s) * np.cos(s) + np.floor(s)
        + np.power(abs(s), 1.7),
        (),
    ),
    "ints": (lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) % 4 + (k - q) // -2 + (k - q) % -3 + q // (k - k), ()),
    "bits and truth": (
        lambda s, b, h, q, k: s + (q & 1) + (q | 2) + (k ^ 3) + ~k
        + np.where((q > 2) ^ ~(k == 3) | (s > 0), s, -np.inf),
        (),
    ),
    "casts": (lambda s, b, h, q, k: (3 * s).astype(int) // 2 + s.astype(bool) + abs(q - k).astype(float) / 2, ()),
    "extrema": (lambda s, b, h, q, k: np.minimum(s, np.nan) + np.maximum(np.nan, s) + np.clip(s, -0.5, 0.5), ()),
    "of rank 0": (lambda s, b, h, q, k, t: s * t, (np.array(1.5, "float32"),)),
    "dot": (
        lambda s, b, h, q, k, x, y: np.where(q > 0, np.dot(x[b, h, q], y[b, h, k] * s), s) + (x[b, h, q] > 0).sum(),
        (numbers(2, 3, 9, 5), numbers(2, 3, 14, 5)),
    ),
    "learned exponent": (
        lambda s, b, h, q, k, a, p: s - a[h] * np.power(1.0 * abs(k - q), p[h]),
        (numbers(3), np.array([0.0, 0.5, 2.0], "float32")),
    ),
    "indices": (
        lambda s, b, h, q, k, ids, keep, t: s + np.where(keep[b, k], t[ids[b, q], k], 0),
        (np.arange(18).reshape(2, 9) % 4, np.arange(28).reshape(2, 14) % 3 > 0, numbers(4, 14)),
    ),
    "gather along a vector": (
        lambda s, b, h, q, k, ids, t: s * t[ids[q]].sum(),
        (np.arange(36).reshape(9, 4) % 7, numbers(7)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_operation(name):
    check("score_mod", *FUNCTIONS[name], tolerance=1e-5)


#: Operands of every operation, and the operations with errors of last bits.
ODD = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.5, 2.5, 3e9, -1e-30)
ROUNDED = ("exp", "exp2", "log", "log1p", "tanh", "sin", "cos", "power")


def of_odd_operands(op: str, s, t):
    """An operation of a pair of floats; of ints, that of the pair cut off towards 0."""
    row = PRIMITIVES[op]
    if op == "where":
        return np.where(s > t, np.where(t.astype(bool), s, -s), t)
    if op in ("invert", "logical_not"):
        return getattr(np, row.function)(s.astype(int if op == "invert" else bool)) + 0
    pair = (s.astype(int), t.astype(int)) if row.rule in ("whole", "bits") else (s, t)
    return getattr(np, row.function)(*pair[: row.text.count("{")]) + 0


def check_odd_operands(dtype: str, is_fast: bool) -> None:
    shape = (1, len(PRIMITIVES), len(ODD), len(ODD))
    x, y = (np.array(ODD, dtype) for _ in range(2))
    scores = np.broadcast_to(x[:, None], shape).copy()

    def function(s, b, h, q, k, t):
        result = s
        for number, op in enumerate(PRIMITIVES):
            result = np.where(h == number, of_odd_operands(op, s, t[k]), result)
        return result

    program = trace("score_mod", function, (argument_kind("t", y),))
    values, *_ = run_text(program, (y,), scores, is_fast)
    with np.errstate(all="ignore"):
        for number, op in enumerate(PRIMITIVES):
            one = trace("score_mod", lambda s, b, h, q, k, t, op=op: of_odd_operands(op, s, t[k]), program.arguments)
            e = Evaluation(one, (y,), dtype, np, score=x[:, None], b=0, h=0, q=0, k=np.arange(len(y)))
            found = np.broadcast_to(e.result(), shape[2:])
            if PRIMITIVES[op].rule not in ("whole", "bits"):
                plain = np.broadcast_to(of_odd_operands(op, x[:, None], y), shape[2:])
                np.testing.assert_array_equal(found, plain, err_msg=op)
            tolerance = (2e-6 if dtype == "float32" else 1e-13) if op in ROUNDED else 0
            np.testing.assert_allclose(values[0, number], found, rtol=tolerance, err_msg=op)


@pytest.mark.parametrize(("dtype", "is_fast"), [("float32", False), ("float32", True), ("float64", False)])
def test_every_operation_of_odd_operands(dtype, is_fast):
    check_odd_operands(dtype, is_fast)


#: Broken headers that odd operands catch.
MUTANTS = {
    "the first NaN of a minimum": ("traced.cuh", "return a < b || a != a ? a : b;", "return a < b ? a : b;"),
    "a NaN of a maximum": ("traced.cuh", "return a > b || a != a ? a : b;", "return fmax(a, b);"),
    "x % 0": ("traced.cuh", "return b == 0 || b == -1 ? 0 :", "return"),
    "the polynomial of tanh beyond its range": (
        "math.cuh",
        "return fabsf(x) < 0.35f ? small",
        "return fabsf(x) < 1.35f ? small",
    ),
    "NaN of tanh": ("math.cuh", "small : fma(-2.0f, inverse, 1.0f)", "small : fma(-2.0f, fmaxf(inverse, 0.0f), 1.0f)"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MUTANTS)
def test_broken_headers_are_caught_by_odd_operands(name, tmp_path, monkeypatch):
    monkeypatch.setattr(traced_kernels, "HEADERS", broken_headers(tmp_path, *MUTANTS[name]))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_odd_operands("float32", is_fast="tanh" in name)


def test_sines_of_large_arguments():
    arguments = np.array([1e5, 123456789.0, -3e9, 1e20, -3e38])
    for dtype, tolerance in (("float32", 2e-6), ("float64", 1e-13)):
        scores = np.tile(arguments[2 * (dtype == "float64") :], 10)[None, None, None].astype(dtype)
        values, *_ = run_text(trace("score_mod", lambda s, b, h, q, k: np.sin(s) - 2 * np.cos(s), ()), (), scores)
        np.testing.assert_allclose(values, np.sin(scores) - 2 * np.cos(scores), rtol=0, atol=tolerance)


def test_derivatives_at_edges():
    shape = (1, len(EDGES), 2, 10)
    pairs = [at_edges(name, shape[2:], "float32") for name in EDGES]
    scores, wanted = (np.stack(arrays)[None] for arrays in zip(*pairs, strict=True))

    def function(s, b, h, q, k):
        result = s
        for number, (own, _) in enumerate(EDGES.values()):
            result = np.where(h == number, own(s, b, h, q, k), result)
        return result

    _, slopes, *_ = run_text(trace("score_mod", function, ()), (), scores)
    for number, name in enumerate(EDGES):
        np.testing.assert_allclose(slopes[:, number], wanted[:, number], rtol=1e-5, atol=1e-30, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int16", "int64", "uint8"])
def test_arrays_of_all_dtypes(dtype):
    table = (4 * numbers(3, 14)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    check("score_mod", lambda s, b, h, q, k, t: s + t[h, k], (np.asfortranarray(table),))


def test_indices_are_clamped():
    table = numbers(9)
    program = trace("score_mod", lambda s, b, h, q, k, t: s + t[2 * q - 4], (argument_kind("t", table),))
    scores = numbers(*SHAPE)
    values, *_ = run_text(program, (table,), scores)
    np.testing.assert_array_equal(values, scores + table[np.clip(2 * Q - 4, 0, 8)])


@pytest.mark.sample(arch=("compute_75",))
@pytest.mark.parametrize("arch", ["compute_75", "compute_90a", "compute_100"])
@pytest.mark.parametrize("name", CASES)
def test_ready_made_functions_compile(name, arch):
    case = CASES[name]
    program = trace(case.role, case.function, tuple(argument_kind("array", array) for array in case.arrays))
    source = source_of(program, case.arrays, SHAPE, "float")
    assert cuda_module(source, arch, (f"-I{CHECKOUT / 'kernels'}",))
