"""Functions of scores in kernels, executed without a GPU: forward and both backward methods against the reference."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import accumulator, extras, gradient_names, numbers
from support.simulator import simulated_gpu
from support.traced_cases import ready_made

from fa2cupy import TileConfig, UnsupportedProblemError
from fa2cupy.families.operations import TILED
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

METHODS = ("single_pass", "two_pass")
SHAPE = (2, 2, 21, 30)
NAMES = tuple(ready_made(*SHAPE))
TILE = TileConfig(8, 8, 2)


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch) as stages:
        yield stages


def on_gpu(options: dict) -> dict:
    """Keywords with arrays of the simulated GPU."""

    def moved(value):
        if isinstance(value, tuple) and value and isinstance(value[0], np.ndarray):
            return tuple(map(place, value))
        return place(value) if isinstance(value, np.ndarray) else value

    return {name: moved(value) for name, value in options.items()}


def draw(dtype: str, shape: tuple = SHAPE, **sizes) -> tuple:
    batch, heads, rows, keys = shape
    sizes = {"num_heads": heads, "num_heads_kv": 1, "head_dim": 24, **sizes}
    return make_inputs(dtype, batch=batch, seqlen_q=rows, seqlen_k=keys, **sizes)


def check(launched: list, inputs: tuple, used: tuple, methods: tuple = METHODS, dlse=None, **options) -> None:
    """All results of a call, by kernels that have the features."""
    expected = Expectation(*inputs, dlse=dlse, **options)
    q, k, v, do = map(place, inputs)
    given = on_gpu(options)
    o, lse = forward(q, k, v, config=TILE, **given)
    expected.check(o=o, lse=lse)
    for method in methods:
        more = {} if dlse is None else {"dlse": place(dlse)}
        gradients = backward(q, k, v, o, lse, do, method=method, config=TILE, **more, **given)
        expected.check(spec=method, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
        names = gradient_names(options)
        switches = extras(options)
        gradients = backward(q, k, v, o, lse, do, method=method, config=TILE, **more, **given, **switches)
        expected.check(spec=method, **dict(zip(names, gradients, strict=True)))
    specs = [stage.spec for stage in launched if stage.spec.operation in TILED]
    assert {spec.family for spec in specs} == {"simt"}
    assert all(set(used) <= set(spec.features) for spec in specs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_ready_made_functions(launched, name, dtype):
    case = ready_made(*SHAPE, wide=accumulator(dtype))[name]
    check(launched, draw(dtype), (case.role,), **case.options)


def low_rank(score, b, h, q, k, x, y, ids, scale):
    return score * scale - np.where(ids[b, k] > 0, np.dot(x[b, h, q], y[h, k]), np.tanh(score))


def test_arrays_of_all_ranks_and_strides_and_all_other_features(launched):
    x = np.asfortranarray(numbers((2, 2, 21, 4), "float16"))
    arrays = (
        x,
        numbers((2, 30, 4), "float64"),
        np.arange(60, dtype="int64").reshape(2, 30) % 3,
        numbers((1,), "float32")[0:1].reshape(()),
    )
    options = {
        "causal": True, "window": (20, None), "softcap": 3.0, "alibi_slopes": numbers((2,), "float32"),
        "bias": numbers((21, 30), "float32"), "mask": numbers((21, 30), "float32") < 1.5, "dropout_p": 0.25, "seed": 7,
        "sink": numbers((2,), "float32"), "mask_mod": lambda b, h, q, k, t: (q + k + b) % t[h] != 0,
        "mask_args": (np.array([3, 5], "int8"),),
    }  # fmt: skip
    inputs = draw("float32")
    check(launched, inputs, ("score_mod", "mask_mod"), score_mod=low_rank, score_args=arrays, **options)


@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences(launched, method):
    offsets = {"cu_seqlens_q": np.array([0, 9, 9, 21], "int32"), "cu_seqlens_k": np.array([0, 13, 20, 30], "int32")}
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (3, 30)), axis=1)
    inputs = tuple(x[0] for x in draw("float32", (1, 2, 21, 30)))
    check(
        launched, inputs, ("score_mod", "mask_mod"), methods=(method,), **offsets,
        score_mod=lambda score, b, h, q, k, t: score + t[b, h, k], score_args=(numbers((3, 2, 30), "float32"),),
        mask_mod=lambda b, h, q, k, ids: ids[b, q] == ids[b, k], mask_args=(ids,),
    )  # fmt: skip


def test_derivatives_of_hidden_keys_may_be_infinite(launched):
    def rooted(score, b, h, q, k):
        return score * np.sqrt(q + 9 - k)

    check(launched, draw("float32"), ("score_mod", "mask_mod"), score_mod=rooted, mask_mod=lambda b, h, q, k: k < q + 9)


def test_functions_of_the_same_expression_share_kernels_and_prepared_calls(launched):
    q, k, v, _ = map(place, draw("float32"))

    def scaled(factor: float) -> np.ndarray:
        return forward(q, k, v, score_mod=lambda score, b, h, q, k: factor * score, config=TILE)[0]

    results = [scaled(2.0), scaled(2.0), scaled(3.0)]
    specs = [stage.spec for stage in launched]
    assert specs[0] == specs[1] != specs[2]
    assert len({spec.symbol for spec in specs}) == 2
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_what_kernels_refuse(launched):
    q, k, v, do = map(place, draw("float32"))
    own = on_gpu(ready_made(*SHAPE)["alibi"].options)
    o, lse = forward(q, k, v, config=TILE, **own)
    launched.clear()
    with pytest.raises(UnsupportedProblemError, match="^return_dscore_args: they are summed atomically; not with det"):
        backward(q, k, v, o, lse, do, return_dscore_args=True, deterministic=True, **own)
    with pytest.raises(ValueError, match=r"^score_args\[0\]: expected at least one element, got shape \(0,\)"):
        forward(q, k, v, score_mod=own["score_mod"], score_args=(place(numbers((0,), "float32")),))
    elsewhere = place(numbers((2,), "float32"))
    elsewhere.device_id = 1
    with pytest.raises(ValueError, match=r"^score_args\[0\]: expected an array on device 0 like q, got device 1"):
        forward(q, k, v, score_mod=own["score_mod"], score_args=(elsewhere,))
    assert not launched
