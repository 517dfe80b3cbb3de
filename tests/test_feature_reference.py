"""The reference's features against plain loops, and its gradients against central differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.feature_cases import ROWS, extras, keyword, numbers, options_of

from fa2cupy import reference
from fa2cupy.problem import philox
from fa2cupy.testing import make_inputs

pytestmark = pytest.mark.filterwarnings("error")

SIZES = {"batch": 2, "seqlen_q": 4, "seqlen_k": 6, "num_heads": 2, "num_heads_kv": 1, "head_dim": 3}
# Each set has three features, so that each feature meets others; all features occur.
SETS = [
    ("softcap", "bias", "dropout"),
    ("alibi", "sink", "window"),
    ("mask", "bias of heads", "sink"),
    ("padding", "softcap", "alibi by batch"),
    ("causal", "window left", "sink"),
    ("bias of keys", "window right", "dropout"),
    ("bias of one row", "mask of rows", "softcap"),
    ("bias of queries", "causal", "dropout"),
]


def options_for(names: tuple[str, ...]) -> dict:
    return {key: value for name in names for key, value in options_of(name, "float64", SIZES).items()}


def test_every_feature_is_in_a_set():
    assert {keyword(name) for names in SETS for name in names} == {keyword(name) for name in ROWS}


def one_score(options: dict, raw: float, b: int, h: int, i: int, j: int) -> float:
    """Returns a single score, by the table of features."""
    aligned = i + SIZES["seqlen_k"] - SIZES["seqlen_q"]
    if "softcap" in options:
        raw = options["softcap"] * math.tanh(raw / options["softcap"])
    if "alibi_slopes" in options:
        slopes = options["alibi_slopes"]
        raw -= (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(aligned - j)
    shape = (2, 2, 4, 6)
    if "bias" in options:
        raw += np.broadcast_to(options["bias"], shape)[b, h, i, j]
    left, right = options.get("window", (None, None))
    visible = not (options.get("causal") and j > aligned)
    visible &= left is None or j >= aligned - left
    visible &= right is None or j <= aligned + right
    visible &= "mask" not in options or bool(np.broadcast_to(options["mask"], shape)[b, h, i, j])
    visible &= "key_padding_mask" not in options or bool(options["key_padding_mask"][b, j])
    return raw if visible else -math.inf


@pytest.mark.parametrize("names", SETS, ids=" + ".join)
def test_forward_is_the_sum_written_out(names):
    options = options_for(names)
    q, k, v, _ = make_inputs("float64", **SIZES)
    o, lse = reference.forward(q, k, v, softmax_scale=0.7, **options)
    for b, h, i in np.ndindex(2, 2, 4):
        scores = [one_score(options, 0.7 * float(q[b, i, h] @ k[b, j, 0]), b, h, i, j) for j in range(6)]
        total = sum(math.exp(s) for s in scores)
        total += math.exp(options["sink"][h]) if "sink" in options else 0
        row = np.zeros(3)
        for j, s in enumerate(scores):
            kept, scale = True, 1.0
            if "dropout_p" in options:
                one = [slice(n, n + 1) for n in (h, i, j)]
                kept = philox.kept(options["dropout_p"], options["seed"], b, *one)[0, 0, 0]
                scale = 2**16 / (2**16 - round(options["dropout_p"] * 2**16))
            if kept and total:
                row += math.exp(s) / total * v[b, j, 0] * scale
        assert lse[b, h, i] == (pytest.approx(math.log(total), abs=1e-13) if total else -math.inf)
        np.testing.assert_allclose(o[b, i, h], row, atol=1e-13)


@pytest.mark.parametrize("names", SETS, ids=" + ".join)
def test_gradients_are_central_differences(names):
    options = options_for(names)
    q, k, v, do = make_inputs("float64", **SIZES, head_dim_v=2)
    dlse = numbers((2, 2, 4), "float64")
    more = extras(options)
    results = reference.forward(q, k, v, **options)
    gradients = reference.backward(q, k, v, *results, do, dlse=dlse, **options, **more)
    arrays = [q, k, v, *(options[name] for name in ("bias", "sink") if name in options)]

    def loss() -> float:
        o, lse = reference.forward(q, k, v, **options)
        return float((o * do).sum() + (dlse * lse)[np.isfinite(lse)].sum())

    step = 1e-5
    for array, gradient in zip(arrays, gradients, strict=True):
        assert gradient.shape == array.shape
        assert abs(gradient).max() > 1e-3
        for index in np.ndindex(array.shape):
            value = array[index]
            losses = []
            for shifted in (value + step, value - step):
                array[index] = shifted
                losses.append(loss())
            array[index] = value
            assert gradient[index] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=2e-8)


def test_the_baseline_of_float32_rounds_distances_like_a_bias():
    """Positions are int64: beside them NumPy would compute float32 scores in float64."""
    q, k, v, _ = make_inputs("float32", seqlen_q=9, seqlen_k=40, num_heads=1, head_dim=8)
    slope = np.float32(0.3)
    bias = -slope * abs(np.arange(9)[:, None] + 31 - np.arange(40)).astype("float32")
    wanted = reference.baseline_forward(q, k, v, bias=bias)
    for one, other in zip(reference.baseline_forward(q, k, v, alibi_slopes=np.array([slope])), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
