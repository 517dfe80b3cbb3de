"""Forwards whose blocks keep a bias for several sequences, executed without a GPU."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import CATCHES, replace_once
from support.fake_cupy import place
from support.fake_gpu import fake_gpu, forward
from support.feature_cases import booleans, check_extreme_biases, numbers
from support.simulator import simulated_gpu

from fa2cupy import TileConfig
from fa2cupy.families import kept_bias
from fa2cupy.families.device import DeviceInfo
from fa2cupy.plan import schedule
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

#: A device whose blocks take several series.
DEVICE = dataclasses.replace(DeviceInfo.named("sm_90"), multiprocessors=1)
#: Tiles of one warp group and of two, of several blocks on a multiprocessor, and of keys whose chunks are not permuted.
TILES = (
    TileConfig(64, 64, 8, 2, 3),
    TileConfig(64, 32, 8, 3, 2),
    TileConfig(64, 48, 8, 2, 1),
    TileConfig(128, 64, 12, 2, 1),
)
#: Tiles of three and of four sequences at a time.
SEVERAL = (TileConfig(64, 48, 16, 2), TileConfig(64, 64, 20, 2))
SEEDS = (None, 1, 2, 3)


@pytest.fixture(autouse=True)
def short_series(monkeypatch):
    """Lets every bias have several series, the last of which is shorter."""
    monkeypatch.setattr(kept_bias, "_LEAST_SHARERS", 4)
    monkeypatch.setattr(schedule, "_LONGEST_SERIES", 3)


def draw(batch: int, rows: int, keys: int, heads: int = 2, head_dim: int = 32, dtype: str = "bfloat16") -> tuple:
    sizes = {"batch": batch, "seqlen_q": rows, "seqlen_k": keys, "num_heads": heads, "num_heads_kv": heads}
    return tuple(place(x) for x in make_inputs(dtype, head_dim=head_dim, **sizes))


def bias_of(*shape: int, dtype: str = "bfloat16"):
    return place(2 * numbers(shape, dtype, 5))


def check(monkeypatch, inputs: tuple, tile: TileConfig | None, order: int | None = None, **options):
    """Checks a forward, whose warps take turns in this order, and that its blocks keep the bias."""
    expected = Expectation(*inputs, **options)
    with simulated_gpu(monkeypatch, DEVICE, seed=order) as launched:
        o, lse = forward(*inputs[:3], config=tile, **options)
    expected.check(o=o, lse=lse)
    (stage,) = launched
    assert stage.spec.kept_keys > 0
    return stage


@pytest.mark.sample(seed=SEEDS[:2], tile=TILES[:2])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_sequences_that_share_a_bias(monkeypatch, tile, seed):
    """Checks series that end inside, tiles past the last query and the last key, and several query tiles."""
    check(monkeypatch, draw(7, 140, 104), tile, order=seed, bias=bias_of(2, 140, 104))


@pytest.mark.sample(seed=(1,))
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tile", SEVERAL, ids=str)
def test_several_sequences_at_a_time(monkeypatch, tile, seed):
    """Checks series that end inside the sequences of a tile, and blocks that go on with another bias."""
    monkeypatch.setattr(schedule, "_LONGEST_SERIES", 5)
    options = {
        "bias": bias_of(2, 1, 2, 70, 139),
        "key_padding_mask": place(np.arange(139) < 139 - 13 * np.arange(10)[:, None]),
    }
    options["key_padding_mask"] = options["key_padding_mask"].reshape(2, 5, 139)
    inputs = (x.reshape(2, 5, *x.shape[1:]) for x in draw(10, 70, 139))
    check(monkeypatch, tuple(inputs), tile, order=seed, **options)


#: Arrays and options beside or in place of a full bias of heads, by the sizes of the problem: batch, rows, keys.
CASES = {
    "no queries": lambda b, r, k: {"bias": bias_of(2, 1, k)},
    "no heads": lambda b, r, k: {"bias": bias_of(r, k)},
    "no keys": lambda b, r, k: {"bias": bias_of(2, r, 1)},
    "reversed": lambda b, r, k: {"bias": bias_of(2, r, k)[:, ::-1, ::-1]},
    "rows off 16 bytes": lambda b, r, k: {"bias": bias_of(2, r, k + 1)[..., :-1]},
    "off 16 bytes": lambda b, r, k: {"bias": bias_of(2, r, k + 8)[..., 1 : k + 1]},
    "padding": lambda b, r, k: {"key_padding_mask": np.arange(k) < (np.arange(b) * 37 % k + 1)[:, None]},
    "hidden rows": lambda b, r, k: {"mask": booleans((b, 1, r, k)) & (np.arange(r) % 7 != 2)[:, None]},
    "causal": lambda b, r, k: {"causal": True},
    "window": lambda b, r, k: {"window": (50, 20)},
    "cap and causal": lambda b, r, k: {"softcap": 2.0, "causal": True, "sink": np.float32([0.5, -1.0])},
    "dropout": lambda b, r, k: {"dropout_p": 0.3, "seed": 5},
    "infinities": lambda b, r, k: {"bias": place(np.where(np.eye(r, k), -np.inf, 1).astype("bfloat16"))},
}
#: Those of everyday tests: most have the same kernel.
OFTEN = (
    "no heads", "no keys", "reversed", "rows off 16 bytes", "off 16 bytes", "padding", "hidden rows", "cap and causal",
    "infinities",
)  # fmt: skip


@pytest.mark.sample(sizes=((7, 70, 139),), name=OFTEN)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [(7, 70, 139), (7, 139, 70)], ids=str)
def test_arrays_and_features(monkeypatch, name, sizes):
    batch, rows, keys = sizes
    options = {"bias": bias_of(2, rows, keys), **CASES[name](*sizes)}
    options = {key: place(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    check(monkeypatch, draw(batch, rows, keys), TILES[0], order=1, **options)


@pytest.mark.parametrize("scale", [None, 4.0])
def test_biases_whose_quotient_by_the_scale_has_no_float(monkeypatch, scale):
    q, k, v, _ = draw(7, 70, 139)
    with simulated_gpu(monkeypatch, DEVICE) as launched:
        call = functools.partial(forward, config=TILES[1])
        check_extreme_biases(call, q, k, v, bias_of(2, 70, 139), softmax_scale=scale)
    assert launched[0].spec.kept_keys > 0


@pytest.mark.sample(rows=(1, 64))
@pytest.mark.parametrize(("rows", "keys"), [(1, 8), (64, 64), (1, 1), (65, 257)], ids=str)
def test_short_sequences(monkeypatch, rows, keys):
    """Checks single rows and keys, windows of one tile, and a last tile of one row and one key."""
    check(monkeypatch, draw(13, rows, keys), None, order=2, bias=bias_of(2, rows, keys))


def test_leading_axes(monkeypatch):
    """Checks that series end where another bias begins."""
    q, k, v, do = (x.reshape(2, 5, *x.shape[1:]) for x in draw(10, 70, 80))
    stage = check(monkeypatch, (q, k, v, do), TILES[0], order=3, bias=bias_of(2, 1, 2, 70, 80))
    assert stage.spec.batch_terms == 1


@pytest.mark.sample(head_dim=(64,))
@pytest.mark.parametrize("head_dim", [16, 64, 48])
def test_head_dims(monkeypatch, head_dim):
    check(
        monkeypatch, draw(6, 70, 80, head_dim=head_dim, dtype="float16"), None, bias=bias_of(2, 70, 80, dtype="float16")
    )


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((6, 70, 80), {"bias": lambda: bias_of(6, 2, 70, 80)}),  # each has its own
        ((6, 70, 80), {"bias": lambda: bias_of(2, 70, 80, dtype="float32")}),
        ((3, 70, 80), {"bias": lambda: bias_of(2, 70, 80)}),  # too few share it
        ((2, 70, 80), {"num_splits": lambda: 2, "bias": lambda: bias_of(70, 80)}),
    ],
)
def test_other_calls_keep_nothing(monkeypatch, sizes, options):
    options = {name: make() for name, make in options.items()}
    with fake_gpu(monkeypatch, DEVICE, lambda launch: None) as launched:
        inputs = draw(*sizes)
        forward(*inputs[:3], **options)
    assert not launched[0].spec.kept_keys


@pytest.mark.parametrize(("heads", "head_dim", "number"), [(2, 32, 4), (1, 32, 1), (2, 64, 1)])
def test_several_sequences_at_a_time_need_few_columns_and_many_tiles(monkeypatch, heads, head_dim, number):
    with fake_gpu(monkeypatch, DEVICE, lambda launch: None) as launched:
        inputs = draw(4, 30, 300, heads, head_dim)
        forward(*inputs[:3], bias=bias_of(heads, 30, 300))
    spec = launched[0].spec
    assert spec.kept_keys == 384 and spec.family.sequences_of_tile(spec.kernel, spec.tile) == number


#: By name: the problem, a change of the forward's source, and the error that must catch it.
MUTANTS = {
    "a series begins with the bias of another": (
        "full",
        "share + rest,\n                             0};",
        "share + rest,\n                             1};",
        "uninitialised",
    ),
    "a series has one sequence": ("full", "next.batch += kSequences<Spec>;", "", "unwritten"),
    "all key tiles have one place": ("full", "(Shape::kKeepsArray ? block : 0)", "0", "numbers"),
    "warps have one key tile apart": (
        "full",
        "(row_group() * 4 + warp_) * Shape::kHeldTiles",
        "(row_group() * 4 + warp_)",
        "race",
    ),
    "the bias is not waited for": ("full", "Tile::wait(Base::held_address(0), lane_);", "", "race"),
    "a series goes on with the next bias": (
        "leading",
        "min_of(params.series_length, params.sharers - first) - 1",
        "params.series_length - 1",
        "blocks",
    ),
    "every bias is that of the first sequences": (
        "leading",
        "bias * params.sharers + first;",
        "first;",
        "blocks",
    ),
    "keys past the end": (
        "elements",
        "min_of(first_key + 8 * chunk + e, last_key)",
        "(first_key + 8 * chunk + e)",
        "bounds",
    ),
    "halves of a word": ("elements", "word[e / 2] | bits << 16 : bits", "word[e / 2] | bits : bits << 16", "numbers"),
    "masks are left out": ("masked", "hide_by_arrays<Spec>(scores, params, tile);", "", "numbers"),
    "a row has the mask of another": (
        "masked",
        "arrays.template pair_at<kRegular>(query + 8 * i, key, 8 * n, term);",
        "arrays.template pair_at<kRegular>(query, key, 8 * n, term);",
        "numbers",
    ),
    "rows past the end": (
        "elements",
        "bias + min_of(first_query + row, last_row) * strides.row;",
        "bias + (first_query + row) * strides.row;",
        "bounds",
    ),
}


MUTANTS |= {
    "a bias is replaced while others read it": (
        "several",
        "wait_for_groups();  // they have read the last one",
        "",
        "race",
    ),
    "a bias is read before others have loaded it": (
        "several",
        "lane_);\n        wait_for_groups();",
        "lane_);",
        "race",
    ),
    "all groups have the keys of the first sequence": (
        "several",
        "memory.key(0) + group * Shape::kGroupKeyBytes",
        "memory.key(0)",
        "numbers",
    ),
    "a series goes on with the sequences of the next": ("several", "next.share -= kSequences<Spec>;", "", "bounds"),
}


@functools.lru_cache(maxsize=None)
def run_mutant(problem: str, change: tuple[str, str] | None = None) -> None:
    sizes, shape = {
        "full": ((7, 70, 104), (2, 70, 104)),
        "leading": ((10, 70, 80), (2, 1, 2, 70, 80)),
        "elements": ((5, 70, 71), (2, 70, 71)),
        "masked": ((4, 70, 88), (2, 70, 88)),
        "several": ((10, 70, 139), (2, 1, 2, 70, 139)),
    }[problem]
    inputs = draw(*sizes)
    if problem in ("leading", "several"):
        inputs = tuple(x.reshape(2, 5, *x.shape[1:]) for x in inputs)

    def patch(spec, text: str) -> str:
        return text if change is None else replace_once(spec, text, *change)

    options = {"bias": bias_of(*shape)}
    if problem == "masked":
        options["mask"] = place(booleans((4, 1, 70, 88)))
    expected = Expectation(*inputs, **options)
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, DEVICE, patch=patch):
        monkeypatch.setattr(schedule, "_LONGEST_SERIES", 5 if problem == "several" else 3)
        o, lse = forward(*inputs[:3], config=SEVERAL[0] if problem == "several" else TILES[0], **options)
    expected.check(o=o, lse=lse)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_kernel_is_caught(mutant):
    problem, old, new, caught_by = MUTANTS[mutant]
    run_mutant(problem)
    exception, text = CATCHES[caught_by]
    with pytest.raises(exception, match=text):
        run_mutant(problem, (old, new))
