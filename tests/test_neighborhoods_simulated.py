"""Kernels of Hopper whose tiles are boxes of tokens, for mask functions of neighborhoods, in the interpreter."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import CATCHES, replace_once
from support.fake_cupy import place
from support.fake_gpu import backward, fake_gpu, forward
from support.simulated_problems import HOPPER
from support.simulator import simulated_gpu
from support.strided_arrays import packed

import fa2cupy
from fa2cupy import BlockMask, TileConfig, mods
from fa2cupy.families.choice import choose
from fa2cupy.families.family import BoxRow
from fa2cupy.families.sm90 import SM90
from fa2cupy.jit.processes import compile_all
from fa2cupy.plan.specs import default_specs
from fa2cupy.problem.boxes import BoxShapes
from fa2cupy.problem.checks import check_forward
from fa2cupy.problem.options import CallOptions
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

#: Grids that boxes do not divide, with windows of odd and even lengths.
GRIDS = {
    "plane": ((21, 19), (7, 5)),
    "even": ((9, 40), (4, 12)),
    "all": ((5, 7), (5, 7)),
    "space": ((4, 13, 7), (3, 7, 5)),
    "even space": ((3, 6, 11), (2, 4, 3)),
}


def function_of(name: str):
    """Returns the mask of a grid's windows: those that stay inside, or for "cut off" those that do not."""
    return mods.neighborhood_2d(19, 3) if name == "cut off" else mods.neighborhood(*GRIDS[name])


def inputs_of(name: str, *, batch=2, head_dim=64, dtype="bfloat16"):
    """Returns q, k, v and do, whose sequences are grids of tokens."""
    length = 21 * 19 if name == "cut off" else math.prod(GRIDS[name][0])
    sizes = {"batch": batch, "seqlen_q": length, "seqlen_k": length, "num_heads": 4, "num_heads_kv": 2}
    return make_inputs(dtype, head_dim=head_dim, **sizes)


def boxes_of(shape, windows):
    """Returns the boxes of a forward with head_dim 128."""
    length, own = math.prod(shape), {"mask_mod": mods.neighborhood(shape, windows)}
    q = np.empty((1, length, 1, 128), "float16")
    problem = check_forward({"q": q, "k": q, "v": q}, CallOptions(), own).problem
    return choose("forward", problem, HOPPER, problem.contiguous_strides(), is_launched=False).boxes


def check(
    monkeypatch, name, *, view=place, patch=None, inputs=None, mapped=False, dtype="bfloat16", head_dim=64, **own
):
    """Checks a forward, and that its tiles are boxes of tokens."""
    q, k, v, do = inputs or inputs_of(name, dtype=dtype, head_dim=head_dim)
    function = function_of(name)
    with simulated_gpu(monkeypatch, HOPPER, patch=patch) as launched:
        arrays = tuple(map(view, (q, k, v)))
        if mapped:
            own["block_mask"] = fa2cupy.block_mask(function, (), 1, 1, q.shape[1], q.shape[1], like=arrays[0])
        del launched[:]
        o, lse = forward(*arrays, mask_mod=None if mapped else function, **own)
    (spec,) = [stage.spec for stage in launched]
    assert spec.operation == "forward" and spec.features == ("boxes",) and not spec.functions
    layout = own.get("layout", "bshd")
    Expectation(q, k, v, do, mask_mod=function, layout=layout).check(o=o, lse=lse)


def check_backward(monkeypatch, name, *, view=place, patch=None, inputs=None, dtype="bfloat16", head_dim=64, **own):
    """Checks a backward, and that its tiles are boxes of tokens."""
    q, k, v, do = inputs or inputs_of(name, batch=1, dtype=dtype, head_dim=head_dim)
    function, options = function_of(name), {"method": "single_pass", **own}
    layout = own.get("layout", "bshd")
    o, lse = fa2cupy.reference.forward(*(x.astype("float32") for x in (q, k, v)), mask_mod=function, layout=layout)
    with simulated_gpu(monkeypatch, HOPPER, patch=patch) as launched:
        arrays = tuple(map(view, (q, k, v, o.astype(q.dtype), lse.astype("float32"), do)))
        gradients = backward(*arrays, mask_mod=function, **options)
    of_stages = {stage.spec.operation: stage.spec.features for stage in launched}
    assert of_stages == {"delta": (), "backward": ("boxes",), "convert_dq": ("boxes",)}
    expected = Expectation(q, k, v, do, mask_mod=function, layout=layout)
    expected.check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.sample(head_dim=(64,), name=("plane", "space", "cut off"))
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("name", [*GRIDS, "cut off"])
def test_gradients_of_each_window(monkeypatch, name, head_dim):
    check_backward(monkeypatch, name, head_dim=head_dim, dtype="float16" if head_dim == 40 else "bfloat16")


