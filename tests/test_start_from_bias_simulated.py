"""Hopper's forward, and its backward by key tiles, whose products start from the bias, executed without a GPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import CATCHES, replace_once
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import booleans, check_extreme_biases, numbers
from support.simulated_problems import HOPPER, draw
from support.simulator import simulated_gpu

from fa2cupy import TileConfig, reference
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

BATCH, ROWS, KEYS = 2, 70, 136
#: dtype, head_dim, method and tile: statistics that are a k-step and others, groups that divide the gradients, a
#: cluster, and shared memory without room for the bias.
KERNELS = {
    "dkdv": ("bfloat16", 32, "two_pass", TileConfig(32, 128, 12, 2)),
    "three stages": ("float16", 64, "two_pass", TileConfig(32, 128, 12, 3)),
    "added statistics": ("float16", 96, "two_pass", TileConfig(32, 128, 12, 2)),
    "divided": ("bfloat16", 144, "two_pass", TileConfig(32, 64, 12, 2)),
    "single_pass": ("bfloat16", 40, "single_pass", TileConfig(128, 128, 12, 2)),
    "cluster": ("float16", 144, "single_pass", TileConfig(64, 128, 12, 2)),
    "without room": ("bfloat16", 256, "single_pass", TileConfig(64, 64, 12, 2)),
}
OTHERS = tuple(KERNELS)[1:]
#: How the bias lies in memory, by the dtype.
BIASES = {
    "of heads": lambda dtype: place(numbers((2, ROWS, KEYS), dtype)),
    "of sequences": lambda dtype: place(numbers((BATCH, 1, ROWS, KEYS), dtype)),
    "of keys": lambda dtype: place(numbers((2, 1, KEYS), dtype)),
    "of queries": lambda dtype: place(numbers((ROWS, 1), dtype)),
    "reversed rows": lambda dtype: place(numbers((2, ROWS, KEYS), dtype))[:, ::-1],
    "reversed keys": lambda dtype: place(numbers((2, ROWS, KEYS), dtype))[..., ::-1],
    "rows off 16 bytes": lambda dtype: place(numbers((2, ROWS, KEYS + 1), dtype))[..., :-1],
    "off 16 bytes": lambda dtype: place(numbers((2, ROWS, KEYS + 8), dtype))[..., 1:-7],
}
STARTS = ("of heads", "rows off 16 bytes")


def padding() -> np.ndarray:
    visible = booleans((BATCH, KEYS), seed=3)
    visible[0, KEYS // 2 :] = False
    return visible


#: Options beside the bias.
BESIDES = {
    "causal": lambda: {"causal": True},
    "window and sink": lambda: {"window": (20, 5), "sink": place(np.float32([0.5, -1.0]))},
    "padding": lambda: {"key_padding_mask": place(padding())},
    "padding and causal": lambda: {"key_padding_mask": place(padding()), "causal": True},
    "dropout": lambda: {"dropout_p": 0.3, "seed": 5},
    "mask": lambda: {"mask": place(booleans((BATCH, 1, ROWS, KEYS)))},
    "large scale": lambda: {"softmax_scale": 4.0},
}


def check(monkeypatch, name: str, bias, order: int | None = None, patch=None, **options) -> None:
    """Checks gradients from the reference's o and lse, with warps that take turns in an order."""
    dtype, head_dim, method, tile = KERNELS[name]
    inputs = draw(dtype, (ROWS, KEYS), head_dim, batch=BATCH)
    options = {"bias": bias, **options}
    o, lse = reference.forward(*inputs[:3], **options)
    o, lse = place(o.astype(inputs[0].dtype)), place(lse.astype(np.float32))
    config = {"backward" if method == "single_pass" else "backward_dkdv": tile}
    with simulated_gpu(monkeypatch, HOPPER, seed=order, patch=patch):
        found = backward(*inputs[:3], o, lse, inputs[3], family="sm90", method=method, config=config, **options)
    expected = Expectation(*inputs, **options)
    expected.check(**dict(zip(("dq", "dk", "dv"), found, strict=True)))


@pytest.mark.sample(bias=STARTS)
@pytest.mark.parametrize("bias", BIASES)
def test_biases(monkeypatch, bias):
    check(monkeypatch, "dkdv", BIASES[bias]("bfloat16"), order=1)


@pytest.mark.sample(name=("added statistics",), bias=STARTS[:1])
@pytest.mark.parametrize("bias", STARTS)
@pytest.mark.parametrize("name", OTHERS)
def test_kernels(monkeypatch, name, bias):
    check(monkeypatch, name, BIASES[bias](KERNELS[name][0]), order=2, causal=True)


@pytest.mark.sample(besides=("padding and causal",))
@pytest.mark.parametrize("besides", BESIDES)
def test_options(monkeypatch, besides):
    check(monkeypatch, "dkdv", BIASES["of heads"]("bfloat16"), **BESIDES[besides]())


