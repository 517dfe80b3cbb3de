"""Kernels that take a v with a head_dim of its own, executed without a GPU.

Arrays have unused heads between their own: a kernel that reads or writes more columns than there are is stopped.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import accumulator, numbers, options_of
from support.simulated_problems import HALF, HOPPER, draw, family_of, leave_out, small_tiles
from support.simulator import simulated_gpu
from support.strided_arrays import packed

from fa2cupy import TileConfig, reference
from fa2cupy.families.operations import TILED
from fa2cupy.gpu.copies import CopyingCall
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

PAIRS = ((40, 72), (8, 136), (136, 8), (128, 64), (64, 128), (192, 128), (256, 128))
#: Beyond 256 columns; (512, 512) is a head_dim of its own.
WIDE = ((264, 328), (512, 512), (512, 264), (320, 64), (512, 256), (64, 320))
METHODS = ("single_pass", "two_pass")
DTYPES = ("float16", "float32")
SCORES = ("softcap", "alibi", "bias of keys", "mask", "padding", "sink", "dropout", "window left")
#: Features by their names in `feature_cases.options_of`, or other calls.
CALLS = ("plain", "lse", "scores", "bias", "packed", "strided", "shares")


@pytest.fixture
def launched(monkeypatch):
    """Provides the stages that were launched, on a device whose blocks take several tiles; no call may copy arrays."""

    def refuse(self, name: str, array: np.ndarray) -> None:
        raise AssertionError(f"the call copies {name}")

    monkeypatch.setattr(CopyingCall, "_copy", refuse)
    with simulated_gpu(monkeypatch, HOPPER) as stages:
        yield stages


def lengths_of(dtype: str) -> tuple[int, int]:
    return (70, 90) if dtype in HALF else (21, 30)


def options_for(call: str, dtype: str, lengths: tuple[int, int]) -> dict:
    """Returns the keywords of a call on two sequences with four heads."""
    names = {"scores": SCORES, "bias": ("bias of heads", "mask of rows", "alibi by batch")}.get(call, ())
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    given = {key: x for name in names for key, x in options_of(name, dtype, sizes).items()}
    return {key: place(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}


def check_pair(launched: list, dtype: str, pair: tuple[int, int], call: str) -> None:
    """Checks all results of a call, and that kernels of this pair have computed them."""
    lengths = lengths_of(dtype)
    heads, batch = ((2, 1), 1) if max(pair) > 256 and call == "plain" else ((4, 2), 2)
    inputs = draw(dtype, lengths, pair[0], heads, head_dim_v=pair[1], batch=batch, view=place)
    options = options_for(call, dtype, lengths)
    options |= {} if call == "scores" else {"causal": True}
    if call == "packed":
        inputs = tuple(place(x[0]) for x in inputs)
        options |= {"cu_seqlens_q": place(np.array([3, 9, 9, lengths[0] - 2], "int32"))}
        options |= {"cu_seqlens_k": place(np.array([0, 5, 12, lengths[1] - 3], "int32"))}
    dlse = place(numbers((2, 4, lengths[0]), accumulator(dtype))) if call == "lse" else None
    view = packed if call == "strided" else None
    q, k, v, do = map(view, inputs) if view else inputs
    own = {
        "config": small_tiles(dtype, max(pair)) if max(pair) <= 256 else None,
        "family": family_of(dtype),
        "num_splits": 3 if call == "shares" else None,
    }
    expected = Expectation(q, k, v, do, dlse=dlse, **options)
    o = view(np.full_like(do, np.nan)) if view else None
    o, lse = forward(q, k, v, out=(o, None), **own, **options)
    expected.check(spec=pair, o=o, lse=lse)
    more = {f"return_d{key}": True for key in ("bias", "sink") if key in options}
    for method in METHODS if dtype not in HALF or max(pair) <= 256 else ("two_pass",):
        out = tuple(view(np.full_like(x, np.nan)) for x in (q, k, v)) if view else None
        gradients = backward(q, k, v, o, lse, do, dlse=dlse, method=method, out=out, **more, **own, **options)
        names = ("dq", "dk", "dv", *(name.removeprefix("return_") for name in more))
        expected.check(spec=method, **dict(zip(names, gradients, strict=True)))
    specs = {stage.spec for stage in launched if stage.spec.operation in TILED}
    assert {(spec.head_dim, spec.head_dim_v or spec.head_dim) for spec in specs} == {pair}


@pytest.mark.sample(dtype=("float32", "float16"), pair=PAIRS[:1])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_pair(launched, dtype, pair):
    check_pair(launched, dtype, pair, "plain")


@pytest.mark.sample(dtype=("float16",), pair=WIDE[:1])
@pytest.mark.parametrize("pair", WIDE, ids=str)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_each_pair_of_more_than_256_columns(launched, dtype, pair):
    check_pair(launched, dtype, pair, "plain")


@pytest.mark.matrix
@pytest.mark.parametrize("pair", [(40, 72), (136, 8), (264, 328)], ids=str)
@pytest.mark.parametrize("call", CALLS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_call(launched, dtype, call, pair):
    if call == "shares" and dtype not in HALF:
        pytest.skip("one block has all of a tile")
    check_pair(launched, dtype, pair, call)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("pair", "tile"), (((8, 128), TileConfig(128, 16, 8, 1)), ((8, 136), TileConfig(128, 32, 8, 1))), ids=str
)
def test_o_that_needs_more_shared_memory_than_q_and_keys(launched, pair, tile):
    """Checks rows of several warps, of which some end before others store O."""
    q, k, v, _ = draw("float16", (150, 70), pair[0], head_dim_v=pair[1])
    o, lse = forward(q, k, v, causal=True, config=tile, family="sm80")
    Expectation(q, k, v, causal=True).check(spec=pair, o=o, lse=lse)


#: Pairs and tiles of the forward on Hopper: O in a buffer of its own beside one or two of Q, one panel of it, three of
#: four, and O that passes through Q's buffer in one panel at a time.
ON_HOPPER = (
    ((40, 72), TileConfig(64, 48, 8, 2, 2)),
    ((136, 8), TileConfig(128, 32, 12, 2)),
    ((8, 136), TileConfig(128, 32, 12, 2)),
    ((128, 64), TileConfig(128, 64, 12, 2)),
    ((64, 128), TileConfig(192, 32, 16, 2)),
    ((192, 128), TileConfig(128, 128, 12, 2)),
    ((256, 128), TileConfig(128, 48, 12, 3)),
    ((64, 256), TileConfig(128, 96, 12, 3)),
    ((64, 256), TileConfig(128, 80, 12, 4)),
)


@pytest.mark.sample(pair=((40, 72),))
@pytest.mark.parametrize(("pair", "tile"), ON_HOPPER, ids=str)
def test_the_forward_on_hopper(launched, pair, tile):
    q, k, v, _ = draw("float16", (150, 210), pair[0], head_dim_v=pair[1], view=packed)
    out = packed(np.full((*q.shape[:-1], pair[1]), np.nan, q.dtype)), None
    o, lse = forward(q, k, v, causal=True, config=tile, family="sm90", num_splits=1, out=out)
    Expectation(q, k, v, causal=True).check(spec=pair, o=o, lse=lse)
    assert {(stage.spec.family_name, stage.spec.head_dim, stage.spec.head_dim_v) for stage in launched} == {
        ("sm90", *pair)
    }


@pytest.mark.matrix
@pytest.mark.parametrize("call", CALLS[2:])
def test_each_call_of_the_forward_on_hopper(launched, call):
    lengths, pair, config = (70, 90), (40, 72), TileConfig(64, 48, 8, 2, 2)
    inputs = tuple(map(place, draw("float16", lengths, pair[0], (4, 2), head_dim_v=pair[1], batch=2)))
    options = {"causal": call != "scores", **options_for(call, "float16", lengths)}
    if call == "packed":
        inputs = tuple(place(x[0]) for x in inputs)
        options |= {"cu_seqlens_q": place(np.array([3, 9, 9, 68], "int32"))}
        options |= {"cu_seqlens_k": place(np.array([0, 5, 12, 87], "int32"))}
    own = {"config": config, "family": "sm90", "num_splits": 3 if call == "shares" else None}
    o, lse = forward(*inputs[:3], **own, **options)
    Expectation(*inputs[:3], **options).check(spec=call, o=o, lse=lse)
    tiled = [stage.spec for stage in launched if stage.spec.operation in TILED]
    assert {(spec.head_dim, spec.head_dim_v) for spec in tiled} == {pair}


#: Kernels of Hopper that own keys, pairs and tiles. Both groups compute dK and dV, with dQ by panels of columns, halves
#: of one panel, rows, and transposed; or, where one of the head dimensions is beyond 128, one of them each, in blocks
#: or, with 128 keys, in pairs of blocks.
BY_KEYS = (
    ("backward", (96, 64), TileConfig(64, 128, 12, 2)),
    ("backward", (64, 128), TileConfig(64, 128, 12, 2)),
    ("backward", (40, 72), TileConfig(64, 128, 12, 2)),
    ("backward", (64, 32), TileConfig(128, 128, 12, 2)),
    ("backward", (128, 64), TileConfig(80, 128, 12, 2)),
    ("backward", (72, 128), TileConfig(48, 128, 12, 2)),
    ("backward", (192, 128), TileConfig(64, 64, 12, 2)),
    ("backward", (192, 128), TileConfig(64, 128, 12, 2)),
    ("backward", (136, 8), TileConfig(64, 64, 12, 3)),
    ("backward", (72, 136), TileConfig(64, 64, 12, 2)),
    ("backward", (8, 136), TileConfig(64, 64, 12, 2)),
    ("backward_dkdv", (64, 128), TileConfig(48, 128, 12, 2)),
    ("backward_dkdv", (72, 40), TileConfig(32, 128, 12, 3)),
    ("backward_dkdv", (192, 128), TileConfig(48, 64, 12, 2)),
    ("backward_dkdv", (8, 136), TileConfig(48, 64, 12, 3)),
    ("backward", (136, 8), TileConfig(64, 128, 12, 2)),
)
#: Pairs and tiles of the dQ kernel on Hopper, for both orders of its products. dQ has a buffer of its own, beside one
#: or two of Q and dO; or two or one of its panels; or passes through dO's buffer, at once or in steps.
BY_QUERIES = (
    ((40, 72), TileConfig(64, 48, 8, 2, 2)),
    ((8, 136), TileConfig(128, 48, 12, 2)),
    ((96, 64), TileConfig(192, 48, 16, 3)),
    ((192, 128), TileConfig(128, 64, 12, 3)),
    ((136, 8), TileConfig(64, 64, 8, 2, 2)),
    ((64, 128), TileConfig(64, 64, 8, 4, 2)),
    ((128, 64), TileConfig(64, 80, 8, 3, 2)),
    ((192, 128), TileConfig(128, 80, 12, 3)),
    ((256, 128), TileConfig(128, 80, 12, 2)),
)


@pytest.mark.sample(operation=("backward",), pair=((8, 136),))
@pytest.mark.parametrize(("operation", "pair", "tile"), BY_KEYS, ids=str)
def test_the_kernels_of_hopper_that_own_keys(launched, monkeypatch, operation, pair, tile):
    check_gradients(launched, monkeypatch, operation, pair, tile, "plain")


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("pair", [(136, 8), (8, 136), (192, 128)], ids=str)
def test_blocks_that_clear_rows_beside_each_other_in_any_order_of_the_warps(monkeypatch, pair, seed):
    """Each block of a pair loads and clears a tile with rows that see no key; no block may then be a tile ahead."""
    lengths, tile = (400, 250), TileConfig(64, 128, 12, 2)
    with simulated_gpu(monkeypatch, HOPPER, seed=seed):
        q, k, v, do = draw("float16", lengths, pair[0], head_dim_v=pair[1])
        expected = Expectation(q, k, v, do, causal=True)
        o, lse = reference.forward(q, k, v, causal=True)
        o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
        own = {"config": {"backward": tile}, "family": "sm90", "method": "single_pass", "num_splits": 1}
        dq, dk, dv = backward(q, k, v, o, lse, do, causal=True, **own)
        expected.check(dq=dq, dk=dk, dv=dv)


@pytest.mark.matrix
@pytest.mark.parametrize("call", CALLS[1:])
@pytest.mark.parametrize(("operation", "pair", "tile"), [BY_KEYS[i] for i in (2, 10, 12, 14, 15)], ids=str)
def test_each_call_of_the_kernels_of_hopper_that_own_keys(launched, monkeypatch, operation, pair, tile, call):
    check_gradients(launched, monkeypatch, operation, pair, tile, call)


@pytest.mark.sample(pair=((40, 72),))
@pytest.mark.parametrize(("pair", "tile"), BY_QUERIES, ids=str)
def test_dq_on_hopper(launched, monkeypatch, pair, tile):
    check_gradients(launched, monkeypatch, "backward_dq", pair, tile, "plain")


@pytest.mark.matrix
@pytest.mark.parametrize("call", CALLS[1:-1])
@pytest.mark.parametrize(("pair", "tile"), [BY_QUERIES[i] for i in (0, 4, 7)], ids=str)
def test_each_call_of_dq_on_hopper(launched, monkeypatch, pair, tile, call):
    check_gradients(launched, monkeypatch, "backward_dq", pair, tile, call)


def check_gradients(
    launched: list, monkeypatch, operation: str, pair: tuple[int, int], tile: TileConfig, call: str
) -> None:
    """Checks the results of one kernel of the backward on Hopper, on several tiles of queries and of keys."""
    lengths, sizes = (tile.b_r + 30, tile.b_c + 20), {"heads": (1, 1), "batch": 1}
    if operation == "backward_dq":
        sizes["heads"] = (9, 3)
    if call != "plain":
        sizes = {"heads": (4, 2), "batch": 2}
    q, k, v, do = draw("float16", lengths, pair[0], head_dim_v=pair[1], view=packed, **sizes)
    options = {"causal": call != "scores", **options_for(call, "float16", lengths)}
    if call == "packed":
        q, k, v, do = (packed(x[0]) for x in (q, k, v, do))
        options |= {"cu_seqlens_q": place(np.array([3, 9, 9, lengths[0] - 2], "int32"))}
        options |= {"cu_seqlens_k": place(np.array([0, 5, 12, lengths[1] - 3], "int32"))}
    dlse = place(numbers((2, 4, lengths[0]), np.float32)) if call == "lse" else None
    expected = Expectation(q, k, v, do, dlse=dlse, **options)
    o, lse = reference.forward(q, k, v, **options)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
    names, method = ("dq", "dk", "dv"), "single_pass"
    if operation != "backward":
        names, method = (names[:1] if operation == "backward_dq" else names[1:]), "two_pass"
        leave_out(monkeypatch, *{"backward_dq", "backward_dkdv"} - {operation})
    out = tuple(packed(np.full_like(x, np.nan)) for x in (q, k, v))
    splits = 3 if call == "shares" else 1
    own = {"config": {operation: tile}, "family": "sm90", "method": method, "num_splits": splits, "out": out}
    gradients = dict(zip(("dq", "dk", "dv"), backward(q, k, v, o, lse, do, dlse=dlse, **own, **options), strict=True))
    expected.check(spec=pair, **{name: gradients[name] for name in names})
    specs = {stage.spec for stage in launched if stage.spec.operation in TILED}
    assert {(spec.operation, spec.head_dim, spec.head_dim_v) for spec in specs} == {(operation, *pair)}


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("pair", [(59, 21), (60, 21), (21, 60)], ids=str)
def test_rows_that_are_copied_one_element_at_a_time(launched, dtype, pair):
    check_pair(launched, dtype, pair, "strided")
