"""Calls on CuPy arrays without a GPU: copies of arrays, records, reuse of prepared calls, and refusals."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import FakeArray, current_device, place
from support.fake_gpu import backward, fake_gpu, forward
from support.fake_gpu import delta as run_delta
from support.launch_record import Launch
from support.strided_arrays import gapped, packed, shifted

from fa2cupy import TileConfig
from fa2cupy.families import sm90
from fa2cupy.families.sm80 import SM80
from fa2cupy.gpu import device_memory, prepare, prepared, signatures
from fa2cupy.testing import Expectation, check_delta, make_inputs

METHODS = ("single_pass", "two_pass")


@pytest.fixture
def launched(monkeypatch):
    with fake_gpu(monkeypatch) as stages:
        yield stages


def inputs_of(dtype="float16", **options) -> list[FakeArray]:
    """Returns inputs of a small grouped-query problem on the fake device."""
    sizes = {"batch": 2, "seqlen_q": 37, "seqlen_k": 53, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64} | options
    return [place(x) for x in make_inputs(dtype, **sizes)]


#: Sizes for which two passes are faster on Hopper.
MANY_SHORT = {"batch": 2, "seqlen_q": 160, "seqlen_k": 161, "num_heads": 16, "num_heads_kv": 8}


@pytest.mark.parametrize("view", (place, packed, shifted, gapped), ids=lambda view: view.__name__)
@pytest.mark.parametrize("head_dim", (64, 59))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_any_strides_and_head_dims_reach_the_kernels_right(launched, dtype, head_dim, view):
    q, k, v, do = (view(x) for x in inputs_of(dtype, head_dim=head_dim))
    expected = Expectation(q, k, v, do, causal=True)
    o, lse = forward(q, k, v, causal=True)
    expected.check(o=o, lse=lse)
    delta = run_delta(o, do)
    check_delta(o, do, delta)
    for method in METHODS:
        for given in (None, delta):
            dq, dk, dv = backward(q, k, v, o, lse, do, causal=True, method=method, delta=given)
            expected.check(dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("view", (place, packed, gapped), ids=lambda view: view.__name__)
@pytest.mark.parametrize(("family", "head_dim"), (("sm90", 64), ("sm80", 64), ("sm80", 59)))
def test_shares_of_a_split_forward_go_through_a_workspace(launched, family, head_dim, view):
    q, k, v, _ = (view(x) for x in inputs_of(head_dim=head_dim))
    o, lse = forward(q, k, v, causal=True, family=family, num_splits=3)
    Expectation(q, k, v, causal=True).check(o=o, lse=lse)
    assert [(stage.spec.operation, stage.spec.is_split) for stage in launched] == [
        ("forward", True),
        ("merge_forward", False),
    ]
    again, _ = forward(q, k, v, causal=True, family=family, num_splits=1)
    assert [stage.spec.operation for stage in launched[2:]] == ["forward"] and not launched[2].spec.is_split
    Expectation(q, k, v, causal=True).check(o=again)


@pytest.mark.parametrize(
    ("view", "head_dim", "dtype", "copied"),
    (
        (place, 64, "float16", False),
        (packed, 64, "float16", False),
        (place, 59, "float32", False),
        (shifted, 64, "float32", False),
        (shifted, 64, "float16", True),
        (gapped, 64, "float32", True),
        (place, 59, "float16", True),
    ),
)
def test_arrays_are_copied_only_where_the_kernels_need_it(launched, monkeypatch, view, head_dim, dtype, copied):
    q, k, v, _ = (view(x) for x in inputs_of(dtype, head_dim=head_dim))
    addresses = []
    original = prepared.KernelCall._run
    monkeypatch.setattr(
        prepared.KernelCall, "_run", lambda self, arrays, at: addresses.extend(at[:3]) or original(self, arrays, at)
    )
    forward(q, k, v)
    assert (addresses != [x.data.ptr for x in (q, k, v)]) == copied


@pytest.mark.parametrize(
    ("views", "head_dim_v", "copied"),
    [
        ({"k": shifted}, 64, {"k"}),
        ({"v": shifted, "o": packed}, 64, {"v"}),
        ({"o": shifted, "dk": shifted}, 64, {"o", "dk"}),
        ({}, 40, set()),
        ({}, 59, {"v", "o", "do", "dv"}),
    ],
    ids=["k", "v", "results", "another head_dim of v", "one that is no multiple"],
)
def test_only_the_arrays_that_need_it_are_copied(launched, monkeypatch, views, head_dim_v, copied):
    """The others, and results of the caller's, are used in place."""
    made = inputs_of("float16", head_dim=64, head_dim_v=head_dim_v)
    q, k, v, do = (views.get(name, place)(x) for name, x in zip(("q", "k", "v", "do"), made, strict=True))
    o, dq, dk, dv = (
        views.get(name, place)(np.full_like(x, np.nan)) for name, x in (("o", do), ("dq", q), ("dk", k), ("dv", v))
    )
    lse = place(np.full((2, 4, 37), np.nan, np.float32))
    own = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "dq": dq, "dk": dk, "dv": dv}
    used = set()
    original = prepared.KernelCall._run

    def run(self, arrays, addresses):
        used.update(addresses)
        return original(self, arrays, addresses)

    monkeypatch.setattr(prepared.KernelCall, "_run", run)
    expected = Expectation(q, k, v, do)
    forward(q, k, v, out=(o, lse), family="sm80")
    backward(q, k, v, o, lse, do, out=(dq, dk, dv), family="sm80")
    expected.check(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
    assert {name for name, x in own.items() if x.data.ptr not in used} == copied


@pytest.mark.parametrize(
    ("shape", "strides", "taken"),
    (
        ((2, 5, 8), (80, 16, 2), True), ((2, 5, 8), (80, 16, 4), False), ((2, 5, 1), (80, 16, 4), True),
        ((2, 5, 8), (88, 16, 2), False), ((2, 5, 8), (80, 24, 2), False), ((1, 5, 8), (88, 16, 2), True),
        ((2, 1, 8), (80, 24, 2), True), ((0, 5, 8), (88, 24, 4), True),
    ),
)  # fmt: skip
def test_rows_are_taken_where_they_start_on_16_bytes_and_have_no_gaps(shape, strides, taken):
    """Strides of axes of length 1 are ignored."""
    memory = place(np.zeros(200, np.float16))
    array = np.lib.stride_tricks.as_strided(memory, shape, strides, subok=True)
    assert prepare._must_be_copied("q", array, SM80.row_alignment) != taken


@pytest.mark.parametrize("head_dims", ((24, 40), (40, 24), (64, 59), (59, 64)), ids=str)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_values_with_a_head_dim_of_their_own(launched, dtype, head_dims):
    q, k, v, do = inputs_of(dtype, head_dim=head_dims[0], head_dim_v=head_dims[1])
    expected = Expectation(q, k, v, do)
    o, lse = forward(q, k, v)
    expected.check(o=o, lse=lse)
    for method in METHODS:
        expected.check(**dict(zip(("dq", "dk", "dv"), backward(q, k, v, o, lse, do, method=method), strict=True)))


@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("rank", (2, 3, 4))
def test_layouts_and_ranks(launched, layout, rank):
    heads = {"num_heads": 1, "num_heads_kv": 1} if rank == 2 else {}
    arrays = inputs_of("float16", layout=layout, **heads, **({} if rank == 4 else {"batch": 1}))
    q, k, v, do = (x if rank == 4 else x[0] if rank == 3 else place(x.reshape(-1, 64)) for x in arrays)
    expected = Expectation(q, k, v, do, causal=True, layout=layout)
    o, lse = forward(q, k, v, causal=True, layout=layout)
    assert o.shape == q.shape and lse.ndim == rank - 1
    expected.check(o=o, lse=lse)
    for method in METHODS:
        gradients = backward(q, k, v, o, lse, do, causal=True, layout=layout, method=method)
        expected.check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.parametrize("view", (place, packed, shifted, gapped), ids=lambda view: view.__name__)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("head_dim", (64, 59))
def test_results_go_into_the_callers_arrays(launched, dtype, head_dim, view):
    q, k, v, do = inputs_of(dtype, head_dim=head_dim)
    o, lse = forward(q, k, v)
    wanted = (o, lse, *backward(q, k, v, o, lse, do, method="two_pass"))
    out = [view(np.full_like(x, np.nan)) if x.ndim == 4 else gapped(np.full_like(x, np.nan)) for x in wanted]
    got = forward(q, k, v, out=(out[0], out[1]))
    got += backward(q, k, v, o, lse, do, method="two_pass", out=tuple(out[2:]))
    for a, b, c in zip(wanted, out, got, strict=True):
        assert c is b and np.array_equal(a, b)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_only_the_results_that_the_caller_lacks_are_allocated(launched, dtype, method):
    q, k, v, do = inputs_of(dtype)
    o, lse = forward(q, k, v)
    mine = place(np.full_like(k, np.nan))
    dq, dk, dv = backward(q, k, v, o, lse, do, method=method, out=(None, mine, None))
    assert dk is mine
    Expectation(q, k, v, do).check(dq=dq, dk=dk, dv=dv)


def test_what_lies_between_the_rows_of_a_result_is_not_cleared(launched):
    """One pass of float32 adds to dk and dv, after their rows are cleared."""
    q, k, v, do = inputs_of("float32")
    o, lse = forward(q, k, v)
    wide = [place(np.full((2, 53, 4, 64), 7, np.float32)) for _ in range(2)]
    dq, dk, dv = backward(q, k, v, o, lse, do, method="single_pass", out=(None, wide[0][:, :, ::2], wide[1][:, :, ::2]))
    Expectation(q, k, v, do).check(dq=dq, dk=dk, dv=dv)
    assert all((x[:, :, 1::2] == 7).all() for x in wide)


def test_a_signature_is_prepared_once(launched, monkeypatch):
    prepared = []
    original = signatures.prepare
    monkeypatch.setattr(signatures, "prepare", lambda *a: prepared.append(a) or original(*a))
    q, k, v, _ = inputs_of()
    for _ in range(3):
        forward(q, k, v, causal=True)
    forward(place(q), place(k), place(v), causal=True)
    assert len(prepared) == 1
    forward(q, k, v, causal=False)
    forward(q, k, v, causal=True, scale=0.3)
    forward(packed(q), k, v, causal=True)
    forward(shifted(q), k, v, causal=True)
    assert len(prepared) >= 5


def test_a_dict_of_tiles_is_taken_though_it_cannot_be_hashed(launched):
    q, k, v, do = inputs_of()
    o, lse = forward(q, k, v, config={"forward": TileConfig(192, 96, 16, 2)})
    assert (launched[-1].spec.tile.b_r, launched[-1].spec.tile.b_c) == (192, 96)
    backward(q, k, v, o, lse, do, method="two_pass", config={"backward_dkdv": TileConfig(64, 128, 12, 3)})
    assert launched[-1].spec.operation == "backward_dkdv" and launched[-1].spec.tile.b_r == 64


def test_methods_choose_their_stages(launched):
    q, k, v, do = inputs_of(**MANY_SHORT)
    o, lse = forward(q, k, v)

    def stages(**options):
        launched.clear()
        backward(q, k, v, o, lse, do, **options)
        return [stage.spec.operation for stage in launched]

    assert stages(method="single_pass") == ["delta", "backward", "convert_dq"]
    assert stages(deterministic=True) == stages(method="two_pass") == ["delta", "backward_dq", "backward_dkdv"]
    assert stages() == stages(method="two_pass")
    assert stages(delta=run_delta(o, do), method="two_pass")[-2:] == ["backward_dq", "backward_dkdv"]
    with pytest.raises(ValueError, match="deterministic"):
        stages(method="single_pass", deterministic=True)


@pytest.mark.parametrize("name", ("k", "v"))
def test_other_objects_are_named_and_told_how_to_convert(launched, name):
    q, k, v, _ = inputs_of()
    tensor = type("Tensor", (), {"__dlpack__": None})()
    for foreign, hint in (([1.0], "numpy.asarray"), (tensor, "from_dlpack")):
        with pytest.raises(TypeError, match=f"{name}: expected a numpy.ndarray or cupy.ndarray.*{hint}"):
            forward(q, *(foreign if n == name else x for n, x in (("k", k), ("v", v))))


def test_arrays_on_two_devices_are_refused(launched):
    q, k, v, _ = inputs_of()
    k.device_id = 1
    with pytest.raises(ValueError, match="k: expected an array on device 0 like q, got device 1"):
        forward(q, k, v)


def test_overlapping_results_are_refused_on_every_call(launched):
    q, k, v, do = inputs_of(seqlen_k=37, num_heads_kv=4)
    o, lse = forward(q, k, v)
    both = place(np.empty((2, 37, 8, 64), np.float16))
    backward(q, k, v, o, lse, do, out=(both[:, :, :4], both[:, :, 4:], None))
    shared = (both[:, :, :4], both[:, :, 1:5], None)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out \(dk\): overlaps out \(dq\)"):
            backward(q, k, v, o, lse, do, out=shared)
        with pytest.raises(ValueError, match=r"out \(o\): overlaps v"):
            forward(q, k, v, out=(v, None))


def test_results_that_overlap_are_refused_where_inputs_are_copied(launched):
    """Results are then written after the kernels, into arrays that the kernels have not seen."""
    q, k, v, do = (gapped(x) for x in inputs_of(seqlen_k=37, num_heads_kv=4))
    o, lse = forward(q, k, v)
    shared = place(q)
    launched.clear()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out \(o\): overlaps v"):
            forward(q, k, v, out=(v, None))
        with pytest.raises(ValueError, match=r"out \(dk\): overlaps out \(dq\)"):
            backward(q, k, v, o, lse, do, out=(shared, shared, None))
    assert not launched


@pytest.mark.parametrize("empty", ("batch", "num_heads", "seqlen_q", "seqlen_k"))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_empty_sizes_launch_what_is_left(launched, dtype, method, empty):
    sizes = {empty: 0, **({"num_heads_kv": 0} if empty == "num_heads" else {})}
    q, k, v, do = inputs_of(dtype, **sizes)
    o, lse = forward(q, k, v, causal=True)
    dq, dk, dv = backward(q, k, v, o, lse, do, causal=True, method=method)
    assert (o.shape, dq.shape, dk.shape, dv.shape) == (q.shape, q.shape, k.shape, v.shape)
    for result in (o, dq, dk, dv):
        assert not np.any(np.asarray(result, np.float32) != 0)
    assert not (launched and empty in ("batch", "num_heads"))


# -------------------------------------------------------------------------------------- memory of calls, also in graphs


def origins(launched, monkeypatch, arrays: tuple, *, stream: int, capturing: set, **options) -> tuple[set, set]:
    """Returns the owners of workspaces and copies, and those of the results of forward and backward."""
    cupy = prepare.cupy
    monkeypatch.setattr(cupy, "stream", stream)
    monkeypatch.setattr(cupy, "capturing", capturing)
    held = []
    original = prepared.KernelCall._run
    monkeypatch.setattr(
        prepared.KernelCall, "_run", lambda self, given, at: held.append(given) or original(self, given, at)
    )
    cupy.workspaces.clear()
    q, k, v, do = arrays
    o, lse = forward(q, k, v, **{name: x for name, x in options.items() if name in ("alibi_slopes", "bias")})
    results = (o, lse, *backward(q, k, v, o, lse, do, **options))
    mine = {x.ctypes.data for x in (*arrays, *results) if x is not None}
    copies = {x.allocator for given in held for x in given if x is not None and x.ctypes.data not in mine}
    workspaces = {allocator for allocator, *_ in cupy.workspaces}
    return (copies - {"view"}) | workspaces, {x.allocator for x in results}


@pytest.mark.parametrize("head_dim", (64, 59))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_what_a_captured_call_needs_is_the_graphs_and_its_results_are_the_callers(
    launched, monkeypatch, dtype, method, head_dim
):
    arrays = tuple(inputs_of(dtype, head_dim=head_dim))
    for stream, capturing, owner in ((0, {77}, "pool"), (1, {77}, "pool"), (77, {5}, "pool"), (77, {77}, "graph")):
        needed, results = origins(launched, monkeypatch, arrays, stream=stream, capturing=capturing, method=method)
        assert needed == {owner} and results == {"pool"}


def test_memory_that_kernels_leave_zero_is_kept_for_a_stream_and_cleared_in_each_call_of_a_graph(launched, monkeypatch):
    monkeypatch.setattr(prepare.cupy, "capturing", {77})
    cleared = []

    def zeros(nbytes: int, stream: int):
        before, memory = len(prepare.cupy.workspaces), device_memory.zeros(nbytes, 0, stream)
        if len(prepare.cupy.workspaces) > before:
            cleared.append(ctypes.string_at(memory.ptr, nbytes) == bytes(nbytes))
        return memory

    first, smaller, larger = zeros(64, 0), zeros(32, 0), zeros(128, 0)
    assert first is smaller and larger is not first and zeros(128, 0) is larger
    assert zeros(64, 5) is not larger and zeros(64, 77) is not zeros(64, 77)
    assert cleared == [True] * 5
    assert [allocator for allocator, *_ in prepare.cupy.workspaces[-2:]] == ["graph"] * 2


def test_given_deltas_and_gradients_of_biases_are_summed_in_the_graph(launched, monkeypatch):
    arrays = tuple(inputs_of())
    o, lse = forward(*arrays[:3])
    delta = run_delta(o, arrays[3])
    subtracted = []
    monkeypatch.setattr(
        FakeArray,
        "__sub__",
        lambda a, b: subtracted.append(place(np.subtract(a.view(np.ndarray), b))) or subtracted[-1],
        raising=False,
    )
    origins(launched, monkeypatch, arrays, stream=77, capturing={77}, delta=delta, dlse=lse)
    assert [x.allocator for x in subtracted] == ["graph"]


# ----------------------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        ({"causal": True}, {"causal": 1}, "causal"),
        ({"scale": 1.0}, {"scale": True}, "softmax_scale"),
        ({"softcap": 1.0}, {"softcap": True}, "softcap"),
        ({"window": (1, 0)}, {"window": (True, False)}, "window"),
        ({"window": (1, 0)}, {"window": (1.0, 0)}, "window"),
        ({"dropout_p": 0.0}, {"dropout_p": False}, "dropout_p"),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_after_an_equal_call(launched, right, wrong, text):
    q, k, v, _ = inputs_of()
    for _ in range(2):
        with pytest.raises(TypeError, match=f"^{text}"):
            forward(q, k, v, **wrong)
        forward(q, k, v, **right)


def test_a_deterministic_flag_of_another_type_is_refused_after_an_equal_call(launched):
    q, k, v, do = inputs_of()
    o, lse = forward(q, k, v)
    for _ in range(2):
        backward(q, k, v, o, lse, do, deterministic=True)
        with pytest.raises(TypeError, match="^deterministic"):
            backward(q, k, v, o, lse, do, deterministic=1)


@pytest.mark.parametrize(
    "options",
    [{"config": {"forward": TileConfig(192, 96, 16, 2)}}, {"window": [9, 4]}, {"window": [9, None], "softcap": 3.0}],
    ids=("dict of tiles", "list", "list and number"),
)
def test_options_that_cannot_be_hashed_are_planned_once(launched, monkeypatch, options):
    prepared = []
    original = signatures.prepare
    monkeypatch.setattr(signatures, "prepare", lambda *a: prepared.append(a) or original(*a))
    q, k, v, _ = inputs_of()
    for _ in range(3):
        forward(q, k, v, **{name: type(x)(x) for name, x in options.items()})
    assert len(prepared) == 1


# ------------------------------------------------------------------------------ calls that Hopper's kernels do not take


def kernels_of_backward(launched, arrays: tuple, **options) -> list[tuple[str, str]]:
    q, k, v, do = arrays
    forward_options = {name: x for name, x in options.items() if name == "scale"}
    o, lse = forward(q, k, v, **forward_options)
    launched.clear()
    backward(q, k, v, o, lse, do, **options)
    return [(s.spec.family_name, s.spec.operation) for s in launched if s.spec.operation.startswith("backward")]


def test_a_call_that_falls_back_takes_the_method_of_the_kernels_that_it_falls_back_to(launched, monkeypatch):
    arrays = tuple(inputs_of(**MANY_SHORT))
    on_hopper = [("sm90", "backward_dq"), ("sm90", "backward_dkdv")]
    assert kernels_of_backward(launched, arrays) == on_hopper
    before = [("sm80", "backward")]
    assert kernels_of_backward(launched, arrays, scale=-0.2) == before
    reversed_rows = tuple(place(x[:, ::-1])[:, ::-1] for x in arrays)
    assert kernels_of_backward(launched, reversed_rows) == before
    # A single array, of any role, decides the family of the whole call.
    out = (None, place(np.empty_like(arrays[1]))[:, ::-1], None)
    assert kernels_of_backward(launched, arrays, out=out) == before
    assert kernels_of_backward(launched, arrays, out=out, deterministic=True) == [
        ("sm80", "backward_dq"), ("sm80", "backward_dkdv"),
    ]  # fmt: skip
    signatures._prepared.clear()
    monkeypatch.setattr(sm90, "_can_encode_maps", lambda: False)
    assert kernels_of_backward(launched, arrays) == before


@pytest.mark.parametrize("view", (shifted, gapped), ids=lambda view: view.__name__)
def test_copies_are_for_the_kernels_that_the_call_would_take(launched, view):
    arrays = tuple(view(x) for x in inputs_of(**MANY_SHORT))
    assert kernels_of_backward(launched, arrays, scale=-0.2) == [("sm80", "backward")]
    assert kernels_of_backward(launched, arrays) == [("sm90", "backward_dq"), ("sm90", "backward_dkdv")]


# --------------------------------------------------------------------------------- devices that are not the current one


@pytest.mark.parametrize("view", (place, gapped), ids=lambda view: view.__name__)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize(("device", "current"), [(1, 0), (0, 1)], ids=("the second", "the first"))
def test_a_call_belongs_to_the_device_of_its_arrays(monkeypatch, device, current, dtype, method, view):
    """Checks kernels, architecture, streams, workspaces, copies and results.

    fake_gpu.py refuses kernels of another device.
    """
    archs = ("sm_90", "sm_80")
    held = []
    original = prepared.KernelCall._run
    monkeypatch.setattr(
        prepared.KernelCall, "_run", lambda self, arrays, at: held.append(arrays) or original(self, arrays, at)
    )
    with fake_gpu(monkeypatch, archs) as launched:
        cupy = prepare.cupy
        monkeypatch.setattr(cupy, "stream", 70)
        with current_device(device):
            q, k, v, do = (view(x) for x in inputs_of(dtype))
        with current_device(current):
            for _ in range(2):  # the first call is prepared, the second is found
                o, lse = forward(q, k, v)
                delta = run_delta(o, do)
                gradients = backward(q, k, v, o, lse, do, method=method)
                results = (o, lse, delta, *gradients)
                assert {x.device_id for x in results} == {device}
            assert cupy.cuda.get_current_stream().ptr == 70 + current
        Expectation(q, k, v, do).check(**dict(zip(("o", "lse"), (o, lse), strict=True)))
    assert set(cupy.launches) == {(device, 70 + device)}
    assert {stage.spec.arch.removesuffix("a") for stage in launched} == {archs[device]}
    assert {x.device_id for arrays in held for x in arrays if x is not None} == {device}
    assert {at for *_, at in cupy.workspaces} == {device}


def test_a_given_delta_and_dlse_are_subtracted_on_their_device(monkeypatch):
    subtracted = []
    monkeypatch.setattr(
        FakeArray,
        "__sub__",
        lambda a, b: subtracted.append(place(np.subtract(a.view(np.ndarray), b))) or subtracted[-1],
        raising=False,
    )
    with fake_gpu(monkeypatch, ("sm_90", "sm_80")):
        with current_device(1):
            q, k, v, do = inputs_of()
            o, lse = forward(q, k, v)
        backward(q, k, v, o, lse, do, delta=lse, dlse=lse)
    assert [x.device_id for x in subtracted] == [1]


def test_each_thread_makes_the_device_known_to_the_driver_once_before_it_launches(launched, monkeypatch):
    events = []
    original = prepared.KernelCall._run
    monkeypatch.setattr(prepared.runtime, "free", lambda pointer: events.append(("free", threading.get_ident())))
    monkeypatch.setattr(
        prepared.KernelCall,
        "_run",
        lambda self, arrays, at: events.append(("run", threading.get_ident())) or original(self, arrays, at),
    )
    q, k, v, _ = inputs_of()

    def work() -> None:
        for _ in range(3):
            forward(q, k, v)

    for _ in range(2):
        events.clear()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert [event for event, _ in events] == ["free", "run", "run", "run"]
        assert {owner for _, owner in events} == {thread.ident}


def test_workspaces_begin_on_512_bytes(monkeypatch):
    """Kernels read vectors and copy tiles: workspaces of any size begin where allocations of CuPy do."""
    found = set()

    def look(launch: Launch) -> None:
        own = {name: at for name, at in launch.pointers.items() if launch._workspaces.get(name)}
        assert not [name for name, address in own.items() if address % 512]
        found.update(own)

    with fake_gpu(monkeypatch, "sm_90", look):
        inputs = make_inputs("float16", seqlen_q=37, seqlen_k=37, num_heads=1, head_dim=8)
        lse = place(np.zeros((1, 1, 37), "float32"))
        q, k, v, do = map(place, inputs)
        backward(q, k, v, q, lse, do, method="single_pass", num_splits=2, family="sm80")
        assert found == {"delta", "dq_accum", "shares"}
        q, k, v, do = (place(x.astype("float32")) for x in inputs)
        backward(q, k, v, q, lse, do, precision="split")
        assert found >= {"q_parts", "q_units", "dout_parts", "exceptions"}