@pytest.mark.parametrize("bias", STARTS)
def test_infinities_and_nan(monkeypatch, bias):
    """Checks keys that the bias hides, rows without a key, and NaN where a mask hides it."""
    array = BIASES[bias](KERNELS["dkdv"][0])
    array[:, :, 3:70] = -np.inf
    array[:, 7] = -np.inf
    array[:, 0, KEYS - ROWS + 1 :] = np.nan  # above the diagonal
    check(monkeypatch, "dkdv", array, causal=True)


#: dtype, head_dim and tile of forwards: of one group to three, which may take turns, and without room for the bias.
FORWARDS = {
    "two groups": ("bfloat16", 32, TileConfig(128, 48, 12, 2)),
    "one group": ("float16", 64, TileConfig(64, 64, 8, 2, 2)),
    "three groups": ("bfloat16", 40, TileConfig(192, 32, 16, 2)),
    "taking turns": ("float16", 128, TileConfig(128, 128, 12, 2)),
    "without room": ("bfloat16", 256, TileConfig(128, 64, 12, 2)),
}


def check_forward(monkeypatch, name: str, bias, order: int | None = None, patch=None, **options) -> None:
    """Checks o and lse of a forward whose blocks do not keep the bias."""
    dtype, head_dim, tile = FORWARDS[name]
    inputs = draw(dtype, (ROWS, KEYS), head_dim, batch=BATCH)
    with simulated_gpu(monkeypatch, HOPPER, seed=order, patch=patch):
        o, lse = forward(*inputs[:3], family="sm90", config=tile, bias=bias, **options)
    Expectation(*inputs, bias=bias, **options).check(o=o, lse=lse)


@pytest.mark.sample(bias=STARTS)
@pytest.mark.parametrize("bias", BIASES)
def test_biases_of_forwards(monkeypatch, bias):
    check_forward(monkeypatch, "two groups", BIASES[bias]("bfloat16"), order=1)


@pytest.mark.sample(name=("three groups",), options=("causal",))
@pytest.mark.parametrize("options", ("causal", "window and sink", "large scale"))
@pytest.mark.parametrize("name", FORWARDS)
def test_forwards(monkeypatch, name, options):
    own = {
        "causal": {"causal": True},
        **{key: BESIDES[key]() for key in BESIDES if key in ("window and sink", "large scale")},
    }
    check_forward(monkeypatch, name, BIASES["of heads"](FORWARDS[name][0]), order=2, **own[options])


@pytest.mark.sample(scale=(None,), bias=STARTS[:1])
@pytest.mark.parametrize("scale", (None, 1.0, 4.0))
@pytest.mark.parametrize("bias", STARTS)
def test_biases_whose_quotient_by_the_scale_has_no_float(monkeypatch, bias, scale):
    call = functools.partial(forward, family="sm90", config=FORWARDS["two groups"][2])
    q, k, v, _ = draw("bfloat16", (ROWS, KEYS), 32, batch=BATCH)
    with simulated_gpu(monkeypatch, HOPPER):
        check_extreme_biases(call, q, k, v, BIASES[bias]("bfloat16"), softmax_scale=scale)


#: By name: a change of the source, and the error that must catch it.
MUTANTS = {
    "read before it has arrived": ("mbarrier_wait(memory_.full_start(kGroup), turn % 2);", ";", "uninitialised"),
    "overwritten while it is read": ("mbarrier_wait(memory_.empty_start(group), parity);", "", "race"),
    "the keys of another warp": ("lane_, 2 * warp_), per_score_)", "lane_, 0), per_score_)", "numbers"),
    "the keys of another group": ("own_.first_key + group * kGroupRows, lane}", "own_.first_key, lane}", "numbers"),
    "not scaled": ("__fmul_rz(term.bias, factor);", "term.bias;", "numbers"),
    "the statistic replaces it": ("wgmma_add_statistic(x, stat", "wgmma_statistic(x, stat", "numbers"),
    "rows past the last one": ("if (kWhole || first_query + row <= last_row) from", "from", "bounds"),
}  # fmt: skip
#: The same of the forward, behind the bias.
MUTANTS_OF_FORWARDS = {
    "no tile is cut off by rows": ("of heads", "first_query + kQueries <= params.seqlen_q && ", "", "bounds"),
    "no tile is cut off by keys": ("of keys", " && first_key + kKeys <= params.seqlen_k", "", "bounds"),
}


@functools.lru_cache(maxsize=None)
def run_mutant(operation: str, bias: str, change: tuple[str, str] | None = None) -> None:
    def patch(spec, text: str) -> str:
        return text if change is None or spec.operation != operation else replace_once(spec, text, *change)

    run, name = (check_forward, "two groups") if operation == "forward" else (check, "dkdv")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run(monkeypatch, name, BIASES[bias]("bfloat16"), patch=patch)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", [*MUTANTS, *MUTANTS_OF_FORWARDS])
def test_a_broken_kernel_is_caught(mutant):
    bias, old, new, caught_by = MUTANTS_OF_FORWARDS.get(mutant) or ("of heads", *MUTANTS[mutant])
    given = ("backward_dkdv" if mutant in MUTANTS else "forward"), bias
    run_mutant(*given)
    exception, text = CATCHES[caught_by]
    with pytest.raises(exception, match=text):
        run_mutant(*given, (old, new))
