"""The accuracy of IEEE arithmetic for large scores and long sums, executed without a GPU.

Errors are as promised, and all kernels compute scores to the same bit.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from common.accuracy import check_promise, data
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import numbers
from support.simulated_problems import draw, small_tiles
from support.simulator import simulated_gpu

from fa2cupy import TileConfig, reference

pytestmark = pytest.mark.simulated

METHODS = ("single_pass", "two_pass")
GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch) as stages:
        yield stages


@pytest.mark.sample(dtype=("float32",))
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("kind", ("large scores", "rows", "outliers", "spread rows"))
def test_errors_are_those_of_the_formulas(launched, kind, dtype):
    inputs = tuple(map(place, data(kind, 41, 59, dtype)))
    q, k, v, do = inputs
    how = {"causal": True, "family": "simt", "config": small_tiles(dtype, 59)}
    o, lse = forward(q, k, v, **how)
    for method in METHODS:
        gradients = backward(q, k, v, o, lse, do, method=method, **how)
        results = {"o": o, **dict(zip(GRADIENTS, gradients, strict=True))}
        check_promise(inputs, results, causal=True)


def dominated(dtype: str, rows: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Returns inputs for which the key with the number of a row has a probability of exactly one in that row."""
    q, k, v, do = draw(dtype, (rows, rows), head_dim, (1, 1))
    direction = numbers((rows, head_dim), "float64")
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    for x, seed in ((q, 1), (k, 2)):
        length = np.random.default_rng(seed).uniform(3000, 4000, (rows, 1))
        x[0, :, 0] = length * direction
    return q, k, v, do


FEATURES = {
    "plain": lambda dtype, rows: {},
    "causal": lambda dtype, rows: {"causal": True},
    "softcap": lambda dtype, rows: {"softcap": 3e7},
    "alibi": lambda dtype, rows: {"alibi_slopes": place(np.full(1, 1000 / 3, dtype))},
    "bias": lambda dtype, rows: {"bias": place(1000 * numbers((1, 1, rows, rows), dtype))},
}


@pytest.mark.sample(dtype=("float32",), feature=("causal",))
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_scores_have_the_same_bits_in_all_kernels(launched, dtype, feature):
    """Checks rows that one score dominates: it is their lse. If the backward finds it, too, P is one and dV is dO."""
    rows, head_dim = 24, 59
    q, k, v, do = dominated(dtype, rows, head_dim)
    how = {"family": "simt", "config": small_tiles(dtype, head_dim), **FEATURES[feature](dtype, rows)}
    o, lse = forward(q, k, v, **how)
    np.testing.assert_array_equal(o, v)
    for method in METHODS:
        _, _, dv = backward(q, k, v, o, lse, do, method=method, **how)
        np.testing.assert_array_equal(dv, do, err_msg=method)


@pytest.mark.matrix
def test_long_sums_are_cut_in_tiles(launched):
    """Checks the errors of long sums. One chain of 2048 additions would leave 1.6e-6 and more of the largest number."""
    inputs = data("positive", 2048, 32)
    tile = TileConfig(16, 32, 2)
    for few, names in ((("q", "do"), ("o",)), (("k", "v"), ("dk", "dv"))):
        arrays = dict(zip(("q", "k", "v", "do"), inputs, strict=True))
        arrays = {name: place(x[:, :16] if name in few else x) for name, x in arrays.items()}
        q, k, v, do = arrays.values()
        o, lse = forward(q, k, v, family="simt", config=tile)
        found = {"o": o}
        if "dk" in names:
            config = {"backward_dq": tile, "backward_dkdv": TileConfig(32, 16, 2)}
            gradients = backward(q, k, v, o, lse, do, family="simt", method="two_pass", config=config)
            found = dict(zip(GRADIENTS, gradients, strict=True))
        exact_o, exact_lse = reference.forward(q, k, v)
        exact = {"o": exact_o, **dict(zip(GRADIENTS, reference.backward(q, k, v, exact_o, exact_lse, do), strict=True))}
        for name in names:
            error = abs(found[name] - exact[name]).max() / abs(exact[name]).max()
            assert error <= 8e-7, (name, error)
