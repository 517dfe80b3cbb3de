"""Odd values of features, documented in `fa2cupy.forward`, in calls of `fa2cupy.attention`.

They run on NumPy, and by the kernels of every family, executed without a GPU. Other modules test most of these values
for each family; the rest is here.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.feature_cases import METHODS, accumulator, booleans, numbers

import fa2cupy
from fa2cupy import TileConfig, api
from fa2cupy.testing import Expectation, make_inputs

SMALL = TileConfig(32, 32, 2, 2)
#: dtype, head_dim and tiles of each family.
FAMILIES = {
    "numpy": ("float32", 24, TileConfig(8, 8, 1)),
    "numpy half": ("float16", 24, TileConfig(8, 8, 1)),
    "simt": ("float32", 24, TileConfig(8, 8, 2)),
    "simt double": ("float64", 24, TileConfig(8, 8, 2)),
    "sm80": ("float16", 24, dict.fromkeys(("forward", "backward_dq"), SMALL) | dict.fromkeys(
        ("backward", "backward_dkdv"), TileConfig(32, 32, 4, 2))),
    "sm90": ("bfloat16", 64, {"forward": TileConfig(128, 64, 12, 2), "backward_dq": TileConfig(128, 64, 12, 2)}),
}  # fmt: skip


def on(*names: str):
    """Marks a test with the families that it runs on."""
    marks = {name: () if name.startswith("numpy") else pytest.mark.simulated for name in names}
    return pytest.mark.parametrize("family", [pytest.param(name, marks=marks[name]) for name in names], indirect=True)


@pytest.fixture
def family(request, monkeypatch):
    """Yields a key of `FAMILIES`. Arrays are NumPy's, or for kernels those of the GPU that executes them."""
    with contextlib.ExitStack() as stack:
        if not request.param.startswith("numpy"):
            pytest.importorskip("cupy")
            from support.simulator import simulated_gpu

            from fa2cupy.gpu import calls as gpu

            stack.enter_context(simulated_gpu(monkeypatch))
            monkeypatch.setattr(api, "backend_of", lambda name, array: gpu)
        yield request.param


def on_device(family: str, array):
    if family.startswith("numpy") or not isinstance(array, np.ndarray):
        return array
    from support.fake_cupy import place

    return place(array)


def check(family: str, inputs: tuple, *, dlse: np.ndarray, **options) -> dict[str, np.ndarray]:
    """Checks all results against the reference, and returns those of two passes."""
    dtype, _, config = FAMILIES[family]
    expected = Expectation(*inputs, dlse=dlse, **options)
    q, k, v, do, dlse = (on_device(family, x) for x in (*inputs, dlse))
    options = {name: on_device(family, x) for name, x in options.items()}
    family = None if family.startswith("numpy") else family.split()[0]
    # Hopper is slow to execute, so it has only the method that gives dbias.
    for method in METHODS[family == "sm90" :]:
        # In 16 bits only two_pass gives dbias; if single_pass were asked for it, two_pass would run.
        asked = [name for name in ("bias", "sink") if name in options and (name, method) != ("bias", "single_pass")]
        more = {f"return_d{name}": True for name in asked}
        o, lse, backprop = fa2cupy.attention(
            q, k, v, **options, **more, method=method, config=config, family=family, return_lse=True
        )
        results = {"o": o, "lse": lse}
        results |= zip(("dq", "dk", "dv", *(f"d{name}" for name in asked)), backprop(do, dlse), strict=True)
        expected.check(spec=method, **results)
    return results


def draw(family: str, rows: int, keys: int, **sizes) -> tuple:
    dtype, head_dim, _ = FAMILIES[family]
    sizes = {"num_heads": 2, "num_heads_kv": 1, **sizes}
    return make_inputs(dtype, seqlen_q=rows, seqlen_k=keys, head_dim=head_dim, **sizes)


def fill(bias: np.ndarray, hidden: np.ndarray) -> None:
    """Writes NaN and infinities to the hidden elements, which must not matter."""
    for first, value in enumerate((np.nan, np.inf, -np.inf)):
        bias.reshape(-1)[np.flatnonzero(hidden)[first::3]] = value


def outside_window(rows: int, keys: int, left: int, right: int) -> np.ndarray:
    distance = np.arange(keys) - (np.arange(rows)[:, None] + keys - rows)
    return (distance < -left) | (distance > right)


@on("numpy", "numpy half", "simt double")
def test_what_a_bias_has_for_hidden_keys_is_ignored(family):
    """Checks keys that are outside the window, hidden by the mask, or padding."""
    rows, keys = 20, 27
    dtype = FAMILIES[family][0]
    mask, padding = booleans((2, 1, rows, keys)), np.arange(keys) < np.array([[22], [27]])
    hidden = outside_window(rows, keys, 9, 4) | ~mask | ~padding[:, None, None]
    hidden = np.broadcast_to(hidden, (2, 2, rows, keys))
    bias = numbers(hidden.shape, dtype)
    fill(bias, hidden)
    results = check(
        family, draw(family, rows, keys, batch=2), dlse=numbers((2, 2, rows), accumulator(dtype)),
        bias=bias, mask=mask, key_padding_mask=padding, window=(9, 4),
    )  # fmt: skip
    assert not np.asarray(results["dbias"], "float64")[hidden].any()