@pytest.mark.sample(head_dim=(64,), name=("plane", "space", "cut off"))
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("name", [*GRIDS, "cut off"])
def test_each_query_sees_its_window(monkeypatch, name, head_dim):
    check(monkeypatch, name, head_dim=head_dim, dtype="float16" if head_dim == 40 else "bfloat16")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("row", "number"),
    [(row, number) for row in SM90.boxes for number in range(len(row.shapes))],
    ids=lambda value: (
        str(value)
        if isinstance(value, int)
        else f"{value.operation}, {value.num_axes} axes, {value.head_dim}, {value.tile.b_r} rows"
    ),
)
def test_boxes_of_all_shapes(monkeypatch, row, number):
    monkeypatch.setattr(type(SM90), "boxes", (row._replace(shapes=row.shapes[number : number + 1]),))
    of_operation = {"forward": check, "backward": check_backward}[row.operation]
    of_operation(monkeypatch, {2: "plane", 3: "space"}[row.num_axes], head_dim=row.head_dim)


def test_a_map_of_the_function_changes_nothing(monkeypatch):
    check(monkeypatch, "even", mapped=True)


@pytest.mark.parametrize("layout", ["bhsd", "parts of one array"])
def test_any_strides(monkeypatch, layout):
    inputs = inputs_of("space")
    if layout == "bhsd":
        inputs = tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in inputs)
        with simulated_gpu(monkeypatch, HOPPER) as launched:
            o, lse = forward(*map(place, inputs[:3]), mask_mod=function_of("space"), layout="bhsd")
        assert launched[-1].spec.features == ("boxes",)
        Expectation(*inputs, mask_mod=function_of("space"), layout="bhsd").check(o=o, lse=lse)
    else:
        check(monkeypatch, "space", inputs=inputs, view=packed)


@pytest.mark.parametrize("layout", ["bhsd", "parts of one array"])
def test_gradients_of_any_strides(monkeypatch, layout):
    inputs = inputs_of("space")
    if layout == "bhsd":
        inputs = tuple(np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in inputs)
        check_backward(monkeypatch, "space", inputs=inputs, layout="bhsd")
    else:
        check_backward(monkeypatch, "space", inputs=inputs, view=packed)


def test_what_a_query_does_not_see_is_not_in_its_result(monkeypatch):
    q, k, v, do = inputs_of("even space", batch=3)
    shape, _ = GRIDS["even space"]
    v[0], v[2], k[0] = np.nan, np.inf, np.nan  # the sequences beside it
    k[1, 0] = np.nan
    with simulated_gpu(monkeypatch, HOPPER):
        o, lse = forward(*map(place, (q, k, v)), mask_mod=function_of("even space"))
    others = np.ones(math.prod(shape), bool)
    sees = [(z, y, x) for z in (0, 1) for y in range(3) for x in range(2)]  # windows of 2 x 4 x 3 that begin at 0
    others[[np.ravel_multi_index(token, shape) for token in sees]] = False
    k[1, 0] = 0
    expected = fa2cupy.reference.forward(q[1:2], k[1:2], v[1:2], mask_mod=function_of("even space"))
    assert np.isnan(np.asarray(o[1, ~others], np.float32)).all() and np.isnan(np.asarray(lse[1][:, ~others])).all()
    np.testing.assert_allclose(np.asarray(o[1, others], np.float32), expected[0][0, others], atol=0.03)
    np.testing.assert_allclose(np.asarray(lse[1][:, others]), expected[1][0][:, others], atol=1e-3)


