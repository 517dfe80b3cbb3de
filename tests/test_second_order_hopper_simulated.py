"""The kernels of second order for Hopper, one at a time, executed without a GPU, against the reference in float64.

README.md of this folder has the checks of every launch.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants import sm90_dq_jvp
from mutants.mutant import CATCHES
from support.feature_cases import numbers, options_of
from support.second_order_calls import CURVED
from support.second_order_on_hopper import (
    CAUSAL,
    HIDING,
    ONE_GROUP,
    TWO_GROUPS,
    call_on_hopper,
    check_alone,
    without_rows,
)

import fa2cupy
from fa2cupy import TileConfig, mods
from fa2cupy.families.sm90 import SM90

pytestmark = pytest.mark.simulated

#: Sizes of calls: one row, groups of heads, batches, both head dimensions, several tiles, key tiles that a warp group
#: skips, no query.
SIZES = {
    "one": {"lengths": (1, 1)},
    "groups": {"heads": (4, 2), "batch": 2, "head_dim": 40},
    "pair": {"head_dim": 96, "head_dim_v": 40},
    "wide v": {"head_dim": 24, "head_dim_v": 128},
    "two groups": {"lengths": (150, 130), "tile": TWO_GROUPS, "dtype": "float16"},
    "three groups": {"lengths": (230, 280), "tile": TileConfig(192, 32, 16, 3)},
    "no query": {"lengths": (0, 3)},
}
of_both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.mark.sample(name=("groups",), causal=(True,))
@of_both_masks
@pytest.mark.parametrize("name", SIZES)
def test_dq_jvp(name, causal):
    launched = check_alone("dq_jvp", call_on_hopper(**SIZES[name], causal=causal))
    assert all(stage.spec.family is SM90 for stage in launched if stage.spec.operation == "dq_jvp")


@pytest.mark.matrix
@pytest.mark.parametrize("given", ["qkv", "kvo"])
@pytest.mark.parametrize("row", SM90.tiles["dq_jvp"], ids=lambda row: f"{row.head_dim}-{row.tile}")
def test_every_default_tile(row, given):
    sizes = (row.tile.b_r + 3, 2 * row.tile.b_c + 5)
    check_alone("dq_jvp", call_on_hopper(sizes, head_dim=row.head_dim, tile=row.tile, given=given, causal=True))


@pytest.mark.sample(given=("kv",))
@pytest.mark.parametrize("given", ["q", "k", "v", "o", "qo", "kv", "qkv", ""])
def test_tangents_that_are_missing(given):
    (*_, stage) = check_alone("dq_jvp", call_on_hopper(given=given))
    assert [one is None for one in stage.maps[4:8]] == [letter not in given for letter in "qkvo"]


@pytest.mark.sample(options=(HIDING,))
@pytest.mark.parametrize(
    ("options", "rows"),
    [(HIDING, 100), ({"bias": np.where(np.arange(70) < 8, -np.inf, 0.0).astype("float32")[:, None]}, 8)],
    ids=["causal", "bias"],
)
def test_rows_without_keys_contribute_nothing_in_any_order_of_the_warps_even_if_they_have_nan(options, rows):
    without_rows("dq_jvp", call_on_hopper(**{"lengths": (70, 62), **options}), rows, order=1)


#: Features of calls by name: each alone, and all that do not exclude each other.
FEATURES = {
    **{name: (name,) for name in ("window", "softcap", "alibi", "bias", "mask of whole rows", "padding", "dropout")},
    "all": ("causal", "window", "softcap", "alibi", "bias of heads", "mask of rows", "padding", "dropout"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FEATURES)
def test_dq_jvp_with_features(name):
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 71, "seqlen_k": 77}
    options: dict = {}
    for row in FEATURES[name]:
        options |= options_of(row, "bfloat16", sizes)
    check_alone("dq_jvp", call_on_hopper((71, 77), (2, 1), batch=2, **options))


@pytest.mark.matrix
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", [(2, 71, 77), (2, 1, 77)], ids=["full", "rows"])
def test_tangents_of_the_gradient_of_a_bias(shape, softcap):
    check_alone(
        "dq_jvp", call_on_hopper((71, 77), (2, 1), bias=numbers(shape, "bfloat16"), softcap=softcap, causal=True)
    )


@pytest.mark.matrix
@pytest.mark.parametrize("options", ["plain", "features"])
def test_dq_jvp_of_packed_sequences(options):
    of_sequences = {"cu_seqlens_q": [0, 70, 70, 80, 148], "cu_seqlens_k": [1, 50, 60, 60, 127], "causal": True}
    of_sequences |= {name: np.array(of_sequences[name], "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    if options == "features":
        of_sequences |= {"bias": numbers((4, 1, 1, 130), "float32"), "window": (50, 20), "dropout_p": 0.3, "seed": 3}
    check_alone("dq_jvp", call_on_hopper((150, 130), (2, 1), **of_sequences))


@pytest.mark.matrix
@pytest.mark.parametrize("sparse", [False, True], ids=["", "map"])
def test_dq_jvp_with_functions(sparse):
    mask = mods.causal(5)
    options = CURVED | {"mask_mod": mask}
    if sparse:
        options["block_mask"] = fa2cupy.block_mask(mask, (), 1, 1, 71, 77, tile=(64, 32))
    check_alone("dq_jvp", call_on_hopper((71, 77), (2, 1), tile=ONE_GROUP, **options))


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", sm90_dq_jvp.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    sm90_dq_jvp.check_unbroken(mutant.call, mutant.check)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        sm90_dq_jvp.run(mutant.call, mutant.check, mutant)


@pytest.mark.matrix
def test_two_groups_skip_key_tiles_under_a_causal_mask():
    check_alone("dq_jvp", call_on_hopper(**CAUSAL, tile=TWO_GROUPS))
