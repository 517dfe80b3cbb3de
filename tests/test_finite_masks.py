"""Biases that hide keys without being -inf, and lse that has lost digits, on NumPy and in the kernels of every family.

The kernels are executed without a GPU.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support.feature_cases import accumulator, extras, gradient_names, numbers

import fa2cupy
from fa2cupy import TileConfig, reference
from fa2cupy.testing import Expectation, make_inputs


class Backend(NamedTuple):
    """What computes: NumPy if `family` is None, else the kernels of a family on a GPU that is simulated."""

    dtype: str
    method: str = "two_pass"
    family: str | None = None
    config: dict[str, TileConfig] | TileConfig | None = None
    precision: str | None = None
    arch: str = "sm_80"
    head_dim: int = 24


BY_ROWS, BY_KEYS = TileConfig(32, 32, 2, 2), TileConfig(32, 32, 4, 2)
OF_SM80 = {"forward": BY_ROWS, "backward": BY_KEYS, "backward_dq": BY_ROWS, "backward_dkdv": BY_KEYS}
BACKENDS = {
    "numpy": Backend("float32", config=TileConfig(8, 8, 1)),
    "numpy half": Backend("float16", "single_pass", config=TileConfig(8, 8, 1)),
    "numpy double": Backend("float64", config=TileConfig(8, 8, 1)),
    "simt": Backend("float32", "single_pass", "simt", TileConfig(8, 8, 2), "ieee"),
    "simt, two_pass": Backend("float32", "two_pass", "simt", TileConfig(8, 8, 2), "ieee"),
    "simt double": Backend("float64", "two_pass", "simt", TileConfig(8, 8, 2)),
    "sm80": Backend("float16", "single_pass", "sm80", OF_SM80, arch="sm_90"),
    "sm80, two_pass": Backend("bfloat16", "two_pass", "sm80", OF_SM80),
    "sm80 float32": Backend("float32", "two_pass", "sm80", None, "split"),
}
NARROW = TileConfig(128, 32, 12, 2)
OF_SM90 = {"forward": NARROW, "backward_dq": NARROW, "backward_dkdv": TileConfig(32, 128, 12, 2)}
#: test_rows_without_keys.py has more of these kernels.
ON_HOPPER = {
    "sm90": Backend("float16", "single_pass", "sm90", OF_SM90, None, "sm_90", 64),
    "sm90, two_pass": Backend("bfloat16", "two_pass", "sm90", OF_SM90, None, "sm_90", 64),
}
ON_NUMPY = [name for name in BACKENDS if name.startswith("numpy")]
ROWS, KEYS = 20, 27


def on(*names: str):
    """Marks a test with the backends that it runs on."""
    marks = {name: () if name.startswith("numpy") else pytest.mark.simulated for name in names}
    return pytest.mark.parametrize("backend", [pytest.param(name, marks=marks[name]) for name in names], indirect=True)


@pytest.fixture
def backend(request, monkeypatch):
    """Yields one of the backends."""
    chosen = (BACKENDS | ON_HOPPER)[request.param]
    with contextlib.ExitStack() as stack:
        if chosen.family is not None:
            pytest.importorskip("cupy")
            from support.simulator import simulated_gpu

            from fa2cupy import api
            from fa2cupy.gpu import calls as gpu

            stack.enter_context(simulated_gpu(monkeypatch, chosen.arch))
            monkeypatch.setattr(api, "backend_of", lambda name, array: gpu)
        yield chosen


def on_device(backend: Backend, array):
    if isinstance(array, tuple):
        return tuple(on_device(backend, x) for x in array)
    if backend.family is None or not isinstance(array, np.ndarray):
        return array
    from support.fake_cupy import place

    return place(array)


def draw(backend: Backend, rows: int = ROWS, keys: int = KEYS, **sizes) -> list[np.ndarray]:
    sizes = {"num_heads": 2, "num_heads_kv": 1, "head_dim": backend.head_dim, **sizes}
    return list(make_inputs(backend.dtype, seqlen_q=rows, seqlen_k=keys, **sizes))


def forward(backend: Backend, q, k, v, **options) -> dict[str, np.ndarray]:
    q, k, v = (on_device(backend, x) for x in (q, k, v))
    options = {name: on_device(backend, x) for name, x in options.items()}
    own = {"family": backend.family, "config": backend.config, "precision": backend.precision}
    return dict(zip(("o", "lse"), fa2cupy.forward(q, k, v, **own, **options), strict=True))


def backward(backend: Backend, q, k, v, o, lse, do, **options) -> dict[str, np.ndarray]:
    """Returns all gradients by name. In one pass of kernels, those of a bias are left out."""
    arrays = (on_device(backend, x) for x in (q, k, v, o, lse, do))
    switches = extras(options)
    if backend.method == "single_pass" and backend.family not in (None, "simt"):
        switches = {name: value for name, value in switches.items() if name == "return_dsink"}
    own = {"family": backend.family, "config": backend.config, "precision": backend.precision}
    features = {name: on_device(backend, x) for name, x in options.items()}
    gradients = fa2cupy.backward(*arrays, method=backend.method, **switches, **own, **features)
    names = gradient_names({name: x for name, x in options.items() if name not in ("delta", "dlse")}, switches)
    return dict(zip(names, gradients, strict=True))


@pytest.mark.sample(backend=(*ON_NUMPY, "sm80"), feature=("softcap",))
@pytest.mark.parametrize("feature", ("plain", "softcap", "sink"))
@on(*BACKENDS)
def test_probabilities_are_at_most_one(backend, feature):
    """Checks rows whose scores are far above lse. If do is 0 there, they contribute nothing, or NaN from 0 * inf."""
    wide = accumulator(backend.dtype)
    options = {"plain": {}, "softcap": {"softcap": 3.0}, "sink": {"sink": np.array([0.5, -1], wide)}}[feature]
    q, k, v, do = draw(backend)
    do[:, 5:9] = 0
    o, lse = forward(backend, q, k, v, **options).values()
    lower = np.array(lse)
    lower[:, :, 5:9] -= 1000
    wanted = backward(backend, q, k, v, o, lse, do, **options)
    for name, gradient in backward(backend, q, k, v, o, lower, do, **options).items():
        np.testing.assert_array_equal(gradient, wanted[name], err_msg=name)


@pytest.mark.sample(backend=(*ON_NUMPY, "sm80"), value=(-1e9,))
@pytest.mark.parametrize("value", (-1e9, -1e30, 1e30))
@on("numpy", "numpy half", "simt", "sm80", "sm80, two_pass", *ON_HOPPER)
def test_a_row_with_the_same_large_bias_for_all_keys_leaves_the_others_alone(backend, value):
    """Checks that nothing of the row is seen where its do is 0. Its lse has lost as much as its scores differ by."""
    keys = 90
    q, k, v, do = draw(backend, keys=keys)
    q *= 8
    bias = np.zeros((ROWS, keys), accumulator(backend.dtype))
    bias[5:9] = value
    do[:, 5:9] = 0
    o, lse = forward(backend, q, k, v, bias=bias).values()
    assert np.isfinite(np.asarray(o, float)).all() and np.isfinite(lse).all()
    assert (abs(np.asarray(o, float)).max(-1) <= abs(np.asarray(v, float)).max() * 1.01).all()
    assert abs(np.asarray(o, float))[:, 5:9].max(-1).all()
    gradients = backward(backend, q, k, v, o, lse, do, bias=bias)
    assert not gradients["dq"][:, 5:9].any()
    others = np.r_[:5, 9:ROWS]
    results = forward(backend, q[:, others], k, v, bias=bias[others])  # zeros
    wanted = backward(backend, q[:, others], k, v, *results.values(), do[:, others], bias=bias[others])
    for name in ("dk", "dv"):  # of other tiles: P and dS are rounded elsewhere
        own, expected = (np.asarray(x[name], float) for x in (gradients, wanted))
        unit = 2**-8 if backend.dtype == "bfloat16" else 2**-11
        np.testing.assert_allclose(own, expected, atol=4 * unit * abs(expected).max(), err_msg=name)


def hidden_rows(name: str, backend: Backend) -> tuple[dict, np.ndarray]:
    """Returns the keywords of a call, and which of its rows see no key."""
    rows = np.arange(ROWS) % 7 == 2
    wide = accumulator(backend.dtype)
    mask = np.broadcast_to(~rows[:, None], (ROWS, KEYS))
    bias = np.where(rows, -np.inf, np.linspace(-1, 1, ROWS)).astype(wide)[:, None]
    causal = np.arange(ROWS) < ROWS - 9
    return {
        "mask": ({"mask": mask}, rows),
        "bias": ({"bias": bias}, rows),
        "mask, sink": ({"mask": mask, "sink": np.full(2, -np.inf, wide)}, rows),
        "mask_mod": ({"mask_mod": lambda b, h, q, k: q % 7 != 2}, rows),
        "causal": ({"causal": True}, causal),
        "window": ({"window": (3, 0)}, causal),
    }[name]


@pytest.mark.sample(backend=(*ON_NUMPY, "simt", "sm80"), feature=("mask",), passes_delta=(False,))
@pytest.mark.parametrize("feature", ("mask", "bias", "mask, sink", "mask_mod", "causal", "window"))
@pytest.mark.parametrize("passes_delta", (False, True))
@on(*BACKENDS)
def test_a_row_without_a_key_contributes_nothing(backend, feature, passes_delta):
    """Checks NaN and infinities in what such rows hold: the results are those of zeros there, to the bit.

    CUDA cores may compute heads of float32 data that have NaN: their results differ in the last bits.
    """
    options, hidden = hidden_rows(feature, backend)
    keys = 9 if feature in ("causal", "window") else KEYS
    q, k, v, do = draw(backend, keys=keys)
    q[:, hidden] = do[:, hidden] = 0
    dlse = np.linspace(-1, 1, 2 * ROWS).astype(accumulator(backend.dtype)).reshape(1, 2, ROWS)
    dlse[..., hidden] = 0
    o, lse = forward(backend, q, k, v, **options).values()
    assert (np.isneginf(lse) == hidden).all()
    given = {"dlse": dlse}
    if passes_delta:
        given = {"delta": np.asarray((do.astype(float) * np.asarray(o, float)).sum(-1).swapaxes(1, 2), dlse.dtype)}
    wanted = backward(backend, q, k, v, o, lse, do, **given, **options)
    assert np.isfinite(np.asarray(wanted["dk"], float)).all() and not wanted["dq"][:, hidden].any()
    number = np.flatnonzero(hidden)
    for array, values in ((q, (np.nan, np.inf)), (do, (np.inf, np.nan))):
        array[:, number[::2]], array[:, number[1::2]] = values
    for array in given.values():
        array[..., number[::2]], array[..., number[1::2]] = -np.inf, np.nan
    tolerance = 2e-6 if backend.precision == "split" else 0
    for name, gradient in backward(backend, q, k, v, o, lse, do, **given, **options).items():
        np.testing.assert_allclose(
            np.asarray(gradient, float), np.asarray(wanted[name], float), rtol=0, atol=tolerance, err_msg=name
        )


LOWEST = float(np.finfo("float32").min)


def lowest_of(name: str, backend: Backend, keys: int) -> dict:
    """Returns a bias, or a function, that is the lowest number for all keys of row 2, and for some keys of others."""
    wide = accumulator(backend.dtype)
    bias = np.zeros((ROWS, keys), wide)
    bias[2] = bias[5, :40] = bias[6, 40:] = bias[7, ::2] = LOWEST
    if name == "bfloat16":
        return {"bias": np.maximum(bias, -3.38e38).astype(ml_dtypes.bfloat16)}
    if name == "highest":
        return {"bias": -bias}
    if name == "softcap":
        return {"bias": bias, "softcap": 5.0}
    if name == "function":
        return {"score_mod": lambda s, b, h, q, k, hidden: np.where(hidden[q, k], LOWEST, s), "score_args": (bias < 0,)}
    return {"bias": bias}


@pytest.mark.sample(backend=(*ON_NUMPY, "sm80, two_pass"), name=("bfloat16",))
@pytest.mark.parametrize("name", ("float32", "bfloat16", "highest", "softcap", "function"))
@on(*BACKENDS, *ON_HOPPER)
def test_the_lowest_finite_number_hides_a_key_only_beside_others(backend, name):
    """Checks o, lse and gradients, over several tiles of keys: if all keys of a row have it, they count alike."""
    if name == "bfloat16" and backend.dtype != "bfloat16":
        pytest.skip("a bias has the dtype of q or of lse")
    keys = 90
    q, k, v, do = draw(backend, keys=keys)
    do[:, 2] = 0
    options = lowest_of(name, backend, keys)
    results = forward(backend, q, k, v, **options)
    wanted_o, wanted_lse = reference.forward(q, k, v, **options)
    small = 2e-2 if backend.dtype == "bfloat16" else 4e-3 if backend.dtype == "float16" else 1e-5
    np.testing.assert_allclose(np.asarray(results["o"], float), wanted_o, atol=small)
    np.testing.assert_allclose(np.asarray(results["lse"], float), wanted_lse, rtol=1e-2, atol=small)
    assert np.isfinite(results["lse"]).all()
    gradients = backward(backend, q, k, v, *results.values(), do, **options)
    wanted = reference.backward(q, k, v, wanted_o, wanted_lse, do, return_dbias="dbias" in gradients, **options)
    for key, expected in zip(gradients, wanted, strict=True):
        allowed = 4 * small * max(1, abs(expected).max())
        np.testing.assert_allclose(np.asarray(gradients[key], float), expected, atol=allowed, err_msg=key)


@pytest.mark.sample(backend=(*ON_NUMPY, "sm80, two_pass"))
@on(*(name for name in BACKENDS if name not in ("simt", "sm80")))
def test_sums_of_a_warp_do_not_need_its_first_lane(backend):
    """Checks sums over rows and keys, where no lane that adds them up to memory has a visible key."""
    wide = accumulator(backend.dtype)
    options = {
        "mask": np.broadcast_to(np.arange(ROWS)[:, None] % 4 != 0, (ROWS, KEYS)),
        "bias": numbers((1, KEYS), wide),
        "score_mod": lambda s, b, h, q, k, heads, table: s + heads[h] * 0.5 + table[np.clip(q - k + 30, 0, 59)],
        "score_args": (numbers((2,), wide, 1), numbers((60,), wide, 2)),
    }
    q, k, v, do = draw(backend)
    results = backward(backend, q, k, v, *forward(backend, q, k, v, **options).values(), do, **options)
    Expectation(q, k, v, do, **options).check(**results)