def test_sequences_beside_one_are_not_in_its_gradients(monkeypatch):
    q, k, v, do = inputs_of("even space", batch=3)
    function = function_of("even space")
    o, lse = fa2cupy.reference.forward(*(x.astype("float32") for x in (q, k, v)), mask_mod=function)
    o, lse = o.astype(q.dtype), lse.astype("float32")
    expected = Expectation(*(x[1:2].copy() for x in (q, k, v, do)), mask_mod=function)
    for x in (q, k, v, o, do):
        x[0], x[2] = np.nan, np.inf
    with simulated_gpu(monkeypatch, HOPPER):
        gradients = backward(*map(place, (q, k, v, o, lse, do)), mask_mod=function, method="single_pass")
    expected.check(**{name: x[1:2] for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)})
    assert all(np.isnan(np.asarray(x[0], np.float32)).all() for x in gradients)


@pytest.mark.parametrize("change", [{"method": "two_pass"}, {"deterministic": True}, {"num_splits": 2}])
def test_other_backwards_evaluate_the_function(monkeypatch, change):
    q, k, v, do = map(place, make_inputs("bfloat16", seqlen_q=400, seqlen_k=400, num_heads=2, head_dim=64))
    lse = place(np.zeros((1, 2, 400), "float32"))
    with fake_gpu(monkeypatch, HOPPER, lambda launch: None) as launched:
        backward(q, k, v, q, lse, do, mask_mod=mods.neighborhood((20, 20), (7, 5)), **change)
    assert not any("boxes" in stage.spec.features for stage in launched)
    assert any("mask_mod" in stage.spec.features for stage in launched)


def test_long_backwards_have_boxes(monkeypatch):
    q, k, v, do = map(place, make_inputs("bfloat16", seqlen_q=4096, seqlen_k=4096, num_heads=2, head_dim=64))
    lse, own = place(np.zeros((1, 2, 4096), "float32")), {"mask_mod": mods.neighborhood((64, 64), (7, 5))}
    with fake_gpu(monkeypatch, HOPPER, lambda launch: None) as launched:
        backward(q, k, v, q, lse, do, **own)
    assert [stage.spec.features for stage in launched] == [(), ("boxes",), ("boxes",)]
    specs = default_specs(HOPPER, "bfloat16", 64, False, "single_pass", functions=own)
    assert all(stage.spec in specs for stage in launched)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"softcap": 2.0},
        {"num_splits": 2},
        {"family": "sm80"},
        {"config": TileConfig(64, 64, 8, 2, 3)},
        {"block_mask": BlockMask(np.ones((4, 4), bool), 400, 400)},
        {"mask_mod": mods.neighborhood((400,), (50,))},
        {"mask_mod": mods.neighborhood((21, 19), (7, 5))},
        {"mask_mod": lambda b, h, q, k: mods.neighborhood((20, 20), (7, 5))(b, h, q, k) & (k >= 0)},
        {"seqlen_k": 380},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_calls_evaluate_the_function(monkeypatch, change):
    length = change.pop("seqlen_k", 400)
    q, k, v, _ = map(place, make_inputs("bfloat16", seqlen_q=400, seqlen_k=length, num_heads=2, head_dim=64))
    if "block_mask" in change:
        states = change["block_mask"].states
        change["block_mask"] = BlockMask.of_states(place(states), 400, 400, (128, 128), None)
    own = {"mask_mod": mods.neighborhood((20, 20), (7, 5)), **change}
    with fake_gpu(monkeypatch, HOPPER, lambda launch: None) as launched:
        forward(q, k, v, **own)
    assert not any("boxes" in stage.spec.features for stage in launched)
    assert any("mask_mod" in stage.spec.features for stage in launched)


