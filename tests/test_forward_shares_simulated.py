"""The forward with several blocks for each query tile, executed without a GPU: partial results, then merged."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import forward
from support.feature_cases import options_of
from support.launch_record import stage_values
from support.simulated_problems import FEW_MULTIPROCESSORS, HOPPER, dominant, draw, growing
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, packed

from fa2cupy import TileConfig
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

SMALL = TileConfig(32, 32, 2, 2)
#: Tiles by (family, head_dim): warps with rows of their own, and pairs of warps; one to three warp groups, with and
#: without Q loaded ahead and a buffer for O.
KERNELS = {
    ("sm80", 64): SMALL,
    ("sm80", 136): SMALL,
    ("sm80", 160): SMALL,
    ("sm90", 8): TileConfig(192, 32, 16, 2),
    ("sm90", 64): TileConfig(64, 48, 8, 2, 2),
    ("sm90", 72): TileConfig(192, 32, 16, 3),
    ("sm90", 128): TileConfig(128, 64, 12, 2),
    ("sm90", 256): TileConfig(128, 80, 12, 2),
}
#: Kernels of the sample, which has a test of the one for head_dim 8 besides.
SOME = (("sm80", 64), ("sm80", 160), ("sm90", 64))


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch, HOPPER) as stages:
        yield stages


def check(launched: list, kernel: tuple, inputs: tuple, num_splits: int, out=(None, None), **problem) -> tuple:
    """Runs a split forward of one of `KERNELS` and checks its results, and which kernels gave them."""
    q, k, v, _ = inputs
    launched.clear()
    o, lse = forward(q, k, v, num_splits=num_splits, config=KERNELS[kernel], family=kernel[0], out=out, **problem)
    Expectation(q, k, v, **problem).check(spec=num_splits, o=o, lse=lse)
    specs = [stage.spec for stage in launched if stage.spec.operation != "clear_forward"]
    assert [(spec.operation, spec.family_name, spec.is_split) for spec in specs] == [
        ("forward", kernel[0], True),
        ("merge_forward", "common", False),
    ]
    return o, lse


def features(names: tuple[str, ...], lengths: tuple[int, int], batch: int = 1, heads: int = 2) -> dict:
    sizes = {"batch": batch, "num_heads": heads, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    given = {key: value for name in names for key, value in options_of(name, "float16", sizes).items()}
    return {key: place(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}


@pytest.mark.sample(kernel=SOME)
@pytest.mark.parametrize("causal", (True,), ids=("causal",))
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_short_queries_against_long_keys(launched, kernel, causal):
    """Some cases have more shares than key tiles, or rows that see no key."""
    for lengths, num_splits in (((1, 200), 8), ((5, 131), 3), ((70, 290), 2), ((5, 40), 8), ((70, 20), 3)):
        check(launched, kernel, draw("float16", lengths, kernel[1]), num_splits, causal=causal)


@pytest.mark.sample(kernel=SOME[:1])
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_each_share_in_turn_has_all_weight(launched, kernel):
    check(launched, kernel, dominant(draw("float16", (5, 288), kernel[1], batch=3)), 3)


def test_all_rows_of_a_tile_of_three_warp_groups(launched):
    """Checks the last rows of the tile, which the last warps of the last group leave in the workspace."""
    inputs = draw("float16", (191, 90), 8, (1, 1))
    check(launched, ("sm90", 8), inputs, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_any_number_of_shares(launched, kernel, causal):
    for rows, keys, num_splits in ((1, 30, 2), (1, 333, 16), (70, 333, 3), (70, 30, 16)):
        check(launched, kernel, draw("bfloat16", (rows, keys), kernel[1]), num_splits, causal=causal)


@pytest.mark.sample(names=(("window", "sink", "dropout"),), kernel=(("sm90", 64),))
@pytest.mark.parametrize(
    "names",
    [
        ("window left",), ("window", "sink", "dropout"), ("window right", "sink"), ("causal", "sink"),
        ("sink", "padding"), ("dropout",), ("causal", "bias"), ("bias of keys", "mask"), ("causal", "mask of rows"),
        ("softcap", "alibi"),
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("kernel", (("sm80", 64), ("sm90", 64)), ids=str)
def test_features(launched, kernel, names):
    for lengths, num_splits in (((70, 290), 3), ((5, 90), 8), ((70, 50), 2)):
        check(launched, kernel, draw("float16", lengths, kernel[1]), num_splits, **features(names, lengths))


@pytest.mark.sample(kernel=(("sm80", 64),), names=(("causal",),))
@pytest.mark.parametrize("names", (("causal",), ("window", "sink")), ids=" ".join)
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_packed_sequences(launched, kernel, names):
    """One sequence has no queries, one has no keys, and unused rows lie before and behind all."""
    lengths = ((5, 200), (0, 70), (70, 0), (40, 130), (1, 3))
    offsets = [np.cumsum([before, *own]).astype("int32") for before, own in zip((3, 7), zip(*lengths), strict=True)]
    inputs = draw("float16", tuple(int(ends[-1]) + 2 for ends in offsets), kernel[1])
    given = {"cu_seqlens_q": place(offsets[0]), "cu_seqlens_k": place(offsets[1]), **features(names, (0, 0))}
    check(launched, kernel, tuple(place(x[0]) for x in inputs), 3, **given)


@pytest.mark.matrix
@pytest.mark.parametrize("heads", ((4, 2),), ids=("gqa",))
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_head_groups_and_strided_results(launched, kernel, heads):
    inputs = draw("float16", (70, 200), kernel[1], heads, batch=2)
    o = packed(np.full_like(inputs[0], np.nan))
    result, _ = check(launched, kernel, inputs, 3, causal=True, out=(o, None))
    assert result is o
    check(launched, kernel, tuple(gapped(x) for x in inputs), 2)
    check(launched, kernel, tuple(place(x.transpose(0, 2, 1, 3)) for x in inputs), 2, layout="bhsd")


@pytest.mark.sample(kernel=(("sm80", 64),), rows=(slice(0, 1),))
@pytest.mark.parametrize("rows", (slice(0, 1), slice(None)), ids=("one row", "all rows"))
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_shares_of_very_different_weight(launched, kernel, rows):
    for num_splits in (2, 8):
        check(launched, kernel, growing(draw("float16", (35, 330), kernel[1]), rows), num_splits, causal=True)


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_heads_in_several_sections(monkeypatch, kernel):
    with simulated_gpu(monkeypatch, FEW_MULTIPROCESSORS) as launched:
        check(launched, kernel, draw("float16", (130, 130), kernel[1], batch=5), 3, causal=True)
        values = stage_values(launched[0])
        assert values["heads_per_section"] < values["scheduled_heads"] * 5


@pytest.mark.sample(kernel=(("sm90", 64),))
@pytest.mark.parametrize("kernel", SOME, ids=str)
def test_the_bits_are_the_same_whichever_warp_runs_first(monkeypatch, kernel):
    """Rows of whole tiles see no key, and blocks take several tiles."""
    inputs = draw("float16", (230, 150), kernel[1])
    found = []
    for seed in (None, 1):
        with monkeypatch.context() as patched, simulated_gpu(patched, HOPPER, seed=seed) as launched:
            found.append(check(launched, kernel, inputs, 3, causal=True))
    for ours, others in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, others)


@pytest.mark.sample(kernel=(("sm80", 64),))
@pytest.mark.parametrize("kernel", (("sm80", 64), ("sm90", 64)), ids=str)
def test_nothing_that_the_query_tile_does_not_see_reaches_it(launched, kernel):
    """A Hopper block with an empty share reads the key tile after the last one of its query tile."""
    tile = KERNELS[kernel]
    rows, keys = 2 * tile.b_r, 2 * tile.b_r + 2 * tile.b_c
    q, k, v, _ = draw("float16", (rows, keys), kernel[1], (1, 1))
    own = {"causal": True, "num_splits": 16, "config": tile, "family": kernel[0]}
    o, lse = forward(q, k, v, **own)
    seen = keys - rows + tile.b_r  # by the first query tile
    first_hidden = -(-seen // tile.b_c) * tile.b_c
    k[:, first_hidden:], v[:, first_hidden:] = np.nan, np.nan
    poisoned, poisoned_lse = forward(q, k, v, **own)
    np.testing.assert_array_equal(poisoned[:, : tile.b_r], o[:, : tile.b_r])
    np.testing.assert_array_equal(poisoned_lse[:, :, : tile.b_r], lse[:, :, : tile.b_r])
    assert np.isnan(np.asarray(poisoned[:, tile.b_r :], np.float32)).any()


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", (("sm90", 64),), ids=str)
def test_a_bias_that_is_copied_to_shared_memory(launched, kernel):
    """Rows of the bias begin on 16 bytes; the first copy of a share is of its own last key tile."""
    lengths = (70, 288)
    bias = place(np.random.default_rng(5).standard_normal((1, 2, *lengths)).astype("float16"))
    check(launched, kernel, draw("float16", lengths, kernel[1]), 3, bias=bias)
