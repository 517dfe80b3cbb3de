"""Functions of scores: tracing and its refusals, values and derivatives, and the CUDA C++ that they become."""

from __future__ import annotations

import functools
import gc
import operator
import os
import re
import subprocess
import sys
import textwrap
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.traced_cases import EDGES, at_edges

import fa2cupy
from fa2cupy import mods
from fa2cupy.functions import derivatives, tracing
from fa2cupy.functions.built_in import Band
from fa2cupy.functions.evaluation import Evaluation, add_elements, reduced
from fa2cupy.functions.expressions import reachable
from fa2cupy.functions.tracing import Program, argument_kind, trace

pytestmark = pytest.mark.filterwarnings("error")

SHAPE = (2, 3, 5, 6)  # batch, heads, queries, keys
B, H, Q, K = np.meshgrid(*(np.arange(n, dtype="int32") for n in SHAPE), indexing="ij", sparse=True)
TABLE = np.array([0.5, -1.0, 2.0])


def numbers(*shape: int, seed: int = 0, dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def traced(function, *arrays: np.ndarray, role: str = "score_mod") -> Program:
    return trace(role, function, tuple(argument_kind(f"argument {i}", array) for i, array in enumerate(arrays)))


def evaluation(function, *arrays: np.ndarray, role: str = "score_mod", score=None, dtype="float64") -> Evaluation:
    inputs = {"b": B, "h": H, "q": Q, "k": K} | ({} if role == "mask_mod" else {"score": score})
    return Evaluation(traced(function, *arrays, role=role), arrays, dtype, np, **inputs)


def value(function, *arrays: np.ndarray, **options) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.broadcast_to(evaluation(function, *arrays, **options).result(), SHAPE)


def gradients(function, weights: np.ndarray, score: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
    """Returns the gradients of ``(weights * function(...)).sum()`` by the arrays."""
    sums = [np.zeros(array.shape) for array in arrays]
    for part in evaluation(function, *arrays, score=score).gradient_parts():
        tile = np.broadcast_to(part.derivative, SHAPE) * weights
        add_elements(sums[part.argument], part.indices, reduced(tile, part.indices), np)
    return sums


# ----------------------------------------------------------------------------------------------------------- values


SCORE = numbers(*SHAPE)
X, Y = numbers(2, 3, 5, 4, seed=1), numbers(2, 3, 6, 4, seed=2)
T = numbers(3, 7, seed=3)
IDS = np.array([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 2]])


def relative(score, b, h, q, k, table):
    return score + table[h, np.clip(k - q, -3, 3) + 3]


#: Functions that give the same on arrays of NumPy as when they are traced.
FUNCTIONS = {
    "operators": (lambda s, b, h, q, k: -(2 - s) * s / 3 + 1 / (4 + abs(s)) - +s, ()),
    "powers": (lambda s, b, h, q, k: s**3 + abs(s) ** 0.5 + abs(s) ** 1.7 + 2.0**s + s**0 + (1 + s * s) ** -2, ()),
    "ints": (lambda s, b, h, q, k: s + (q - k) // 3 + (q - k) % 4 + (k - q) // -2 + (k - q) % -3 + q / (k + 1), ()),
    "by zero": (lambda s, b, h, q, k: s + q // (k - k) + q % (k - k), ()),
    "ufuncs": (
        lambda s, b, h, q, k: np.exp(s) + np.exp2(s) + np.log(s * s + 1) + np.log1p(s * s) + np.tanh(s)
        + np.sqrt(abs(s)) + np.sin(s) * np.cos(s) + np.floor(s) + np.power(abs(s), s) + np.absolute(s),
        (),
    ),
    "extrema": (
        lambda s, b, h, q, k: np.minimum(s, 0.3) + np.maximum(q, k) + np.clip(s, -1, None) * np.clip(s, 0, 1),
        (),
    ),
    "comparisons": (
        lambda s, b, h, q, k: np.where((q < k) | (q >= 4) & ~(k == 2), s, -np.inf)
        + (s > 0) * 2.0 + (q != k) + (s <= q),
        (),
    ),
    "logic": (
        lambda s, b, h, q, k: np.where(np.logical_and(q, k) ^ np.logical_or(s > 0, q == 1), s, np.logical_not(q) * s),
        (),
    ),
    "bits": (lambda s, b, h, q, k: s + (q & 1) + (q | 2) + (k ^ 3) + ~k, ()),
    "casts": (lambda s, b, h, q, k: (3 * s).astype(int) // 2 + s.astype(bool) + q.astype(float) / 2, ()),
    "scalars of NumPy": (lambda s, b, h, q, k: np.float64(2) * s + s * np.float32(0.5) + np.int32(3) - q, ()),
    "nan": (lambda s, b, h, q, k: np.minimum(s, np.nan) + np.maximum(np.nan, s), ()),
    "table": (relative, (T,)),
    "constant index": (lambda s, b, h, q, k, t: s * t[h, 2] + t[1, k], (T,)),
    "of rank 0": (lambda s, b, h, q, k, t: s * t, (np.array(1.5),)),
    "index from an array": (lambda s, b, h, q, k, ids, t: s + t[ids[b, q], k], (IDS, T)),
    "bool array": (lambda s, b, h, q, k, keep: np.where(keep[b, k], s, 0.0), (IDS == 1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_what_it_gives_on_arrays(name):
    function, arrays = FUNCTIONS[name]
    with np.errstate(all="ignore"):
        wanted = np.broadcast_to(function(SCORE, B, H, Q, K, *arrays), SHAPE)
    np.testing.assert_allclose(value(function, *arrays, score=SCORE), wanted, rtol=1e-14, atol=1e-14)


TRUNCATED = {
    2.9: 2, -2.9: -2, 3e9: 2**31 - 1, -3e9: -(2**31), 2147483647.5: 2**31 - 1, np.inf: 2**31 - 1, -np.inf: -(2**31),
    np.nan: 0, 0.1: 0,
}  # fmt: skip


@pytest.mark.parametrize("number", TRUNCATED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_become_ints_by_one_definition(number, dtype):
    score = np.full(SHAPE, number, dtype)
    wanted = np.full(SHAPE, TRUNCATED[number], dtype)

    def folded(s, b, h, q, k):
        return np.where(True, number, s).astype(int)

    def folded_truth(s):
        return np.where(True, number, s).astype(bool)

    for function in (lambda s, b, h, q, k: s.astype(int), folded):
        np.testing.assert_array_equal(value(function, score=score, dtype=dtype), wanted)
    for truth in (lambda s, b, h, q, k: s.astype(bool) + 0, lambda s, b, h, q, k: folded_truth(s) + 0):
        np.testing.assert_array_equal(value(truth, score=score, dtype=dtype), 1)


def test_constants_are_folded_as_arrays_would_be():
    one = SCORE.astype("float32") ** 0
    found = value(lambda s, b, h, q, k: s**0 * 0.1 * 3.0, score=SCORE.astype("float32"), dtype="float32")
    np.testing.assert_array_equal(found, one * np.float32(0.1) * np.float32(3))
    wrapped = value(lambda s, b, h, q, k: q**0 * (2**31 - 1) + 1, score=SCORE)
    np.testing.assert_array_equal(wrapped, np.full(SHAPE, -(2.0**31)))


def test_assignments_in_place_change_no_other_name():
    def in_place(score, b, h, q, k):
        start = score
        score += 1
        score *= 2
        return score - start

    np.testing.assert_allclose(value(in_place, score=SCORE), SCORE + 2, rtol=1e-14)


def test_vectors():
    def function(score, b, h, q, k, x, y, ids):
        near = np.dot(x[b, h, q], y[b, h, k]) + x[b, h, q, :] @ y[b, h, k]
        squares = np.sum(x[b, h, q] ** 2 * near) + (abs(x[b, h, q]) < 0.5).sum()
        return score + near + squares + ids[:].sum() + ids[ids[:]].sum()

    ids = np.array([1, 2, 0, 3])
    rows, columns = X[:, :, :, None], Y[:, :, None]
    near = 2 * (rows * columns).sum(-1)
    wanted = SCORE + near + (rows**2).sum(-1) * near + (abs(rows) < 0.5).sum(-1) + 12
    np.testing.assert_allclose(value(function, X, Y, ids, score=SCORE), wanted, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_arrays_are_converted_to_the_dtype_of_scores(dtype):
    table = T.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    result = value(relative, table, score=SCORE.astype("float32"), dtype="float32")
    assert result.dtype == "float32"
    np.testing.assert_array_equal(result, relative(SCORE.astype("float32"), B, H, Q, K, table.astype("float32")))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64", "uint64"])
def test_index_arrays_of_any_integer_dtype(dtype):
    result = value(mods.document, IDS.astype(dtype), role="mask_mod")
    np.testing.assert_array_equal(result, np.broadcast_to(IDS[B, Q] == IDS[B, K], SHAPE))


def test_a_function_is_traced_once_and_freed(monkeypatch, small_heap):
    calls = []
    original = tracing._traced
    monkeypatch.setattr(tracing, "_traced", lambda *given: calls.append(1) or original(*given))

    def counted(score, b, h, q, k, t):
        return score + t[h, k]

    program = traced(counted, T)
    assert traced(counted, T + 1) is program
    assert traced(counted, T[:, :1].astype("float16")) is program
    assert len(calls) == 1
    assert traced(counted, T.astype(int)) is not program
    assert len(calls) == 2
    reference = weakref.ref(counted)
    del counted
    gc.collect()
    assert reference() is None


def test_any_callable():
    class Unhashable:
        __hash__ = None

        def __call__(self, score, b, h, q, k):
            return score * 2

    def scaled(factor, score, b, h, q, k):
        return score * factor

    for function in (Unhashable(), functools.partial(scaled, 2), lambda score, *positions: score * 2):
        np.testing.assert_array_equal(value(function, score=SCORE), SCORE * 2)


@pytest.mark.parametrize(("index", "place"), [(lambda q, k: k - q, -4), (lambda q, k: k + 3, 8), (lambda q, k: 9, 9)])
def test_reading_outside_an_array_names_the_line(index, place):
    def outside(score, b, h, q, k, t):
        return score + t[h, index(q, k)]

    with pytest.raises(
        IndexError, match=rf"^score_args\[0\]: index {place} is outside of axis 1 of shape \(3, 7\) .*t\[h, i"
    ):
        value(outside, T, score=SCORE)


# ----------------------------------------------------------------------------------------------------------- refusals


def branches(score, b, h, q, k):
    if q > k:
        return score
    return 0.0


REFUSED = {
    "if": (branches, r"truth value; write np.where\(.*if q > k:"),
    "and": (lambda score, b, h, q, k: np.where(q > k and k > 2, score, 0), "truth value; .* & | ~ in place of and"),
    "chain": (lambda score, b, h, q, k: np.where(0 <= k < 3, score, 0), r"truth value; .*\(a <= x\) & \(x < b\)"),
    "min": (lambda score, b, h, q, k: min(score, 0), r"truth value; .*np.minimum\(x, y\) in place of min"),
    "math": (lambda score, b, h, q, k: __import__("math").exp(score), "no number of Python; write np.exp"),
    "int": (lambda score, b, h, q, k: int(score), r"write .*x.astype\(int\) in place of int\(x\)"),
    "list": (lambda score, b, h, q, k: score + [1.0, 2.0][h], "pass arrays and lists that are indexed as arguments"),
    "ufunc": (lambda score, b, h, q, k: np.arctan(score), "np.arctan cannot be compiled; there are absolute, "),
    "function": (lambda score, b, h, q, k: np.round(score), "np.round cannot be compiled; there are absolute, "),
    "method": (lambda score, b, h, q, k: score.clip(0, 1), "no attribute 'clip'; symbols take Python's operators"),
    "out": (lambda score, b, h, q, k: np.add(score, 1, out=score), "out= cannot be compiled; write plain calls of"),
    "reduce": (lambda score, b, h, q, k: np.add.reduce(score), "np.add.reduce cannot be compiled"),
    "where alone": (lambda score, b, h, q, k: np.where(q > k), "np.where with these arguments cannot be compiled"),
    "global": (lambda score, b, h, q, k: score + TABLE[h], "TABLE is an array; arrays are passed as arg"),
    "hidden array": (lambda score, b, h, q, k: score + [TABLE][0], "arrays are passed as arguments"),
    "hidden index": (lambda score, b, h, q, k: score + [TABLE][0][h], "[Aa]rrays are passed as arguments"),
    "float //": (lambda score, b, h, q, k: score // 2, r"floor_divide is for ints; write np.floor\(x / y\)"),
    "float %": (lambda score, b, h, q, k: score % 2, r"remainder is for ints; write x - y \* np.floor\(x / y\)"),
    "float &": (lambda score, b, h, q, k: score & 1, "bitwise_and is for ints"),
    "long int": (lambda score, b, h, q, k: score + q * 2**31, "ints have 32 bits, and 2147483648 has more"),
    "int power": (lambda score, b, h, q, k: score + q**k, "a power of ints needs a constant exponent"),
    "negative power": (lambda score, b, h, q, k: score + q**-1, "an int has no negative power; write 1.0 / x"),
    "iteration": (lambda score, b, h, q, k: sum(x for x in score), "a symbol cannot be iterated"),
    "index": (lambda score, b, h, q, k: score[0], "a symbol cannot be indexed"),
    "no vector": (lambda score, b, h, q, k: score.sum(), r"sum\(\) is of a vector: an argument that"),
    "None": (lambda score, b, h, q, k: None, "expected a score to be returned, got NoneType"),
    "bool": (lambda score, b, h, q, k: q > k, r"expected a score to be returned, got bool; write np.where"),
    "few parameters": (lambda score, b, h: score, r"of 5 parameters \(score, b, h, q, k, \*score_args\)"),
    "many parameters": (relative, r"expected a function of 5 parameters .*, got \(score, b, h, q, k, table\)"),
    "no function": (3.0, "expected a function or None, got float"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled(name):
    function, match = REFUSED[name]
    with pytest.raises(TypeError, match=f"^score_mod: (?s:.*){match}") as caught:
        traced(function)
    assert caught.type is TypeError
    if callable(function):
        assert "test_functions.py:" in str(caught.value), "the line is named"


ARGUMENTS_REFUSED = {
    "whole": (lambda score, b, h, q, k, t: score + t, r"t has 2 axes; write t\[b, h\]"),
    "whole first": (lambda score, b, h, q, k, t: t + score, r"t has 2 axes; write t\[b, h\]"),
    "returned": (lambda score, b, h, q, k, t: t, "expected a score to be returned, got the array itself"),
    "three": (lambda score, b, h, q, k, t: score + t[b, h, q], "t: expected 2 indices for an element, or 1"),
    "vector": (lambda score, b, h, q, k, t: score + t[h], r"a vector is returned; write .sum\(\) or np.dot"),
    "dot": (lambda score, b, h, q, k, t: np.dot(t[h], score), "np.dot is of two vectors"),
    "float index": (lambda score, b, h, q, k, t: t[h, score], r"t: an index is an int; write np.floor\(x\).ast"),
    "negative": (lambda score, b, h, q, k, t: score + t[h, -1], "t: the index -1 is outside; indices count"),
    "slice": (lambda score, b, h, q, k, t: t[h, 1:].sum(), "t: indices are ints; only the last one"),
    "first axis": (lambda score, b, h, q, k, t: t[:, h], "t: indices are ints; only the last one"),
    "shape": (lambda score, b, h, q, k, t: score + t.shape[0], "t.shape is not known here; pass numbers"),
    "len": (lambda score, b, h, q, k, t: score + len(t), "t has no length here; pass it through the closure"),
    "loop": (lambda score, b, h, q, k, t: next(score for _ in t), "t cannot be iterated"),
    "text index": (lambda score, b, h, q, k, t: score + t[h, "x"], "t: an index is an int, got str"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS_REFUSED)
def test_uses_of_arrays_that_cannot_be_compiled(name):
    function, match = ARGUMENTS_REFUSED[name]
    with pytest.raises(TypeError, match=rf"^score_mod: {match}(?s:.*)test_functions\.py:\d+: .*lambda score"):
        traced(function, T)


@pytest.mark.parametrize("result", [lambda b, h, q, k: q - k, lambda b, h, q, k: 0.5, lambda b, h, q, k: (q, k)])
def test_a_mask_function_returns_a_truth_value(result):
    with pytest.raises(TypeError, match="^mask_mod: expected a truth value to be returned, got (int|float|tuple)"):
        traced(result, role="mask_mod")
    assert traced(lambda b, h, q, k: True, role="mask_mod").result.value is True


def test_an_array_in_the_closure():
    table = TABLE.copy()
    with pytest.raises(TypeError, match="^mask_mod: table is an array; arrays are passed as arguments, mask_args"):
        traced(lambda b, h, q, k: table[0] > q, role="mask_mod")


def test_errors_of_the_function_itself_are_its_own():
    def broken(score, b, h, q, k):
        return score / (1 // 0)

    with pytest.raises(ZeroDivisionError):
        traced(broken)


def test_lengths_of_vectors():
    program = traced(lambda score, b, h, q, k, x, y: score + np.dot(x[q], y[k]), numbers(5, 4), numbers(6, 4))
    program.check_lengths((numbers(5, 9), numbers(6, 9)))
    with pytest.raises(ValueError, match=r"^score_args\[1\]: expected a last axis of 4 like score_args\[0\], got 5"):
        program.check_lengths((numbers(5, 4), numbers(6, 5)))
    with pytest.raises(ValueError, match=r"^score_args\[0\]: vectors of up to 256 elements are summed, got 257"):
        program.check_lengths((numbers(5, 257), numbers(6, 257)))


@pytest.mark.parametrize("dtype", ["complex64", "U1", ml_dtypes.float8_e4m3fn])
def test_dtypes_of_arguments(dtype):
    with pytest.raises(TypeError, match=r"^x: expected bools, ints, or floats of dtype float16, bfloat16, .* got "):
        argument_kind("x", np.zeros(3, dtype))


# -------------------------------------------------------------------------------------------------------- derivatives


ARRAYS = (T, numbers(2, 3, 5, seed=5), numbers(5, 4, seed=6), numbers(6, 4, seed=7))

_LEAVES = st.sampled_from(
    [
        "score", "score", "table[h, np.clip(k - q, -3, 3) + 3]", "bias[b, h, q]", "np.dot(x[q], y[k])", "x[q].sum()",
        "(x[q] * np.tanh(y[k] * score)).sum()", "(q - k)", "0.7", "-1.3", "x[k % 5, (q + k) % 4]",
        "np.dot(x[q] * np.dot(x[q], y[k]), x[k % 5])",
    ]
)  # fmt: skip


def _grown(inner):
    unary = [
        "-{}", "abs({})", "np.tanh({})", "np.sin({})", "np.cos({})", "np.exp(np.tanh({}))", "np.exp2(np.sin({}))",
        "np.log(1.5 + np.sin({}))", "np.log1p(np.square_({}))", "np.sqrt(0.5 + np.square_({}))",
        "np.clip({}, -0.8, 0.9)", "np.floor({})", "({}) ** 3",
        "(2 + np.tanh({})) ** -1.5", "({}) / 3", "2 / (3 + np.cos({}))",
    ]  # fmt: skip
    binary = [
        "({} + {})", "({} - {})", "({} * {})", "({} / (2 + np.sin({})))", "np.minimum({}, {})", "np.maximum({}, {})",
        "np.where(q < k, {}, {})", "np.power(2 + np.sin({}), np.tanh({}))",
    ]  # fmt: skip
    return st.one_of(
        st.builds(lambda form, x: form.format(x), st.sampled_from(unary), inner),
        st.builds(lambda form, x, y: form.format(x, y), st.sampled_from(binary), inner, inner),
        st.builds("np.where({} < {}, {}, np.sqrt(abs({})))".format, inner, inner, inner, inner),
    )


EXPRESSIONS = st.recursive(_LEAVES, _grown, max_leaves=6)


def compiled(expression: str):
    """Returns a function of an expression; ``np.square_`` in its text stands for a product."""
    text = expression.replace("np.square_", "square")
    names = {"np": np, "square": lambda x: x * x}
    exec(f"def function(score, b, h, q, k, table, bias, x, y):\n    return 1.0 * ({text})", names)
    return names["function"]


def quotient(of, step: float):
    return (of(step) - of(-step)) / (2 * step)


@given(expression=EXPRESSIONS, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_derivatives_are_those_of_finite_differences(expression, seed):
    function = compiled(expression)
    score, weights = numbers(*SHAPE, seed=seed), numbers(*SHAPE, seed=seed + 100)
    with np.errstate(all="ignore"):
        slope = np.broadcast_to(evaluation(function, *ARRAYS, score=score).slope(), SHAPE)

        def moved(step: float) -> np.ndarray:
            return value(function, *ARRAYS, score=score + step)

        fine, coarse = quotient(moved, 1e-6), quotient(moved, 4e-6)
        smooth = abs(fine - coarse) <= 1e-6 * (1 + abs(fine))  # no kink, jump or pole is near
        assume(smooth.mean() > 0.8)
        np.testing.assert_allclose(slope[smooth], fine[smooth], rtol=2e-5, atol=2e-5)

        ways = [numbers(*array.shape, seed=seed + 200 + i) for i, array in enumerate(ARRAYS)]

        def along(step: float) -> float:
            moved_arrays = [array + step * way for array, way in zip(ARRAYS, ways, strict=True)]
            return (value(function, *moved_arrays, score=score) * weights).sum()

        fine, coarse = quotient(along, 1e-6), quotient(along, 4e-6)
        assume(abs(fine - coarse) <= 1e-5 * (1 + abs(fine)))
        found = gradients(function, weights, score, *ARRAYS)
        total = sum((gradient * way).sum() for gradient, way in zip(found, ways, strict=True))
        np.testing.assert_allclose(total, fine, rtol=1e-4, atol=1e-4)


def test_a_branch_that_is_not_taken_adds_no_nan():
    def root(score, b, h, q, k, t):
        return np.where(t[h, k] > 0, np.sqrt(t[h, k] * score), score)

    t = np.abs(T) * (np.arange(7) % 2)
    score = abs(SCORE)
    with np.errstate(all="ignore"):
        slope = evaluation(root, t, score=score).slope()
        (found,) = gradients(root, np.ones(SHAPE), score, t)
    assert np.isfinite(slope).all()
    assert np.isfinite(found).all()
    assert found[:, 1].all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", EDGES)
def test_derivatives_at_edges(name, dtype):
    score, wanted = at_edges(name, SHAPE, dtype)
    program = traced(EDGES[name][0])
    with np.errstate(all="ignore"):
        e = Evaluation(program, (), dtype, np, score=score, b=np.int32(0), h=H, q=Q, k=K)
        np.testing.assert_allclose(np.broadcast_to(e.slope(), SHAPE), wanted, rtol=1e-6, atol=1e-30)


def test_every_rule_is_tried_at_edges():
    nodes = {node.op for name in EDGES for node in reachable([traced(EDGES[name][0]).result])}
    assert set(derivatives._RULES) <= nodes


def learned_power(score, b, h, q, k, a, p):
    return score - a[h] * np.power(1.0 * abs(k - q), p[h])


def power_of_scores(score, b, h, q, k, p):
    return score * abs(score) ** p[h] + np.power(score * score, p[h])


def root_of_dot(score, b, h, q, k, x):
    return score + np.sqrt(np.dot(x[q], x[k]))


@pytest.mark.parametrize("exponents", [(0.0, 1.0), (0.5, 2.0)])
def test_gradients_where_a_learned_exponent_meets_0(exponents):
    rng = np.random.default_rng(5)
    q, k, v, do = (rng.standard_normal((1, 6, 2, 4)) for _ in range(4))
    a, p = np.array([0.3, -0.2]), np.array(exponents)

    def loss(step: float) -> float:
        moved = np.array([p[0] + step, p[1]])
        return (fa2cupy.forward(q, k, v, score_mod=learned_power, score_args=(a, moved))[0] * do).sum()

    def gradients_of(function, *arrays):
        options = {"score_mod": function, "score_args": arrays}
        o, lse = fa2cupy.forward(q, k, v, **options)
        return fa2cupy.backward(q, k, v, o, lse, do, return_dscore_args=True, **options)

    found = gradients_of(learned_power, a, p)
    assert all(np.isfinite(x).all() for x in found)
    if exponents[0]:  # 0 ** p jumps at p = 0
        np.testing.assert_allclose(found[4][0], (loss(1e-6) - loss(-1e-6)) / 2e-6, rtol=1e-6)
    q[:, 2] = 0
    assert all(np.isfinite(x).all() for x in gradients_of(power_of_scores, p))
    *_, of_root = gradients_of(root_of_dot, np.zeros((6, 3)))
    assert not of_root.any()


def test_what_has_no_derivative():
    program = traced(lambda score, b, h, q, k, t: np.floor(t[h, k] + score) + (score > t[h, q]) + q, T)
    assert program.slope is None
    assert not program.scatters
    assert traced(lambda score, b, h, q, k, ids: score + ids[b, q], IDS).scatters == []


def test_reductions_along_axes_that_no_index_has():
    tile = numbers(*SHAPE)
    assert reduced(tile, (H,)).shape == (1, 3, 1, 1)
    assert reduced(tile, (np.int32(1),)).shape == (1, 1, 1, 1)
    assert reduced(tile, (B, H, K[0])).shape == (2, 3, 1, 6)


# --------------------------------------------------------------------------------------------------------------- text


def text_in_another_process(seed: int, statements: str = "") -> str:
    code = textwrap.dedent(
        f"""
        import numpy as np
        from fa2cupy.functions.tracing import ArgumentKind, trace
        {statements}
        def relative(score, b, h, q, k, table, x):
            score = 20 * np.tanh(score / 20) + table[h, np.clip(k - q, -3, 3) + 3] * np.dot(x[q], x[k])
            return np.where((q >= k) & (h > 0), score, -np.inf)
        print(trace("score_mod", relative, (ArgumentKind(2, "float"), ArgumentKind(2, "float"))).text)
        """
    )
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_the_text_is_the_same_in_every_process():
    first = text_in_another_process(0)
    assert "score_value_and_slope" in first
    assert text_in_another_process(4711, "trace('mask_mod', lambda b, h, q, k: q > k, ()).text") == first


def test_the_text_does_not_depend_on_names_and_on_what_is_left_over():
    def function(score, b, h, q, k, t):
        return np.tanh(score) * t[h, k] * np.tanh(score)

    def renamed(s, batch, head, query, key, table):
        unused = np.exp(s) + table[head, query] * query
        bounded = np.tanh(s)
        assert unused is not bounded
        return bounded * table[head, key] * bounded

    assert traced(function, T).text == traced(renamed, T).text
    assert (traced(function, T), hash(traced(function, T))) == (traced(renamed, T), hash(traced(renamed, T)))


def test_common_subexpressions_are_computed_once():
    def function(score, b, h, q, k):
        return np.tanh(score / 4) + 3 * np.tanh(score * 0.25) + np.exp(q + k) + np.exp(k + q)

    value_text, *_ = traced(function).text.split("score_value_and_slope")
    assert value_text.count("tanh_of<") == value_text.count("exp_of<") == 1


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda s, b, h, q, k: s * 1 - 0, "return score;"),
        (lambda s, b, h, q, k: s + 0, "score + Real(0.0)"),
        (lambda s, b, h, q, k: s + -0.0, "return score;"),
        (lambda s, b, h, q, k: s - -0.0, "score - Real(-0.0)"),
        (lambda s, b, h, q, k: s + (q + 0), "static_cast<Real>(q)"),
        (lambda s, b, h, q, k: np.where(True, s, 0.0), "return score;"),
        (lambda s, b, h, q, k: s + np.exp(0.0) - 1, "return t2;"),
        (lambda s, b, h, q, k: s / 4, "score * Real(0.25)"),
        (lambda s, b, h, q, k: s / 7, "score * Real(0.14285714285714285)"),
        (lambda s, b, h, q, k: np.floor(s / 7), "score / Real(7.0)"),
        (lambda s, b, h, q, k: s / 0.0, "score / Real(0.0)"),
        (lambda s, b, h, q, k: s / 1e300, "score / Real(1e+300)"),
        (lambda s, b, h, q, k: np.negative(-s), "return score;"),
        (lambda s, b, h, q, k: s * 0, "score * Real(0.0)"),
        (lambda s, b, h, q, k: s - np.inf, "score - infinity<Real>()"),
        (lambda s, b, h, q, k: s + 7 // 2 * -2, "score + Real(-6.0)"),
    ],
)
def test_simplification(function, wanted):
    assert wanted in traced(function).text.split("score_value_and_slope")[0]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda b, h, q, k: k <= q, "0 <= distance;"),
        (lambda b, h, q, k: q > k - 3, "-3 < distance;"),
        (lambda b, h, q, k: q - 5 < k, "distance < 5;"),
        (lambda b, h, q, k: 2 - q >= 7 - k, "distance <= -5;"),
        (lambda b, h, q, k: q == k + 1, "distance == 1;"),
        (lambda b, h, q, k: k - q != 0, "0 != distance;"),
        (lambda b, h, q, k: abs(q - k) < 9, "-9 < distance;"),
        (lambda b, h, q, k: abs(q - k) <= b, "absolute(distance);"),
        (lambda b, h, q, k: (k - q + 4) % 5 == 0, "= 4 - distance;"),
        (lambda b, h, q, k: (q + 1 - (k - 1)) % 5 == 0, "= distance + 2;"),
    ],
)
def test_what_depends_on_the_distance_alone_is_written_in_terms_of_it(function, wanted):
    text = traced(function, role="mask_mod").text
    assert text.count("const int32 distance = q - k;") == 1
    assert wanted in text
    assert " q " not in text.split("distance = q - k;")[1]


@pytest.mark.parametrize("bound", (-(2**31), -1, 0, 1, 3, 2**31 - 1))
@pytest.mark.parametrize("function", (lambda x, bound: abs(x) <= bound, lambda x, bound: abs(x) < bound))
def test_a_bounded_magnitude_is_a_range(function, bound):
    positions = np.arange(-4, 5)[:, None], np.arange(3)
    program = traced(lambda b, h, q, k: function(q // 2 - k, bound), role="mask_mod")
    assert "absolute" not in program.text
    evaluation = Evaluation(program, (), "float64", np, b=0, h=0, q=positions[0], k=positions[1])
    seen = np.broadcast_to(evaluation.result(), (9, 3))
    assert np.array_equal(seen, function(positions[0] // 2 - positions[1], bound))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: q + k < 5,
        lambda b, h, q, k: 2 * q - k < 5,
        lambda b, h, q, k: q - (k + k) < 5,
        lambda b, h, q, k: q < 5,
        lambda b, h, q, k: q - k + b < 5 + b,
        lambda b, h, q, k: 1.0 * q < k,
    ],
)
def test_what_depends_on_more_is_not(function):
    assert "distance <" not in traced(function, role="mask_mod").text


def test_the_distance_is_declared_where_the_slope_does_not_need_it():
    text = traced(lambda s, b, h, q, k: s * s - (q - k) * k).text
    for name in ("score_value", "score_value_and_slope"):
        own = text.split(f" {name}(")[1].split("\n}")[0]
        assert own.count("const int32 distance = q - k;") == 1


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda s, b, h, q, k: s + (q - k), "= real_distance.plus(0);"),
        (lambda s, b, h, q, k: s + 0.5 * (3 - k + q), "= real_distance.plus(3);"),
        (lambda s, b, h, q, k: s / (k - q - 4), "= real_distance.from(-4);"),
        (lambda s, b, h, q, k: s - 0.5 * abs(q + 2 - k), "= absolute(real_distance.plus(2));"),
        (lambda s, b, h, q, k: abs(k - q + 2) * s, "= absolute(real_distance.plus(-2));"),
    ],
)
def test_a_distance_in_floating_point_is_converted_once(function, wanted):
    whole = traced(function).text
    for name in ("score_value", "score_value_and_slope"):
        text = whole.split(f" {name}(")[1].split("{")[1].split("\n}")[0]
        assert text.count("real_distance") == text.count(wanted) == 1
        assert "static_cast" not in text
        assert "int32" not in text


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + (q + k),
        lambda s, b, h, q, k: s + 2 * (q - k),
        lambda s, b, h, q, k: s + (q - k + h),
        lambda s, b, h, q, k: s + np.maximum(q - k, 0),
        lambda s, b, h, q, k: s + q,
    ],
)
def test_other_ints_are_converted_each(function):
    value = traced(function).text.split(" score_value(")[1].split("{")[1].split("\n}")[0]
    assert "real_distance" not in value
    assert "static_cast<Real>" in value


def test_the_gradients_of_arguments_know_no_distance_in_floating_point():
    text = traced(lambda s, b, h, q, k, t: s + t[h] * abs(q - k), np.ones(3, "float32")).text
    assert "real_distance" not in text.split("add_argument_gradients")[1]


@pytest.mark.parametrize(
    ("function", "adding"),
    [
        (lambda s, b, h, q, k, t, u: s * t[0], ["add_element_of_warp"]),
        (lambda s, b, h, q, k, t, u: s + t[h] * (q - k) + t[b], ["add_element_of_warp"] * 2),
        (lambda s, b, h, q, k, t, u: s + t[q], ["move_to", "end"]),
        (lambda s, b, h, q, k, t, u: s + t[q - k], ["begin", "move_to", "end"]),
        (lambda s, b, h, q, k, t, u: s + t[abs(k - q + b) // (h + 1)] * q, ["begin", "move_to", "end"]),
        (lambda s, b, h, q, k, t, u: s + t[abs(k - q) // (q + 1)], ["move_to", "end"]),
        (lambda s, b, h, q, k, t, u: s * t[k % 3] + t[0], ["move_to", "end", "add_element_of_warp"]),
        (lambda s, b, h, q, k, t, u: s + np.dot(u[q], u[k]) * t[0], ["atomicAdd"] * 2 + ["add_element_of_warp"]),
    ],
)
def test_lanes_sum_gradients_before_they_add_them_to_memory(function, adding):
    """An atomic addition for each score would round once for each, and take longer."""
    text = traced(function, np.ones(3, "float32"), np.ones((3, 4), "float32")).text
    assert re.findall(r"\b(atomicAdd|add_element_of_warp|begin|move_to|end)\(", text) == adding


@pytest.mark.parametrize(
    ("function", "adds"),
    [
        (lambda s, b, h, q, k: s - 3 * abs(q - k), True),
        (lambda s, b, h, q, k: s, True),
        (lambda s, b, h, q, k: 2 * s, False),
        (lambda s, b, h, q, k: np.where(k > q, -np.inf, s), False),
        (lambda s, b, h, q, k: 1.0 * q, False),
    ],
)
def test_whether_the_derivative_is_one(function, adds):
    assert traced(function).adds is adds


@pytest.mark.parametrize(
    ("function", "shifts"),
    [
        (lambda s, b, h, q, k: s - 3 * abs(q - k), True),
        (lambda s, b, h, q, k: s, True),
        (lambda s, b, h, q, k: h + (q * q + (s - b)), True),
        (lambda s, b, h, q, k: 2 * s, False),
        (lambda s, b, h, q, k: 1 - s, False),
        (lambda s, b, h, q, k: s + np.floor(s), False),  # although its derivative is 1
        (lambda s, b, h, q, k: q + (s - s * h), False),
        (lambda s, b, h, q, k: np.where(k > q, s, s + 1), False),
        (lambda s, b, h, q, k: 1.0 * q, False),
    ],
)
def test_whether_a_function_adds_what_no_score_changes(function, shifts):
    program = traced(function)
    assert program.shifts is shifts
    assert program.adds or not shifts


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda b, h, q, k, t: t[b, q] == t[b, k], True),
        (lambda b, h, q, k, t: k < t[h, abs(q - k)], True),
        (lambda b, h, q, k, t: t[q].sum() > 0, True),
        (lambda b, h, q, k, t: k < t[b, h], False),
        (lambda b, h, q, k, t: q - k < 5, False),
    ],
)
def test_whether_a_mask_reads_by_position(function, reads):
    assert traced(function, T, role="mask_mod").reads_by_position is reads


def test_a_mask_shifts_no_score():
    assert not traced(lambda b, h, q, k: q < k, role="mask_mod").shifts


@pytest.mark.parametrize(
    ("function", "cap"),
    [
        (mods.softcap(30), 30.0),
        (mods.softcap(0.7), 0.7),
        (lambda s, b, h, q, k: np.tanh(s * 0.125) * 8.0, 8.0),
        (lambda s, b, h, q, k: np.tanh(s * (1 / 7)) * 7, 7.0),
        (lambda s, b, h, q, k: np.tanh(s), None),
        (lambda s, b, h, q, k: 8 * np.tanh(s), None),
        (lambda s, b, h, q, k: 8 * np.tanh(s / 7), None),
        (lambda s, b, h, q, k: 8 * np.tanh(q / 8), None),
        (lambda s, b, h, q, k: 8 * np.sin(s / 8), None),
        (lambda s, b, h, q, k: 8 * np.tanh(s / 8) + 1, None),
        (lambda s, b, h, q, k: s * np.tanh(s / 8), None),
        (mods.softcap(-3.0), None),
        (mods.softcap(1e-300), None),
    ],
)
def test_which_functions_are_soft_caps(function, cap):
    assert traced(function).soft_cap == cap


# -------------------------------------------------------------------------------------------------------------- terms

TOKENS, LENGTHS = np.zeros((2, 5), "int32"), np.zeros(2, "int32")


@pytest.mark.parametrize(
    ("function", "arguments", "of_q", "of_k"),
    [
        (mods.document, (TOKENS,), ["args.array0, b, q"], ["args.array0, b, k"]),
        (mods.neighborhood_2d(9, 2), (), ["divide(q, 9)", "modulo(q, 9)"], ["divide(k, 9)", "modulo(k, 9)"]),
        (mods.neighborhood((4, 9), (3, 5)), (), ["divide(q, 9)", "least(t"], ["divide(k, 9)", "modulo(k, 9)"]),
        (mods.sliding_window(9), (), [], []),
        (mods.dilated_window(9, 3), (), [], []),
        (mods.prefix_lm, (LENGTHS,), [], []),
        (lambda b, h, q, k, t: t[b, 2 * k + 1] + 3 < q, (TOKENS,), [], ["args.array0, b, t"]),
        (lambda b, h, q, k, t: np.where(k > q, t[b, k] > 0, t[b, k] > q), (TOKENS,), [], ["args.array0, b, k", "0 <"]),
        (lambda b, h, q, k, t: t[b, k] > 0, (TOKENS,), [], ["args.array0, b, k"]),
        (lambda b, h, q, k, t: t[q, k] > 0, (TOKENS,), [], []),
        (lambda b, h, q, k, t: t[q].sum() > k, (TOKENS,), ["for (int32 j"], []),
        (lambda b, h, q, k, t: np.dot(t[q], t[k]) > 0, (TOKENS,), [], []),
        (lambda b, h, q, k: np.sin(q) < np.sin(k), (), ["sin("], ["sin("]),
        (lambda b, h, q, k: q % 2 + q % 3 * k + q % 5 * k * k + q % 7 * k**3 + q % 11 * k**4 > 0, (), [], []),
    ],
)
def test_what_depends_on_one_position_alone_is_a_term(function, arguments, of_q, of_k):
    text = traced(function, *arguments, role="mask_mod").text
    texts = {name: text.split(f" {name}_terms(")[1].split("\n}")[0] for name in ("query", "key")}
    for name, wanted in (("query", of_q), ("key", of_k)):
        assert ("return {};" in texts[name]) is (not wanted)
        assert all(part in texts[name] for part in wanted)
    of_pairs = text.split("is_visible(")[1]
    assert not any(part in of_pairs for part in (*of_q, *of_k) if "args" in part or "(" in part)


@pytest.mark.parametrize(
    ("function", "terms", "value"),
    [
        (mods.t5_relative(8), ["element<Real>(args.array0, t8, h);"], "score + of_distance.term0;"),
        (lambda s, b, h, q, k, t: s + t[h, q - k], ["element<Real>(args.array0, h, distance);"], "score + of_dist"),
        (lambda s, b, h, q, k, t: s * np.sin(k - q), ["sin("], "score * of_distance.term0;"),
        (lambda s, b, h, q, k, t: s + np.where(k > q, t[h, k - q], -1.0), ["distance < 0", "element<"], "score + of_d"),
        (lambda s, b, h, q, k, t: s + t[abs(q - k)].sum(), ["absolute(distance)", "for (int32 j"], "score + of_dist"),
        (lambda s, b, h, q, k, t: s + t[h, q - k] + t[b, k - q], ["h, distance", "b, t"], "of_distance.term1"),
        (lambda s, b, h, q, k, t: s - t[b, h] * abs(q - k), [], "absolute(real_distance"),
        (lambda s, b, h, q, k, t: s + t[h, q], [], "h, q)"),
        (lambda s, b, h, q, k, t: s + t[h, q + k], [], "h, t1)"),
        (lambda s, b, h, q, k, t: s + t[k, q - k], [], "k, distance)"),
        (lambda s, b, h, q, k, t: s + np.sin(s + (q - k)), [], "sin("),
        (lambda s, b, h, q, k, t: s + np.dot(t[q - k], t[k]), [], "for (int32 j"),
    ],
)
def test_what_a_score_depends_on_by_the_distance_alone_is_a_term(function, terms, value):
    text = traced(function, T).text
    of_distance = text.split(" distance_terms(")[1].split("\n}")[0]
    assert ("return {};" in of_distance) is (not terms)
    assert all(part in of_distance for part in terms)
    assert "real_distance" not in of_distance
    for name in ("score_value", "score_value_and_slope"):
        of_pairs = text.split(f" {name}(")[1].split("\n}")[0]
        assert value in of_pairs
        assert not any(part in of_pairs for part in terms if "(" in part)


@pytest.mark.parametrize(
    ("function", "terms", "value"),
    [
        (lambda s, b, h, q, k, t: s - t[b, h] * abs(q - k), ["element<Real>(args.array0, b, h);"], "of_head.term0 * "),
        (lambda s, b, h, q, k, t: s * (1 + np.sin(t[h, 2])), ["element<", "sin("], "* of_head.term0;"),
        (lambda s, b, h, q, k, t: s + t[h].sum() * q, ["for (int32 j"], "of_head.term0 * "),
        (lambda s, b, h, q, k, t: s * t[0, 1] + t[h, q - k], ["element<"], "* of_head.term0;"),
        (lambda s, b, h, q, k, t: s + t[h, q], [], "element<"),
        (lambda s, b, h, q, k, t: s + (b - h), [], "t1 = b - h;"),
        (lambda s, b, h, q, k, t: s + np.dot(t[h], t[k]), [], "element<"),
        (
            lambda s, b, h, q, k, t: s * t[h, 0] + q * t[h, 1] + k * t[h, 2] + s * s * t[h, 3] - s**3 * t[b, 0],
            [],
            "h, 3",
        ),
    ],
)
def test_what_a_score_depends_on_by_the_head_alone_is_a_term(function, terms, value):
    text = traced(function, T).text
    of_head = text.split(" score_head_terms(")[1].split("\n}")[0]
    assert ("return {};" in of_head) is (not terms)
    assert all(part in of_head for part in terms)
    for name in ("score_value", "score_value_and_slope"):
        of_pairs = text.split(f" {name}(")[1].split("\n}")[0]
        assert value in of_pairs
        assert not any(part in of_pairs for part in terms if "(" in part)


def test_the_slope_has_the_same_terms():
    both = traced(lambda s, b, h, q, k, t: s * t[h, q - k] + s * s, T).text.split(" score_value_and_slope(")[1]
    assert both.split("\n}")[0].count("of_distance.term0") == 2
    assert "element<" not in both.split("\n}")[0]


def test_functions_of_terms_are_short():
    assert traced(mods.t5_relative(), T).is_short
    assert traced(mods.document, TOKENS, role="mask_mod").is_short
    assert traced(lambda b, h, q, k, t: t[q].sum() > t[k].sum(), TOKENS, role="mask_mod").is_short
    assert not traced(lambda b, h, q, k, t: t[q, k] > 0, TOKENS, role="mask_mod").is_short
    assert not traced(lambda b, h, q, k, t: np.dot(t[q], t[k]) > 0, TOKENS, role="mask_mod").is_short


def test_cheap_functions_have_no_costly_parts_of_a_position_however_many():
    assert traced(mods.sliding_window(9), role="mask_mod").is_cheap
    for count in (1, 4, 5):

        def quotients(b, h, q, k, count=count):
            return functools.reduce(operator.and_, (q // (2 + n) >= k for n in range(count)))

        program = traced(quotients, role="mask_mod")
        assert program.is_short and len(program.terms.of_q) == (count if count <= 4 else 0)
        assert not program.is_cheap


def test_a_program_shows_what_it_is():
    program = traced(mods.causal(), role="mask_mod")
    assert str(program).startswith("Program(mask_mod, ")
    assert program != traced(mods.causal(1), role="mask_mod")
    assert program == tracing.trace("mask_mod", lambda b, h, q, k: k <= q, ())
    assert program.depends_on("q")
    assert not program.depends_on("b")


#: Mask functions, and the least and the largest k - q of the keys that they show.
BANDS = [
    (lambda b, h, q, k: k <= q, (None, 0)),
    (lambda b, h, q, k: k < q, (None, -1)),
    (lambda b, h, q, k: q >= k, (None, 0)),
    (lambda b, h, q, k: q > k, (None, -1)),
    (lambda b, h, q, k: k - q <= 3, (None, 3)),
    (lambda b, h, q, k: 3 - k >= -q, (None, 3)),
    (lambda b, h, q, k: q - k < 5, (-4, None)),
    (lambda b, h, q, k: q - 5 < k, (-4, None)),
    (lambda b, h, q, k: k - q >= -5, (-5, None)),
    (lambda b, h, q, k: ~(k > q + 2), (None, 2)),
    (lambda b, h, q, k: np.logical_not(k < q - 2), (-2, None)),
    (lambda b, h, q, k: (q - k < 5) & (k <= q), (-4, 0)),
    (lambda b, h, q, k: (k <= q) & (k <= q - 2) & (k >= q - 7) & (k >= q - 6), (-6, -2)),
    (lambda b, h, q, k: abs(q - k) <= 4, (-4, 4)),
    (lambda b, h, q, k: abs(k - q - 2) < 4, (-1, 5)),
    (lambda b, h, q, k: q == k, (0, 0)),
    (lambda b, h, q, k: k == q + 3, (3, 3)),
    (lambda b, h, q, k: q == k + 3, (-3, -3)),
    (lambda b, h, q, k: (k < q) & (k > q), (1, -1)),
    (lambda b, h, q, k: mods.sliding_window(5, 2, 1)(b, h, q, k) & mods.causal(2)(b, h, q, k), (-4, 2)),
]


@pytest.mark.parametrize("number", range(len(BANDS)))
def test_bands_are_found(number):
    function, limits = BANDS[number]
    found = traced(function, role="mask_mod").known
    assert found == limits
    q, k = np.arange(20)[:, None], np.arange(20)
    least, most = (other if x is None else x for x, other in zip(found, (-99, 99), strict=True))
    np.testing.assert_array_equal(function(0, 0, q, k), (least <= k - q) & (k - q <= most))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (k <= q) | (k < 4),
        lambda b, h, q, k: (k <= q) & (h > 0),
        lambda b, h, q, k: k <= q + b,
        lambda b, h, q, k: k + q <= 9,
        lambda b, h, q, k: k <= 9,
        lambda b, h, q, k: 2 * k <= q,
        lambda b, h, q, k: k != q,
        lambda b, h, q, k: ~((k <= q) & (k >= q - 3)),
        lambda b, h, q, k: ~(k == q),
        lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),
        lambda b, h, q, k: k // 8 <= q // 8,
        lambda b, h, q, k: 1.0 * k <= q,
        lambda b, h, q, k: (k <= q) == (k < 4),
        lambda b, h, q, k: abs(q - k) >= 4,
        lambda b, h, q, k: True,
    ],
)
def test_other_functions_are_no_bands(function):
    assert traced(function, role="mask_mod").known is None


def test_a_band_of_an_array_is_none():
    assert traced(lambda b, h, q, k, reach: q - k < reach[h], np.array([3, 4]), role="mask_mod").known is None


@pytest.mark.parametrize("lengths", [(9, 9), (6, 9), (9, 6)])
def test_windows_of_bands_compute_the_same(lengths):
    q, k, v, _ = fa2cupy.testing.make_inputs("float64", seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=4)
    has_window = 0
    for function, limits in BANDS:
        window = Band(*limits).window(lengths[1] - lengths[0])
        if window is not None:
            has_window += 1
            for one, other in zip(
                fa2cupy.forward(q, k, v, mask_mod=function), fa2cupy.forward(q, k, v, window=window), strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=1e-14, atol=1e-14)
    assert 3 < has_window < len(BANDS)