@pytest.mark.parametrize("order", [1, -1])
def test_a_function_that_computes_the_same_is_evaluated(monkeypatch, order):
    ready_made = mods.neighborhood((20, 20), (7, 5))
    others = (ready_made, lambda b, h, q, k: ready_made(b, h, q, k))[::order]
    q, k, v, _ = map(place, make_inputs("bfloat16", seqlen_q=400, seqlen_k=400, num_heads=2, head_dim=64))
    with fake_gpu(monkeypatch, HOPPER, lambda launch: None) as launched:
        for function in others:
            forward(q, k, v, mask_mod=function)
        made = fa2cupy.block_mask(others[0], (), 1, 1, 400, 400, like=q)
        forward(q, k, v, mask_mod=others[1], block_mask=made)
    found = ["boxes" in stage.spec.features for stage in launched if stage.spec.operation == "forward"]
    assert found == [order == 1, order == -1, order == -1]


def test_large_windows_have_large_boxes():
    found = [boxes_of((128, 128), windows).shapes.queries for windows in ((7, 7), (13, 13), (41, 41))]
    assert found == [(8, 8, 1), (4, 16, 1), (16, 8, 1)]
    assert [boxes_of((16, 32, 32), (n,) * 3).shapes.queries for n in (5, 9)] == [(4, 4, 4), (8, 2, 8)]


