"""Functions of many operations: a trace is a graph, and all that is asked of it takes one visit of each node."""

from __future__ import annotations

import contextlib
import functools
import sys
import tracemalloc

import numpy as np
import pytest
from support.traced_cases import ready_made

from fa2cupy import mods
from fa2cupy.functions.evaluation import Evaluation, add_elements
from fa2cupy.functions.tracing import ArgumentKind, Program, argument_kind, trace

TABLE = (ArgumentKind(2, "float"),)


@contextlib.contextmanager
def at_most(calls: int):
    """Raises in the body once it has called Python functions more often than that: time depends on the machine."""
    made = 0

    def count(frame, event, argument) -> None:
        nonlocal made
        made += event == "call"
        if made > calls:
            sys.setprofile(None)
            raise AssertionError(f"more than {calls} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def doubled(x, times):
    for _ in range(times):
        x = x + x
    return x


def differences(x, y, times):
    for _ in range(times):
        x, y = y, x - y
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s + doubled(q - k, 60) % 7,
        lambda s, b, h, q, k: s + np.sin(differences(q - k, k - q, 60)),
        lambda s, b, h, q, k: s * np.where(differences(q, k, 60) < doubled(k, 40), 1.0, 2.0),
    ],
)
def test_chains_of_distances_take_one_visit_of_each_node(function):
    with at_most(40_000):
        assert "score_value" in trace("score_mod", function, ()).text


def deep(s, b, h, q, k):
    for _ in range(10_000):
        s = s + 0.0625
    return s


def deep_ints(s, b, h, q, k):
    for number in range(2, 3_300):
        q = q + (k + b) % number
    return s + q


def wide(s, b, h, q, k):
    parts = [(q + b) % number for number in range(2, 5_002)]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return s * parts[0]


def diamonds(s, b, h, q, k):
    x, y = s * 0.125, q - k + 0.5 * s
    for _ in range(1_700):
        x, y = np.sin(y) * x, np.cos(x) - y
    return x + y


def diamonds_of_masks(b, h, q, k):
    x, y = q > k, k % 3 == b
    for number in range(2, 2_102):
        x, y = np.where((q + k) % number == 1, x, y), x ^ y
    return x | y


LARGE = [deep, deep_ints, wide, diamonds, diamonds_of_masks]


@functools.lru_cache(maxsize=None)
def traced(function) -> Program:
    return trace("mask_mod" if function is diamonds_of_masks else "score_mod", function, ())


@pytest.mark.sample(function=(deep, diamonds))
@pytest.mark.parametrize("function", LARGE)
def test_the_text_of_10_000_nodes_takes_a_few_calls_for_each(function):
    program = traced(function)
    assert 9_900 < len(program.graph) < 40_000  # with those of the derivative
    # Counting calls takes longer than the calls.
    with at_most(80 * len(program.graph)) if function in (deep, diamonds_of_masks) else contextlib.nullcontext():
        text = program.text
        assert (program.shifts, program.is_short, program.soft_cap) == (function in (deep, deep_ints), False, None)
        assert program.reads_by_position is False
        assert program.depends_on("q") is (function is not deep)
    assert max(map(len, text.splitlines())) < 300, "a compiler recurses into the operands of a statement"


