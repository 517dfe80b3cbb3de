"""Masks of keys as tensor cores' kernels read them, executed without a GPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import CATCHES, replace_once
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import METHODS, booleans, numbers
from support.simulated_problems import HOPPER, draw
from support.simulator import simulated_gpu

from fa2cupy import TileConfig
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

BATCH, ROWS, KEYS = 2, 70, 150
#: dtype, head_dim and family.
CASES = {
    "sm90": ("bfloat16", 64, "sm90"),
    "sm90 wide": ("float16", 144, "sm90"),
    "sm80": ("bfloat16", 64, "sm80"),
    "sm90 float32": ("float32", 32, "sm90"),
    "sm80 float32": ("float32", 32, "sm80"),
}


def scattered(keys: int) -> np.ndarray:
    """Returns a mask that hides all keys of a tile, keys of every remainder, and none of some fours."""
    visible = booleans((BATCH, keys), seed=3) | (np.arange(keys) // 8 % 3 == 0)
    visible[0, keys // 2 :] = False
    return visible


#: How the mask lies in memory.
VIEWS = {
    "contiguous": lambda keys: place(scattered(keys)),
    "off four bytes": lambda keys: place(np.pad(scattered(keys), ((0, 0), (1, 4))))[:, 1:-4],
    "every second": lambda keys: place(scattered(keys).repeat(2, axis=1))[:, ::2],
    "reversed": lambda keys: place(scattered(keys)[:, ::-1])[:, ::-1],
    "of all sequences": lambda keys: np.broadcast_to(place(scattered(keys))[:1], (BATCH, keys), subok=True),
    "one for all sequences": lambda keys: place(scattered(keys)[:1]),
    "no axis of sequences": lambda keys: place(scattered(keys)[0]),
    "one for all keys": lambda keys: np.broadcast_to(place(np.array([[True], [False]])), (BATCH, keys), subok=True),
    "all visible": lambda keys: place(np.ones((BATCH, keys), bool)),
}
#: Other features of scores. A bias or a mask is held in shared memory beside the padding.
BESIDES = {
    "": lambda dtype: {},
    "bias": lambda dtype: {"bias": place(numbers((2, ROWS, KEYS), dtype))},
    "mask": lambda dtype: {"mask": place(booleans((BATCH, 1, ROWS, KEYS)))},
    "bias and mask": lambda dtype: {
        "bias": place(numbers((2, ROWS, KEYS), dtype)), "mask": place(booleans((BATCH, 1, ROWS, KEYS))),
    },
    "causal": lambda dtype: {"causal": True},
    "negative scale": lambda dtype: {"softmax_scale": -0.3},
    "cap and dropout": lambda dtype: {"softcap": 1.5, "dropout_p": 0.3, "seed": 5},
}  # fmt: skip


def check(monkeypatch, name: str, padding: np.ndarray, methods=METHODS, tile=None, patch=None, **options) -> None:
    dtype, head_dim, family = CASES[name]
    methods = methods[-1:] if name == "sm80 float32" else methods
    inputs = draw(dtype, (ROWS, padding.shape[-1]), head_dim, batch=BATCH)
    options |= {"key_padding_mask": padding}
    expected = Expectation(*inputs, **options)
    with simulated_gpu(monkeypatch, HOPPER, seed=1, patch=patch):
        o, lse = forward(*inputs[:3], family=family, config=tile, **options)
        found = [backward(*inputs[:3], o, lse, inputs[3], family=family, method=one, **options) for one in methods]
    expected.check(o=o, lse=lse)
    for dq, dk, dv in found:
        expected.check(dq=dq, dk=dk, dv=dv)


@pytest.mark.sample(name=("sm80",), view=("off four bytes", "one for all sequences"))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("view", VIEWS)
def test_views(monkeypatch, name, view):
    check(monkeypatch, name, VIEWS[view](KEYS))


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("besides", BESIDES)
def test_other_features(monkeypatch, name, besides):
    if (name, besides) in {("sm90", "negative scale"), ("sm90 wide", "negative scale")}:
        pytest.skip("Hopper's kernels need a positive scale")
    check(monkeypatch, name, VIEWS["contiguous"](KEYS), **BESIDES[besides](CASES[name][0]))


@pytest.mark.sample(keys=(7,), method=("two_pass",))
@pytest.mark.parametrize("keys", [1, 3, 7, 129])
@pytest.mark.parametrize("method", METHODS)
def test_few_keys(monkeypatch, method, keys):
    """Checks that nothing is read past the last key, whatever the tile."""
    check(monkeypatch, "sm90", VIEWS["contiguous"](keys), (method,))


def test_tiles_of_more_than_128_keys(monkeypatch):
    """Checks that a lane has keys of every 128."""
    check(monkeypatch, "sm90", VIEWS["contiguous"](300), (), TileConfig(64, 192, 8, 2, 1))


MUTANTS = {
    "lanes have the bits of others": ("lane % 2 ? ballot[2 + e] : ballot[e]", "ballot[e]", "numbers"),
    "a lane's second pair": (">> (lane % 4 / 2)", ">> 0", "numbers"),
    "columns": ("n8 % 16 * 2", "n8 % 16", "numbers"),
    "keys past the end": ("keys[min_of(key + b, last_key_of<Spec>(params))", "keys[(key + b)", "bounds"),
    "fours past the end": ("&& key + 4 <= params.seqlen_k", "", "bounds"),
    "one visible lane": ("!__all_sync(kFullWarp, all)) visible()", "!__any_sync(kFullWarp, all)) visible()", "numbers"),
}  # fmt: skip


@functools.lru_cache(maxsize=None)
def run_mutant(change: tuple[str, str] | None = None) -> None:
    def patch(spec, text: str) -> str:
        return text if change is None or spec.operation != "forward" else replace_once(spec, text, *change)

    with pytest.MonkeyPatch.context() as monkeypatch:
        check(monkeypatch, "sm90", VIEWS["of all sequences"](KEYS), (), patch=patch)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_kernel_is_caught(mutant):
    old, new, caught_by = MUTANTS[mutant]
    run_mutant()
    exception, text = CATCHES[caught_by]
    with pytest.raises(exception, match=text):
        run_mutant((old, new))
