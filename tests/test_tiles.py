"""Tiles: legality, costs and the choice for a call. All of it is arithmetic, except that NVRTC checks the costs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import warnings

import ml_dtypes
import numpy as np
import pytest

from fa2cupy import TileConfig, legal_configs, mods
from fa2cupy.errors import KernelCompileError, UnsupportedProblemError
from fa2cupy.families import tuning
from fa2cupy.families.choice import choose
from fa2cupy.families.device import ARCHITECTURES, DeviceInfo
from fa2cupy.families.family import Family, Kernel
from fa2cupy.families.kept_bias import kept_biases
from fa2cupy.families.operations import OPERATIONS, TILED
from fa2cupy.families.registry import FAMILIES, choose_family, family_of_kernel
from fa2cupy.families.sm90_latent import SM90_LATENT
from fa2cupy.families.tile_choice import choose_tile as choose_tile_of
from fa2cupy.jit.compiler import compile_source
from fa2cupy.jit.source import render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.decode import plan_decode
from fa2cupy.problem.attention import AttentionProblem, CacheShape
from fa2cupy.problem.block_mask import MapLayout
from fa2cupy.problem.features import NO_SETTINGS, FeatureSettings
from fa2cupy.problem.function_checks import bound_function
from fa2cupy.problem.options import CallOptions
from fa2cupy.settings import tuning_file

H100 = DeviceInfo.named("sm_90")
# GPUs before Ampere, which the simt family serves with less shared memory.
P100 = DeviceInfo("P100", "sm_60", 56, 48 * 1024, 64 * 1024, 65536, 2048, 4 * 1024**2)
OLDER = (P100, DeviceInfo.named("sm_70"), DeviceInfo.named("sm_75"))
DEVICES = (*ARCHITECTURES.values(), P100)
BY_NAME = {one.name: one for one in FAMILIES}

#: Every default, with its family and operation.
ROWS = [(family, operation, row) for family in FAMILIES for operation, rows in family.tiles.items() for row in rows]
#: The kernels whose tile is a choice.
KERNELS = [
    (operation, row.name)
    for row in FAMILIES
    if not row.multiplies_parts
    for operation in TILED
    if operation in row.operations
]


def problem(
    dtype: str = "float16",
    head_dim: int = 64,
    causal: bool = False,
    batch: int = 1,
    head_dim_v: int | None = None,
    num_heads: int = 4,
) -> AttentionProblem:
    return AttentionProblem(
        dtype, batch, 256, 256, num_heads, num_heads, head_dim, causal, 0.125, "bshd", 4, head_dim_v
    )


def choose_tile(operation: str, family: str, call: AttentionProblem, device: DeviceInfo, config=None) -> TileConfig:
    """Returns the tile of a call; one of as many rows as any tile has for kernels whose tiles have all keys."""
    if OPERATIONS[operation].holds_keys:
        call = dataclasses.replace(call, seqlen_q=16, seqlen_k=16)
    return choose_tile_of(operation, family_of_kernel(operation, call.dtype, device, family), call, device, config)


def choose_method(family: str, call: AttentionProblem, method=None, deterministic=False) -> str:
    """Returns the method of a call whose arrays every family takes."""
    strides = dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), (8, 8, 8))
    dtype = BY_NAME[family].dtypes[0]
    options = CallOptions(family=family, method=method, deterministic=deterministic)
    call = dataclasses.replace(call, dtype=dtype)
    return choose("backward", call, H100, strides, options, is_launched=False).method


def head_dims_of(dtype: str) -> range:
    return range(8, 257, 8) if dtype in ("float16", "bfloat16") else range(1, 257, 5)


# ----------------------------------------------------------------------------------------------------------- TileConfig


@pytest.mark.parametrize("field", ("b_r", "b_c", "num_warps", "num_stages", "blocks_per_sm"))
@pytest.mark.parametrize("value", (0, -16, 2.0, True, "16", None))
def test_a_tile_takes_positive_ints_only(field, value):
    fields = {"b_r": 64, "b_c": 64, "num_warps": 4} | {field: value}
    with pytest.raises(ValueError, match=f"{field}: expected a positive int"):
        TileConfig(**fields)


@pytest.mark.parametrize("family", ("sm90", "sm80", "simt"))
def test_padding_covers_head_dim_and_adds_less_than_a_warp(family):
    for head_dim in range(1, 257):
        padded = BY_NAME[family].padded_head_dim(head_dim)
        assert padded % (32 if family == "simt" else 16) == 0
        assert head_dim <= padded < head_dim + 32
        assert BY_NAME[family].padded_head_dim(padded) == padded


# --------------------------------------------------------------------------------------------------------- legal or not


@pytest.mark.parametrize(
    ("operation", "family", "tile", "reason"),
    [
        ("forward", "sm80", TileConfig(64, 24, 4), "b_c=24"),
        ("forward", "sm80", TileConfig(72, 64, 4), "b_r=72"),
        ("forward", "sm80", TileConfig(64, 64, 8), "b_r=64"),
        ("forward", "sm80", TileConfig(64, 64, 4, 9), "num_stages=9"),
        ("forward", "sm80", TileConfig(128, 128, 4, 1, 4), "registers"),
        ("forward", "sm80", TileConfig(128, 256, 8, 4), "shared memory"),
        ("backward_dq", "sm80", TileConfig(64, 40, 4), "b_c=40"),
        ("backward_dq", "sm80", TileConfig(256, 256, 16), "registers"),
        ("backward", "sm80", TileConfig(64, 64, 3), "num_warps=3"),
        ("backward", "sm80", TileConfig(64, 72, 8), "b_c=72"),
        ("backward", "sm80", TileConfig(128, 32, 4), "b_r=128"),
        ("backward", "sm80", TileConfig(64, 64, 8, 3), "num_stages=3"),
        ("backward_dkdv", "sm80", TileConfig(64, 256, 8), "registers"),
        ("forward", "sm90", TileConfig(128, 128, 8, 2), "num_warps=8"),
        ("forward", "sm90", TileConfig(96, 128, 12, 2), "b_r=96"),
        ("forward", "sm90", TileConfig(256, 64, 20, 2), "b_r=256"),
        ("forward", "sm90", TileConfig(128, 120, 12, 2), "b_c=120"),
        ("forward", "sm90", TileConfig(128, 128, 12, 1), "num_stages=1"),
        ("forward", "sm90", TileConfig(128, 64, 12, 2, 3), "blocks_per_sm=3"),
        ("forward", "sm90", TileConfig(128, 128, 12, 2, 2), "registers"),
        ("backward_dq", "sm90", TileConfig(64, 128, 8, 2), "blocks_per_sm=1"),
        ("forward", "sm90", TileConfig(192, 160, 16, 2), "registers"),
        ("forward", "sm90", TileConfig(192, 128, 16, 9), "num_stages=9"),
        ("backward", "sm90", TileConfig(128, 64, 12, 2), "b_c=64"),
        ("backward", "sm90", TileConfig(128, 128, 8, 2), "num_warps=8"),
        ("backward", "sm90", TileConfig(80, 128, 12, 2), "b_r=80"),
        ("backward", "sm90", TileConfig(128, 128, 12, 1), "num_stages=1"),
        ("backward_dkdv", "sm90", TileConfig(144, 128, 12, 2), "b_r=144"),
        ("backward_dkdv", "sm90", TileConfig(72, 128, 12, 2), "b_r=72"),
        ("backward_dq", "sm90", TileConfig(128, 64, 8, 2), "num_warps=8"),
        ("backward_dq", "sm90", TileConfig(192, 112, 16, 2), "registers"),
        ("backward_dq", "sm90", TileConfig(128, 192, 12, 4), "registers"),
        ("backward_dq", "sm90", TileConfig(64, 96, 8, 2), "blocks_per_sm=1"),
        ("forward", "simt", TileConfig(30, 32, 4), "b_r=30"),
        ("forward", "simt", TileConfig(96, 64, 8), "b_r=96"),
        ("forward", "simt", TileConfig(64, 36, 4), "b_c=36"),
        ("forward", "simt", TileConfig(64, 72, 4), "b_c=72"),
        ("backward", "simt", TileConfig(32, 24, 4), "b_c=24"),
        ("backward", "simt", TileConfig(32, 48, 4), "b_c=48"),
        ("backward_dq", "simt", TileConfig(128, 64, 4), "registers"),
        ("backward_dkdv", "simt", TileConfig(30, 32, 4), "b_r=30"),
        ("backward_dq", "simt", TileConfig(32, 32, 4, 2), "num_stages=2"),
        ("forward", "sm80", TileConfig(64, 64, 4, cluster=2), "cluster=2"),
    ],
)
def test_an_illegal_tile_is_refused_with_the_field_or_resource_that_does_not_fit(operation, family, tile, reason):
    dtype = "float32" if family == "simt" else "float16"
    assert reason in BY_NAME[family].why_illegal(Kernel(operation, dtype, 64, 64), tile, H100)


@pytest.mark.parametrize(
    ("operation", "tile", "reason"),
    [
        ("forward", TileConfig(96, 64, 6), "b_r=96"),
        ("forward", TileConfig(128, 48, 8), "b_c=48"),
        ("forward", TileConfig(128, 64, 4), "num_warps|of 4 warps"),
        ("forward", TileConfig(64, 64, 4, 2), "num_stages=2"),
        ("forward", TileConfig(64, 64, 4, 1, 4), "registers"),
        ("backward_dq", TileConfig(64, 64, 4, 3), "num_stages=3"),
        ("backward_dq", TileConfig(128, 128, 8, 2), "shared memory|registers"),
        ("backward_dkdv", TileConfig(64, 96, 6), "b_c=96"),
        ("backward_dkdv", TileConfig(128, 64, 4), "b_r=128"),
    ],
)
def test_an_illegal_tile_of_parts_is_refused(operation, tile, reason):
    family = BY_NAME["sm80_float32"]
    assert re.search(reason, family.why_illegal(Kernel(operation, "float32", 128, 128), tile, H100))
    assert family.why_not_shape(Kernel(operation, "float32", 144, 144), tile) == "head_dim=144 is above 128"


@pytest.mark.parametrize(
    ("columns", "tile", "reason"),
    [
        ((576, 512), TileConfig(8, 64, 8, 2), "b_r=8"),
        ((576, 512), TileConfig(64, 64, 12, 2), "b_r=64"),
        ((576, 512), TileConfig(16, 128, 8, 2), "b_c=128"),
        ((576, 512), TileConfig(16, 64, 4, 2), "num_warps=4"),
        ((576, 512), TileConfig(16, 64, 8, 3), "num_stages=3"),
        ((576, 576), TileConfig(16, 64, 8, 2), "head_dim_v=576"),
        ((512, 512), TileConfig(16, 64, 8, 2), "head_dim=512"),
    ],
)
def test_an_illegal_tile_of_latent_attention_is_refused(columns, tile, reason):
    assert reason in SM90_LATENT.why_illegal(Kernel("decode", "bfloat16", *columns), tile, H100)


#: The numbers of stages that each kernel can have, from the least to the most.
STAGES = {
    "sm90": {
        "forward": (2, 4), "backward": (2, 4), "backward_dq": (2, 4), "backward_dkdv": (2, 4), "jvp": (2, 4),
        "output_jvp": (2, 4), "dq_jvp": (2, 4), "dkdv_jvp": (2, 4), "dbias": (2, 4), "backward_both": (2, 4),
        "backward_one_tile": (1, 1), "backward_one_tile_dbias": (1, 1),
    },
    "sm80": {
        "forward": (1, 4), "backward": (1, 2), "backward_dq": (1, 4), "backward_dkdv": (1, 2), "decode": (2, 8),
        "jvp": (1, 4), "output_jvp": (1, 4), "dq_jvp": (1, 4), "dkdv_jvp": (1, 2), "dbias": (1, 2),
        "backward_one_tile": (1, 1), "backward_one_tile_dbias": (1, 1),
    },
    "sm90_float32": {"forward": (1, 4), "backward": (1, 4), "backward_dq": (1, 4), "backward_dkdv": (1, 4)},
    "sm90_latent": {"decode": (2, 2)},
    "sm80_float32": {"forward": (1, 1), "backward_dq": (1, 2), "backward_dkdv": (1, 2)},
    "sm80_float64": {
        "forward": (1, 1), "backward": (1, 2), "backward_dq": (1, 1), "backward_dkdv": (1, 2),
        "jvp": (1, 1), "output_jvp": (1, 1), "dq_jvp": (1, 1), "dkdv_jvp": (1, 1),
    },
    "simt": {
        "forward": (1, 1), "backward": (1, 1), "backward_dq": (1, 1), "backward_dkdv": (1, 1), "decode": (2, 8),
        "jvp": (1, 1), "output_jvp": (1, 1), "dq_jvp": (1, 1), "dkdv_jvp": (1, 1), "dbias": (1, 1),
    },
}  # fmt: skip


#: Kernels whose registers hold rows of up to 128 columns, by family; another one takes the call if they are wider.
NARROW = {("sm90", "dq_jvp"), ("sm90", "dkdv_jvp")}


def test_every_kernel_has_the_stages_that_its_main_loop_knows():
    """Checks all head dimensions that have main loops of their own; shared memory may hold fewer."""
    assert {family.name: set(family.operations) for family in FAMILIES} == {
        kernel: set(of_kernel) for kernel, of_kernel in STAGES.items()
    }
    kinds = [(family, (n, n)) for family in FAMILIES for n in (32, 64, 96, 128, 160, 256) if family != SM90_LATENT]
    for family, (head_dim, head_dim_v) in (*kinds, (SM90_LATENT, (576, 512))):
        dtype, padded = family.dtypes[0], family.padded_head_dim(head_dim)
        for operation, (least, most) in STAGES[family.name].items():
            kernel = Kernel(operation, dtype, padded, family.padded_head_dim(head_dim_v))
            rows = (row.tile for row in family.tiles[operation] if row.head_dim >= padded)
            tile = next((tile for tile in rows if not family.why_not_shape(kernel, tile)), None)
            if tile is None:
                has_fewer = family.multiplies_parts or OPERATIONS[operation].is_second_order
                is_narrow = OPERATIONS[operation].owns == "both" and head_dim > 64
                assert is_narrow or (
                    head_dim > 128 and (has_fewer or family.why_not_columns(operation, padded, padded))
                )
                continue
            for number in range(1, 10):
                reason = family.why_not_shape(kernel, dataclasses.replace(tile, num_stages=number))
                assert (reason is None) == (least <= number <= most), (family.name, operation, head_dim, number)
                assert reason is None or f"num_stages={number}" in reason


@pytest.mark.parametrize(("operation", "family"), KERNELS)
def test_a_block_has_at_most_1024_threads_and_the_devices_shared_memory(operation, family):
    kernel = Kernel(operation, "float32" if family == "simt" else "float16", 32, 32)
    tiny = dataclasses.replace(H100, shared_memory_per_block=1024)
    tile = next(row.tile for row in BY_NAME[family].tiles[operation] if "kept_bias" not in row.features)
    assert BY_NAME[family].why_illegal(kernel, tile, H100) is None
    assert "shared memory" in BY_NAME[family].why_illegal(kernel, tile, tiny)
    wide = dataclasses.replace(tile, num_warps=64, b_r=64 * 16, b_c=64 * 16)
    assert BY_NAME[family].why_illegal(kernel, wide, H100)


@pytest.mark.parametrize(
    ("operation", "dtype", "arch"),
    [(operation, "float64", "sm_86") for operation in Family.operations]
    + [
        (operation, *kind)
        for operation in TILED
        for kind in (("float16", "sm_80"), ("float16", "sm_90"), ("bfloat16", "sm_120"))
    ],
)
def test_legal_configs_lists_legal_tiles_once_each_and_the_default_among_them(operation, dtype, arch):
    family = family_of_kernel(operation, dtype, DeviceInfo.named(arch))
    for head_dim in (40, 128, 256):
        tiles = legal_configs(operation, dtype=dtype, head_dim=head_dim, arch=arch)
        assert len(set(tiles)) == len(tiles) > 0
        kernel, device = Kernel(operation, dtype, head_dim, head_dim), DeviceInfo.named(arch)
        assert not [tile for tile in tiles if family.why_illegal(kernel, tile, device)]
        assert choose_tile(operation, family.name, problem(dtype, head_dim), device) in tiles


@pytest.mark.parametrize("operation", ["forward", "backward_dkdv"])
def test_a_function_that_adds_little_has_the_tile_of_alibi(operation):
    def tile(dtype: str, **settings) -> TileConfig:
        call = problem(dtype).with_settings(FeatureSettings(**settings))
        return choose_tile(operation, "sm90", call, H100)

    slopes, table = np.zeros(4, "float32"), np.zeros((32, 4), "float32")
    alibi = tile("float16", arrays=("alibi_slopes",))
    little = bound_function("score_mod", mods.alibi(), (slopes,))
    more = bound_function("score_mod", mods.t5_relative(), (table,))
    assert tile("float16", score_mod=little) == alibi != tile("float16", score_mod=more)
    # A larger tile of float32 would make the compiler serialise products.
    assert tile("float32", score_mod=little) == tile("float32", score_mod=more)


@pytest.mark.parametrize(
    ("operation", "mask_mod", "score_mod", "wanted"),
    [
        ("forward", mods.causal(), None, (192, 128)),  # more queries than the map's tiles
        ("forward", mods.prefix_lm, None, (192, 128)),
        ("forward", mods.document, None, (128, 128)),  # whose borders may be those of the map's tiles
        ("forward", mods.causal(), mods.alibi(), (192, 128)),
        ("forward", mods.causal(), mods.t5_relative(), (128, 128)),  # it needs registers
        ("forward", None, None, (128, 128)),  # no function tells what tiles of another size show
        ("backward", mods.causal(), None, (128, 128)),
        # Steps of 96 queries would meet two tiles of the map.
        ("backward_dkdv", mods.causal(), mods.t5_relative(), (128, 128)),
    ],
)
def test_the_tiles_that_blocks_own_may_be_larger_than_those_of_a_map_with_a_function(
    operation, mask_mod, score_mod, wanted
):
    arrays = {mods.prefix_lm: (np.zeros(1, "int32"),), mods.document: (np.zeros((1, 1024), "int32"),)}
    settings = {"block_mask": MapLayout((1, 1, 8, 8), 1024, 1024, (128, 128), None)}
    if mask_mod is not None:
        settings["mask_mod"] = bound_function("mask_mod", mask_mod, arrays.get(mask_mod, ()))
        settings["block_mask"] = settings["block_mask"]._replace(program=settings["mask_mod"].program)
    if score_mod is not None:
        array = np.zeros(4, "float32") if score_mod is mods.alibi() else np.zeros((32, 4), "float32")
        settings["score_mod"] = bound_function("score_mod", score_mod, (array,))
    tile = choose_tile(operation, "sm90", problem("float16", 64).with_settings(FeatureSettings(**settings)), H100)
    assert (tile.b_r, tile.b_c) == wanted


def test_legal_configs_refuses_what_does_not_exist():
    with pytest.raises(ValueError, match="operation: expected one of"):
        legal_configs("sideways", arch="sm_90")
    with pytest.raises(ValueError, match="family: expected one of"):
        legal_configs("forward", arch="sm_90", family="sm70")
    for arch in ("sm_12", ""):
        with pytest.raises(UnsupportedProblemError, match=f"^arch: '{arch}' is not known; known are sm_70"):
            legal_configs("forward", arch=arch)
    with pytest.raises(TypeError, match="^arch: expected a str such as 'sm_90', got int"):
        legal_configs("forward", arch=90)
    with pytest.raises(UnsupportedProblemError, match="^dtype: expected float16, bfloat16, .* or float64, got int8"):
        legal_configs("forward", arch="sm_90", dtype="int8")
    with pytest.raises(ValueError, match="^dtype: expected float16, .*, got 'half16'"):
        legal_configs("forward", arch="sm_90", dtype="half16")


@pytest.mark.parametrize(
    ("head_dim", "error", "text"),
    [
        (0, ValueError, "^head_dim: expected at least 1, got 0"),
        (-8, ValueError, "^head_dim: expected at least 1, got -8"),
        (600, UnsupportedProblemError, "^head_dim: up to 512 is supported, got 600"),
        (64.0, TypeError, "^head_dim: expected an int, got float"),
        (True, TypeError, "^head_dim: expected an int, got bool"),
        ("64", TypeError, "^head_dim: expected an int, got str"),
    ],
)
def test_legal_configs_refuses_a_head_dim_that_no_call_can_have(head_dim, error, text):
    with pytest.raises(error, match=text):
        legal_configs("forward", arch="sm_90", head_dim=head_dim)


@pytest.mark.parametrize("dtype", (np.float16, np.dtype("float16"), "f2", "half", ml_dtypes.bfloat16))
def test_legal_configs_takes_dtypes_as_numpy_does(dtype):
    assert legal_configs("forward", arch="sm_90", dtype=dtype, head_dim=np.int64(64)) == legal_configs(
        "forward", arch="sm_90", head_dim=64
    )


@pytest.mark.parametrize("arch", ("sm_70", "sm_75"))
@pytest.mark.parametrize("operation", Family.operations)
def test_volta_and_turing_have_tiles_for_float32(operation, arch):
    device = DeviceInfo.named(arch)
    for head_dim in (64, 256):
        tiles = legal_configs(operation, dtype="float32", head_dim=head_dim, arch=arch)
        assert choose_tile(operation, "simt", problem("float32", head_dim), device) in tiles
    with pytest.raises(UnsupportedProblemError, match="compute capability 8.0"):
        legal_configs(operation, dtype="float16", arch=arch)


def test_where_no_tile_fits_the_message_says_what_there_is_room_for():
    with pytest.raises(UnsupportedProblemError, match="fits T4, which has 65536 bytes of shared memory for a block"):
        choose_tile("backward", "simt", problem("float64", 400), DeviceInfo.named("sm_75"))


def test_before_ampere_blocks_can_have_all_of_the_shared_memory():
    tile, kernel = TileConfig(32, 32, 8), Kernel("forward", "float32", 96, 96)
    needed = BY_NAME["simt"].shared_memory_bytes(kernel, tile)
    for arch, blocks in (("sm_70", 2), ("sm_80", 1)):
        device = dataclasses.replace(DeviceInfo.named(arch), shared_memory_per_multiprocessor=2 * needed)
        assert device.resident_blocks(256, 32, needed) == blocks
        two = dataclasses.replace(tile, blocks_per_sm=2)
        assert BY_NAME["simt"].fits_blocks(kernel, two, device) == (blocks == 2)


def operations_of_families() -> list[tuple[str, str, str, int]]:
    # The sm80 forward has another main loop above head_dim 128; the sm90 forward chooses the buffers that fit.
    cases = [(operation, "sm80", "float16", 64) for operation in TILED]
    cases += [(operation, "simt", "float32", 32) for operation in Family.operations]
    cases += [
        (operation, "sm90", "float16", head_dim)
        for operation in ("forward", "backward_dq")
        for head_dim in (64, 128, 192, 256)
    ]
    # The sm90 kernels by key tiles have two main loops, too.
    cases += [(name, "sm90", "float16", head_dim) for name in ("backward", "backward_dkdv") for head_dim in (96, 256)]
    # Kernels of two parts have fewer stages of V, or dO, if shared memory is short.
    of_parts = ("forward", "backward", "backward_dq", "backward_dkdv")
    cases += [(name, "sm90_float32", "float32", head_dim) for name in of_parts for head_dim in (64, 128)]
    cases += [(name, "sm90_float32", "float32", 256) for name in of_parts if name != "backward"]
    cases += [(name, "sm80_float32", "float32", 64) for name in ("forward", "backward_dq", "backward_dkdv")]
    return [*cases, ("forward", "sm80", "float16", 160)]


@pytest.mark.sample(wrong_by=(-16,))
@pytest.mark.parametrize(("operation", "family", "dtype", "head_dim"), operations_of_families())
@pytest.mark.parametrize("wrong_by", (-16, 16))
def test_a_wrong_formula_for_shared_memory_does_not_compile(operation, family, dtype, head_dim, wrong_by, monkeypatch):
    pytest.importorskip("cupy", exc_type=ImportError)
    own = BY_NAME[family]
    tile = choose_tile_of(operation, own, dataclasses.replace(problem(dtype, head_dim), seqlen_k=64), H100)
    spec = KernelSpec(operation, own, "sm_90a", dtype, head_dim, False, tile)
    right = own.shared_memory_bytes(spec.kernel, tile)
    monkeypatch.setattr(KernelSpec, "shared_memory_bytes", right + wrong_by)
    with pytest.raises(KernelCompileError, match=r"static assertion failed|static_assert"):
        compile_source(render_kernel(spec))


# ------------------------------------------------------------------------------------------------------------ the table


DROPPED = FeatureSettings(dropout_p=0.5, seed=0)
BIASED = FeatureSettings(arrays=("bias",))
OF_DOUT = FeatureSettings(tangents="o")
OF_A_FUNCTION = FeatureSettings(mask_mod=bound_function("mask_mod", mods.causal(), ()))
CAPPED, WINDOW, SINK = (
    FeatureSettings(softcap=30.0),
    FeatureSettings(window=(1023, None)),
    FeatureSettings(arrays=("sink",)),
)


@pytest.mark.parametrize(
    ("operation", "features", "wanted"),
    [
        ("backward", (NO_SETTINGS, SINK), (80, 128)),
        ("backward", (CAPPED, DROPPED, WINDOW), (64, 128)),
        ("backward_dkdv", (NO_SETTINGS, SINK, WINDOW), (80, 128)),
        ("backward_dkdv", (CAPPED, DROPPED), (64, 128)),
        ("backward_dq", (NO_SETTINGS, SINK, WINDOW, CAPPED), (128, 128)),
        ("backward_dq", (DROPPED, OF_A_FUNCTION), (128, 64)),
    ],
)
def test_features_that_take_registers_have_tiles_of_their_own(operation, features, wanted):
    for each in features:
        tile = choose_tile(operation, "sm90", problem("bfloat16", 128).with_settings(each), H100)
        assert (tile.b_r, tile.b_c) == wanted


def chosen_rows() -> set[int]:
    """Returns the positions in the table of all tiles that some call on some GPU gets."""
    found = set()
    for device, row in itertools.product(DEVICES, FAMILIES):
        for dtype, operation in itertools.product(row.dtypes, row.operations):
            if not row.supports(operation, dtype, device) or OPERATIONS[operation].holds_keys:
                continue
            has_own_tiles = any(entry.features for entry in row.tiles[operation])
            own = [(entry.head_dim, entry.head_dim_v) for entry in row.tiles[operation] if entry.head_dim_v]
            pairs = [*own, (64, 128), (192, 64), (240, 16), (256, 128)] if operation != "decode" else own
            for (head_dim, head_dim_v), causal, features, batch in itertools.product(
                [*((head_dim, None) for head_dim in head_dims_of(dtype)), *pairs],
                (False, True),
                (NO_SETTINGS, DROPPED, OF_A_FUNCTION, OF_DOUT) if has_own_tiles else (NO_SETTINGS,),
                (1, 512) if operation == "decode" else (1,),
            ):
                call = problem(dtype, head_dim, causal, batch).with_settings(features)
                call = row.padded(dataclasses.replace(call, head_dim_v=head_dim_v))
                if row.name == "sm80_float64" and row.why_not(operation, call, {}):
                    continue  # tangents of wide rows
                try:
                    tile = choose_tile_of(operation, row, call, device)
                except UnsupportedProblemError:
                    # Wide rows of float64 exceed the shared memory of GPUs before Ampere, and on tensor cores that of
                    # GeForce, wide rows of two parts that of Ampere, and dK and dV of two parts, beside dQ, that of
                    # all GPUs. Two stages of keys and values of float64 exceed that of small GPUs.
                    if operation == "decode" and (device in OLDER or dtype == "float64" or row == SM90_LATENT):
                        continue
                    if (row.name, operation) in NARROW and max(head_dim, call.columns_of("v")) > 128:
                        continue
                    too_wide = row.why_not_columns(operation, head_dim, call.columns_of("v")) or (
                        row.multiplies_parts and operation == "backward"
                    )
                    is_small = device in OLDER or (
                        row.name == "sm80_float64" and device.shared_memory_per_block < 100 * 1024
                    )
                    if OPERATIONS[operation].owns == "both" and max(head_dim, call.columns_of("v")) > 64:
                        continue
                    # Rows with tangents are twice as many.
                    if operation in ("dq_jvp", "dkdv_jvp") and device == P100 and head_dim > 96:
                        continue
                    if is_small and OPERATIONS[operation].is_second_order and head_dim > 64:
                        continue
                    assert head_dim > 128 and ((is_small and dtype == "float64") or too_wide)
                    continue
                assert row.why_illegal(Kernel.of(operation, call), tile, device) is None
                padded_v = row.padded_head_dim(head_dim_v or head_dim)
                found.add(
                    next(
                        position
                        for position, (of, name, entry) in enumerate(ROWS)
                        if (of, name, entry.tile) == (row, operation, tile)
                        and row.padded_head_dim(head_dim) <= entry.head_dim
                        and padded_v <= (entry.head_dim_v or entry.head_dim)
                        and (entry.dtypes is None or dtype in entry.dtypes)
                        and (not entry.features or not set(entry.features).isdisjoint(features.features))
                    )
                )
    return found


def wide_rows() -> set[int]:
    """Returns the positions of the tiles of calls of more than 256 columns, on the GPUs that have one."""
    found = set()
    columns = (264, 320, 384, 448, 512)
    for position, (family, operation, entry) in enumerate(ROWS):
        if entry.head_dim <= 256:
            continue
        dtypes, of_v = entry.dtypes or family.dtypes, (64, 160, *columns)
        pairs = [(n, n_v) for n, n_v in itertools.product((64, 160, *columns), of_v) if max(n, n_v) > 256]
        for device, (head_dim, head_dim_v) in itertools.product(reversed(DEVICES), pairs):
            if not family.supports(operation, dtypes[0], device):
                continue
            call = family.padded(
                problem(dtypes[0], head_dim, head_dim_v=head_dim_v if head_dim_v != head_dim else None)
            )
            try:
                tile = choose_tile_of(operation, family, call, device)
            except UnsupportedProblemError:
                continue
            if tile == entry.tile:
                found.add(position)
                break
    return found


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
@pytest.mark.parametrize("columns", [(512, 512), (320, 320), (512, 256), (256, 512), (512, 40)], ids=str)
def test_calls_of_more_than_256_columns_have_tiles_from_ampere_on(dtype, columns):
    call = problem(dtype, columns[0], head_dim_v=columns[1] if columns[1] != columns[0] else None)
    strides = call.contiguous_strides()
    for arch in ("sm_80", "sm_86", "sm_90", "sm_120"):
        for name in ("forward", "backward"):
            choice = choose(name, call, DeviceInfo.named(arch), strides, is_launched=False)
            of_half = "sm90" if arch == "sm_90" else "sm80"
            assert choice.family.public_name == (of_half if dtype in ("float16", "bfloat16") else "simt")


def test_kernels_that_end_at_256_columns_say_so():
    wide = dataclasses.replace(problem("float16", 384), seqlen_k=64)
    strides, text = wide.contiguous_strides(), "^family 'sm80' for this problem: head_dim=384 is above the 256 of"
    for call, options, reason in (
        ("backward", {"family": "sm80", "method": "single_pass"}, f"{text} 'single_pass'; use 'two_pass' or None$"),
        (
            "backward",
            {"family": "sm90", "method": "single_pass"},
            "^family 'sm90' for this problem: head_dim=384 is above 256$",
        ),
        ("backward", {"family": "sm80", "method": "one_tile"}, f"{text} 'one_tile'; use 'two_pass' or None$"),
    ):
        with pytest.raises(UnsupportedProblemError, match=reason):
            choose(call, wide, H100, strides, CallOptions(**options), is_launched=False)


def test_kernels_that_hold_no_tile_say_how_many_columns_have_one():
    a100 = DeviceInfo.named("sm_80")
    for call, columns, operation, most in (("decode", 264, "decode", 256), ("double_backward", 448, "dq_jvp", 416)):
        one = problem("float64", columns)
        text = f"^head_dim: no default tile of {operation} .simt. at head_dim {columns}, float64 fits A100, .*"
        with pytest.raises(UnsupportedProblemError, match=f"{text}; head_dim up to {most} has one$"):
            choose(call, one, a100, one.contiguous_strides(), is_launched=False)
    shared = dataclasses.replace(problem("float64", 512), settings=FeatureSettings(arrays=("bias",), dbias=True))
    options = CallOptions(deterministic=True)
    with pytest.raises(UnsupportedProblemError, match="^family 'simt' has no kernel of dbias for this problem$"):
        choose("backward", shared, DeviceInfo.named("sm_75"), shared.contiguous_strides(), options, is_launched=False)
    assert not legal_configs("backward", head_dim=264, arch="sm_90")
    assert not legal_configs("backward_one_tile", head_dim=40, head_dim_v=264, arch="sm_90")


@pytest.mark.parametrize("columns", [(512, 512), (264, 264), (40, 512), (512, 40), (512, 256), (384, 128)], ids=str)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_calls_of_more_than_256_columns_have_second_derivatives(dtype, columns):
    one = problem(dtype, columns[0], head_dim_v=columns[1] if columns[1] != columns[0] else None)
    arches = ("sm_90", "sm_100") if dtype == "float64" and sum(columns) > 896 else ("sm_80", "sm_90", "sm_100")
    for arch, call in itertools.product(arches, ("jvp", "output_jvp", "backward_jvp", "double_backward")):
        choice = choose(call, one, DeviceInfo.named(arch), one.contiguous_strides(), is_launched=False)
        assert choice.family.public_name == ("sm80" if dtype in ("float16", "bfloat16") else "simt")
        # Lanes hold o and its tangent of up to 448 columns of float64.
        in_two = call == "jvp" and dtype == "float64" and columns[1] > 448
        assert ("forward" in choice.tiles) == in_two, call


def rows_of_some_sizes() -> set[int]:
    """Returns the positions of the tiles on the H100 of blocks that keep the bias, and of some lengths or jobs."""
    found = set()
    for position, (family, operation, entry) in enumerate(ROWS):
        if OPERATIONS[operation].holds_keys:
            rows = entry.tile.b_c if OPERATIONS[operation].owns == "keys" else entry.tile.b_r
            used = next((one for one in (DROPPED, BIASED) if {*one.features} & {*entry.features}), NO_SETTINGS)
            sizes = {"seqlen_q": rows, "seqlen_k": entry.tile.b_c, "settings": used}
            calls = [
                (dataclasses.replace(problem(head_dim=head_dim), **sizes), device)
                for head_dim in range(16, entry.head_dim + 1, 16)
                for device in DEVICES
                if family.supports(operation, "float16", device)
            ]
            if any(choose_tile_of(operation, family, *call) == entry.tile for call in calls):
                found.add(position)
        elif "kept_bias" in entry.features:
            biased = problem("bfloat16", entry.head_dim).with_settings(FeatureSettings(arrays=("bias",)))
            calls = [dataclasses.replace(biased, seqlen_q=rows, seqlen_k=rows) for rows in (64, entry.tile.b_c)]
            if entry.tile in {one.tile for call in calls for one in kept_biases(family, call, H100, CallOptions())}:
                found.add(position)
        elif {*entry.features} in ({"bias"}, {"mask"}, {"block_mask"}):
            layout = MapLayout((1, 1, 8, 8), 1024, 1024, (128, 128), None)
            settings = {"block_mask": layout} if "block_mask" in entry.features else {"arrays": entry.features}
            call = problem("bfloat16", entry.head_dim).with_settings(FeatureSettings(**settings))
            if choose_tile_of(operation, family, call, H100) == entry.tile:
                found.add(position)
        elif entry.least_saving:  # it leaves calls that fill the tiles of the next row to that one
            following = ROWS[position + 1][2]
            settings = DROPPED if following.features else NO_SETTINGS
            for number, tile in ((position, entry.tile), (position + 1, following.tile)):
                call = dataclasses.replace(problem(head_dim=entry.head_dim), seqlen_q=tile.b_r, seqlen_k=tile.b_c)
                assert choose_tile_of(operation, family, call.with_settings(settings), H100) == tile
                found.add(number)
        elif entry.most_jobs < math.inf or entry.most_rows < math.inf:
            jobs = int(min(entry.most_jobs, 1) * H100.multiprocessors)
            keys = int(min(min(entry.most_keys, 1 << 20) * H100.multiprocessors / jobs, entry.most_seqlen_k))
            call = problem(head_dim=entry.head_dim, num_heads=jobs, head_dim_v=entry.head_dim_v)
            call = dataclasses.replace(call, seqlen_q=entry.tile.b_r, seqlen_k=keys)
            assert choose_tile_of(operation, family, call, H100) == entry.tile
            found.add(position)
    return found


def test_calls_on_every_gpu_have_a_legal_default_tile_and_every_row_serves_one():
    chosen = chosen_rows() | wide_rows() | rows_of_some_sizes()
    assert [row for position, row in enumerate(ROWS) if position not in chosen] == []


def test_rows_of_pairs_serve_no_equal_head_dims(monkeypatch):
    calls = [
        (operation, family, problem(family.dtypes[0], head_dim).with_settings(features), device)
        for family, operation in {(family, operation): None for family, operation, row in ROWS if row.head_dim_v}
        for device in DEVICES
        if family.supports(operation, family.dtypes[0], device)
        for head_dim in head_dims_of(family.dtypes[0])
        for features in (NO_SETTINGS, DROPPED, OF_A_FUNCTION)
    ]

    def tile_of(*call) -> TileConfig | None:
        try:
            return choose_tile_of(*call)
        except UnsupportedProblemError:  # wide rows with tangents
            return None

    chosen = [tile_of(*call) for call in calls]
    for family in FAMILIES:
        rest = {name: tuple(row for row in rows if not row.head_dim_v) for name, rows in family.tiles.items()}
        monkeypatch.setattr(type(family), "tiles", rest)
    assert any(chosen)
    assert [tile_of(*call) for call in calls] == chosen


def test_measured_rows_name_the_gpu_and_the_date():
    for *_, row in ROWS:
        assert not row.measured or re.fullmatch(r".+, \d{4}-\d{2}-\d{2}", row.measured), row


@pytest.mark.parametrize(
    ("jobs", "head_dim", "keys", "wanted"),
    [
        (1, 64, 1024, (8, 128, 8)),
        (1, 128, 16384, (8, 64, 112)),
        (1, 64, 131072, (8, 128, 112)),
        (1, 128, 1 << 20, (1, 128, 132)),
        (8, 64, 1024, (8, 128, 64)),
        (8, 64, 16384, (2, 128, 128)),
        (8, 128, 16384, (8, 128, 64)),
        (14, 128, 2048, (8, 128, 112)),
        (16, 64, 1024, (2, 128, 128)),
        (17, 64, 1024, (1, 128, 132)),
    ],
)
def test_clusters_of_decode_suit_jobs_and_keys_and_are_resident(jobs, head_dim, keys, wanted):
    call = AttentionProblem("float16", jobs, 1, keys, 4, 1, head_dim, False, 0.125, "bshd", 4)
    call = dataclasses.replace(call, cache=CacheShape(jobs, keys, 1, 0))
    strides = dict.fromkeys(("q", "k_cache", "v_cache", "k", "v", "o"), (8, 8, 8))
    (stage,) = plan_decode(call, H100, strides, choose("decode", call, H100, strides)).stages
    tile = stage.spec.tile
    assert (tile.cluster, tile.b_c, stage.blocks) == wanted
    assert tile.cluster == 1 or stage.blocks // tile.cluster <= H100.resident_clusters(tile.cluster)
    older = choose("decode", call, DeviceInfo.named("sm_80"), strides).tiles["decode"]
    assert older.cluster == 1
    fixed = choose("decode", call, H100, strides, CallOptions(num_splits=1)).tiles["decode"]
    assert fixed.cluster == 1


# ---------------------------------------------------------------------------------- which tile, family and method it is


def default_tile() -> TileConfig:
    return choose_tile("forward", "sm80", problem(), H100)


def save(tile: TileConfig, operation="forward", family="sm80", dtype="float16", head_dim=64, causal=False, device=H100):
    tuning.save_tuned_tile(BY_NAME[family], Kernel(operation, dtype, head_dim, head_dim), causal, device, tile)


TUNED, ASKED = TileConfig(64, 48, 4), TileConfig(64, 80, 4)


def test_the_callers_tile_comes_before_the_users_and_that_before_the_tables(tuning_folder):
    assert default_tile() not in (TUNED, ASKED)
    save(TUNED)
    assert choose_tile("forward", "sm80", problem(), H100) == TUNED
    assert choose_tile("forward", "sm80", problem(), H100, ASKED) == ASKED
    assert choose_tile("forward", "sm80", problem(), H100, {"forward": ASKED}) == ASKED
    # A mapping without this operation does not change the choice.
    assert choose_tile("forward", "sm80", problem(), H100, {"backward": ASKED}) == TUNED


@pytest.mark.parametrize(
    ("tuned", "sizes", "function", "is_taken"),
    [
        ((64, 48, 4), (128, 128), None, False),  # its keys would be of two tiles of the map
        ((64, 32, 4), (128, 128), None, True),
        ((128, 32, 8), (64, 128), None, False),  # its queries would, and nothing tells what the map hides
        ((128, 32, 8), (64, 128), mods.causal(), True),
        ((64, 48, 4), (128, 128), mods.causal(), False),
        ((64, 48, 4), (128, 96), mods.causal(), True),
    ],
)
def test_the_users_tile_must_suit_a_map(tuning_folder, tuned, sizes, function, is_taken):
    tuned = TileConfig(*tuned)
    shape = tuple(-(-256 // size) for size in sizes)
    settings = {"block_mask": MapLayout((1, 1, *shape), 256, 256, sizes, None)}
    if function is not None:
        settings["mask_mod"] = bound_function("mask_mod", function, ())
        settings["block_mask"] = settings["block_mask"]._replace(program=settings["mask_mod"].program)
    call = problem().with_settings(FeatureSettings(**settings))
    default = choose_tile("forward", "sm80", call, H100)
    assert default != tuned
    save(tuned)
    assert choose_tile("forward", "sm80", call, H100) == (tuned if is_taken else default)
    assert choose_tile("forward", "sm80", problem(), H100) == tuned


@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_the_users_tile_must_suit_a_map_by_the_rows_that_its_blocks_own(tuning_folder, family):
    """Blocks that own keys may have more of them than the map's tiles, and steps of queries within those."""
    tuned = TileConfig(64, 128, 8, 2) if family == "sm80" else TileConfig(64, 128, 12, 2)
    program = bound_function("mask_mod", mods.causal(), ())
    for sizes, is_taken in (((64, 64), True), ((48, 128), False)):
        layout = MapLayout((1, 1, *(-(-256 // size) for size in sizes)), 256, 256, sizes, program.program)
        call = problem().with_settings(FeatureSettings(block_mask=layout, mask_mod=program))
        tuning._tuned_tiles.cache_clear()
        save(tuned, "backward_dkdv", family)
        assert (choose_tile("backward_dkdv", family, call, H100) == tuned) == is_taken


def test_the_users_tile_is_for_one_kernel_on_one_gpu(tuning_folder):
    before = default_tile()
    save(TUNED, causal=True)
    save(TUNED, dtype="bfloat16")
    save(TUNED, head_dim=72)
    save(TUNED, operation="backward_dq")
    save(TUNED, device=DeviceInfo.named("sm_80"))
    assert choose_tile("forward", "sm80", problem(), H100) == before
    assert choose_tile("forward", "sm80", problem(causal=True), H100) == TUNED
    assert choose_tile("forward", "sm80", problem("bfloat16"), H100) == TUNED
    assert len(json.loads(tuning_file().read_text())) == 5


def test_saving_replaces_the_entry_and_keeps_the_others(tuning_folder):
    save(ASKED)
    save(ASKED, causal=True)
    save(TUNED)
    tuning._tuned_tiles.cache_clear()  # the state of a new process
    assert choose_tile("forward", "sm80", problem(), H100) == TUNED
    assert choose_tile("forward", "sm80", problem(causal=True), H100) == ASKED
    assert sorted(path.name for path in tuning_folder.iterdir()) == ["tuning.json", "tuning.json.lock"]


def test_a_users_tile_that_is_not_legal_is_passed_over_with_one_warning(tuning_folder):
    before = default_tile()
    save(TileConfig(72, 24, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert choose_tile("forward", "sm80", problem(), H100) == before
    (warning,) = caught
    reason = BY_NAME["sm80"].why_illegal(Kernel("forward", "float16", 64, 64), TileConfig(72, 24, 3), H100)
    for part in (str(tuning_file()), "H100/sm80/forward/float16/64/full", reason, "default tile"):
        assert part in str(warning.message)


@pytest.mark.parametrize(
    "content",
    (
        "{",
        "",
        "[1, 2]",
        "7",
        '{"key": 7}',
        '{"key": {"b_r": 64}}',
        '{"key": {"b_r": 0, "b_c": 1, "num_warps": 1}}',
        "\x00",
        "[" * 100_000,
    ),
)
def test_a_broken_tuning_file_is_ignored_with_one_warning(content, tuning_folder):
    tuning_folder.mkdir()
    (tuning_folder / "tuning.json").write_text(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiles = [choose_tile("forward", "sm80", problem(causal=causal), H100) for causal in (False, True)]
    (warning,) = caught
    assert str(tuning_folder / "tuning.json") in str(warning.message)
    tuning._tuned_tiles.cache_clear()
    (tuning_folder / "tuning.json").unlink()
    assert tiles == [choose_tile("forward", "sm80", problem(causal=causal), H100) for causal in (False, True)]


def test_without_a_tuning_file_nothing_is_said(tuning_folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default_tile()


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        (TileConfig(72, 64, 4), ValueError, "b_r=72"),
        ({"forward": TileConfig(64, 24, 4)}, ValueError, "b_c=24"),
        ({"sideways": TUNED}, ValueError, "sideways"),
        ((64, 64, 4), TypeError, "config: expected a TileConfig"),
        ({"forward": 64}, TypeError, r"config\['forward'\]: expected a TileConfig"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(config, error, text):
    with pytest.raises(error, match=text) as caught:
        choose_tile("forward", "sm80", problem(), H100, config)
    assert str(caught.value).startswith("config")


def test_the_operation_the_dtype_and_the_device_call_for_the_family():
    for dtype in ("float16", "bfloat16"):
        assert choose_family("forward", dtype, H100).name == "sm90"
        assert choose_family("forward", dtype, H100, "sm80").name == "sm80"
        for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
            assert choose_family("forward", dtype, DeviceInfo.named(arch)).name == "sm80"
        for operation in ("backward", "backward_dkdv"):
            assert choose_family(operation, dtype, H100).name == "sm90"
        assert choose_family("delta", dtype, H100).name == "sm90"  # one kernel for all
    assert choose_family("forward", "float32", H100).name == "sm90_float32"
    assert choose_family("forward", "float32", H100, precision="ieee").name == "simt"
    assert choose_family("backward", "float64", P100).name == "simt"


def test_a_family_that_does_not_fit_is_refused_with_those_that_there_are():
    too_old = r"^no kernel takes float16 on T4 \(sm_75\): that needs compute capability 8\.0 or newer; here there is"
    with pytest.raises(UnsupportedProblemError, match=too_old) as caught:
        choose_family("forward", "float16", DeviceInfo.named("sm_75"))
    assert str(caught.value).endswith("simt (float32, float64; compute capability 6.0 or newer)")
    assert len(str(caught.value)) < 350
    with pytest.raises(UnsupportedProblemError, match="^family 'simt' has no kernels for float16"):
        choose_family("forward", "float16", H100, "simt")
    with pytest.raises(ValueError, match="^operation: expected one of .*'forward'.*, got 'sideways'"):
        choose_family("sideways", "float16", H100)
    with pytest.raises(UnsupportedProblemError, match=r"^family 'sm90' does not run on B200 .*: it needs .* 9\.0"):
        choose_family("forward", "float16", DeviceInfo.named("sm_100"), "sm90")
    with pytest.raises(
        UnsupportedProblemError, match=r"^family 'sm90' has no kernels of backward_jvp for float32 on H100"
    ):
        choose_family("backward_jvp", "float32", H100, "sm90")
    with pytest.raises(UnsupportedProblemError, match="^no kernel family has kernels of backward_one_tile for float64"):
        choose_family("backward_one_tile", "float64", H100)
    with pytest.raises(ValueError, match="family: expected one of"):
        choose_family("forward", "float16", H100, "sm70")


def backward_problem(head_dim: int, seqlen_q: int, causal: bool) -> AttentionProblem:
    return AttentionProblem("float16", 1, seqlen_q, 4096, 2, 2, head_dim, causal, 1.0, "bshd", 4)


@pytest.mark.parametrize(
    "problem", [backward_problem(d, n, c) for d in (8, 128, 136) for n in (1, 9999) for c in (False, True)]
)
@pytest.mark.parametrize(
    "family", [row.name for row in FAMILIES if "backward" in row.operations and row.name == row.public_name]
)
def test_deterministic_calls_never_get_the_method_with_atomics(family, problem):
    assert choose_method(family, problem, None, True) == choose_method(family, problem, "two_pass", True) == "two_pass"
    assert choose_method(family, problem, "single_pass", False) == "single_pass"
    assert choose_method(family, problem, None, False) in ("single_pass", "two_pass")
    with pytest.raises(ValueError, match="'single_pass' adds atomically"):
        choose_method(family, problem, "single_pass", True)
    with pytest.raises(ValueError, match="method: expected None"):
        choose_method(family, problem, "three_pass", False)
    with pytest.raises(TypeError, match="deterministic: expected a bool"):
        choose_method(family, problem, None, 1)


@pytest.mark.parametrize(
    ("head_dim", "seqlen_q", "causal", "wanted"),
    [
        (64, 256, True, "two_pass"),
        (64, 2048, True, "single_pass"),
        (72, 2048, False, "single_pass"),
        (128, 512, True, "two_pass"),
        (128, 2048, True, "single_pass"),
        (136, 65536, False, "two_pass"),
    ],
)
def test_hopper_takes_one_pass_where_it_is_long_enough(head_dim, seqlen_q, causal, wanted):
    call = dataclasses.replace(backward_problem(head_dim, seqlen_q, causal), batch=64, seqlen_k=seqlen_q)
    assert choose_method("sm90", call, None, False) == wanted
    assert choose_method("sm80", call, None, False) == "single_pass"


@pytest.mark.parametrize(
    ("window", "causal", "wanted"),
    [
        ((127, None), True, "two_pass"),
        ((1023, None), True, "single_pass"),
        ((50, 77), False, "two_pass"),
        ((500, 523), False, "single_pass"),
        ((100, None), False, "single_pass"),
    ],
)
def test_hopper_takes_two_passes_for_narrow_windows(window, causal, wanted):
    call = dataclasses.replace(backward_problem(128, 16384, causal), num_heads=16, num_heads_kv=16, seqlen_k=16384)
    call = call.with_settings(FeatureSettings(window=window))
    assert choose_method("sm90", call, None, False) == wanted
    assert choose_method("sm80", call, None, False) == "single_pass"


@pytest.mark.parametrize(
    ("sequences", "longest", "wanted"),
    [(8, 2557, "single_pass"), (64, 511, "two_pass"), (64, 16384, "two_pass"), (8, 16384, "single_pass")],
)
def test_of_packed_sequences_twice_the_mean_counts_but_no_more_than_the_longest(sequences, longest, wanted):
    features = FeatureSettings(num_sequences=sequences, max_seqlen_q=longest, max_seqlen_k=longest)
    call = dataclasses.replace(backward_problem(128, 16384, True), num_heads=16, num_heads_kv=16, seqlen_k=16384)
    packed = dataclasses.replace(call, settings=features)
    assert choose_method("sm90", packed, None, False) == wanted