@pytest.mark.parametrize("function", LARGE)
def test_10_000_nodes_on_numpy(function):
    program = traced(function)
    positions = {"b": 1, "h": 2, "q": np.arange(3)[:, None], "k": np.arange(4)}
    scores = np.linspace(-1, 1, 12).reshape(3, 4)
    inputs = positions if function is diamonds_of_masks else {"score": scores, **positions}
    evaluation = Evaluation(program, (), "float64", np, **inputs)
    np.testing.assert_allclose(np.broadcast_to(evaluation.result(), (3, 4)), function(*inputs.values()), rtol=1e-12)
    if function is diamonds:
        step = 1e-7
        finite = (function(scores + step, *positions.values()) - function(scores - step, *positions.values())) / 2e-7
        np.testing.assert_allclose(evaluation.slope(), finite, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("function", [deep, wide])
def test_10_000_nodes_on_numpy_hold_few_tiles(function):
    tile = np.zeros((100, 100))
    evaluation = Evaluation(traced(function), (), "float64", np, score=tile, b=0, h=0, q=0, k=0)
    tracemalloc.start()
    evaluation.result()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (10 if function is deep else 5000) * tile.nbytes


def test_a_long_program_with_loops_has_the_values_and_derivatives_of_a_short_one():
    def short(s, b, h, q, k, x, y):
        product = np.dot(np.sin(x[q]) * s, y[k])
        return product * product + x[q].sum() * s + y[k, 1]

    def long(s, b, h, q, k, x, y):
        result = short(s, b, h, q, k, x, y)
        for number in range(1, 1001):
            result = result + np.where(q > k + number + 5, s, x[q, 0])
        return result - 1000 * x[q, 0]

    kinds = (ArgumentKind(2, "float"), ArgumentKind(2, "float"))
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((2, 3, 4))
    inputs = {"score": rng.standard_normal((3, 3)), "b": 0, "h": 0, "q": np.arange(3)[:, None], "k": np.arange(3)}
    found = [Evaluation(trace("score_mod", one, kinds), arrays, "float64", np, **inputs) for one in (short, long)]
    for _ in range(2):
        np.testing.assert_allclose(found[1].result(), found[0].result(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found[1].slope(), found[0].slope(), rtol=1e-9, atol=1e-9)
        sums = []
        for one in found:
            totals = np.zeros_like(arrays)
            for argument, indices, derivative in one.gradient_parts():
                add_elements(totals[argument], indices, np.broadcast_to(derivative, (3, 3)), np)
            sums.append(totals)
        np.testing.assert_allclose(sums[1], sums[0], rtol=1e-9, atol=1e-9)


def test_the_derivatives_by_many_elements_take_one_visit_of_each_dependent_node():
    def function(s, b, h, q, k, t):
        unrelated = doubled(s, 2_000)
        for number in range(40):
            s = s + t[number, h]
        return s + np.sin(unrelated)

    program = trace("score_mod", function, TABLE)
    with at_most(100_000):
        assert len(program.scatters) == 40


def test_t5_with_many_buckets():
    with at_most(300_000):
        function = mods.t5_relative(2048, 4096)
        text = trace("score_mod", function, TABLE).text
    assert text.count("distance_terms") == 1
    starts = [0, 511, 512, 513, 2000, 4095, 4096, 10_000]
    array = np.arange(2048)[:, None].repeat(2, axis=1)
    buckets = function(0, 0, 1, 0, np.array(starts), array)
    wanted = [d if d < 512 else 512 + int(512 * np.log(d / 512) / np.log(4096 / 512) + 1e-9) for d in starts[:-2]]
    np.testing.assert_array_equal(buckets, [0, *(1024 + d for d in wanted[1:]), 2047, 2047])


def test_a_comparison_of_ints_that_wrap_around_is_not_one_of_their_difference():
    def large(b, h, q, k):
        return (q + 2147483647) < (k - 2147483647)

    def small(b, h, q, k):
        return (q + 2**29) < (k - 2**29)

    assert "distance" not in trace("mask_mod", large, ()).text
    assert f"distance < -{2**30}" in trace("mask_mod", small, ()).text


@pytest.mark.parametrize("name", ready_made(1, 2, 3, 4))
def test_a_program_can_be_a_part_of_another_function(name):
    own = ready_made(1, 2, 3, 4)[name]
    kinds = tuple(argument_kind("array", array) for array in own.arrays)
    program = trace(own.role, own.function, kinds)
    assert trace(own.role, lambda *given: program(*given), kinds) == program


def test_a_program_with_sums_and_casts_can_be_a_part_of_another_function():
    def function(s, b, h, q, k, t, u):
        return np.where(np.dot(t[h], t[q]) > u, (s * 1.5).astype(int) + t[q].sum(), (q > k) * np.sqrt(s))

    kinds = (ArgumentKind(2, "float"), ArgumentKind(0, "float"))
    program = trace("score_mod", function, kinds)

    def moved(s, b, h, q, k, t, u, place):
        return program(s, b, h + place[0], q + place[1], k, t, u)

    def wanted(s, b, h, q, k, t, u, place):
        return function(s, b, h + place[0], q + place[1], k, t, u)

    kinds = (*kinds, ArgumentKind(1, "int"))
    assert trace("score_mod", moved, kinds) == trace("score_mod", wanted, kinds)
