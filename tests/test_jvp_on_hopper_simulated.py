"""Tangents of the forward on Hopper, with and without its results, executed without a GPU, against the references.

README.md of this folder has the checks of every launch.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants import sm90_jvp
from mutants.mutant import CATCHES
from support.feature_cases import numbers, options_of
from support.second_order_calls import CURVED
from support.second_order_on_hopper import CAUSAL, HIDING, JVP_CHECKS, TWO_GROUPS, call_on_hopper
from support.simulated_problems import FEW_MULTIPROCESSORS, HOPPER

import fa2cupy
from fa2cupy import TileConfig, mods
from fa2cupy.families.sm90 import SM90

pytestmark = pytest.mark.simulated

#: Two warp groups that divide the columns of V.
DIVIDED = TileConfig(64, 32, 12, 2)
#: Sizes of calls: one row, groups of heads, batches, both head dimensions, several tiles, key tiles that a warp group
#: skips, no query.
SIZES = {
    "one": {"lengths": (1, 1)},
    "groups": {"heads": (4, 2), "batch": 2, "head_dim": 40},
    "pair": {"head_dim": 96, "head_dim_v": 40},
    "wide v": {"head_dim": 24, "head_dim_v": 128, "dtype": "float16"},
    "two groups": {**CAUSAL, "tile": TWO_GROUPS, "dtype": "float16"},
    "three groups": {"lengths": (230, 280), "tile": TileConfig(192, 32, 16, 3)},
    "divided": {"lengths": (70, 101), "head_dim": 24, "head_dim_v": 200, "tile": DIVIDED},
    "wide": {"lengths": (70, 101), "head_dim": 256, "tile": DIVIDED},
    "no query": {"lengths": (0, 3)},
}
of_both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
of_both_operations = pytest.mark.parametrize("operation", JVP_CHECKS)


@pytest.mark.sample(name=("two groups", "divided"), causal=(True,), operation=("jvp",))
@of_both_operations
@of_both_masks
@pytest.mark.parametrize("name", SIZES)
def test_tangents(operation, name, causal):
    launched = JVP_CHECKS[operation](call_on_hopper(**{**SIZES[name], "causal": causal}))
    assert [stage.spec.family for stage in launched] == ([] if name == "no query" else [SM90])


@pytest.mark.matrix
@of_both_operations
@pytest.mark.parametrize("given", ["qkv", "kv"])
@pytest.mark.parametrize("row", SM90.tiles["jvp"], ids=lambda row: f"{row.head_dim}-{row.tile}")
def test_every_default_tile(operation, row, given):
    sizes = (row.tile.b_r + 3, 2 * row.tile.b_c + 5)
    JVP_CHECKS[operation](call_on_hopper(sizes, head_dim=row.head_dim, tile=row.tile, given=given, causal=True))


@pytest.mark.matrix
@of_both_operations
@pytest.mark.parametrize("head_dim", [64, 128], ids=["two buffers of Q", "one buffer of Q"])
def test_blocks_take_several_query_tiles(operation, head_dim):
    call = call_on_hopper((330, 70), (2, 1), head_dim, causal=True)
    JVP_CHECKS[operation](call, device=FEW_MULTIPROCESSORS)


@pytest.mark.sample(given=("kv",), operation=("output_jvp",))
@of_both_operations
@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "qv", "kv", "qkv", ""])
def test_tangents_that_are_missing(operation, given):
    (stage,) = JVP_CHECKS[operation](call_on_hopper(given=given))
    assert [one is None for one in stage.maps[3:6]] == [letter not in given for letter in "qkv"]


@pytest.mark.parametrize("operation", ["jvp"])
def test_the_row_shift_rises_behind_the_first_key_tile(operation):
    """Keys grow along the sequence, which kernels visit from its end."""
    call = call_on_hopper((70, 200), causal=False)
    call.arrays["k"] *= np.linspace(8, 0.1, 200).astype("bfloat16")[:, None, None]
    JVP_CHECKS[operation](call)


@pytest.mark.sample(options=(HIDING,))
@pytest.mark.parametrize(
    ("operation", "options", "rows"),
    [
        ("jvp", HIDING, 100),
        ("jvp", {**HIDING, "head_dim": 256, "tile": DIVIDED}, 100),
        ("output_jvp", HIDING, 100),
        ("output_jvp", {"bias": np.where(np.arange(70) < 8, -np.inf, 0.0).astype("float32")[:, None]}, 8),
        (
            "output_jvp",
            {"bias": np.where(np.arange(70) < 8, -np.inf, 0.0)[:, None], "head_dim": 136, "tile": DIVIDED},
            8,
        ),
    ],
    ids=["jvp", "jvp of wide heads", "output_jvp", "bias", "bias of wide heads"],
)
def test_rows_without_keys_contribute_nothing_in_any_order_of_the_warps_even_if_they_have_nan(operation, options, rows):
    call = call_on_hopper(**{"lengths": (70, 62), **options})
    JVP_CHECKS[operation](call, nan_rows=rows, device=HOPPER, order=1)


#: Features of calls by name: each alone, and all that do not exclude each other.
FEATURES = {
    **{name: (name,) for name in ("window", "softcap", "alibi", "bias", "mask of whole rows", "padding", "sink")},
    "dropout": ("dropout",),
    "all": ("causal", "window", "softcap", "alibi", "bias of heads", "mask of rows", "padding", "sink", "dropout"),
}


@pytest.mark.matrix
@of_both_operations
@pytest.mark.parametrize("name", FEATURES)
def test_tangents_with_features(operation, name):
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 71, "seqlen_k": 77}
    options: dict = {}
    for row in FEATURES[name]:
        options |= options_of(row, "bfloat16", sizes)
    JVP_CHECKS[operation](call_on_hopper((71, 77), (2, 1), batch=2, **options))


@pytest.mark.matrix
@pytest.mark.parametrize("given", ["v", ""])
@of_both_operations
def test_a_bias_alone_has_a_tangent(operation, given):
    JVP_CHECKS[operation](call_on_hopper((71, 77), (2, 1), bias=numbers((2, 71, 77), "bfloat16"), given=given))


@pytest.mark.matrix
@of_both_operations
@pytest.mark.parametrize("options", ["plain", "features"])
def test_tangents_of_packed_sequences(operation, options):
    of_sequences = {"cu_seqlens_q": [0, 70, 70, 80, 148], "cu_seqlens_k": [1, 50, 60, 60, 127], "causal": True}
    of_sequences |= {name: np.array(of_sequences[name], "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if options == "features":
        of_sequences |= {"bias": numbers((4, 1, 1, 130), "float32"), "window": (50, 20), "dropout_p": 0.3, "seed": 3}
    JVP_CHECKS[operation](call_on_hopper((150, 130), (2, 1), **of_sequences))


@pytest.mark.matrix
@of_both_operations
@pytest.mark.parametrize("sparse", [False, True], ids=["", "map"])
def test_tangents_with_functions(operation, sparse):
    mask = mods.causal(5)
    options = CURVED | {"mask_mod": mask}
    if sparse:
        options["block_mask"] = fa2cupy.block_mask(mask, (), 1, 1, 71, 77, tile=(64, 32))
    JVP_CHECKS[operation](call_on_hopper((71, 77), (2, 1), **options))


@pytest.mark.matrix
@of_both_operations
def test_a_map_without_functions_of_scores(operation):
    mask = mods.causal(5)
    made = fa2cupy.block_mask(mask, (), 1, 1, 71, 77, tile=(64, 32))
    JVP_CHECKS[operation](call_on_hopper((71, 77), (2, 1), mask_mod=mask, block_mask=made))


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", sm90_jvp.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    sm90_jvp.check_unbroken(mutant.operation, mutant.call)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        sm90_jvp.run(mutant.operation, mutant.call, mutant)
