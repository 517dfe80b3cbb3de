"""Calls whose v has another head_dim than q: the kernels, their tiles, records and workspaces."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support import plans

from fa2cupy import UnsupportedProblemError, legal_configs
from fa2cupy.families import tuning
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Kernel
from fa2cupy.families.operations import TILED
from fa2cupy.families.registry import FAMILIES
from fa2cupy.families.simt import SIMT
from fa2cupy.families.sm80_float32 import SM80_FLOAT32
from fa2cupy.families.sm90 import SM90
from fa2cupy.families.sm90_float32 import SM90_FLOAT32
from fa2cupy.families.tile import TileConfig
from fa2cupy.families.tile_choice import candidate_tiles
from fa2cupy.jit.source import render_kernel
from fa2cupy.plan.schedule import COLUMNS_BY_QUERIES, groups_per_section
from fa2cupy.plan.specs import decode_specs, default_specs
from fa2cupy.problem.attention import AttentionProblem

H100 = DeviceInfo.named("sm_90")
BASE = AttentionProblem("float32", 2, 300, 500, 4, 2, 40, True, 0.25, "bshd", 4, 72)
METHODS = (None, "single_pass", "two_pass")
#: The families all of whose kernels take pairs.
WITH_DECODE = tuple(family for family in FAMILIES if "decode" in family.operations)
with_decode = pytest.mark.parametrize("family", WITH_DECODE, ids=lambda family: family.name)


def specs_of(family, head_dim: int, head_dim_v: int | None, **how) -> dict:
    """Returns the kernels of a call by their operations, with those for packed sequences."""
    how = {"features": ("cu_seqlens",), **how}
    device, dtype, name = DeviceInfo.named("sm_90"), family.dtypes[0], family.public_name
    found = {}
    for method in METHODS:
        for spec in default_specs(device, dtype, head_dim, True, method, name, head_dim_v=head_dim_v, **how):
            found[spec.operation] = spec
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_head_dim_is_padded_by_itself(family):
    first, second = (-(-columns // family.head_dim_step) * family.head_dim_step for columns in (61, 125))
    assert family.head_dims(64, 64) == (64, 64)
    assert family.head_dims(61, 64) == (first, 64)
    assert family.head_dims(192, 125) == (192, second)
    for pair in ((192, 128), (61, 64)):
        columns, columns_v = family.head_dims(*pair)
        padded = family.padded(dataclasses.replace(BASE, head_dim=pair[0], head_dim_v=pair[1]))
        assert (padded.head_dim, padded.head_dim_v) == (columns, None if columns_v == columns else columns_v)


@with_decode
def test_a_kernel_has_the_head_dims_of_its_tensors_alone(family):
    """Kernels of o alone are those of calls with that head_dim, and so are those of dq."""
    found = specs_of(family, 40, 72)
    for operation, spec in found.items():
        of_o, of_dq = operation in ("delta", "clear_forward", "merge_forward"), operation == "convert_dq"
        expected = (72, None) if of_o else (40, None) if of_dq else (40, 72)
        assert (spec.head_dim, spec.head_dim_v) == expected, operation
    equal = specs_of(family, 72, None)
    assert {found[name] for name in ("delta", "clear_forward")} <= set(equal.values())


@with_decode
def test_only_kernels_of_two_head_dims_name_both(family):
    for spec in specs_of(family, 40, 72).values():
        both = spec.head_dim_v is not None
        assert (f"_d{spec.head_dim}v72_" in spec.symbol) == both and ("head_dim_v 72" in str(spec)) == both
    for spec in specs_of(family, 64, 64).values():
        assert spec.head_dim_v is None and "_d64_r" in spec.symbol
        assert "kHeadDimV = 64;" in render_kernel(spec).text


@with_decode
@pytest.mark.parametrize("pair", [(40, 72), (192, 128), (128, 64), (8, 256)], ids=str)
def test_a_pair_needs_no_more_than_its_wider_head_dim_for_all(family, pair):
    dtype, wider, narrower = family.dtypes[0], max(pair), min(pair)
    # Kernels of Hopper that own queries take what is left over for O and dQ.
    for operation in (
        ("backward", "backward_dkdv") if family is SM90 else [name for name in TILED if name in family.operations]
    ):
        for tile in list(candidate_tiles(family))[::211]:
            own = family.shared_memory_bytes(Kernel(operation, dtype, *pair), tile)
            bounds = [family.shared_memory_bytes(Kernel(operation, dtype, n, n), tile) for n in (narrower, wider)]
            assert bounds[0] <= own <= bounds[1]


def runs_on(family, arch: str) -> bool:
    return family.supports_call("forward", family.dtypes[0], DeviceInfo.named(arch))


@with_decode
def test_legal_tiles_are_those_of_the_pair(family):
    arch = f"sm_{max(80, family.min_compute_capability)}"
    given = {"dtype": family.dtypes[0], "family": family.public_name, "arch": arch}
    for operation in ("forward", "backward_dkdv"):
        wide = legal_configs(operation, head_dim=256, **given)
        pair = legal_configs(operation, head_dim=256, head_dim_v=160, **given)
        assert set(wide) < set(pair)
        assert legal_configs(operation, head_dim=64, head_dim_v=64, **given) == legal_configs(
            operation, head_dim=64, **given
        )
    with pytest.raises(UnsupportedProblemError, match=r"^head_dim_v: up to 512 is supported, got 640$"):
        legal_configs("forward", head_dim_v=640, **given)


@pytest.mark.parametrize("pair", [(192, 128), (64, 128), (40, 72), (256, 8), (8, 256)], ids=str)
@pytest.mark.parametrize(
    ("family", "arch"),
    [(one, arch) for arch in ("sm_80", "sm_86", "sm_90") for one in WITH_DECODE if runs_on(one, arch)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_pair_has_a_default_tile_and_a_tile_for_decoding(family, arch, pair):
    device, dtype = DeviceInfo.named(arch), family.dtypes[0]
    for method in METHODS:
        specs = default_specs(device, dtype, pair[0], True, method, family.public_name, head_dim_v=pair[1])
        assert all((spec.head_dim, spec.head_dim_v) == pair for spec in specs if spec.operation in TILED)
    assert {(spec.head_dim, spec.head_dim_v) for spec in decode_specs(device, dtype, *pair)} == {pair}


@pytest.mark.parametrize("pair", [(64, 128), (128, 64), (192, 64), (240, 16), (192, 128), (40, 200)], ids=str)
@pytest.mark.parametrize(
    ("family", "arch"),
    [(SM80_FLOAT32, "sm_80"), (SM80_FLOAT32, "sm_86"), (SM90_FLOAT32, "sm_90")],
    ids=["A100", "Ampere", "H100"],
)
def test_float32_on_tensor_cores_has_default_tiles_for_pairs_that_its_kernels_hold(family, arch, pair):
    device, held = DeviceInfo.named(arch), family.why_not_columns("forward", *pair) is None
    assert held == (family is SM90_FLOAT32 or (sum(pair) <= 256 and pair[1] <= 128))
    of_methods = {None: held, "two_pass": held}
    if family is SM90_FLOAT32:
        of_methods["single_pass"] = max(pair) <= 128

    def tiled(method, name=None) -> list:
        specs = default_specs(device, "float32", pair[0], True, method, name, head_dim_v=pair[1])
        return [spec for spec in specs if spec.operation in TILED]

    for method, is_taken in of_methods.items():
        if is_taken:
            assert all((spec.head_dim, spec.head_dim_v) == pair for spec in tiled(method, family.public_name))
        else:
            with pytest.raises(UnsupportedProblemError, match=r"head_dim(_v)?=\d+ .*above (the )?\d+"):
                tiled(method, family.public_name)
    # A call that names no family goes to the next one where the kernels do not hold the pair.
    chosen = {spec.family for spec in tiled("two_pass") if not spec.is_fallback}
    assert chosen == {family if held and family.is_default_on(device) else SIMT}


def test_parts_have_the_columns_of_their_inputs():
    one = dataclasses.replace(BASE, head_dim=192, head_dim_v=72)
    strides = one.contiguous_strides()
    plan = plans.backward_plan(one, H100, strides, family="sm90", method="two_pass")
    sizes = {workspace.name: workspace.nbytes for workspace in plan.workspaces}
    assert sizes["q_parts"] * 2 == sizes["dout_parts"] * 3 and sizes["k_parts"] * 2 == sizes["v_parts"] * 3
    assert sizes["extremes"] == 4 * one.batch * one.num_heads_kv * (192 + 192 + 2)


def test_tensor_maps_have_the_columns_of_their_tensors():
    """TMA then fills what lies behind them with zeros in a load, and skips it in a store."""
    one = dataclasses.replace(BASE, dtype="float16")
    (stage,) = plans.forward_plan(one, H100, one.contiguous_strides(), family="sm90", num_splits=1).stages
    columns = dict(zip(stage.spec.params.maps, (layout.sizes[0] for layout in stage.maps), strict=True))
    assert columns == {"q": 40, "k": 40, "v": 72, "o": 72}


def test_a_saved_tile_is_for_its_pair_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tuning._tuned_tiles.cache_clear()
    tile, kernel = TileConfig(16, 16, 4), Kernel("forward", "float32", 40, 72)
    tuning.save_tuned_tile(SIMT, kernel, True, H100, tile)
    assert tuning.tuned_tile(SIMT, kernel, True, H100) == tile
    for other in (40, 64):
        assert tuning.tuned_tile(SIMT, kernel._replace(head_dim_v=other), True, H100) is None
    (key,) = json.loads(next(tmp_path.rglob("*.json")).read_text())
    assert key.endswith("/forward/float32/40v72/causal")


def test_estimates_are_those_of_kernels_for_the_wider_head_dim():
    costs, operation = SM90.costs, "backward"
    for pair in ((256, 8), (8, 256), (200, 72)):
        problem = dataclasses.replace(BASE, head_dim=pair[0], head_dim_v=pair[1])
        assert costs.of_block(operation, problem) is costs.blocks[operation][256]


def test_sections_have_the_mean_of_both_head_dims():
    """The rows of a head are those of k and v, or of q and dO."""
    assert dataclasses.replace(BASE, head_dim=192, head_dim_v=128).mean_head_dim == 160
    assert dataclasses.replace(BASE, head_dim=60, head_dim_v=None).mean_head_dim == 60

    many = dataclasses.replace(BASE, batch=300)
    pair, equal, wider = (
        groups_per_section(dataclasses.replace(many, head_dim=n, head_dim_v=of_v), H100, COLUMNS_BY_QUERIES)
        for n, of_v in ((192, 64), (128, None), (192, None))
    )
    assert pair == equal > wider