@pytest.mark.sample(family=("numpy", "sm80"), precise=(False,))
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("rows_of_bias", [20, 1])
@on(*FAMILIES)
def test_what_a_bias_has_for_keys_that_a_function_hides_is_ignored(family, rows_of_bias, precise):
    """The last row's bias is that of rows past the end in kernels, from which the function hides other keys."""
    rows, keys = 20, 27
    dtype = FAMILIES[family][0]

    def shown(b, h, q, k):
        return (3 * k % 7 + 5 * q % 11 < 8) & ((k != 4) | (q > 19))

    query, key = np.arange(rows)[:, None], np.arange(keys)
    hidden = ~shown(0, 0, query, key)[-rows_of_bias:] if rows_of_bias > 1 else (key == 4)[None]
    bias = numbers((1, 2, rows_of_bias, keys), accumulator(dtype) if precise else dtype)
    bias[..., hidden] = np.nan
    dlse = numbers((1, 2, rows), accumulator(dtype))
    check(family, draw(family, rows, keys), dlse=dlse, bias=bias, mask_mod=shown)


@pytest.mark.matrix
@on(*FAMILIES)
def test_of_packed_sequences_a_bias_may_be_larger_than_all_of_them(family):
    """Checks max_seqlen above the totals: the bias behind the sequences is ignored, and has the gradient 0."""
    dtype = FAMILIES[family][0]
    ends_q, ends_k = np.array([2, 9, 20], "int32"), np.array([0, 11, 27], "int32")
    longest = {"max_seqlen_q": 23, "max_seqlen_k": 31}
    padding = np.arange(31) < np.array([[8], [31]])
    hidden = np.ones((2, 2, 23, 31), bool)
    for number, (rows, keys) in enumerate(zip(np.diff(ends_q), np.diff(ends_k), strict=True)):
        hidden[number, :, :rows, :keys] = outside_window(rows, keys, 6, 3) | ~padding[number, :keys]
    bias = numbers(hidden.shape, dtype)
    fill(bias, hidden)
    results = check(
        family, tuple(x[0] for x in draw(family, 20, 27)), dlse=numbers((2, 20), accumulator(dtype)), window=(6, 3),
        bias=bias, key_padding_mask=padding, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, **longest,
    )  # fmt: skip
    assert not np.asarray(results["dbias"], "float64")[hidden].any()


@pytest.mark.sample(family=("numpy", "sm90"))
@on(*FAMILIES)
def test_packed_sequences_may_all_lack_keys(family):
    """Checks max_seqlen_k of 0: biases and masks have no element then, and kernels on Hopper read one all the same."""
    dtype = FAMILIES[family][0]
    lengths = {"cu_seqlens_q": np.array([2, 9, 20], "int32"), "cu_seqlens_k": np.array([5, 5, 5], "int32")}
    options = {"key_padding_mask": np.ones((2, 0), bool), "mask": np.ones((2, 2, 11, 0), bool)}
    results = check(
        family, tuple(x[0] for x in draw(family, 20, 27)), dlse=numbers((2, 20), accumulator(dtype)),
        bias=numbers((2, 1, 11, 0), dtype), **options, **lengths, max_seqlen_q=11, max_seqlen_k=0,
    )  # fmt: skip
    assert np.isneginf(results["lse"]).all()


@pytest.mark.sample(family=("numpy", "numpy half", "sm80"))
@on("numpy", "numpy half", "simt double", "sm80")
def test_a_sink_of_minus_infinity_is_none_and_has_no_gradient(family):
    """Checks also rows that see no key; there are more of them than a tile has."""
    wide = accumulator(FAMILIES[family][0])
    sink = np.array([-np.inf, 0.5], wide)
    results = check(family, draw(family, 40, 9), dlse=numbers((1, 2, 40), wide), sink=sink, causal=True)
    assert (results["lse"][0, 0, :31] == -np.inf).all() and results["dsink"][0] == 0
    assert np.isfinite(results["lse"][0, 1]).all() and results["dsink"][1] != 0


@pytest.mark.sample(family=("numpy", "sm90"), causal=(False,))
@pytest.mark.parametrize("causal", [False, True])
@on(*FAMILIES)
def test_large_slopes_leave_the_score_on_the_diagonal(family, causal):
    """Checks slopes whose products with the distances in a tile have errors that are larger than scores."""
    wide = accumulator(FAMILIES[family][0])
    slopes = np.array([98765.4, 0.1], wide)
    check(family, draw(family, 70, 90), dlse=numbers((1, 2, 70), wide), alibi_slopes=slopes, causal=causal)


@on("numpy", "numpy half", "simt", "simt double")
@pytest.mark.sample(cap=(1e4,), family=("numpy", "numpy half", "simt"))
@pytest.mark.parametrize("cap", [1e4, 1e8])
def test_a_large_cap_leaves_scores_as_they_are(family, cap):
    wide = accumulator(FAMILIES[family][0])
    check(family, draw(family, 20, 27), dlse=numbers((1, 2, 20), wide), softcap=cap)
