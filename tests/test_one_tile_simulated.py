"""``one_tile``: all gradients of heads whose keys are one tile, from one kernel, executed without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.fake_gpu import delta as run_delta
from support.feature_cases import ROWS, numbers, options_of
from support.simulated_problems import draw
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, packed, shifted

from fa2cupy import TileConfig, UnsupportedProblemError
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

#: Tiles whose warps have both roles for their keys, and one of them.
BOTH_ROLES, ONE_ROLE = TileConfig(32, 32, 2), TileConfig(32, 32, 4)
SMALL = [BOTH_ROLES, pytest.param(ONE_ROLE, marks=pytest.mark.matrix)]
ONE_TILE = {"forward": TileConfig(32, 32, 2), "backward_one_tile": BOTH_ROLES}
#: With more query heads than K/V heads, and rows that fill no tile.
SIZES = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 37, "seqlen_k": 29}


@pytest.fixture(params=["sm80", "sm90"])
def launched(monkeypatch, request):
    device = "sm_80" if request.param == "sm80" else "sm_90"
    with simulated_gpu(monkeypatch, device, seed=1) as stages:
        yield stages


def check(inputs: tuple, launched: list, *, stages=("backward_one_tile",), dlse=None, config=ONE_TILE, **options):
    """Checks the gradients of `one_tile`, and the kernels that they come from."""
    expected = Expectation(*inputs, dlse=dlse, **options)
    q, k, v, do = inputs
    o, lse = forward(q, k, v, config={"forward": ONE_TILE["forward"]}, family="sm80", **options)
    launched.clear()
    more = {"return_dsink": True} if "sink" in options else {}
    gradients = backward(q, k, v, o, lse, do, dlse=dlse, method="one_tile", config=config, **more, **options)
    names = ("dq", "dk", "dv", *(["dsink"] if more else []))
    expected.check(spec="one_tile", **dict(zip(names, gradients, strict=True)))
    assert [stage.spec.operation for stage in launched] == list(stages)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (32, 32), (37, 29), (90, 32), (5, 30), (75, 17)])
@pytest.mark.parametrize("tile", SMALL)
@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_any_number_of_queries(launched, tile, lengths, causal):
    check(draw("float16", lengths, 64), launched, causal=causal, config={"backward_one_tile": tile})


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tile"),
    [
        ("bfloat16", 24, TileConfig(64, 64, 4)),
        ("float16", 32, TileConfig(32, 64, 2)),
        ("float16", 32, TileConfig(64, 64, 8)),
        ("float16", 40, TileConfig(64, 64, 4)),
        ("bfloat16", 64, TileConfig(32, 128, 8)),
        ("bfloat16", 96, TileConfig(64, 64, 8)),
        ("float16", 128, TileConfig(64, 128, 8)),
    ],
)
@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_head_dims_and_tiles(launched, dtype, head_dim, tile):
    lengths = (tile.b_r + 9, tile.b_c - 3)
    check(draw(dtype, lengths, head_dim), launched, causal=True, config={"backward_one_tile": tile})


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(32, 64), (64, 24)])
def test_columns_of_v(launched, head_dim, head_dim_v):
    check(draw("bfloat16", (40, 31), head_dim, head_dim_v=head_dim_v), launched)


def test_hopper_takes_it_too(launched):
    check(draw("bfloat16", (37, 29), 64), launched, causal=True)
    assert {stage.spec.family_name for stage in launched} == {"sm80" if launched[0].spec.arch == "sm_80" else "sm90"}


@pytest.mark.parametrize("view", [packed, gapped, shifted])
@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_strides(launched, view):
    check(draw("float16", (37, 29), 32, view=view), launched)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.startswith(("sink", "causal"))])
@pytest.mark.parametrize("tile", SMALL)
@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_features(launched, tile, row):
    inputs = draw("float16", (SIZES["seqlen_q"], SIZES["seqlen_k"]), 24, (4, 2), batch=2)
    options = {
        key: place(x) if isinstance(x, np.ndarray) else x for key, x in options_of(row, "float16", SIZES).items()
    }
    # A bias that is the same for all keys has the gradient 0 unless lse has one.
    dlse = place(numbers((2, 4, SIZES["seqlen_q"]), "float32"))
    options["config"] = {"backward_one_tile": tile}
    check(inputs, launched, causal=not row.startswith("window"), dlse=dlse, **options)


@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_a_sink_has_delta_from_its_own_kernel(launched):
    sink = place(numbers((2,), "float32"))
    check(draw("float16", (37, 29), 32), launched, sink=sink, stages=("delta", "dsink", "backward_one_tile"))


@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_a_given_delta(launched):
    q, k, v, do = draw("float16", (37, 29), 32)
    expected = Expectation(q, k, v, do)
    o, lse = forward(q, k, v)
    delta = run_delta(o, do)
    launched.clear()
    dq, dk, dv = backward(q, k, v, o, lse, do, delta=delta, method="one_tile", config=ONE_TILE)
    expected.check(dq=dq, dk=dk, dv=dv)
    assert [stage.spec.operation for stage in launched] == ["backward_one_tile"]


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_no_rows(launched, lengths):
    q, k, v, do = draw("float16", lengths, 32)
    o, lse = forward(q, k, v)
    out = tuple(place(np.full(x.shape, np.nan, x.dtype)) for x in (q, k, v))
    for gradient in backward(q, k, v, o, lse, do, method="one_tile", out=out):
        assert not np.asarray(gradient).any()


def hidden_by(name: str) -> tuple[dict, np.ndarray]:
    """Returns the keywords of a call of 40 queries and 29 keys, and which rows see no key."""
    seventh = np.arange(40) % 7 == 2
    return {
        "causal": lambda: ({"causal": True}, np.arange(40) < 11),
        "mask": lambda: ({"mask": place(np.broadcast_to(~seventh[:, None], (40, 29)).copy())}, seventh),
        "bias": lambda: (
            {"bias": place(np.where(seventh[:, None], -np.inf, numbers((40, 29), "float32")).astype("float16"))},
            seventh,
        ),
    }[name]()


@pytest.mark.parametrize("returns_dbias", [False, True])
@pytest.mark.parametrize("name", ["causal", "mask", "bias"])
@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_nothing_of_a_row_without_keys_is_seen(launched, name, returns_dbias):
    if returns_dbias and name != "bias":
        pytest.skip("there is no bias")
    options, hidden = hidden_by(name)
    q, k, v, do = draw("float16", (40, 29), 32, (2, 2), batch=2)
    dlse = place(numbers((2, 2, 40), "float32"))
    q[:, hidden], do[:, hidden], dlse[..., hidden] = 0, 0, 0
    o, lse = forward(q, k, v, **options)
    assert (np.isneginf(lse) == hidden).all()
    options |= {"method": "one_tile", "return_dbias": returns_dbias}
    wanted = backward(q, k, v, o, lse, do, dlse=dlse, **options)
    q[:, hidden], do[:, hidden], dlse[..., hidden], o[:, hidden] = np.nan, np.inf, np.nan, np.nan
    for gradient, expected in zip(backward(q, k, v, o, lse, do, dlse=dlse, **options), wanted, strict=True):
        assert np.isfinite(np.asarray(expected, "float32")).all()
        np.testing.assert_array_equal(gradient, expected)


def test_deterministic_calls_may_take_it(launched):
    q, k, v, do = draw("float16", (50, 40), 32, (2, 2), batch=40)
    o, lse = forward(q, k, v, family="sm80")
    results = [backward(q, k, v, o, lse, do, deterministic=True) for _ in range(2)]
    assert [stage.spec.operation for stage in launched[1:]] == ["backward_one_tile"] * 2
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_bits_that_do_not_depend_on_other_sequences_are_those_of_two_passes(launched):
    """How many sequences there are decides whether one tile is the fastest: with a number of splits, none is taken."""
    q, k, v, do = draw("float16", (50, 40), 32, (2, 2), batch=40)
    o, lse = forward(q, k, v, family="sm80")
    launched.clear()
    backward(q, k, v, o, lse, do, deterministic=True, num_splits=1)
    assert [stage.spec.operation for stage in launched] == ["delta", "backward_dq", "backward_dkdv"]


def test_a_bias_with_an_element_for_each_score_has_two_passes(launched):
    q, k, v, do = draw("float16", (30, 29), 32, (2, 2))
    bias = place(numbers((1, 2, 30, 29), "float16"))
    o, lse = forward(q, k, v, bias=bias, family="sm80")
    launched.clear()
    backward(q, k, v, o, lse, do, bias=bias, return_dbias=True, method="one_tile")
    assert [stage.spec.operation for stage in launched] == ["delta", "backward_dq", "backward_dkdv"]


@pytest.mark.parametrize("launched", ["sm80"], indirect=True)
def test_dbias_beside_it_comes_from_the_kernel_that_owns_tiles(launched):
    """Checks a bias of heads whose keys several query heads share."""
    inputs = draw("bfloat16", (37, 29), 32, (2, 1), batch=3)
    bias = place(numbers((2, 37, 29), "bfloat16"))
    q, k, v, do = inputs
    o, lse = forward(q, k, v, bias=bias)
    launched.clear()
    results = backward(q, k, v, o, lse, do, bias=bias, return_dbias=True, method="one_tile")
    Expectation(*inputs, bias=bias).check(**dict(zip(("dq", "dk", "dv", "dbias"), results, strict=True)))
    assert [stage.spec.operation for stage in launched] == ["delta", "backward_one_tile", "dbias"]


def test_more_keys_than_a_tile_has(launched):
    q, k, v, do = draw("float16", (20, 300), 32)
    o, lse = forward(q, k, v)
    with pytest.raises(UnsupportedProblemError, match="its 300 keys are more than the 128 of a tile"):
        backward(q, k, v, o, lse, do, method="one_tile")
    q, k, v, do = draw("float16", (20, 40), 32)
    o, lse = forward(q, k, v)
    with pytest.raises(ValueError, match="config: backward_one_tile needs a tile with all 40 keys"):
        backward(q, k, v, o, lse, do, method="one_tile", config=ONE_TILE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 30, 29), (1, 1, 30, 29), (30, 29), (5, 1, 30, 29)], ids=["heads", "all", "everything", "sequences"]
)
def test_dbias_of_a_bias_that_sequences_share(launched, shape, deterministic):
    inputs = draw("bfloat16", (30, 29), 32, (2, 2), batch=5)
    bias = place(numbers(shape, "bfloat16"))
    q, k, v, do = inputs
    expected = Expectation(*inputs, bias=bias)
    o, lse = forward(q, k, v, bias=bias, family="sm80")
    launched.clear()
    options = {"method": "one_tile", "deterministic": deterministic}
    results = backward(q, k, v, o, lse, do, bias=bias, return_dbias=True, **options)
    expected.check(**dict(zip(("dq", "dk", "dv", "dbias"), results, strict=True)))
    assert [stage.spec.operation for stage in launched] == ["backward_one_tile_dbias", "sum_dbias"]


def test_a_requested_tile_is_that_of_the_kernel_beside_which_another_sums_dbias(launched):
    inputs = draw("bfloat16", (30, 29), 32, (2, 2), batch=5)
    bias = place(numbers((2, 30, 29), "bfloat16"))
    q, k, v, do = inputs
    expected = Expectation(*inputs, bias=bias)
    o, lse = forward(q, k, v, bias=bias, family="sm80")
    launched.clear()
    options = {"method": "one_tile", "config": {"backward_one_tile": BOTH_ROLES}}
    results = backward(q, k, v, o, lse, do, bias=bias, return_dbias=True, **options)
    expected.check(**dict(zip(("dq", "dk", "dv", "dbias"), results, strict=True)))
    stages = [stage.spec for stage in launched]
    assert [spec.operation for spec in stages[:3]] == ["delta", "backward_one_tile", "dbias"]
    assert stages[1].tile == BOTH_ROLES
