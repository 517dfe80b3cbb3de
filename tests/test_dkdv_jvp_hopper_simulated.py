"""The tangents of dK and dV for Hopper, executed without a GPU, against the reference in float64.

README.md of this folder has the checks of every launch.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants import sm90_dkdv_jvp
from mutants.mutant import CATCHES
from support.feature_cases import numbers, options_of
from support.second_order_calls import CURVED, PACKED, Call
from support.second_order_on_hopper import HIDING, call_on_hopper, check_alone, without_rows
from support.simulator import simulated_gpu

import fa2cupy
from fa2cupy import TileConfig, mods
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.sm90 import SM90
from fa2cupy.plan.stages import Stage
from fa2cupy.problem.checks import problem_from_arrays

pytestmark = pytest.mark.simulated

TILE = TileConfig(32, 128, 12, 2)
#: Sizes of calls: one row, groups of heads, batches, both head dimensions, several tiles, no key.
SIZES = {
    "one": {"lengths": (1, 1)},
    "groups": {"heads": (4, 2), "batch": 2, "head_dim": 40},
    "pair": {"head_dim": 96, "head_dim_v": 40},
    "wide v": {"head_dim": 24, "head_dim_v": 128},
    "tiles": {"lengths": (150, 270), "tile": TileConfig(64, 128, 12, 3), "given": "qkv", "dtype": "float16"},
    "48 queries": {"lengths": (150, 130), "tile": TileConfig(48, 128, 12, 2)},
    "no key": {"lengths": (3, 0)},
}
of_both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def call_of(*lengths: int, **options) -> Call:
    return call_on_hopper(**{"lengths": lengths or (70, 130), "tile": TILE, **options})


def check(call: Call) -> list[Stage]:
    return check_alone("dkdv_jvp", call)


@pytest.mark.sample(name=("groups",), causal=(True,))
@of_both_masks
@pytest.mark.parametrize("name", SIZES)
def test_dkdv_jvp(name, causal):
    launched = check(call_of(**SIZES[name], causal=causal))
    assert all(stage.spec.family is SM90 for stage in launched if stage.spec.operation == "dkdv_jvp")


@pytest.mark.matrix
@pytest.mark.parametrize("given", ["qkv", "kvo"])
@pytest.mark.parametrize("row", SM90.tiles["dkdv_jvp"], ids=lambda row: f"{row.head_dim}-{row.tile}")
def test_every_default_tile(row, given):
    check(call_of(row.tile.b_r + 3, row.tile.b_c + 5, head_dim=row.head_dim, tile=row.tile, given=given, causal=True))


@pytest.mark.matrix
@pytest.mark.parametrize("given", ["q", "k", "v", "o", "qo", "kv", "vo", "qkv", ""])
def test_tangents_that_are_missing(given):
    (*_, stage) = check(call_of(given=given))
    assert [one is None for one in stage.maps[4:8]] == [letter not in given for letter in "qkvo"]


@pytest.mark.sample(options=(HIDING,))
@pytest.mark.parametrize(
    ("options", "rows"),
    [(HIDING, 100), ({"bias": np.where(np.arange(70) < 8, -np.inf, 0.0).astype("float32")[:, None]}, 8)],
    ids=["causal", "bias"],
)
def test_rows_without_keys_contribute_nothing_in_any_order_of_the_warps_even_if_they_have_nan(options, rows):
    without_rows("dkdv_jvp", call_of(**{"lengths": (70, 62), **options}), rows, order=1)


#: Features of calls by name: each alone, and all that do not exclude each other.
FEATURES = {
    **{name: (name,) for name in ("window", "softcap", "alibi", "bias", "mask of whole rows", "padding", "dropout")},
    "all": ("causal", "window", "softcap", "alibi", "bias of heads", "mask of rows", "padding", "dropout"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FEATURES)
def test_dkdv_jvp_with_features(name):
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 71, "seqlen_k": 137}
    options: dict = {}
    for row in FEATURES[name]:
        options |= options_of(row, "bfloat16", sizes)
    check(call_of(71, 137, heads=(2, 1), batch=2, **options))


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"bias": numbers((3, 1, 1, 52), "float32")}], ids=["plain", "bias"])
def test_dkdv_jvp_of_packed_sequences(options):
    check(call_of(40, 52, heads=(4, 2), **PACKED, **options))


@pytest.mark.matrix
@pytest.mark.parametrize("sparse", [False, True], ids=["", "map"])
def test_dkdv_jvp_with_functions(sparse):
    mask = mods.causal(60)
    options = CURVED | {"mask_mod": mask}
    if sparse:
        options["block_mask"] = fa2cupy.block_mask(mask, (), 1, 1, 71, 270, tile=(32, 128))
    check(call_of(71, 270, heads=(2, 1), **options))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(136, 136), (64, 192)])
def test_wider_heads_are_for_other_families(head_dim, head_dim_v):
    problem = problem_from_arrays(*(np.zeros((1, 8, 1, n), "float16") for n in (head_dim, head_dim, head_dim_v)))
    reason = SM90.why_not("dkdv_jvp", problem, problem.contiguous_strides())
    widest = max(head_dim, head_dim_v)
    assert reason == f"registers do not hold the tangents of dk and dv of head_dim {widest}, only up to 128"


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", [64, 136])
@pytest.mark.parametrize("check", ["check_double_backward", "check_backward_jvp"])
def test_a_call_takes_all_kernels_from_one_family(monkeypatch, check, head_dim):
    call = Call((40, 70), (2, 1), head_dim, dtype="float16", causal=True)
    call.tile = None
    with simulated_gpu(monkeypatch) as launched:
        getattr(call, check)()
    assert {stage.spec.family for stage in launched} == {None, SM90 if head_dim <= 128 else SM80}


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", sm90_dkdv_jvp.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    sm90_dkdv_jvp.check_unbroken(mutant.call, mutant.check)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        sm90_dkdv_jvp.run(mutant.call, mutant.check, mutant)
