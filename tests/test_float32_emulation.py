"""The promised accuracy of float32 on tensor cores, at lengths for which the interpreter is too slow."""

from __future__ import annotations

import numpy as np
import pytest
from common.accuracy import MIXTURES, check_promise, data, exact_results, mixture, orders_of
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from support.float32_emulation import Head, is_exception

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.simulator import simulated_gpu

pytestmark = pytest.mark.simulated

GRADIENTS = ("dq", "dk", "dv")
BLOCK = 64  # rows that are computed
DRAWN = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in MIXTURES.items()})


def head_of(inputs: tuple, causal: bool) -> Head:
    return Head(*(np.asarray(x)[0, :, 0] for x in inputs), causal=causal)


def of_blocks(inputs: tuple, causal: bool, exact: dict, queries: int, keys: int) -> dict:
    """Returns exact results, with a block of queries and a block of keys computed by the emulation instead."""
    head, results = head_of(inputs, causal), {name: exact[name].copy() for name in ("o", *GRADIENTS)}
    rows, columns = slice(queries, queries + BLOCK), slice(keys, keys + BLOCK)
    lse = exact["lse"].astype(np.float32)
    results["o"][rows], lse[rows] = head.forward(rows)
    delta = (head.do * results["o"].astype(np.float32)).sum(axis=1)
    results["dq"][rows] = head.of_queries(rows, lse, delta)
    results["dk"][columns], results["dv"][columns] = head.of_keys(columns, lse, delta)
    return {name: x[None, :, None] for name, x in results.items()}


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", (64, 128, 176))
@pytest.mark.parametrize("kind", ("normal", "channels"))
def test_the_kernels_compute_what_is_emulated(monkeypatch, kind, head_dim):
    """Gradients have the same bits. In the forward, exponentials are added up in another order.

    Both have the delta of the kernel that splits inputs; those of others differ in last bits.
    """
    inputs = data(kind, 190, head_dim)
    head, rows, everything = head_of(inputs, True), slice(64, 192), slice(0, 192)
    deltas = []

    def note_delta(launch):
        if launch.spec.operation == "split_gradients":
            deltas.append(launch.array("delta").copy())

    with simulated_gpu(monkeypatch, cuts_sums=True, after=note_delta):
        q, k, v, do = map(place, inputs)
        o, lse = forward(q, k, v, causal=True, precision="split")
        gradients = backward(q, k, v, o, lse, do, causal=True, precision="split", method="two_pass")
    delta = deltas[0].reshape(-1)[:190]
    o, lse = np.asarray(o)[0, :, 0], np.asarray(lse)[0, 0]
    dq, dk, dv = (np.asarray(x)[0, :, 0] for x in gradients)
    pairs = zip((o[64:], lse[64:]), head.forward(rows), strict=True)
    pairs = [*pairs, (dq[64:], head.of_queries(rows, lse, delta))]
    pairs += zip((dk, dv), head.of_keys(everything, lse, delta), strict=True)
    exact = exact_results(inputs, True)
    for name, (kernels, emulated) in zip(("o", "lse", *GRADIENTS), pairs, strict=True):
        bound = 0 if name in GRADIENTS else 1e-7
        assert abs(kernels - emulated).max() <= bound * abs(exact[name]).max(), name


@pytest.mark.sample(head_dim=(64,), growth=(30,))
@pytest.mark.parametrize("head_dim", (64, 256))
@pytest.mark.parametrize("growth", (1, 30, 300))
def test_a_backward_in_ieee_arithmetic_needs_its_own_lse_after_a_forward_in_parts(head_dim, growth):
    """Cuts of S cancel only if the backward makes them, too; the two lse differ by less than `own_lse` allows."""
    rng = np.random.default_rng(1)
    q, do = (rng.standard_normal((1, 200, 1, head_dim), dtype="float32") for _ in range(2))
    k, v = (rng.standard_normal((1, 700, 1, head_dim), dtype="float32") for _ in range(2))
    inputs = (q, k * np.linspace(growth, 0.01, 700, dtype="float32")[None, :, None, None], v, do)
    head = head_of(inputs, False)
    blocks = [head.forward(slice(first, first + BLOCK)) for first in range(0, 200, BLOCK)]
    given = np.concatenate([of_rows for _, of_rows in blocks])
    scores = (head.q @ head.k.T) * head.scale
    largest = scores.max(axis=1)
    own = largest + np.log(np.exp(scores - largest[:, None]).sum(axis=1))
    assert (abs(given - own) < 2**-20 * (1 + abs(own))).all()
    of_own, of_given = ((np.exp(scores - lse[:, None]).T @ head.do)[None, :, None] for lse in (own, given))
    check_promise(inputs, {"dv": of_own}, False)
    if growth > 1:
        with pytest.raises(AssertionError, match="dv"):
            check_promise(inputs, {"dv": of_given}, False)


@pytest.mark.sample(kind=("rows", "outliers"))
@pytest.mark.parametrize("kind", ("normal", "channels", "rows", "outliers", "large scores"))
def test_the_kernels_have_the_exceptions_of_the_emulation(monkeypatch, kind):
    inputs = data(kind, 70, 59)
    with simulated_gpu(monkeypatch):
        arrays = tuple(map(place, inputs[:3]))
        split, ieee = (forward(*arrays, causal=True, precision=name)[0] for name in ("split", "ieee"))
    assert np.array_equal(split, ieee) == is_exception(head_of(inputs, True))


@pytest.mark.sample(turn=(0,))
@pytest.mark.parametrize("turn", range(16))
def test_errors_are_those_of_float32(turn):
    """Checks inputs drawn by hypothesis, new ones in each turn. Shorter sequences are left to IEEE arithmetic."""

    @seed(turn)
    @settings(max_examples=3, deadline=None, database=None, phases=[Phase.generate])  # shrinking takes long
    @given(DRAWN, st.data())
    def run(how, draw):
        rows, head_dim = draw.draw(st.integers(128, 2048)), draw.draw(st.sampled_from((64, 128, 256)))
        causal, inputs = draw.draw(st.booleans()), mixture(turn, rows, head_dim, **how)
        if is_exception(head_of(inputs, causal)):
            return
        queries, keys = (draw.draw(st.integers(0, (rows - 1) // BLOCK)) * BLOCK for _ in range(2))
        results = of_blocks(inputs, causal, exact_results(inputs, causal), queries, keys)
        check_promise(inputs, results, causal, orders_of("mixture"))

    run()
