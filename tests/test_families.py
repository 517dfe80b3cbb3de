"""Families as objects: each owns its decisions, a call is decided once, and a new family is one module."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest
from support.feature_cases import inputs_of
from support.plans import backward_plan, forward_plan

from fa2cupy import TileConfig, UnsupportedProblemError
from fa2cupy.families import registry
from fa2cupy.families.choice import choose, choose_with_copies
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Family, Kernel, TileRow
from fa2cupy.families.operations import METHODS, OPERATIONS, TILED
from fa2cupy.families.registry import FAMILIES, choose_family, family_of_kernel
from fa2cupy.families.simt import SIMT, Simt
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.sm90 import Sm90
from fa2cupy.jit.params import param_layout
from fa2cupy.jit.source import kernel_directory, render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.problem.attention import AttentionProblem
from fa2cupy.problem.features import FEATURES, FeatureSettings
from fa2cupy.problem.options import CallOptions
from fa2cupy.testing import Expectation, make_inputs

H100 = DeviceInfo.named("sm_90")
STRIDES = dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), (8192, 128, 64))


def problem(dtype: str = "float16", **changes) -> AttentionProblem:
    sizes = {"seqlen_q": 64, "seqlen_k": 64, "num_heads": 2, "num_heads_kv": 2, "head_dim": 64}
    given = {"causal": False, "softmax_scale": 0.125, "layout": "bshd", "rank": 4}
    return AttentionProblem(**{"dtype": dtype, "batch": 1, **sizes, **given, **changes})


# ------------------------------------------------------------------------------------------- completeness of the tables


def test_operations_are_the_entry_files():
    assert set(OPERATIONS) == {path.stem for path in kernel_directory().glob("*.cu")}
    assert set(TILED) == {"forward", *(name for names in METHODS.values() for name in names)}
    for operation in OPERATIONS.values():
        assert set(operation.features) <= set(FEATURES)
        assert (operation.record is None) == operation.is_tiled


def test_every_feature_concerns_an_operation():
    assert set(FEATURES) == {feature for operation in OPERATIONS.values() for feature in operation.features}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_a_folder_records_and_tiles_for_all_that_it_computes(family):
    assert (kernel_directory() / family.name).is_dir()
    assert [one.name for one in FAMILIES].count(family.name) == 1
    assert pickle.loads(pickle.dumps(family)) is family
    assert set(family.tiles) == set(family.operations) <= {name for name, one in OPERATIONS.items() if one.is_tiled}
    for operation in family.operations:
        assert family.record(operation).pointers
        assert family.owns(operation) in ("queries", "keys", "both", "pairs")


# --------------------------------------------------------------------------------------------- errors for unknown names


@pytest.mark.parametrize(
    "make",
    (
        lambda: OPERATIONS["sideways"],
        lambda: choose_family("sideways", "float16", H100),
        lambda: param_layout("sideways", SM80, "float16"),
        lambda: KernelSpec("sideways", SM80, "sm_80", "float16", 64, False, TileConfig(64, 64, 4)).params,
    ),
)
def test_an_unknown_operation_is_refused_where_it_is_named(make):
    with pytest.raises(ValueError, match="^operation: expected one of .*'forward'.*, got 'sideways'$"):
        make()


@pytest.mark.parametrize(
    "make",
    (
        lambda: choose_family("forward", "float32", H100, "sm90_float32"),
        lambda: choose_family("forward", "float16", H100, "sm70"),
        lambda: choose("forward", problem(), H100, STRIDES, CallOptions(family="sm70")),
    ),
)
def test_an_unknown_family_is_refused_where_it_is_named(make):
    with pytest.raises(
        ValueError, match=r"^family: expected one of \['sm90', 'sm80', 'simt'\], got 'sm(70|90_float32)'$"
    ):
        make()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_formula_serves_an_operation_that_it_is_not_for(family):
    for operation in ("delta", "convert_dq", "sideways"):
        kernel = Kernel(operation, family.dtypes[0], 64, 64)
        with pytest.raises(KeyError, match=operation):
            family.shared_memory_bytes(kernel, TileConfig(64, 64, 4))
        with pytest.raises(KeyError, match=operation):
            family.why_not_shape(kernel, TileConfig(64, 64, 4))
        with pytest.raises(KeyError, match=operation):
            family.record(operation)


# ------------------------------------------------------------------------------------------------ one choice for a call


@pytest.mark.parametrize(
    "changes", ({"softmax_scale": -0.1}, {"seqlen_q": 0}, {"softmax_scale": 0.0, "head_dim": 128}), ids=str
)
def test_a_call_that_falls_back_has_the_method_and_tiles_of_the_family_that_it_gets(changes):
    call = problem(**changes)
    chosen = choose("backward", call, H100, STRIDES, is_launched=False)
    asked = choose("backward", call, H100, STRIDES, CallOptions(family="sm80"), is_launched=False)
    assert chosen == asked and chosen.family.name == "sm80" and chosen.method == "one_tile"
    of_hopper = problem(batch=64, num_heads=8, num_heads_kv=8, seqlen_q=192, seqlen_k=192)
    assert choose("backward", of_hopper, H100, STRIDES, is_launched=False).method == "two_pass"


def test_what_this_machine_lacks_matters_to_calls_and_not_to_kernels_that_are_compiled_ahead(monkeypatch):
    monkeypatch.setattr(Sm90, "why_not_here", lambda self: "needs more")
    assert choose("forward", problem(), H100, STRIDES).family.name == "sm80"
    assert choose("forward", problem(), H100, STRIDES, is_launched=False).family.name == "sm90"
    with pytest.raises(UnsupportedProblemError, match="^family 'sm90' needs more$"):
        choose("forward", problem(), H100, STRIDES, CallOptions(family="sm90"))
    assert choose("delta", problem(), H100, STRIDES, CallOptions(family="sm90")).tiles == {}


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("copied", (False, True))
def test_kernels_are_chosen_once_for_a_call(monkeypatch, dtype, copied):
    pytest.importorskip("cupy")
    from support.fake_cupy import place
    from support.fake_gpu import backward, delta, fake_gpu, forward
    from support.strided_arrays import gapped

    from fa2cupy.gpu import prepare

    calls = []
    monkeypatch.setattr(
        prepare, "choose_with_copies", lambda call, *rest: calls.append(call) or choose_with_copies(call, *rest)
    )
    q, k, v, do = (gapped(x) if copied else place(x) for x in inputs_of(dtype, num_heads=2, num_heads_kv=2))
    with fake_gpu(monkeypatch):
        for _ in range(2):
            o, lse = forward(q, k, v)
            delta(o, do)
            backward(q, k, v, o, lse, do)
    assert calls == ["forward", "delta", "backward"]


#: A call in float32 that the kernels of parts take.
LONG = {"seqlen_q": 200, "seqlen_k": 300}


@pytest.mark.parametrize(
    ("precision", "changes", "device", "call", "more", "wanted"),
    (
        (None, {}, "sm_90", "forward", {}, "sm90"),
        (None, {}, "sm_90", "backward", {"deterministic": True}, "sm90"),
        (None, {"seqlen_q": 127}, "sm_90", "forward", {}, "simt"),
        ("ieee", {}, "sm_90", "forward", {}, "simt"),
        ("split", {}, "sm_90", "forward", {}, "sm90"),
        ("split", {}, "sm_90", "backward", {}, "sm90"),
        ("split", {}, "sm_90", "backward", {"deterministic": True}, "sm90"),
        ("split", {}, "sm_90", "backward", {"method": "single_pass"}, "sm90"),
        ("split", {}, "sm_90", "backward", {"method": "two_pass"}, "sm90"),
        (None, {"head_dim": 256}, "sm_90", "forward", {}, "sm90"),
        (None, {"head_dim": 160}, "sm_90", "backward", {}, "sm90"),
        (None, {"head_dim": 256}, "sm_90", "backward", {"method": "two_pass"}, "sm90"),
        (None, {"head_dim": 160}, "sm_90", "backward", {"method": "single_pass"}, "simt"),
        ("split", {"head_dim": 160}, "sm_90", "backward", {"method": "single_pass"}, "simt"),
        (None, {}, "sm_80", "forward", {}, "sm80"),
        (None, {}, "sm_80", "backward", {}, "sm80"),
        (None, {}, "sm_80", "backward", {"deterministic": True}, "sm80"),
        (None, {}, "sm_80", "backward", {"method": "single_pass"}, "simt"),
        (None, {"seqlen_k": 127}, "sm_80", "forward", {}, "simt"),
        (None, {"head_dim": 160}, "sm_80", "forward", {}, "simt"),
        ("ieee", {}, "sm_80", "backward", {}, "simt"),
        (None, {}, "sm_86", "forward", {}, "simt"),
        (None, {}, "sm_89", "backward", {}, "simt"),
        (None, {}, "sm_86", "forward", {"family": "sm80"}, "sm80"),
        ("split", {}, "sm_86", "forward", {}, "sm80"),
        ("split", {"seqlen_q": 127}, "sm_89", "backward", {}, "sm80"),
        ("split", {}, "sm_75", "forward", {}, "simt"),
        (None, {}, "sm_90", "backward", {"family": "sm80"}, "sm80"),
        (None, {}, "sm_100", "forward", {}, "simt"),
        ("split", {}, "sm_100", "forward", {}, "sm80"),
        ("split", {"seqlen_q": 127}, "sm_90", "forward", {}, "sm90"),
        (None, {"seqlen_k": 127}, "sm_90", "backward", {}, "simt"),
        ("split", {"num_heads": 0}, "sm_90", "backward", {}, "simt"),
        (None, {"seqlen_q": 127}, "sm_90", "forward", {"family": "sm90"}, "sm90"),
    ),
)
def test_the_precision_of_float32_and_what_has_no_kernel_for_it(precision, changes, device, call, more, wanted):
    options = CallOptions(precision=precision, **more)
    one = problem("float32", **{**LONG, **changes})
    chosen = choose(call, one, DeviceInfo.named(device), STRIDES, options, is_launched=False)
    of_gradients = {"single_pass": {"backward"}, "two_pass": {"backward_dq", "backward_dkdv"}}
    assert chosen.family.public_name == wanted
    assert (chosen.fallback is None) == (wanted == "simt")
    if chosen.fallback is not None:
        assert chosen.fallback.method == chosen.method
        operations = of_gradients.get(chosen.method or "", {"forward"})
        assert chosen.fallback.family.name == "simt" and chosen.fallback.tiles.keys() == operations


def test_the_default_method_is_the_first_that_has_a_tile(monkeypatch):
    wide, b200 = problem("float64", head_dim=400), DeviceInfo.named("sm_100")
    assert choose("backward", wide, b200, STRIDES, is_launched=False).method == "single_pass"
    monkeypatch.setattr(SIMT, "tiles", {**SIMT.tiles, "backward": ()})
    assert choose("backward", wide, b200, STRIDES, is_launched=False).method == "two_pass"
    with pytest.raises(UnsupportedProblemError, match="no default tile of backward .simt. at head_dim 400"):
        choose("backward", wide, b200, STRIDES, CallOptions(method="single_pass"), is_launched=False)


@pytest.mark.parametrize(
    ("arch", "name", "wanted"),
    (
        ("sm_80", "NVIDIA A100-SXM4-80GB", "sm80"),
        ("sm_80", "NVIDIA A30", "sm80"),
        ("sm_86", "NVIDIA A10", "sm80"),
        ("sm_86", "NVIDIA A10G", "simt"),
        ("sm_86", "NVIDIA RTX A6000", "sm80"),
        ("sm_86", "NVIDIA GeForce RTX 3090", "simt"),
        ("sm_87", "Orin", "simt"),
        ("sm_89", "NVIDIA L4", "sm80"),
        ("sm_89", "NVIDIA L40", "simt"),
        ("sm_89", "NVIDIA L40S", "sm80"),
        ("sm_89", "NVIDIA RTX 6000 Ada Generation", "sm80"),
        ("sm_89", "NVIDIA GeForce RTX 4090", "simt"),
        ("sm_120", "NVIDIA GeForce RTX 5090", "simt"),
    ),
)
def test_parts_are_the_default_where_three_products_are_faster_than_one(arch, name, wanted):
    """The driver reports most names with the prefix NVIDIA."""
    device = dataclasses.replace(DeviceInfo.named("sm_86"), arch=arch, name=name)
    for call in ("forward", "backward"):
        assert choose(call, problem("float32", **LONG), device, STRIDES, is_launched=False).family.public_name == wanted
        assert choose_family(call, "float32", device).public_name == wanted


@pytest.mark.parametrize(
    ("arch", "wanted"),
    (
        ("sm_75", "simt"), ("sm_80", "sm80"), ("sm_86", "simt"), ("sm_87", "simt"), ("sm_89", "simt"),
        ("sm_90", "sm80"), ("sm_100", "simt"), ("sm_103", "simt"), ("sm_120", "simt"),
    ),
)  # fmt: skip
def test_tensor_cores_are_the_default_of_float64_where_they_are_faster(arch, wanted):
    device = dataclasses.replace(DeviceInfo.named("sm_86"), arch=arch)
    for call in ("forward", "backward"):
        assert choose(call, problem("float64"), device, STRIDES, is_launched=False).family.public_name == wanted
        assert choose_family(call, "float64", device).public_name == wanted
    if arch != "sm_75":
        asked = choose("forward", problem("float64"), device, STRIDES, CallOptions(family="sm80"), is_launched=False)
        assert asked.family.name == "sm80_float64"
    assert choose("decode", problem("float64"), device, STRIDES, is_launched=False).family.name == "simt"


def test_a_family_without_a_kernel_of_single_pass():
    a100, options = DeviceInfo.named("sm_80"), CallOptions(family="sm80", method="single_pass")
    with pytest.raises(UnsupportedProblemError, match="^family 'sm80' has no kernel of backward$"):
        choose("backward", problem("float32", **LONG), a100, STRIDES, options, is_launched=False)
    assert choose_family("backward", "float32", a100).name == "sm80_float32"
    assert family_of_kernel("backward", "float32", a100).name == "simt"
    assert family_of_kernel("backward_dq", "float32", a100).name == "sm80_float32"
    with pytest.raises(UnsupportedProblemError, match="^family 'sm80' has no kernel of backward for float32$"):
        family_of_kernel("backward", "float32", a100, "sm80")


def test_a_family_that_does_not_have_the_precision():
    with pytest.raises(UnsupportedProblemError, match="^family 'sm90' has no kernels for float32"):
        choose("forward", problem("float32"), H100, STRIDES, CallOptions(family="sm90", precision="ieee"))
    options = CallOptions(family="sm90", method="single_pass")
    with pytest.raises(UnsupportedProblemError, match="head_dim=160 is above the 128 of 'single_pass'"):
        choose("backward", problem("float32", head_dim=160), H100, STRIDES, options)


# ------------------------------------------------------------------------------------------------- an additional family


class Toy(Simt):
    """The kernels of simt under another name, with tiles of its own, for float32 alone."""

    public_name = "toy"
    operations = Family.operations
    dtypes = ("float32",)
    tiles = {
        "forward": (TileRow(256, TileConfig(16, 16, 4)),),
        "backward": (TileRow(256, TileConfig(16, 16, 4)),),
        "backward_dq": (TileRow(256, TileConfig(8, 16, 2)),),
        "backward_dkdv": (TileRow(256, TileConfig(16, 8, 2)),),
    }

    default_methods = ("single_pass",)


@pytest.fixture
def toy(monkeypatch) -> Toy:
    """Provides the family, registered in front of the others."""
    family = Toy()
    monkeypatch.setattr(registry, "FAMILIES", (family, *registry.FAMILIES))
    return family


def test_a_family_that_is_in_the_list_is_chosen(toy):
    assert choose_family("forward", "float32", H100) is toy
    assert choose_family("forward", "float64", H100).name == "sm80_float64"
    forward = forward_plan(problem("float32"), H100, STRIDES).stages
    single = backward_plan(problem("float32"), H100, STRIDES, None).stages
    assert [(s.spec.operation, s.spec.family_name) for s in single] == [("delta", "common"), ("backward", "toy")]
    assert forward[0].spec.tile == TileConfig(16, 16, 4)
    assert re.match("fa2_forward_toy_fp32_d64_r16_c16", forward[0].spec.symbol)
    assert 'kernels/simt/forward.cuh"' in render_kernel(forward[0].spec).text


@pytest.mark.simulated
@pytest.mark.parametrize("method", (None, "two_pass"))
def test_a_family_that_is_in_the_list_runs(toy, monkeypatch, method):
    pytest.importorskip("cupy")
    from support.fake_cupy import place
    from support.fake_gpu import backward, forward
    from support.simulator import simulated_gpu

    q, k, v, do = (place(x) for x in make_inputs("float32", seqlen_q=21, seqlen_k=37, num_heads_kv=1, head_dim=32))
    with simulated_gpu(monkeypatch, "sm_80") as launched:
        o, lse = forward(q, k, v, causal=True)
        dq, dk, dv = backward(q, k, v, o, lse, do, causal=True, method=method)
    assert {s.spec.family_name for s in launched} == {"common", "toy"}
    assert [s.spec.operation for s in launched][2:] == list(METHODS[method or "single_pass"])
    Expectation(q, k, v, do, causal=True).check(o=o, lse=lse, dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize(
    ("queries", "heads", "wanted"),
    [
        (1, (2, 2), "decode"), (32, (2, 2), "decode"), (33, (2, 2), "forward"), (8, (4, 1), "decode"),
        (9, (4, 1), "forward"), (8, (8, 2), "decode"), (16, (8, 2), "forward"), (1, (33, 1), "forward"),
        (0, (2, 2), "forward"),
    ],
)  # fmt: skip
def test_a_forward_whose_queries_of_a_group_are_one_tile_reads_keys_once(queries, heads, wanted):
    call = problem(seqlen_q=queries, num_heads=heads[0], num_heads_kv=heads[1])
    assert list(choose("forward", call, H100, STRIDES, is_launched=False).tiles) == [wanted]


@pytest.mark.parametrize("wanted", (FeatureSettings(dbias=True), FeatureSettings(dscore_args=True)))
@pytest.mark.parametrize(("family", "dtype"), (("sm80", "float16"), ("sm90", "float16"), ("sm90", "float32")))
def test_gradients_that_only_kernels_with_query_tiles_write_are_given_by_two_passes(family, dtype, wanted):
    for method in (None, "single_pass", "two_pass"):
        options = CallOptions(family=family, method=method)
        choice = choose("backward", problem(dtype, settings=wanted), H100, STRIDES, options, is_launched=False)
        assert (choice.family.public_name, choice.method) == (family, "two_pass")
    options = CallOptions(family="simt", method="single_pass")
    choice = choose("backward", problem("float32", settings=wanted), H100, STRIDES, options, is_launched=False)
    assert choice.method == "single_pass"


@pytest.mark.parametrize("call", ("forward", "backward"))
@pytest.mark.parametrize("empty", ({"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"num_heads": 0, "num_heads_kv": 0}))
def test_nothing_is_not_shared(call, empty):
    for num_splits in (None, 2):
        options = CallOptions(family="sm80", num_splits=num_splits)
        assert not choose(call, problem(**empty), H100, STRIDES, options, is_launched=False).num_splits
