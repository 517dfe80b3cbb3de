"""The kernel that owns tiles of a broadcast bias, executed without a GPU: which calls have it, and their gradients."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import CATCHES, replace_once
from support.fake_cupy import FakeArray, place
from support.fake_gpu import backward, backward_jvp, double_backward, fake_gpu, forward
from support.feature_cases import accumulator, booleans, numbers
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, packed, reversed_columns, shifted
from support.traced_cases import on_gpu

import fa2cupy
from fa2cupy import BlockMask, TileConfig, UnsupportedProblemError
from fa2cupy.families import dbias
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import TileRow
from fa2cupy.families.registry import FAMILIES
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

#: dtype, head_dim, queries and keys, device, family of the tiled kernels and of ``dbias``, and its tile.
CASES = {
    "simt": ("float32", 12, (21, 30), "sm_90", "simt", "simt", TileConfig(8, 8, 2)),
    "simt double": ("float64", 12, (21, 30), "sm_80", "simt", "simt", TileConfig(16, 8, 2)),
    "sm80": ("float16", 24, (70, 90), "sm_80", "sm80", "sm80", TileConfig(32, 64, 2, 2)),
    "sm80 of one stage": ("bfloat16", 160, (70, 50), "sm_80", "sm80", "sm80", TileConfig(64, 16, 2)),
    "sm90": ("bfloat16", 64, (70, 90), "sm_90", "sm90", "sm90", TileConfig(64, 32, 8, 3, 2)),
    "sm90 of two groups": ("float16", 72, (150, 130), "sm_90", "sm90", "sm90", TileConfig(128, 48, 12, 2)),
    "sm90 of narrow panels": ("bfloat16", 24, (150, 130), "sm_90", "sm90", "sm90", TileConfig(128, 64, 12, 4)),
    "sm80_float64": ("float64", 16, (20, 40), "sm_80", "sm80", "simt", TileConfig(16, 16, 4)),
    "sm80_float32": ("float32", 16, (20, 40), "sm_80", "sm80", "simt", TileConfig(16, 16, 4)),
    "sm90_float32": ("float32", 64, (24, 48), "sm_90", "sm90", "simt", TileConfig(16, 16, 4)),
}
CONFIGS = {"simt": TileConfig(8, 8, 2), "simt double": TileConfig(8, 8, 2), "sm80": TileConfig(32, 32, 2, 2)}
BATCH, HEADS, GROUPS = 3, 4, 2
FEW = ("simt", "sm80")
SOME = (*FEW, "sm90")
#: The axes of the bias that are not 1.
SHAPES = ("hqk", "bqk", "qk", "bhk", "hk", "bhq", "q", "b", "h", "")


def shape_of(name: str, axes: str) -> tuple[int, ...]:
    rows, keys = CASES[name][2]
    lengths = {"b": BATCH, "h": HEADS, "q": rows, "k": keys}
    return tuple(length if axis in axes else 1 for axis, length in lengths.items())


def inputs_of(name: str, **sizes) -> tuple:
    dtype, head_dim, (rows, keys), *_ = CASES[name]
    sizes = {"batch": BATCH, "num_heads": HEADS, "num_heads_kv": GROUPS, "seqlen_q": rows, "seqlen_k": keys, **sizes}
    return make_inputs(dtype, head_dim=head_dim, **sizes)


def with_small_tile(monkeypatch, name: str) -> None:
    *_, family, tile = CASES[name]
    owner = next(one for one in FAMILIES if one.name == family)
    monkeypatch.setitem(owner.tiles, "dbias", (TileRow(256, tile),))


def gradients(
    name: str,
    inputs: tuple,
    *,
    shares: int = 1,
    order: int | None = None,
    patch=None,
    out=None,
    bias_before=None,
    **options,
) -> tuple:
    """Returns the results of a deterministic call with all gradients, and the stages that it launched.

    `shares` is the number of blocks that are resident for each tile of the bias; fewer sequences have fewer. The
    forward has the same bias unless it is given another one, `bias_before`.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_small_tile(monkeypatch, name)
        monkeypatch.setattr(dbias, "tiles_of_bias", lambda *_: 1)
        device = dataclasses.replace(DeviceInfo.named(CASES[name][3]), multiprocessors=shares)
        with simulated_gpu(monkeypatch, device, seed=order, patch=patch) as launched:
            q, k, v, do = map(place, inputs)
            own = {**on_gpu(options), "family": CASES[name][4], "config": CONFIGS.get(name)}
            dlse = own.pop("dlse", None)
            o, lse = forward(q, k, v, **own | ({} if bias_before is None else {"bias": place(bias_before)}))
            launched.clear()
            own |= {"deterministic": True, "return_dbias": True, "dlse": dlse}
            given = None if out is None else (None, None, None, out)
            return backward(q, k, v, o, lse, do, out=given, **own), list(launched)