def test_boxes_have_as_many_tokens_as_tiles():
    for row in SM90.boxes:
        for queries, keys in row.shapes:
            assert (math.prod(queries), math.prod(keys)) == (row.tile.b_r, row.tile.b_c)
            own, others = (queries, keys) if row.operation == "forward" else (keys, queries)
            assert others[0] % 8 == 0 and (max(queries[2], keys[2]) > 1) == (row.num_axes == 3)
            x = min(16, own[0])
            assert 16 % x == 0 and own[0] % x == 0 and own[1] % min(16 // x, own[1]) == 0


@pytest.mark.parametrize("function", [mods.neighborhood((20, 20), (7, 5)), mods.neighborhood_2d(20, 3)])
def test_a_call_has_a_kernel_that_is_compiled_ahead(monkeypatch, function):
    q, k, v, _ = map(place, make_inputs("bfloat16", seqlen_q=400, seqlen_k=400, num_heads=2, head_dim=64))
    with fake_gpu(monkeypatch, HOPPER, lambda launch: None) as launched:
        forward(q, k, v, mask_mod=function)
    assert launched[0].spec.boxes
    assert launched[0].spec in default_specs(HOPPER, "bfloat16", 64, False, functions={"mask_mod": function})


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_with_boxes_spill_nothing(monkeypatch, head_dim):
    """A process of its own compiles: spills of a text depend on what NVRTC has compiled before in its process."""
    allowed = {}
    for row in SM90.boxes:
        if not row.least_head_dim <= head_dim <= row.head_dim:
            continue
        length = math.prod(GRIDS["space" if row.num_axes == 3 else "plane"][0])
        q, k, v, _ = map(
            place, make_inputs("bfloat16", seqlen_q=length, seqlen_k=length, num_heads=1, head_dim=head_dim)
        )
        # A backward with 64 columns has few registers left for what it loads once in a step.
        most = 24 if row.operation == "backward" and row.head_dim == 64 else 0
        own = {"mask_mod": function_of("space" if row.num_axes == 3 else "plane")}
        for shapes in row.shapes:
            monkeypatch.setattr(type(SM90), "boxes", (row._replace(shapes=(shapes,)),))
            with fake_gpu(monkeypatch, HOPPER, lambda launch: None) as launched:
                if row.operation == "forward":
                    forward(q, k, v, **own)
                else:
                    lse = place(np.zeros((1, 1, length), "float32"))
                    backward(q, k, v, q, lse, q, method="single_pass", **own)
            (spec,) = [stage.spec for stage in launched if stage.spec.boxes]
            assert spec.boxes == shapes
            allowed[spec] = most
    reports = compile_all(list(allowed), jobs=1)
    assert not any(report.failure for report in reports)
    spilled = {str(spec): one.spill_bytes for spec, one in zip(allowed, reports, strict=True)}
    assert spilled == {str(spec): min(spilled[str(spec)], most) for spec, most in allowed.items()}


#: Boxes of queries and keys by the number of axes.
OF_MUTANTS = {2: ((16, 8, 1), (8, 16, 1)), 3: ((4, 4, 8), (8, 8, 2))}
#: Texts of the kernel, what is in their places, and what catches it.
MUTANTS = {
    "a window is longer": (
        "plane",
        "Sees::end(grid.x, own.x) - first_x",
        "Sees::end(grid.x, own.x) + 1 - first_x",
        "numbers",
    ),
    "a window begins late": (
        "space",
        "(Sees::begin(axis, own) - other)",
        "(Sees::begin(axis, own) + 1 - other)",
        "numbers",
    ),
    "windows along y are those along x": (
        "plane",
        "kLayerBits>(grid.y, own.y",
        "kLayerBits>(grid.x, own.y",
        "numbers",
    ),
    "windows along y reach into the next layer": ("space", "seen & ((1u << kAllBits % 32) - 1)", "seen", "numbers"),
    "windows along z are not looked at": (
        "space",
        "visible &= along<kLayerBits, 32>(grid.z, own.z, column.z);",
        ";",
        "numbers",
    ),
    "all boxes of keys begin at the first": ("plane", "first_x = column.x +", "first_x = boxes.others.x +", "numbers"),
    "boxes of keys lie in the wrong place": (
        "plane",
        "(tile - row * along_x) * Box::kWidth",
        "(tile - row * along_x) * Box::kHeight",
        "numbers",
    ),
    "the last queries see nothing": ("plane", "min_of(own + tokens, axis.length) - 1)", "own)", "numbers"),
    "heads and sequences are exchanged": (
        "plane",
        "head_index * head + batch_index * batch",
        "head_index * batch + batch_index * head",
        "unwritten",
    ),
    "lse of rows outside of the grid is stored": ("plane", "x < grid.x.length && y", "y", "blocks"),
    "lse is stored by rows of boxes": (
        "plane",
        "(z * grid.y.length + y) * grid.x.length + x",
        "x",
        "blocks",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_kernel_is_caught(monkeypatch, mutant):
    name, old, new, caught_by = MUTANTS[mutant]
    exception, text = CATCHES[caught_by]
    tile = TileConfig(128, 128, 12, 2)
    rows = (BoxRow(0, 128, axes, tile, (BoxShapes(*pair),), 1.0) for axes, pair in OF_MUTANTS.items())
    monkeypatch.setattr(type(SM90), "boxes", tuple(rows))
    with pytest.raises(exception, match=text):
        check(monkeypatch, name, patch=lambda spec, source: replace_once(spec, source, old, new))


#: The same of the kernels of a backward.
OF_BACKWARD = {
    "a query fewer sees a key": ("plane", "key + before + 1;", "key + before;", "numbers"),
    "queries see a key late": (
        "plane",
        "wanted = key - size + before + 1;",
        "wanted = key - size + before + 2;",
        "numbers",
    ),
    "the first queries do not see keys of moved windows": ("plane", "first > key - size ||", "", "numbers"),
    "the last queries do not see keys of moved windows": ("space", "last <= key ||", "", "numbers"),
    "statistics are those of rows that follow each other": (
        "plane",
        "own_.queries.position(params_, first, query)",
        "query",
        "numbers",
    ),
    "dQ is added to the next step's rows": ("plane", "own_.step_before(next)", "next", "bounds"),
    "dQ of queries outside of the grid is added": ("plane", "if (row >= params_.seqlen_q) continue;", "", "bounds"),
    "the last dQ of a head is added to the next one": ("plane", "step.head - is_first", "step.head", "bounds"),
    "dQ's columns are converted in the order of other kernels": (
        "plane",
        "x[t].item[2 * j], x[t].item[2 * j + 1]",
        "x[t].item[j], x[t].item[j + 2]",
        "numbers",
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", OF_BACKWARD)
def test_a_broken_backward_is_caught(monkeypatch, mutant):
    name, old, new, caught_by = OF_BACKWARD[mutant]
    exception, text = CATCHES[caught_by]

    def patch(spec, source):
        is_meant = spec.operation == ("convert_dq" if "converted" in mutant else "backward")
        return replace_once(spec, source, old, new) if is_meant else source

    with pytest.raises(exception, match=text):
        check_backward(monkeypatch, name, patch=patch)
