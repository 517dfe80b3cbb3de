"""Every kernel executed without a GPU.

The tests check results by the numerical rule, and that accesses stay within their array and in initialised memory, and
that warps do not race. Shapes are a few tiles and reach every branch; see README.md in this folder.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.fake_gpu import delta as run_delta
from support.launch_record import stage_values
from support.simulated_problems import (
    FEW_MULTIPROCESSORS,
    HALF,
    HOPPER,
    at_level,
    check_dq,
    dq_on_hopper,
    draw,
    family_of,
    growing,
    jumping,
    small_tiles,
    with_few_bits,
)
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, packed, shifted

from fa2cupy import TileConfig, reference
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Kernel
from fa2cupy.families.operations import TILED
from fa2cupy.families.registry import FAMILIES
from fa2cupy.testing import Expectation, check_delta

pytestmark = pytest.mark.simulated

METHODS = ("single_pass", "two_pass")
STAGES = {
    ("sm80", "single_pass"): ["delta", "backward", "convert_dq"],
    ("simt", "single_pass"): ["delta", "backward"],
    ("sm80", "two_pass"): ["delta", "backward_dq", "backward_dkdv"],
    ("simt", "two_pass"): ["delta", "backward_dq", "backward_dkdv"],
}


def lengths_around(n: int) -> tuple[tuple[int, int], ...]:
    """Returns pairs of seqlen_q and seqlen_k for tiles of n rows.

    The lengths are less than a tile, one tile, ragged, several tiles with more keys, and so many more queries that
    whole tiles see no key under the causal mask.
    """
    return ((1, 1), (n, n), (n + 1, n - 1), (2 * n + 5, 3 * n + 3), (3 * n - 2, n + 5))


def check(inputs: tuple, launched: list, *, methods: tuple = METHODS, **options) -> None:
    """Runs forward, delta and the backward by each method, and checks all results and which kernels gave them."""
    q, k, v, do = inputs
    problem = {name: options[name] for name in ("causal", "layout") if name in options}
    expected = Expectation(q, k, v, do, **problem)
    o, lse = forward(q, k, v, family=family_of(q.dtype.name), **options)
    expected.check(o=o, lse=lse)
    delta = run_delta(o, do, layout=options.get("layout", "bshd"))
    check_delta(o, do, delta, layout=options.get("layout", "bshd"))
    for method in methods:
        launched.clear()
        gradients = backward(q, k, v, o, lse, do, method=method, family=family_of(q.dtype.name), **options)
        expected.check(spec=method, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
        if q.size and k.size:  # kernels without blocks are not launched
            operations = [stage.spec.operation for stage in launched]
            assert operations == STAGES[family_of(q.dtype.name), method]


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch) as stages:
        yield stages


@pytest.mark.sample(head_dim=(64,), causal=(True,))
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [("float16", d, causal) for d in (64, 160) for causal in (False, True)]
    + [("float16", d, d % 64 == 0) for d in (32, 40, 59, 96, 128, 256)]
    + [("bfloat16", d, d % 64 != 0) for d in (64, 80, 128, 192)],
)
def test_tensor_cores_at_every_head_dim(launched, dtype, head_dim, causal):
    for lengths in lengths_around(32):
        check(draw(dtype, lengths, head_dim), launched, causal=causal, config=small_tiles(dtype, head_dim))


@pytest.mark.sample(head_dim=(59,), causal=(True,))
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [("float32", d, d % 2 == 0) for d in (1, 32, 59, 128, 250)]
    + [("float32", 59, True)]
    + [("float64", d, d % 64 != 0) for d in (32, 64, 111, 256)],
)
def test_ieee_arithmetic_at_every_head_dim(launched, dtype, head_dim, causal):
    for lengths in lengths_around(8):
        check(draw(dtype, lengths, head_dim), launched, causal=causal, config=small_tiles(dtype, head_dim))


def rows_of_the_table() -> list:
    """Returns (operation, family, dtype, head_dim, head_dim_v, tile) of each row, without repetitions."""
    cases = {}
    every_row = (
        (family, operation, row)
        for family in FAMILIES
        if family.name == family.public_name  # the others have tests of their own
        for operation, rows in family.tiles.items()
        if operation in TILED  # test_decode_simulated.py and test_second_order_simulated.py have the others
        for row in rows
        if "kept_bias" not in row.features  # test_kept_bias_simulated.py has those, which other kernels cannot have
    )
    for family, operation, row in every_row:
        dtype = row.dtypes[0] if row.dtypes else "float16"
        # blocks_per_sm limits registers; the interpreter does not.
        tile = row.tile if family.name == "sm90" else dataclasses.replace(row.tile, blocks_per_sm=1)
        head_dim, device = row.head_dim, DeviceInfo.named("sm_90")
        while family.why_illegal(Kernel(operation, dtype, head_dim, row.head_dim_v or head_dim), tile, device):
            head_dim -= 32  # the row serves smaller ones only
        columns = f"{head_dim}" + (f"v{row.head_dim_v}" if row.head_dim_v else "")
        name = f"{operation}-{family.name}-{dtype}-{columns}-{str(tile).replace(', ', '-').replace(' ', '')}"
        cases[name] = pytest.param(operation, family.name, dtype, head_dim, row.head_dim_v, tile, id=name)
    return list(cases.values())


@pytest.mark.matrix
@pytest.mark.parametrize(("operation", "family", "dtype", "head_dim", "head_dim_v", "tile"), rows_of_the_table())
def test_every_default_tile(launched, operation, family, dtype, head_dim, head_dim_v, tile):
    check_tile(operation, family, dtype, head_dim, tile, head_dim_v)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operation", "head_dim", "tile"),
    (
        ("forward", 64, TileConfig(64, 32, 4, 1)),
        ("forward", 64, TileConfig(64, 32, 4, 3)),
        ("forward", 64, TileConfig(128, 16, 8, 4)),
        ("forward", 32, TileConfig(64, 32, 1, 2)),
        ("forward", 192, TileConfig(64, 32, 8, 3)),
        ("forward", 192, TileConfig(32, 96, 2, 2)),
        ("backward", 64, TileConfig(16, 32, 4, 1)),
        ("backward", 64, TileConfig(64, 32, 4, 2)),
        ("backward", 64, TileConfig(32, 128, 8, 2)),
        ("backward", 32, TileConfig(64, 128, 4, 1)),
        ("backward", 96, TileConfig(48, 48, 6, 2)),
        ("backward_dq", 64, TileConfig(64, 16, 4, 1)),
        ("backward_dq", 64, TileConfig(64, 32, 4, 3)),
        ("backward_dq", 64, TileConfig(128, 32, 8, 2)),
        ("backward_dkdv", 64, TileConfig(16, 64, 4, 1)),
        ("backward_dkdv", 64, TileConfig(64, 64, 8, 2)),
        ("backward_dkdv", 32, TileConfig(32, 128, 4, 1)),
        ("forward", 16, TileConfig(16, 416, 1, 1)),
        ("forward", 32, TileConfig(512, 16, 32, 2)),
        ("forward", 256, TileConfig(144, 32, 18, 1)),
        ("backward", 32, TileConfig(16, 240, 30, 1)),
        ("backward", 64, TileConfig(192, 96, 12, 1)),
        ("backward", 32, TileConfig(32, 16, 2, 2)),
        ("backward_dq", 16, TileConfig(16, 208, 1, 1)),
        ("backward_dq", 32, TileConfig(512, 16, 32, 1)),
        ("backward_dkdv", 32, TileConfig(16, 240, 30, 2)),
        ("backward_dkdv", 64, TileConfig(192, 96, 12, 1)),
    ),
    ids=str,
)
def test_other_tiles_of_the_tensor_cores(launched, operation, head_dim, tile):
    check_tile(operation, "sm80", "bfloat16", head_dim, tile)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operation", "dtype", "head_dim", "tile"),
    (
        ("forward", "float32", 40, TileConfig(4, 64, 1)),
        ("forward", "float32", 64, TileConfig(64, 8, 2)),
        ("forward", "float32", 64, TileConfig(32, 32, 8)),
        ("forward", "float64", 40, TileConfig(48, 24, 12)),
        ("backward", "float32", 64, TileConfig(48, 48, 12)),
        ("backward", "float32", 64, TileConfig(16, 64, 2)),
        ("backward", "float32", 40, TileConfig(32, 32, 8)),
        ("backward", "float64", 64, TileConfig(4, 8, 1)),
        ("backward_dq", "float32", 64, TileConfig(48, 8, 12)),
        ("backward_dq", "float32", 64, TileConfig(4, 64, 1)),
        ("backward_dq", "float32", 64, TileConfig(64, 8, 2)),
        ("backward_dq", "float64", 40, TileConfig(32, 32, 8)),
        ("backward_dkdv", "float32", 64, TileConfig(8, 48, 12)),
        ("backward_dkdv", "float32", 64, TileConfig(64, 4, 1)),
        ("backward_dkdv", "float32", 64, TileConfig(8, 64, 2)),
        ("backward_dkdv", "float64", 40, TileConfig(32, 32, 8)),
    ),
    ids=str,
)
def test_other_tiles_of_ieee_arithmetic(launched, operation, dtype, head_dim, tile):
    check_tile(operation, "simt", dtype, head_dim, tile)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operation", "head_dim", "tile"),
    (
        ("forward", 32, TileConfig(192, 16, 16, 4)),
        ("forward", 64, TileConfig(192, 32, 16, 2)),
        ("forward", 64, TileConfig(128, 240, 12, 2)),
        ("forward", 64, TileConfig(64, 192, 8, 2, 2)),
        ("forward", 200, TileConfig(128, 64, 12, 2)),  # O passes through two panels of memory
        ("forward", 256, TileConfig(128, 16, 12, 4)),
        ("backward_dq", 64, TileConfig(192, 16, 16, 4)),
        ("backward_dq", 64, TileConfig(192, 32, 16, 2)),
        ("backward_dq", 64, TileConfig(128, 176, 12, 2)),
        ("backward_dq", 64, TileConfig(64, 160, 8, 2, 2)),
        ("backward_dq", 256, TileConfig(128, 16, 12, 4)),
        ("backward", 128, TileConfig(16, 128, 12, 4)),
        ("backward_dkdv", 64, TileConfig(128, 128, 12, 4)),
        ("backward_dkdv", 256, TileConfig(16, 64, 12, 4)),
    ),
    ids=str,
)
def test_other_tiles_of_hopper(launched, operation, head_dim, tile):
    check_tile(operation, "sm90", "float16", head_dim, tile)


def check_tile(
    operation: str, family: str, dtype: str, head_dim: int, tile: TileConfig, head_dim_v: int | None = None
) -> None:
    """Checks one kernel on lengths just above its tile, with a causal mask and more keys than queries."""
    lengths = (tile.b_r + 3, tile.b_c + tile.b_r // 2 + 5)
    inputs = draw(dtype, lengths, head_dim, (1, 1), head_dim_v=head_dim_v)
    if (operation, family) == ("backward_dq", "sm90"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            dq_on_hopper(monkeypatch)
            check_dq(inputs, causal=True, config=tile)
        return
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, causal=True)
    if operation == "forward":
        o, lse = forward(q, k, v, causal=True, config=tile, family=family)
        expected.check(spec=tile, o=o, lse=lse)
        return
    o, lse = reference.forward(q, k, v, causal=True)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(expected.problem.accumulator_dtype))
    method = "single_pass" if operation == "backward" else "two_pass"
    other = {"backward_dq": "backward_dkdv", "backward_dkdv": "backward_dq"}.get(operation)
    config = {operation: tile}
    if family == "sm90":  # sm90 may lack the other kernel
        family = None
    elif other:
        config[other] = small_tiles(dtype, head_dim)[other]
    dq, dk, dv = backward(q, k, v, o, lse, do, causal=True, method=method, config=config, family=family)
    expected.check(spec=tile, dq=dq, dk=dk, dv=dv)


@pytest.mark.sample(head_dim=(64,))
@pytest.mark.parametrize("head_dim", (64, 160))
def test_tensor_cores_before_hopper_order_the_workspace_otherwise(monkeypatch, head_dim):
    with simulated_gpu(monkeypatch, "sm_80") as launched:
        options = {"causal": True, "config": small_tiles("float16", head_dim), "methods": ("single_pass",)}
        check(draw("float16", (70, 90), head_dim), launched, **options)
        assert {stage.spec.arch for stage in launched} == {"sm_80"}


@pytest.mark.sample(head_dim=(59,))
@pytest.mark.parametrize("head_dim", (59, 60))
def test_ieee_arithmetic_before_ampere_copies_through_registers(monkeypatch, head_dim):
    with simulated_gpu(monkeypatch, "sm_75") as launched:
        check(draw("float32", (21, 27), head_dim), launched, causal=True, config=small_tiles("float32", head_dim))
        assert {stage.spec.arch for stage in launched} == {"sm_75"}


def test_rows_without_a_key_of_several_pairs_of_warps(launched):
    """Checks O above head_dim 128: two warps share its rows and stage them where all warps may still be copying Q."""
    tiles = {**small_tiles("float16", 160), "forward": TileConfig(64, 32, 4, 2)}
    check(draw("float16", (200, 40), 160), launched, methods=(), causal=True, config=tiles)


@pytest.mark.sample(heads=((4, 2),), dtype=("float16",))
@pytest.mark.parametrize("heads", ((3, 3), (4, 2), (3, 1)), ids=("mha", "gqa", "mqa"))
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_head_groups_in_both_layouts(launched, dtype, layout, heads):
    n = 32 if dtype in HALF else 8
    inputs = draw(dtype, (n + 3, 2 * n + 1), 64, heads, batch=2, layout=layout)
    check(inputs, launched, layout=layout, causal=True, config=small_tiles(dtype, 64))


def backwards(x: np.ndarray) -> np.ndarray:
    """Returns x with its rows in memory from last to first."""
    return place(x[:, ::-1])[:, ::-1]


def joined(x: np.ndarray) -> np.ndarray:
    """Returns x with gaps between its heads, as if one array held q, k and v."""
    wide = place(np.full((*x.shape[:3], 3 * x.shape[3]), np.nan, x.dtype))
    wide[..., x.shape[3] : 2 * x.shape[3]] = x
    return wide[..., x.shape[3] : 2 * x.shape[3]]


@pytest.mark.sample(view=(gapped,), head_dim=(64, 59))
@pytest.mark.parametrize("view", (packed, joined, backwards, shifted, gapped), ids=lambda view: view.__name__)
@pytest.mark.parametrize(("dtype", "head_dim"), (("float16", 64), ("float16", 160), ("float32", 59), ("float32", 60)))
def test_strided_arrays_are_read_and_written_only_where_they_are(launched, dtype, head_dim, view):
    n = 32 if dtype in HALF else 8
    q, k, v, do = draw(dtype, (n + 3, 2 * n + 1), head_dim, batch=2, view=view)
    config = small_tiles(dtype, head_dim)
    expected = Expectation(q, k, v, do, causal=True)
    o, lse = view(np.full_like(q, np.nan)), None
    _, lse = forward(q, k, v, causal=True, config=config, out=(o, lse), family=family_of(dtype))
    expected.check(o=o, lse=lse)
    for method in METHODS:
        out = tuple(view(np.full_like(x, np.nan)) for x in (q, k, v))
        dq, dk, dv = backward(
            q, k, v, o, lse, do, causal=True, config=config, method=method, out=out, family=family_of(dtype)
        )
        assert dq is out[0] and dk is out[1] and dv is out[2]
        expected.check(dq=dq, dk=dk, dv=dv)


@pytest.mark.sample(rows=(slice(None),), head_dim=(64,))
@pytest.mark.parametrize("rows", (slice(0, 1), slice(None)), ids=("one row", "all rows"))
@pytest.mark.parametrize(("dtype", "head_dim"), (("float16", 64), ("bfloat16", 128), ("float16", 192), ("float64", 64)))
def test_scores_that_grow_take_the_slow_path_of_the_softmax(launched, dtype, head_dim, rows):
    n = 32 if dtype in HALF else 8
    q, k, v, _ = growing(draw(dtype, (n + 3, 4 * n), head_dim), rows)
    for causal in (False, True):
        o, lse = forward(q, k, v, causal=causal, config=small_tiles(dtype, head_dim), family=family_of(dtype))
        Expectation(q, k, v, causal=causal).check(o=o, lse=lse)


@pytest.mark.sample(dtype=("float16",))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_heads_in_several_sections(monkeypatch, dtype):
    n = 32 if dtype in HALF else 8
    inputs = draw(dtype, (2 * n + 1, 2 * n + 1), 64, (2, 1), batch=5)
    with simulated_gpu(monkeypatch, FEW_MULTIPROCESSORS) as launched:
        check(inputs, launched, causal=True, config=small_tiles(dtype, 64))
        by_query, by_key = (stage_values(stage) for stage in launched[-2:])
        # A section by query tiles has three groups: two would be enough, but waste more. One by key tiles has one.
        assert (by_query["heads_per_section"], by_key["heads_per_section"]) == (6, 1)


@pytest.mark.sample(seed=(1,), head_dim=(64,))
@pytest.mark.parametrize("seed", (1, 2))
@pytest.mark.parametrize(("dtype", "head_dim"), (("float16", 64), ("bfloat16", 160), ("float32", 40)))
def test_warps_may_take_turns_in_any_order(monkeypatch, dtype, head_dim, seed):
    n = 32 if dtype in HALF else 8
    with simulated_gpu(monkeypatch, seed=seed) as launched:
        check(draw(dtype, (2 * n + 5, 3 * n + 3), head_dim), launched, causal=True, config=small_tiles(dtype, head_dim))


@pytest.mark.sample(method=("single_pass",), head_dim=(64, 33))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "head_dim"), (("float16", 64), ("float16", 160), ("float64", 33)))
@pytest.mark.parametrize("empty", ("seqlen_q", "seqlen_k"))
def test_lengths_of_zero(launched, dtype, head_dim, empty, method):
    lengths = (0, 21) if empty == "seqlen_q" else (21, 0)
    options = {"causal": True, "config": small_tiles(dtype, head_dim)}
    check(draw(dtype, lengths, head_dim), launched, methods=(method,), **options)


@pytest.mark.parametrize("head_dim", (8, 96, 256))
@pytest.mark.parametrize("dtype", ("float16", "float32", "float64"))
def test_delta_of_its_own(launched, dtype, head_dim):
    _, _, _, do = draw(dtype, (37, 1), head_dim, (3, 3), batch=2, view=packed)
    o = draw(dtype, (37, 1), head_dim, (3, 3), batch=2, view=joined, seed=1)[0]
    check_delta(o, do, run_delta(o, do))


# ----------------------------------------------------------------------------------------------------- Hopper's forward

#: Tiles of one, two and three warp groups that multiply. The first of several groups skip the last key tiles.
GROUPS = (TileConfig(64, 48, 8, 2, 2), TileConfig(128, 64, 12, 2), TileConfig(192, 64, 16, 3))


@pytest.fixture
def on_hopper(monkeypatch):
    with simulated_gpu(monkeypatch, HOPPER) as stages:
        yield stages


def check_forward(inputs: tuple, launched: list, *, family: str = "sm90", **options) -> None:
    """Checks a forward whose blocks walk all keys, and the family of its kernel; no block has a share of the keys."""
    q, k, v, _ = inputs
    problem = {name: options[name] for name in ("causal", "layout") if name in options}
    expected = Expectation(q, k, v, softmax_scale=options.get("scale"), **problem)
    o, lse = forward(q, k, v, num_splits=1, **options)
    expected.check(o=o, lse=lse)
    assert launched[-1].spec.family_name == family


@pytest.mark.sample(head_dim=(256,), dtype=("float16",), causal=(True,))
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [("float16", d, True) for d in (8, 59, 64, 128, 160, 256)]
    + [("float16", d, False) for d in (40, 64, 72, 256)]
    + [("bfloat16", 64, False), ("bfloat16", 96, True), ("bfloat16", 192, False)],
)
def test_hopper_at_every_head_dim(on_hopper, dtype, head_dim, causal):
    tile = GROUPS[0] if head_dim <= 192 else GROUPS[1]
    for lengths in ((1, 1), (64, 48), (65, 47), (133, 150), (190, 70)):
        check_forward(draw(dtype, lengths, head_dim), on_hopper, causal=causal, config=tile)


@pytest.mark.sample(seed=(1,), lengths=((260, 130),), tile=GROUPS[::2])
@pytest.mark.parametrize("seed", (None, 1))
@pytest.mark.parametrize(
    ("head_dim", "tile"), [*((64, tile) for tile in GROUPS), (256, TileConfig(128, 80, 12, 2))], ids=str
)
@pytest.mark.parametrize("lengths", ((200, 260), (260, 130)), ids=str)
def test_hopper_with_one_to_three_groups_in_any_order(monkeypatch, lengths, head_dim, tile, seed):
    with simulated_gpu(monkeypatch, HOPPER, seed=seed) as launched:
        check_forward(draw("float16", lengths, head_dim), launched, causal=True, config=tile)


@pytest.mark.sample(heads=((4, 2),), dtype=("float16",))
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize(("dtype", "heads"), (("float16", (4, 2)), ("bfloat16", (4, 2)), ("bfloat16", (3, 1))), ids=str)
def test_head_groups_on_hopper(on_hopper, layout, dtype, heads):
    inputs = draw(dtype, (70, 100), 64, heads, batch=2, layout=layout)
    check_forward(inputs, on_hopper, causal=True, layout=layout, config=GROUPS[0])


@pytest.mark.sample(view=(gapped,))
@pytest.mark.parametrize("view", (packed, joined, shifted, gapped), ids=lambda view: view.__name__)
def test_strided_arrays_on_hopper(on_hopper, view):
    q, k, v, _ = draw("float16", (70, 100), 72, batch=2, view=view)
    o = view(np.full_like(q, np.nan))
    _, lse = forward(q, k, v, causal=True, config=GROUPS[0], out=(o, None))
    Expectation(q, k, v, causal=True).check(o=o, lse=lse)
    assert on_hopper[-1].spec.family_name == "sm90"


@pytest.mark.parametrize(
    ("view", "options"),
    ((backwards, {}), (place, {"scale": 0.0}), (place, {"scale": -0.2})),
    ids=("reversed rows", "no scale", "negative scale"),
)
def test_what_the_hopper_kernels_do_not_take_runs_on_the_older_ones(on_hopper, view, options):
    check_forward(draw("float16", (70, 100), 64, view=view), on_hopper, family="sm80", causal=True, **options)


@pytest.mark.sample(rows=(slice(None),), head_dim=(64,))
@pytest.mark.parametrize("rows", (slice(0, 1), slice(None)), ids=("one row", "all rows"))
@pytest.mark.parametrize(("head_dim", "tile"), ((64, GROUPS[0]), (128, GROUPS[1]), (256, TileConfig(128, 80, 12, 2))))
def test_scores_that_grow_on_hopper(on_hopper, head_dim, tile, rows):
    inputs = growing(draw("float16", (70, 330), head_dim), rows)
    for causal in (False, True):
        check_forward(inputs, on_hopper, causal=causal, config=tile)


def test_heads_in_several_sections_on_hopper(monkeypatch):
    inputs = draw("float16", (130, 130), 64, (2, 1), batch=5)
    with simulated_gpu(monkeypatch, FEW_MULTIPROCESSORS) as launched:
        check_forward(inputs, launched, causal=True, config=GROUPS[0])
        assert stage_values(launched[-1])["heads_per_section"] == 6


def test_tiles_are_taken_in_a_fixed_order_without_a_counter(monkeypatch):
    with simulated_gpu(monkeypatch, HOPPER, with_counter=False) as launched:
        check_forward(draw("float16", (200, 200), 64, (3, 1)), launched, causal=True, config=GROUPS[0])


#: (dtype, head_dim, tile of a Hopper kernel or None) for each way in which a kernel keeps a reference for the softmax.
REFERENCES = (
    ("float16", 64, None),
    ("float16", 192, None),
    ("float32", 40, None),
    ("float16", 64, TileConfig(64, 48, 8, 2, 2)),
    ("float16", 256, TileConfig(128, 80, 12, 2)),
)


@pytest.mark.parametrize(("dtype", "head_dim", "tile"), REFERENCES)
class TestReferenceOfTheSoftmax:
    """Scores that are as large, as small or as far apart as exponentials and the 16 bits of P allow."""

    @staticmethod
    def check(launched: list, inputs: tuple, tile: TileConfig | None, causal: bool) -> None:
        if tile is None:
            dtype, head_dim = inputs[0].dtype.name, inputs[0].shape[3]
            check(inputs, launched, causal=causal, config=small_tiles(dtype, head_dim))
        else:
            check_forward(inputs, launched, causal=causal, config=tile)

    @pytest.mark.sample(score=(-24.0,), head_dim=(64,))
    @pytest.mark.parametrize("score", (-24.0, -90.0, 90.0))
    def test_all_scores_at_one_level(self, launched, dtype, head_dim, tile, score):
        n = 32 if dtype in HALF else 8
        inputs = with_few_bits(at_level(draw(dtype, (n + 3, 3 * n + 5), head_dim, (1, 1)), score))
        self.check(launched, inputs, tile, causal=True)

    @pytest.mark.matrix
    @pytest.mark.parametrize("most", (17.5, 300.0))
    def test_a_score_above_those_before_it(self, launched, dtype, head_dim, tile, most):
        """Checks scores below and above three limits: of a share of the sum, of float16 and of float32."""
        n = 32 if dtype in HALF else 8
        keys = 3 * (n if tile is None else tile.b_c)
        inputs = jumping(draw(dtype, (2 * n + 3, keys), head_dim, (1, 1)), most)
        self.check(launched, inputs, tile, causal=False)


# ---------------------------------------------------------------------------------------------------- Hopper's backward

#: Tiles by their largest head_dim. Up to 128 each warp group owns keys; above, one group computes dK and one dV. Code
#: of few queries compiles fastest; below 64 columns dQ needs 128.
BY_KEYS = {64: TileConfig(128, 128, 12, 2), 128: TileConfig(48, 128, 12, 2), 256: TileConfig(64, 64, 12, 2)}


def by_keys(head_dim: int, **operations: TileConfig) -> dict[str, TileConfig]:
    """Returns the tiles of the backward; `operations` replaces the default ones of kernels by key tiles."""
    tile = next(tile for widest, tile in BY_KEYS.items() if head_dim <= widest)
    of_two_passes = TileConfig(32, 128, 12, 2) if head_dim <= 64 else tile
    tiles = {"backward": tile, "backward_dkdv": of_two_passes, "backward_dq": TileConfig(128, 32, 12, 2)}
    return {**tiles, **operations}


def forward_of_reference(q, k, v, **options) -> tuple:
    """Returns o and lse for a backward of 16-bit data, without compiling a forward kernel."""
    o, lse = reference.forward(q, k, v, **options)
    return place(o.astype(q.dtype)), place(lse.astype(np.float32))


def check_backward(inputs: tuple, launched: list, *, methods: tuple = METHODS, family: str = "sm90", **options) -> list:
    """Runs the backward by each method and checks the gradients, and the family of the kernels by key tiles."""
    q, k, v, do = inputs
    problem = {name: options[name] for name in ("causal", "layout") if name in options}
    expected = Expectation(q, k, v, do, softmax_scale=options.get("scale"), **problem)
    o, lse = forward_of_reference(q, k, v, softmax_scale=options.get("scale"), **problem)
    results = []
    for method in methods:
        launched.clear()
        results.append(backward(q, k, v, o, lse, do, method=method, **options))
        expected.check(spec=method, **dict(zip(("dq", "dk", "dv"), results[-1], strict=True)))
        stages = [
            stage.spec for stage in launched if stage.spec.operation in ("backward", "backward_dkdv", "convert_dq")
        ]
        assert stages and {spec.family_name for spec in stages} == {family}
    return results


@pytest.mark.sample(head_dim=(128,), causal=(True,))
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [("float16", head_dim, causal) for head_dim in (64, 256) for causal in (False, True)]
    + [
        ("float16", 8, False),
        ("float16", 40, True),
        ("float16", 59, False),
        ("float16", 128, True),
        ("float16", 160, False),
    ]
    + [("bfloat16", 96, False), ("bfloat16", 136, True)],
)
def test_hopper_backward_at_every_head_dim(on_hopper, dtype, head_dim, causal):
    # Lengths below a tile, of one, of several with more keys, and with so many queries that whole tiles see no key.
    rows, keys = by_keys(head_dim)["backward"].b_r, by_keys(head_dim)["backward"].b_c
    for lengths in ((1, 1), (rows, keys), (rows + 70, keys + 30), (2 * rows + 90, 71)):
        check_backward(draw(dtype, lengths, head_dim), on_hopper, causal=causal, config=by_keys(head_dim))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("operation", "head_dim", "tile"),
    (
        ("backward", 64, TileConfig(128, 128, 12, 3)),
        ("backward", 128, TileConfig(64, 128, 12, 2)),
        ("backward", 128, TileConfig(48, 128, 12, 3)),
        ("backward", 112, TileConfig(96, 128, 12, 2)),
        ("backward", 72, TileConfig(48, 128, 12, 3)),
        ("backward", 80, TileConfig(64, 128, 12, 3)),
        ("backward_dkdv", 64, TileConfig(16, 128, 12, 4)),
        ("backward_dkdv", 40, TileConfig(112, 128, 12, 3)),
        ("backward_dkdv", 128, TileConfig(64, 128, 12, 2)),
        ("backward_dkdv", 96, TileConfig(32, 128, 12, 2)),
        ("backward_dkdv", 192, TileConfig(80, 64, 12, 2)),
        ("backward_dkdv", 160, TileConfig(48, 64, 12, 3)),
    ),
    ids=str,
)
def test_other_tiles_of_the_hopper_backward(on_hopper, operation, head_dim, tile):
    causal = head_dim % 64 != 0
    method = "single_pass" if operation == "backward" else "two_pass"
    inputs = draw("bfloat16", (tile.b_r * 5 + 3, tile.b_c + 37), head_dim)
    check_backward(inputs, on_hopper, methods=(method,), causal=causal, config={operation: tile})


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_hopper_backward_has_the_same_dk_and_dv_in_whatever_order_warps_run(monkeypatch, head_dim):
    results = []
    for seed in (None, 1, 2) if head_dim == 64 else (None, 1):
        with simulated_gpu(monkeypatch, HOPPER, seed=seed) as launched:
            inputs = draw("float16", (300, 2 * 128 + 9), head_dim)
            results.append(check_backward(inputs, launched, causal=True, config=by_keys(head_dim)))
    for single_pass, two_pass in results[1:]:
        for name in (1, 2):  # dk, dv
            assert np.array_equal(single_pass[name], results[0][0][name])
            assert np.array_equal(two_pass[name], results[0][1][name])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("head_dim", "heads", "layout", "causal"),
    [(64, (4, 2), "bshd", True), (64, (3, 1), "bhsd", False), (96, (4, 2), "bhsd", False), (96, (3, 1), "bshd", True),
     (192, (4, 2), "bshd", False), (192, (3, 1), "bhsd", True)],
)  # fmt: skip
def test_head_groups_in_the_hopper_backward(on_hopper, head_dim, heads, layout, causal):
    inputs = draw("bfloat16", (150, 170), head_dim, heads, batch=2, layout=layout)
    check_backward(inputs, on_hopper, causal=causal, layout=layout, config=by_keys(head_dim))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("head_dim", "view"),
    ((72, packed), (72, shifted), (200, joined), (200, gapped)),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_strided_arrays_in_the_hopper_backward(on_hopper, head_dim, view):
    q, k, v, do = draw("float16", (70, 140), head_dim, batch=2, view=view)
    expected = Expectation(q, k, v, do, causal=True)
    o, lse = reference.forward(q, k, v, causal=True)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
    for method in METHODS:
        out = tuple(view(np.full_like(x, np.nan)) for x in (q, k, v))
        gradients = backward(q, k, v, o, lse, do, causal=True, config=by_keys(head_dim), method=method, out=out)
        assert all(x is y for x, y in zip(gradients, out, strict=True))
        expected.check(**dict(zip(("dq", "dk", "dv"), out, strict=True)))
        assert "sm90" in {stage.spec.family_name for stage in on_hopper}


@pytest.mark.sample(view=(backwards,))
@pytest.mark.parametrize(
    ("view", "options"),
    ((backwards, {}), (place, {"scale": 0.0}), (place, {"scale": -0.2})),
    ids=("reversed rows", "no scale", "negative scale"),
)
def test_what_the_hopper_backward_does_not_take_runs_on_the_older_kernels(on_hopper, view, options):
    own = {"family": "sm80", "causal": True, "config": small_tiles("float16", 64)}
    check_backward(draw("float16", (70, 100), 64, view=view), on_hopper, **own, **options)


@pytest.mark.sample(method=("single_pass",), empty=("seqlen_k",))
@pytest.mark.parametrize("empty", ("seqlen_q", "seqlen_k"))
@pytest.mark.parametrize("method", METHODS)
def test_lengths_of_zero_in_the_hopper_backward(on_hopper, method, empty):
    q, k, v, do = draw("float16", (0, 21) if empty == "seqlen_q" else (21, 0), 64)
    o, lse = forward_of_reference(q, k, v)
    tiles = small_tiles("float16", 64)
    if empty == "seqlen_k":  # the only kernel of Hopper that takes such a call
        tiles["backward"] = by_keys(64)["backward"]
    for gradient in backward(q, k, v, o, lse, do, method=method, config=tiles):
        assert not np.asarray(gradient, np.float32).any()


@pytest.mark.matrix
@pytest.mark.parametrize(("head_dim", "scale"), ((64, 0.02), (64, 4.0), (256, 1.0), (256, 4.0)))
def test_hopper_backward_with_other_scales(on_hopper, head_dim, scale):
    inputs = draw("float16", (140, 150), head_dim)
    check_backward(inputs, on_hopper, causal=True, scale=scale, config=by_keys(head_dim))


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", (64, 128, 192))
def test_rows_without_a_key_have_no_gradient_whatever_they_hold(on_hopper, head_dim):
    q, k, v, do = draw("float16", (2 * 128 + 30, 41), head_dim)
    blind = q.shape[1] - k.shape[1]
    q[:, :blind], do[:, :blind] = 60000.0, -60000.0
    o, lse = forward(q, k, v, causal=True)
    assert np.isneginf(lse[:, :, :blind]).all() and not np.asarray(o[:, :blind]).any()
    for method in METHODS:
        dq, dk, dv = backward(q, k, v, o, lse, do, causal=True, method=method, config=by_keys(head_dim))
        assert not dq[:, :blind].any()
        Expectation(*(place(x) for x in (q[:, blind:], k, v, do[:, blind:])), causal=True).check(
            dq=place(dq[:, blind:]), dk=dk, dv=dv
        )


@pytest.mark.sample(head_dim=(64,), method=("two_pass",))
@pytest.mark.parametrize("head_dim", (64, 128, 192))
@pytest.mark.parametrize("method", METHODS)
def test_probabilities_are_at_most_one_on_hopper(on_hopper, method, head_dim):
    """Checks rows whose scores are far above lse, as rounding makes large ones. Their do is 0, and 0 * inf is NaN."""
    q, k, v, do = draw("float16", (70, 150), head_dim)
    do[:, 5:9] = 0
    o, lse = forward_of_reference(q, k, v, causal=True)
    lower = lse.copy()
    lower[:, :, 5:9] -= 5000
    options = {"method": method, "config": by_keys(head_dim), "causal": True}
    wanted, results = (backward(q, k, v, o, x, do, **options) for x in (lse, lower))
    for gradient, expected in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(gradient, expected)
    assert {stage.spec.family_name for stage in on_hopper if stage.spec.operation in TILED} == {"sm90"}


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", (64, 192))
@pytest.mark.parametrize("method", METHODS)
def test_a_delta_of_the_callers_in_the_hopper_backward(on_hopper, method, head_dim):
    q, k, v, do = draw("float16", (140, 150), head_dim)
    o, lse = forward_of_reference(q, k, v, causal=True)
    options = {"causal": True, "method": method, "config": by_keys(head_dim)}
    given, own = (backward(q, k, v, o, lse, do, delta=x, **options) for x in (run_delta(o, do), None))
    assert np.array_equal(given[1], own[1]) and np.array_equal(given[2], own[2])
    other = backward(q, k, v, o, lse, do, delta=run_delta(o, do) + np.float32(0.5), **options)
    assert not np.array_equal(other[1], own[1]) and np.array_equal(other[2], own[2])


@pytest.mark.matrix
def test_heads_in_several_sections_in_the_hopper_backward(monkeypatch):
    inputs = draw("float16", (260, 260), 64, (2, 1), batch=3)
    with simulated_gpu(monkeypatch, FEW_MULTIPROCESSORS) as launched:
        check_backward(inputs, launched, causal=True, config=by_keys(64))
        assert stage_values(launched[-1])["heads_per_section"] == 1


# ---------------------------------------------------------------------------------------------------------- Hopper's dQ


@pytest.fixture
def dq_launched(monkeypatch, on_hopper):
    dq_on_hopper(monkeypatch)
    return on_hopper


@pytest.mark.sample(head_dim=(64,), dtype=("float16",), causal=(True,))
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [("float16", d, True) for d in (8, 64, 128, 256)]
    + [("float16", d, False) for d in (40, 64, 72, 160)]
    + [("bfloat16", 64, False), ("bfloat16", 96, True), ("bfloat16", 192, False)],
)
def test_dq_on_hopper_at_every_head_dim(dq_launched, dtype, head_dim, causal):
    tile = GROUPS[0] if head_dim <= 192 else TileConfig(128, 48, 12, 2)
    for lengths in ((1, 1), (64, 48), (65, 47), (133, 150), (190, 70)):
        check_dq(draw(dtype, lengths, head_dim), causal=causal, config=tile)
        assert (dq_launched[-1].spec.family_name, dq_launched[-1].spec.tile) == ("sm90", tile)


#: Tiles for both orders of the products, dQ stored through its own buffer and through dO's, one to three stages of V,
#: and Q loaded ahead or not.
DQ_TILES = (
    (64, TileConfig(64, 48, 8, 2, 2)),
    (64, TileConfig(128, 64, 12, 3)),
    (64, TileConfig(192, 48, 16, 2)),
    (64, TileConfig(192, 64, 16, 3)),
    (128, TileConfig(128, 32, 12, 4)),
    (192, TileConfig(128, 64, 12, 3)),
    (256, TileConfig(128, 48, 12, 2)),
    (256, TileConfig(128, 64, 12, 2)),
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("head_dim", "tile", "seed"), [(*case, (1, 2, None)[i % 3]) for i, case in enumerate(DQ_TILES)], ids=str
)
def test_dq_on_hopper_in_any_order_of_the_warps(monkeypatch, head_dim, tile, seed):
    dq_on_hopper(monkeypatch)
    with simulated_gpu(monkeypatch, dataclasses.replace(HOPPER, multiprocessors=2), seed=seed):
        for lengths in ((200, 260), (390, 130)) if head_dim == 64 else ((200, 133),):
            check_dq(draw("float16", lengths, head_dim), causal=True, config=tile)


@pytest.mark.matrix
def test_dq_of_many_tiles_by_one_block(monkeypatch):
    dq_on_hopper(monkeypatch)
    with simulated_gpu(monkeypatch, dataclasses.replace(HOPPER, multiprocessors=1)):
        for causal in (False, True):
            check_dq(draw("bfloat16", (640, 90), 32), causal=causal, config=TileConfig(64, 48, 8, 3, 2))
            check_dq(draw("float16", (390, 70), 64, (3, 1)), causal=causal, config=TileConfig(128, 64, 12, 2))


@pytest.mark.sample(heads=((4, 2),), dtype=("float16",))
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize(("dtype", "heads"), (("float16", (4, 2)), ("bfloat16", (4, 2)), ("bfloat16", (3, 1))), ids=str)
def test_dq_of_head_groups_on_hopper(dq_launched, layout, dtype, heads):
    inputs = draw(dtype, (70, 100), 64, heads, batch=2, layout=layout)
    check_dq(inputs, causal=True, layout=layout, config=GROUPS[0])


@pytest.mark.sample(view=(gapped,))
@pytest.mark.parametrize("view", (packed, joined, shifted, gapped), ids=lambda view: view.__name__)
def test_dq_of_strided_arrays_on_hopper(dq_launched, view):
    inputs = draw("float16", (70, 100), 72, batch=2, view=view)
    out = tuple(view(np.full_like(x, np.nan)) for x in inputs[:3])
    check_dq(inputs, causal=True, config=GROUPS[0], out=(out[0], None, None) if view in (packed, joined) else None)
    assert dq_launched[-1].spec.family_name == "sm90"


@pytest.mark.sample(rows=(slice(None),))
@pytest.mark.parametrize("rows", (slice(0, 1), slice(None)), ids=("one row", "all rows"))
def test_dq_of_a_peaked_softmax_on_hopper(dq_launched, rows):
    inputs = growing(draw("float16", (70, 330), 64), rows)
    for causal in (False, True):
        check_dq(inputs, causal=causal, config=GROUPS[0])


@pytest.mark.matrix
def test_dq_of_heads_in_several_sections_on_hopper(monkeypatch):
    dq_on_hopper(monkeypatch)
    inputs = draw("float16", (130, 130), 64, (2, 1), batch=5)
    with simulated_gpu(monkeypatch, FEW_MULTIPROCESSORS) as launched:
        check_dq(inputs, causal=True, config=GROUPS[0])
        assert stage_values(launched[-1])["heads_per_section"] == 6


def test_dq_in_a_fixed_order_without_a_counter(monkeypatch):
    dq_on_hopper(monkeypatch)
    with simulated_gpu(monkeypatch, HOPPER, with_counter=False):
        check_dq(draw("float16", (200, 200), 64, (3, 1)), causal=True, config=GROUPS[0])


@pytest.mark.matrix
def test_dq_has_the_same_bits_in_every_order_of_the_warps(monkeypatch):
    dq_on_hopper(monkeypatch)
    q, k, v, do = draw("float16", (200, 150), 64)
    o, lse = reference.forward(q, k, v, causal=True)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
    found = []
    for seed in (None, 1, 2):
        with monkeypatch.context() as patched, simulated_gpu(patched, HOPPER, seed=seed):
            dq_on_hopper(patched)
            config = {"backward_dq": TileConfig(128, 64, 12, 2)}
            found.append(backward(q, k, v, o, lse, do, causal=True, method="two_pass", config=config)[0])
    assert all(np.array_equal(found[0].view(np.uint16), other.view(np.uint16)) for other in found)


#: Root mean square errors of o, dq, dk and dv, relative to the baseline's, if each operand of a product is rounded
#: once, plus a twentieth. The bounds of `fa2cupy.testing` are wider because they are for all problems.
ROUNDED_ONCE = {"float16": (0.60, 0.565, 0.51, 0.575), "bfloat16": (0.57, 0.51, 0.47, 0.54)}


@pytest.mark.sample(dtype=("float16",), family=("sm80",))
@pytest.mark.parametrize(("family", "method"), [("sm80", "two_pass"), ("sm90", "single_pass"), ("sm90", "two_pass")])
@pytest.mark.parametrize("dtype", HALF)
def test_what_is_no_operand_of_a_product_is_not_rounded(on_hopper, dtype, family, method):
    """Checks that P is rounded as an operand, but not to compute dS; sm80's dK kernel rounds it there, in float16."""
    inputs = draw(dtype, (200, 220), 64)
    tiles = small_tiles(dtype, 64) if family == "sm80" else by_keys(64)
    o, lse = forward(*inputs[:3], family=family, config=tiles if family == "sm80" else None)
    results = o, *backward(*inputs[:3], o, lse, inputs[3], method=method, family=family, config=tiles)
    baseline = reference.baseline_forward(*inputs[:3])[0], *reference.baseline_backward(*inputs)
    o, lse = reference.forward(*inputs[:3])
    wanted = o, *reference.backward(*inputs[:3], o, lse, inputs[3])
    for name, limit, *arrays in zip(
        ("o", "dq", "dk", "dv"), ROUNDED_ONCE[dtype], results, baseline, wanted, strict=True
    ):
        ours, theirs, right = (x.astype("float64") for x in arrays)
        ratio = np.linalg.norm(ours - right) / np.linalg.norm(theirs - right)
        wider = 1.2 if (family, dtype, name) == ("sm80", "float16", "dk") else 1
        assert ratio <= wider * limit, f"{name}: root mean square {ratio:.3f} of the baseline's"