def map_of(name: str) -> BlockMask:
    """Returns a map without a function, whose tiles are those of the kernels or larger."""
    (rows, keys), size = CASES[name][2], {"simt": 8, "sm90": 128}.get(name, 64)
    return BlockMask(booleans((BATCH, 1, -(-rows // size), -(-keys // size))), rows, keys, tile=(size, size))


def check(name: str, inputs: tuple | None = None, **options) -> FakeArray:
    """Checks the gradients of a deterministic call, and that ``dbias`` sums that of the bias; returns that."""
    inputs = inputs or inputs_of(name)
    how = {key: options.pop(key) for key in ("shares", "order", "patch", "out", "bias_before") if key in options}
    results, launched = gradients(name, inputs, **how, **options)
    Expectation(*inputs, **options).check(**dict(zip(("dq", "dk", "dv", "dbias"), results, strict=True)))
    specs = [stage.spec for stage in launched]
    first = next(number for number, spec in enumerate(specs) if spec.operation == "dbias")
    assert specs[first].family.name == CASES[name][5]
    assert not any("dbias" in spec.features for spec in specs[:first])
    assert [spec.operation for spec in specs[first + 1 :]] == ["sum_dbias"] * specs[first].is_split
    return results[3]


# ------------------------------------------------------------------------------------------------------ kinds of biases


@pytest.mark.sample(name=SOME, axes=("",))
@pytest.mark.parametrize("axes", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_biases_of_all_axes(name, axes):
    check(name, bias=numbers(shape_of(name, axes), CASES[name][0]))


@pytest.mark.sample(name=("simt",))
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_order_of_warps(name):
    options = {"bias": numbers(shape_of(name, "hk"), CASES[name][0]), "causal": True}
    bits = {check(name, order=order, **options).tobytes() for order in (None, 1, 2)}
    assert len(bits) == 1


@pytest.mark.sample(name=("simt",), leading=((2, 1, 2),))
@pytest.mark.parametrize("leading", [(2, 1, 2), (1, 3, 1), (2, 3, 1), (1, 3, 2), (2, 1, 1), (3, 2), ()], ids=str)
@pytest.mark.parametrize("name", [*FEW, "sm90"])
def test_leading_axes(name, leading):
    """Neighbouring axes, of which a bias has one, both or none."""
    check_leading(name, leading)


def check_leading(name: str, leading: tuple, **options) -> None:
    dtype, head_dim, *_ = CASES[name]
    sizes = ((20, 2), (30, 1), (30, 1), (20, 2))
    inputs = tuple(numbers((2, 3, 2, *size, head_dim), dtype, seed) for seed, size in enumerate(sizes))
    check(name, inputs, bias=numbers((*leading, 1, 20, 30), dtype), causal=True, **options)


@pytest.mark.sample(name=("simt",))
@pytest.mark.parametrize("name", ["simt", "simt double", "sm80", "sm90"])
def test_biases_of_any_strides_and_dtypes(name):
    dtype, _, (rows, keys), *_ = CASES[name]
    bias = numbers((1, HEADS, rows, keys), dtype)
    wanted = check(name, bias=bias)
    for layout in (gapped, reversed_columns, shifted):
        np.testing.assert_array_equal(check(name, bias=layout(bias)), wanted)
    wide = check(name, bias=bias.astype(accumulator(dtype)), bias_before=bias)
    assert wide.dtype == accumulator(dtype)
    np.testing.assert_array_equal(wide.astype(wanted.dtype), wanted)


@pytest.mark.sample(name=FEW)
@pytest.mark.parametrize("name", SOME)
def test_results_into_arrays_of_the_callers(name):
    dtype, _, (rows, keys), *_ = CASES[name]
    for axes in ("hqk", "bk"):
        bias = numbers(shape_of(name, axes), dtype)
        wide = place(np.full((*bias.shape[:3], 2 * bias.shape[3]), np.nan, bias.dtype))
        out = wide[..., ::-2]
        assert check(name, bias=bias, out=out) is out
        assert np.isnan(np.asarray(wide, "float64")[..., ::2]).all()


# -------------------------------------------------------------------------------------------- blocks that share a tile


@pytest.mark.sample(name=("simt",), axes=("hqk",))
@pytest.mark.parametrize("axes", ["hqk", "bqk", "hk", "q", ""])
@pytest.mark.parametrize("name", ["simt", "sm80", "sm90", "sm80_float64"])
def test_shares_of_the_sequences(name, axes):
    """One of the shares is shorter. A bias that no other sequence has is not shared."""
    dtype = CASES[name][0]
    bias, wide = numbers(shape_of(name, axes), dtype), accumulator(dtype)
    for own in (bias, bias.astype(wide)):
        check(name, bias=own, causal=True, shares=2)


@pytest.mark.sample(leading=((2, 1, 2),))
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("leading", [(2, 1, 2), (1, 3, 1), (2, 1, 1)], ids=str)
def test_shares_of_leading_axes(name, leading):
    check_leading(name, leading, shares=4)


@pytest.mark.matrix
@pytest.mark.parametrize("name", SOME)
def test_shares_of_packed_sequences_and_maps(name):
    check_packed(name, "hqk", shares=2)
    check(name, bias=numbers(shape_of(name, "hk"), CASES[name][0]), block_mask=map_of(name), shares=3)


# ---------------------------------------------------------------------------------------------------- lengths and heads


@pytest.mark.sample(name=FEW, lengths=((1, 1), (33, 65)))
@pytest.mark.parametrize("lengths", [(1, 1), (1, 70), (70, 1), (33, 65), (64, 64)], ids=str)
@pytest.mark.parametrize("name", ["simt", "sm80", "sm80 of one stage", "sm90"])
def test_lengths(name, lengths):
    dtype, rows, keys = CASES[name][0], *lengths
    inputs = inputs_of(name, seqlen_q=rows, seqlen_k=keys, batch=2)
    for shape in ((1, HEADS, rows, keys), (2, 1, 1, keys)):
        check(name, inputs, bias=numbers(shape, dtype), causal=True)


@pytest.mark.sample(name=FEW)
@pytest.mark.parametrize("name", SOME)
def test_heads_that_do_not_share_keys(name):
    check(name, inputs_of(name, num_heads_kv=HEADS), bias=numbers(shape_of(name, "bqk"), CASES[name][0]))


@pytest.mark.sample(name=("simt",))
@pytest.mark.parametrize("name", SOME)
def test_other_columns_of_v(name):
    check(name, inputs_of(name, head_dim_v=40), bias=numbers(shape_of(name, "hqk"), CASES[name][0]))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("empty", ["batch", "num_heads", "seqlen_q", "seqlen_k"])
def test_empty_calls(name, empty):
    """Elements that no score has get zeros."""
    sizes = {empty: 0} | ({"num_heads_kv": 0} if empty == "num_heads" else {})
    for shape in ((1, 1, 1, 1), (1, 1)):
        results, _ = gradients(name, inputs_of(name, **sizes), bias=numbers(shape, CASES[name][0]))
        assert results[3].shape == shape
        assert not np.asarray(results[3], "float64").any()


@pytest.mark.sample(name=("simt",), axes=("hqk",))
@pytest.mark.parametrize("name", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("axes", ["hqk", "bhk", "q"])
def test_packed_sequences(name, axes):
    check_packed(name, axes)


def check_packed(name: str, axes: str, **options) -> None:
    dtype, head_dim, *_ = CASES[name]
    offsets = {"q": np.array([0, 5, 5, 41], "int32"), "k": np.array([0, 35, 39, 80], "int32")}
    longest = {"q": 40, "k": 44}  # one more than the longest sequence, and rows of dbias that no sequence has
    inputs = tuple(x[0] for x in inputs_of(name, batch=1, seqlen_q=44, seqlen_k=85))
    lengths = {"b": 3, "h": HEADS, **longest}
    shape = tuple(length if axis in axes else 1 for axis, length in lengths.items())
    packing = {f"cu_seqlens_{side}": x for side, x in offsets.items()} | {
        f"max_seqlen_{side}": n for side, n in longest.items()
    }
    check(name, inputs, bias=numbers(shape, dtype), causal=True, **packing, **options)


# ------------------------------------------------------------------------------------------------------------- features


def features(name: str) -> dict:
    dtype, _, (rows, keys), *_ = CASES[name]
    wide, visible = accumulator(dtype), np.arange(keys) == 1
    padding = np.arange(keys) < np.array([keys - 5, keys, 7])[:, None]
    mask = booleans((BATCH, 1, rows, keys)) | visible
    return {
        "causal": {"causal": True},
        "window": {"window": (9, 4)},
        "causal and window": {"causal": True, "window": (20, None)},
        "dropout": {"dropout_p": 0.3, "seed": 0x123456789ABCDEF0},
        "softcap": {"softcap": 0.8},
        "slopes": {"alibi_slopes": numbers((BATCH, HEADS), wide)},
        "mask": {"mask": mask},
        "padding": {"key_padding_mask": padding},
        "sink": {"sink": numbers((HEADS,), wide)},
        "dlse": {"dlse": numbers((BATCH, HEADS, rows), wide)},
        "scale": {"softmax_scale": -0.3},
        "score_mod": {"score_mod": lambda score, b, h, q, k: score * score - 0.01 * (q - k)},
        "mask_mod": {"mask_mod": lambda b, h, q, k: (q + k + h) % 3 != 0},
        "score_args": {
            "score_mod": lambda score, b, h, q, k, table: score * table[h],
            "score_args": (numbers((HEADS,), wide),),
        },
        "all": {
            "causal": True, "dropout_p": 0.2, "seed": 7, "softcap": 1.5, "key_padding_mask": padding,
            "mask": mask, "score_mod": lambda score, b, h, q, k: score * 0.5 + h,
        },
    }  # fmt: skip


@pytest.mark.sample(name=("sm80",), feature=("causal and window",))
@pytest.mark.parametrize("name", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("feature", features("simt"))
def test_features(name, feature):
    if (name, feature) == ("sm90", "scale"):
        pytest.skip("Hopper's kernels need a positive scale")
    bias = numbers(shape_of(name, "hqk"), CASES[name][0])
    check(name, bias=bias, **features(name)[feature])


@pytest.mark.sample(name=("simt",), axes=("hqk",))
@pytest.mark.parametrize("name", ["simt", "sm80", "sm90"])
@pytest.mark.parametrize("axes", ["hqk", "k"])
@pytest.mark.parametrize("of_function", [True, False])
def test_sparse_maps(name, axes, of_function):
    (rows, keys), own = CASES[name][2], {}
    if of_function:
        own["mask_mod"] = lambda b, h, q, k: (q // 16 + h) % 2 == (k // 16) % 2
        own["block_mask"] = fa2cupy.block_mask(own["mask_mod"], (), 1, HEADS, rows, keys, tile=(16, 16))
    else:
        own["block_mask"] = map_of(name)
    check(name, bias=numbers(shape_of(name, axes), CASES[name][0]), **own)


@pytest.mark.sample(name=("simt",))
@pytest.mark.parametrize("name", SOME)
def test_rows_that_see_no_key_may_have_nan(name):
    """Such rows contribute nothing, whatever q and do have there."""
    (rows, keys), dtype = CASES[name][2], CASES[name][0]
    bias = numbers(shape_of(name, "hk"), dtype)
    mask = np.arange(rows)[:, None] % 7 != np.full(keys, 2)
    inputs = inputs_of(name)
    wanted, _ = gradients(name, inputs, bias=bias, mask=mask)
    for x in (inputs[0], inputs[3]):
        x[:, ~mask[:, 0]] = np.nan
    found, _ = gradients(name, inputs, bias=bias, mask=mask)
    np.testing.assert_array_equal(found[3], wanted[3])


@pytest.mark.sample(name=FEW)
@pytest.mark.parametrize("name", SOME)
def test_strides_of_tensors(name):
    inputs = inputs_of(name)
    bias = numbers(shape_of(name, "bk"), CASES[name][0])
    q, k, v, do = (place(x[:, ::-1])[:, ::-1] if number % 2 else packed(x) for number, x in enumerate(inputs))
    np.testing.assert_array_equal(check(name, (q, k, v, do), bias=bias), check(name, inputs, bias=bias))


# ------------------------------------------------------------------------------------------------------ which calls do


@pytest.mark.parametrize("name", FEW)
def test_other_calls_do_without_it(monkeypatch, name):
    dtype, _, (rows, keys), device, family, *_ = CASES[name]
    q, k, v, do = map(place, inputs_of(name, batch=1))
    own = {"family": family, "return_dbias": True}
    with fake_gpu(monkeypatch, device, lambda launch: None) as launched:
        for bias, deterministic in ((numbers((keys,), dtype), False), (numbers((1, HEADS, rows, keys), dtype), True)):
            bias = place(bias)
            o, lse = forward(q, k, v, bias=bias, family=family)
            backward(q, k, v, o, lse, do, bias=bias, deterministic=deterministic, **own)
    assert not any(stage.spec.operation == "dbias" for stage in launched)


def test_calls_of_second_order_refuse_it(monkeypatch):
    q, k, v, do = map(place, inputs_of("simt"))
    own = {"bias": place(numbers((30,), "float32")), "deterministic": True, "return_dbias": True}
    with fake_gpu(monkeypatch, run=lambda launch: None) as launched:
        o, lse = forward(q, k, v, bias=own["bias"])
        launched.clear()
        with pytest.raises(UnsupportedProblemError, match="^return_dbias: .* second order"):
            backward_jvp(q, k, v, o, lse, do, q, k, v, o, lse, do, **own)
        with pytest.raises(UnsupportedProblemError, match="^return_dbias: .* second order"):
            double_backward(q, k, v, o, lse, do, q, k, v, **own)
    assert not launched


# ------------------------------------------------------------------------------------------------------ broken kernels

#: A barrier, with the code behind it, without which mutants do.
BARRIER = "__syncthreads();"
#: By name: the case, the axes of the bias, further options, a change of the source, and the error that must catch it.
MUTANTS = {
    "steps of the first head alone": ("sm80", "qk", {}, "if (++head_ == heads_.end) {", "if (true) {", "numbers"),
    "steps of the first sequence alone": (
        "sm80", "qk", {}, "params_.shared_strides.offset(sharer_, 0, 0, 0)", "0", "numbers",
    ),
    "tiles of the first sequence alone": (
        "sm80", "bqk", {}, "heads_ = Shared::take(block, strides.head, params.num_heads);\n        "
        "first_ = static_cast<int32>(params.owned_strides.offset(block, 0, 0, 0));",
        "heads_ = Shared::take(block, strides.head, params.num_heads);\n        first_ = 0;", "blocks",
    ),
    "the first query tile alone": ("sm80", "k", {}, "if (++query_tile_ == queries_.end) {", "if (true) {", "numbers"),
    "key tiles that other blocks own": ("sm80", "qk", {}, "min_of(tiles_.end, keys_.end)", "tiles_.end", "numbers"),
    "hidden keys": ("sm80", "qk", {"causal": True}, "position_ >= tiles_.full_end ||", "", "numbers"),
    "dbias past the last row": ("sm80", "hqk", {}, "rows - own_row, keys, lane);", "kBr, keys, lane);", "bounds"),
    "sums over keys past the last row": ("sm80", "hq", {}, "row < rows - own_row)", "true)", "bounds"),
    "sums over queries past the last key": (
        "sm80", "hk", {}, "if (!sums_keys && key < keys)", "if (!sums_keys)", "bounds",
    ),
    "sums of one lane of a row": ("sm80", "q", {}, "of_row = row_sum<kLanes, kStep>(of_row);", "", "numbers"),
    "sums of one row of a warp": ("sm80", "k", {}, "of_column = column_sum<kLanes, kStep>(of_column);", "", "numbers"),
    "sums of one warp": ("sm80", "k", {}, "w < Threads::kWarps; ++w) sum +=", "w < 1; ++w) sum +=", "numbers"),
    "sums of a lane's keys": ("sm80", "", {}, "all = row_sum<32>(all);", "", "numbers"),
    "scratch that other warps read": ("sm80", "bhk", {}, "Threads::sync();  // no warp reads operands", "//", "race"),
    "sums before those of all warps": (
        "sm80", "k", {}, "Threads::sync();  // the sums of all warps are there", "", "race",
    ),
    "a sum before those of all keys": ("sm80", "", {}, "Threads::sync();  // those of all keys are there", "", "race"),
    "a tile before its copies": ("sm80", "qk", {}, f"{BARRIER}  // the tile is there", "//", "race"),
    "the next tile into the slot in use": (
        "sm80", "qk", {}, "smem + (slot + 1) % kStages * kSlotBytes", "smem + slot * kSlotBytes", "race",
    ),
    "one stage without its barrier": ("sm80 of one stage", "qk", {}, f"{BARRIER}  // the slot is free", "", "race"),
    "statistics of another tile": ("sm80", "qk", {}, "const Rows rows = next;", "Rows& rows = next;", "numbers"),
    "simt: dO before its copies": ("simt", "qk", {}, f"{BARRIER}  // dO and V are there", "//", "race"),
    "simt: Q before its copies": ("simt", "qk", {}, f"{BARRIER}  // Q and K are there", "//", "race"),
    "the share of another block": (
        "sm80", "qk", {"shares": 3}, "blockIdx.x % params_.num_splits * params_", "0 * params_", "blocks",
    ),
    "sequences of all shares": ("sm80", "qk", {"shares": 3}, "end_ = own.end;", "", "numbers"),
    "simt: no sum": ("simt", "qk", {}, "sums[0](i, j) += ds(i, j);", "sums[0](i, j) = ds(i, j);", "numbers"),
    "a tile that a list has not": (
        "simt", "qk", {"listed": True}, "exists && tiles_.at(position_ + lane) == keys_.begin", "exists", "numbers",
    ),
    "sm90: a stage before its data": (
        "sm90", "qk", {}, "mbarrier_wait(memory_.full(slot), stages_.parity());", "", "uninitialised",
    ),
    "sm90: a stage in use": (
        "sm90", "qk", {}, "mbarrier_wait(memory_.empty(stages_.slot()), stages_.parity() ^ 1);", "", "race",
    ),
    "sm90: S in flight": ("sm90", "qk", {}, "wgmma_wait<1>();", "", "in flight"),
    "sm90: dP in flight": ("sm90", "qk", {}, "wgmma_wait<0>();", "", "in flight"),
    "sm90: products before the bias is there": ("sm90", "qk", {}, "wgmma_fence();", "", "wgmma fence"),
    "sm90: statistics of the first warp": (
        "sm90", "qk", {}, "16 * warp_ + Scores::row(i, lane_)", "Scores::row(i, lane_)", "numbers",
    ),
    "sm90: the bias of the first warp": (
        "sm90", "qk", {}, "memory_.bias(warp_), 16 * warp_, lane_);", "memory_.bias(warp_), 0, lane_);", "numbers",
    ),
    "sm90: the bias of the first head": (
        "sm90", "hqk", {}, "own{first_, heads_.begin, {queries_", "own{first_, 0, {queries_", "numbers",
    ),
    "sm90: the bias of the first sequence": (
        "sm90", "bqk", {}, "own{first_, heads_.begin, {queries_", "own{0, heads_.begin, {queries_", "numbers",
    ),
    "sm90: rows of the bias past the last one": (
        "sm90", "qk", {}, "params_.bias_rows, params_.bias_columns};", "4096, params_.bias_columns};", "bounds",
    ),
    "sm90: masks beside the bias": (
        "sm90", "qk", {"masked": True}, "common::hide_by_arrays<OfScores>(scores, own, tile);", "", "numbers",
    ),
    "sm90: hidden keys": ("sm90", "qk", {"causal": True}, "if (masked)\n", "if (false)\n", "numbers"),
    "sm90: rows that see no key": (
        "sm90", "qk", {"unseen": True}, "if (!kHides || lse[e / 2] != common::infinity<float>()) sums", "sums",
        "numbers",
    ),
    "sm90: V of the first key tile": (
        "sm90", "qk", {}, "params_.v, full, column, key,", "params_.v, full, column, 0,", "numbers",
    ),
    "sm90: keys of a query head": ("sm90", "qk", {}, "step.head / params_.heads_per_group;", "step.head;", "numbers"),
    "sm90: statistics of the next step": (
        "sm90", "qk", {}, "lse[i] = next_lse[i];\n", "lse[i] = 0.0f;\n", "numbers",
    ),
    "sm90: keys of the padding": ("sm90", "qk", {"padded": True}, "padding.clear(scores);", "", "numbers"),
    "sm90: the padding of the next step": (
        "sm90", "qk", {"padded": True}, "padding.put(memory_", "next_padding.put(memory_", "numbers",
    ),
    "sm90: the padding of another stage": (
        "sm90", "qk", {"padded": True}, "return step(slot) + Shape::kPaddingAt", "return step(0) + Shape::kPaddingAt",
        "race",
    ),
    "sm90: a stage before its statistics": (
        "sm90", "qk", {}, "mbarrier_init(full(slot), 2);", "mbarrier_init(full(slot), 1);", "uninitialised",
    ),
    "sm90: sums of a warp that loads": (
        "sm90", "k", {}, "threadIdx.x - kGroupThreads;", "threadIdx.x;", "uninitialised",
    ),
    "a list of another row": (
        "simt", "qk", {"listed": True}, "key_tiles<Spec>(own, {query_tile_, head_, batch_})",
        "key_tiles<Spec>(own, {0, head_, batch_})", "numbers",
    ),
}  # fmt: skip


@functools.lru_cache(maxsize=None)
def run_mutant(name: str, axes: str, options: tuple, change: tuple[str, str] | None = None) -> None:
    def patch(spec, text: str) -> str:
        return text if change is None or spec.operation != "dbias" else replace_once(spec, text, *change)

    own = dict(options)
    if own.pop("listed", False):
        own["block_mask"] = map_of(name)
    if own.pop("masked", False):
        own["mask"] = booleans((1, 1, *CASES[name][2]))
    if own.pop("padded", False):
        own["key_padding_mask"] = booleans((BATCH, CASES[name][2][1]))
    inputs = inputs_of(name)
    if own.pop("unseen", False):
        own["mask"] = np.arange(CASES[name][2][0])[:, None] % 7 != np.full(CASES[name][2][1], 2)
        inputs[0][:, 2::7] = inputs[3][:, 2::7] = np.nan
    check(name, inputs, bias=numbers(shape_of(name, axes), CASES[name][0]), patch=patch, **own)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_kernel_is_caught(mutant):
    name, axes, options, old, new, caught_by = MUTANTS[mutant]
    given = name, axes, tuple(options.items())
    run_mutant(*given)
    exception, text = CATCHES[caught_by]
    with pytest.raises(exception, match=text):
        run_mutant(*given, (old, new))


def test_no_sequence_gives_zeros(monkeypatch):
    """The estimate of the kernel's time divided by the number of tiles."""
    arrays = [place(x) for x in make_inputs("float16", batch=0, seqlen_q=3, seqlen_k=15, head_dim=192)]
    with fake_gpu(monkeypatch, "sm_90"):
        options = {"bias": place(numbers((1, 1, 3, 1), "float16"))}
        o, lse = forward(*arrays[:3], **options)
        *_, found = backward(*arrays[:3], o, lse, arrays[3], return_dbias=True, deterministic=True, **options)
    assert not found.any()
