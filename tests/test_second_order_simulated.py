"""The kernels of second order, executed without a GPU, against the references in float64.

README.md of this folder has the checks of every launch.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants import second_order
from mutants.mutant import CATCHES
from support.fake_cupy import place
from support.feature_cases import numbers, options_of
from support.second_order_calls import CURVED, FAMILIES, Call, packed_call
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, packed

import fa2cupy
from fa2cupy import TileConfig, mods
from fa2cupy.families import choice, float32_parts
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Family, Kernel
from fa2cupy.families.simt import SIMT
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.sm80_float64 import SM80_FLOAT64
from fa2cupy.plan.specs import second_order_specs

pytestmark = pytest.mark.simulated

#: Sizes of calls: ragged and whole tiles, rows that see no key under a causal mask, groups of heads, none at all.
SIZES = (
    {"lengths": (1, 1)},
    {"lengths": (16, 16)},
    {"lengths": (37, 21)},
    {"heads": (4, 2), "batch": 2},
    {"head_dim": 24, "head_dim_v": 72},
    {"lengths": (0, 3)},
    {"lengths": (3, 0)},
)
#: The families of everyday tests of what all families have from the same code.
OTHERS = ("simt", "sm80")
of_both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
#: Further dtypes of families.
of_other_dtypes = pytest.mark.parametrize(("family", "dtype"), [("simt", "float32"), ("sm80", "float16")])
of_all_sizes = pytest.mark.parametrize("sizes", SIZES, ids=str)


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def dtype(family) -> str:
    return FAMILIES[family][0]


@pytest.fixture
def launched(monkeypatch, family):
    with simulated_gpu(monkeypatch, FAMILIES[family][1]) as stages:
        yield stages
        assert all(stage.spec.family in (None, ALL[family]) for stage in stages if "jvp" in stage.spec.operation)


#: Families by name.
ALL = {one.name: one for one in (SIMT, SM80, SM80_FLOAT64)}


def widest_of_calls(family: Family, operation: str, dtype: str, head_dim: int, head_dim_v: int | None) -> int:
    """The widest head_dim up to a row's for which the other kernels of a call have a tile, too.

    Rows with a head_dim_v serve calls with at most as many columns of V, which are fewer than those of q.
    """
    device = DeviceInfo.named("sm_90")
    others = () if operation == "jvp" else ("output_jvp", "dq_jvp", "dkdv_jvp")

    def has_tiles(columns: int) -> bool:
        return all(
            any(
                family.why_illegal(Kernel(other, dtype, columns, head_dim_v or columns), row.tile, device) is None
                for row in rows
            )
            for other, rows in ((other, family.tiles[other]) for other in others)
        )

    return next(columns for columns in range(head_dim, 0, -32) if has_tiles(columns))


def rows_of_the_table(operation: str) -> list:
    """Returns (family, operation, head_dim, head_dim_v, dtype, tile) of each default tile."""
    return [
        pytest.param(
            family,
            operation,
            head_dim,
            row.head_dim_v,
            dtype,
            row.tile,
            id=f"{operation}-{dtype}-{head_dim}{f'v{row.head_dim_v}' if row.head_dim_v else ''}-{row.tile}",
        )
        for family in FAMILIES
        for row in ALL[family].tiles[operation]
        for dtype in row.dtypes or ALL[family].dtypes[:1]
        for head_dim in (widest_of_calls(ALL[family], operation, dtype, row.head_dim, row.head_dim_v),)
    ]


# --------------------------------------------------------------------------------------------------------------- jvp


@pytest.mark.sample(sizes=SIZES[2:4], causal=(True,))
@of_both_masks
@of_all_sizes
def test_jvp(launched, dtype, sizes, causal):
    Call(**sizes, dtype=dtype, causal=causal).check_jvp()


@pytest.mark.sample(family=OTHERS)
def test_jvp_of_packed_sequences(launched, dtype):
    options = {"bias": numbers((3, 1, 1, 52), "float64"), "sink": np.array([0.3, -np.inf, 0.1, 0.2])}
    packed_call(dtype=dtype, **options).check_jvp()


@pytest.mark.sample(family=("simt", "sm80"))
def test_tangents_of_given_results(launched, dtype):
    options = {"bias": numbers((3, 1, 1, 52), "float64"), "sink": np.array([0.3, -np.inf, 0.1, 0.2])}
    call = packed_call(dtype=dtype, **options)
    o, lse, *wanted = call.jvp()
    tolerance = 1e-12 if dtype == "float64" else 4e-2  # o, which is subtracted lse' times, is rounded
    for one, other in zip(call.jvp(o=place(o), lse=place(lse)), wanted, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, "float64") for x in (one, other)), atol=tolerance)
    assert [stage.spec.operation for stage in launched][-1] == "output_jvp"


@pytest.mark.sample(causal=(True,), dtype=("float32",))
@of_both_masks
@of_other_dtypes
def test_errors_of_jvp_are_bounded_by_those_of_the_formulas_in_the_same_precision(launched, dtype, causal):
    Call((45, 61), (4, 2), 24, dtype=dtype, causal=causal, softcap=2.0).check_jvp()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "operation", "head_dim", "head_dim_v", "dtype", "tile"),
    [case for operation in ("jvp", "output_jvp", "dq_jvp", "dkdv_jvp") for case in rows_of_the_table(operation)],
)
def test_every_default_tile(launched, monkeypatch, family, operation, head_dim, head_dim_v, dtype, tile):
    call = Call((tile.b_r + 3, 2 * tile.b_c + 5), (1, 1), head_dim, head_dim_v, dtype=dtype, causal=True)
    call.tile = None
    chosen = choice.choose_tile

    def choose_tile(name, *more, **options):
        return tile if name == operation else chosen(name, *more, **options)

    monkeypatch.setattr(choice, "choose_tile", choose_tile)
    call.check_jvp() if operation == "jvp" else call.check_double_backward()
    assert tile in [stage.spec.tile for stage in launched if stage.spec.operation == operation]


@pytest.mark.sample(given=("q",), family=("simt",))
@pytest.mark.parametrize("given", ["q", "k", "v", ""])
def test_a_missing_tangent_counts_as_zeros(launched, dtype, given):
    call = Call(dtype=dtype)
    call.direction = {name: array for name, array in call.direction.items() if name == given}
    call.check_jvp()


@pytest.mark.sample(family=OTHERS)
def test_rows_without_keys_have_zeros_even_if_they_have_nan(launched, dtype):
    call = Call((20, 12), dtype=dtype, causal=True)
    for arrays in (call.arrays, call.direction):
        arrays["q"][:, :8] = np.nan
    _, _, ot, lset = call.jvp()
    assert not ot[:, :8].any() and not lset[..., :8].any()
    assert np.isfinite(ot).all() and np.isfinite(lset).all()


@pytest.mark.sample(name=("ot",), family=("simt",))
@pytest.mark.parametrize("name", ["o", "lse", "ot", "lset"])
def test_results_in_arrays_of_the_caller(launched, dtype, name):
    call, names = Call(dtype=dtype), ("o", "lse", "ot", "lset")
    wanted = dict(zip(names, call.jvp(), strict=True))
    out = {one: place(np.full(array.shape, np.nan, array.dtype)) for one, array in wanted.items()}
    out[name] = gapped(out[name])
    found = dict(zip(names, call.jvp(out=tuple(out.values())), strict=True))
    for one, array in found.items():
        assert array is out[one]
        np.testing.assert_array_equal(array, wanted[one])


@pytest.mark.sample(name=("k",), family=("simt",))
@pytest.mark.parametrize("name", "qkv")
def test_tangents_with_strides_of_their_own(launched, dtype, name):
    call = Call(head_dim=16, dtype=dtype, causal=True)
    wanted = call.jvp()
    call.direction[name] = packed(call.direction[name])
    for one, other in zip(call.jvp(), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


# ---------------------------------------------------------------------------------------- backward_jvp, double_backward

BACKWARDS = ("check_backward_jvp", "check_double_backward")
STAGES = {
    "check_backward_jvp": ["delta_jvp", "dq_jvp", "dkdv_jvp"],
    "check_double_backward": ["output_jvp", "delta_jvp", "dq_jvp", "dkdv_jvp"],
}
of_both_backwards = pytest.mark.parametrize("check", BACKWARDS)


@pytest.mark.sample(sizes=SIZES[2:4], causal=(True,), check=("check_double_backward",))
@of_both_masks
@of_all_sizes
@of_both_backwards
def test_tangents_of_gradients(launched, dtype, sizes, causal, check):
    getattr(Call(**sizes, dtype=dtype, causal=causal), check)()


@pytest.mark.matrix
@of_both_masks
@of_both_backwards
@of_other_dtypes
def test_errors_of_tangents_of_gradients_are_bounded(launched, dtype, check, causal):
    getattr(Call((45, 61), (4, 2), 24, dtype=dtype, causal=causal, softcap=2.0), check)()
    assert [stage.spec.operation for stage in launched] == STAGES[check]


@pytest.mark.sample(check=("check_double_backward",))
@of_both_backwards
def test_lse_of_kernels_that_multiply_parts_is_computed_again(monkeypatch, check):
    """Checks float32 on Hopper."""
    monkeypatch.setattr(float32_parts, "_SHORTEST", 1)
    with simulated_gpu(monkeypatch) as launched:
        getattr(Call(dtype="float32"), check)()
    assert [stage.spec.operation for stage in launched] == ["forward", *STAGES[check]]


@pytest.mark.sample(given=("v",), check=("check_double_backward",), family=("sm80",))
@pytest.mark.parametrize("given", ["q", "k", "v", "do", "dlse", ""])
@of_both_backwards
def test_a_missing_tangent_counts_as_zeros_in_gradients(launched, dtype, check, given):
    call = Call(dtype=dtype)
    call.direction = {name: array for name, array in call.direction.items() if name == given}
    getattr(call, check)()


@pytest.mark.sample(check=("check_double_backward",), family=("simt",))
@of_both_backwards
def test_gradients_of_lse_may_be_missing(launched, dtype, check):
    call = Call(dtype=dtype)
    del call.arrays["dlse"]
    getattr(call, check)()


@pytest.mark.sample(name=("double_backward",), family=("simt",))
@pytest.mark.parametrize("name", ["backward_jvp", "double_backward"])
def test_rows_without_keys_contribute_nothing_even_if_they_have_nan(launched, dtype, name):
    Call((20, 12), dtype=dtype, causal=True).check_hidden_rows(name)
    Call((20, 12), dtype=dtype, bias=np.where(np.arange(20) < 8, -np.inf, 0.0)[:, None]).check_hidden_rows(name)


# ---------------------------------------------------------------------------------------------------------- features

#: Features of calls by name: each alone, and all that do not exclude each other.
FEATURES = {
    **{name: (name,) for name in ("window", "softcap", "alibi", "bias", "mask of whole rows", "padding", "sink")},
    "dropout": ("dropout",),
    "all": ("causal", "window", "softcap", "alibi", "bias of heads", "mask of rows", "padding", "sink", "dropout"),
}


def featured_options(name: str, dtype: str) -> dict:
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 19, "seqlen_k": 27}
    options: dict = {}
    for row in FEATURES[name]:
        options |= options_of(row, dtype, sizes)
    return options


@pytest.fixture(params=FEATURES)
def featured(request, dtype) -> Call:
    return Call((19, 27), batch=2, dtype=dtype, **featured_options(request.param, dtype))


@pytest.fixture(params=[False, True], ids=["", "map"])
def with_functions(request, dtype) -> Call:
    mask = mods.causal(5)
    options = CURVED | {"mask_mod": mask}
    if request.param:
        options["block_mask"] = fa2cupy.block_mask(mask, (), 1, 1, 21, 27, tile=(16, 16))
    return Call(dtype=dtype, **options)


@pytest.mark.sample(name=("jvp",), family=("simt",))
@pytest.mark.parametrize("name", ["jvp", "backward_jvp", "double_backward"])
def test_tangents_of_a_bias_are_ignored_for_hidden_keys_even_if_they_are_nan(launched, dtype, name):
    call = Call(dtype=dtype, causal=True, bias=np.zeros((21, 27)))
    hidden = np.arange(27) > np.arange(21)[:, None] + 6
    wanted = getattr(call, name)()
    call.direction["bias"][hidden] = np.nan
    for one, other in zip(getattr(call, name)(), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sample(check=("check_double_backward",), family=("simt",))
@of_both_backwards
def test_tangents_of_a_bias_and_a_sink_of_packed_sequences(launched, dtype, check):
    call = packed_call(dtype=dtype, bias=numbers((3, 1, 1, 52), "float64"), sink=np.array([0.3, -np.inf, 0.1, 0.2]))
    getattr(call, check)()


@pytest.mark.sample(featured=("all",))
def test_jvp_with_features(launched, featured):
    featured.check_jvp()


@pytest.mark.sample(featured=("all",), check=("check_double_backward",), family=("sm80",))
@of_both_backwards
def test_tangents_of_gradients_with_features(launched, featured, check):
    getattr(featured, check)()


@pytest.mark.sample(with_functions=(True,), family=OTHERS)
def test_jvp_with_functions(launched, with_functions):
    with_functions.check_jvp()


@pytest.mark.sample(with_functions=(True,), check=("check_double_backward",), family=("simt",))
@of_both_backwards
def test_tangents_of_gradients_with_functions(launched, with_functions, check):
    getattr(with_functions, check)()


# ------------------------------------------------------------------------------------------------------- wide heads

#: Beyond 256 columns of q or v, warps of 16-bit data share rows and divide columns. In float64, lanes do not hold all
#: that they sum: kernels go over the tiles twice, and o comes from a forward.
WIDE = (("sm80", (264, 328)), ("sm80", (40, 512)), ("sm80", (512, 40)), ("sm80", (512, 256)), ("simt", (512, 512)))
HIDDEN_BY_BIAS = {"bias": np.where(np.arange(37) < 8, -np.inf, 0.3)[:, None]}


def wide_call(dtype: str, pair: tuple[int, int], **options) -> Call:
    return Call((37, 45), (2, 1), *pair, dtype=dtype, default_tiles=True, **options)


@pytest.mark.sample(family=("sm80",), pair=((264, 328),), check=("check_double_backward",))
@pytest.mark.parametrize(("family", "pair"), WIDE, ids=str)
@pytest.mark.parametrize("check", ["check_jvp", *BACKWARDS])
def test_more_than_256_columns(launched, dtype, pair, check):
    getattr(wide_call(dtype, pair, causal=True, **HIDDEN_BY_BIAS), check)()
    specs = [stage.spec for stage in launched if "jvp" in stage.spec.operation and stage.spec.family is not None]
    assert {(spec.head_dim, spec.head_dim_v or spec.head_dim) for spec in specs} == {
        (max(pair[0], 64), max(pair[1], 64))
    }


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "pair"), [("sm80", (264, 328)), ("simt", (512, 512))], ids=str)
def test_hidden_rows_of_more_than_256_columns(launched, dtype, pair):
    wide_call(dtype, pair, **HIDDEN_BY_BIAS).check_hidden_rows_twice()


@pytest.mark.matrix
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("family", "pair"), [("sm80", (264, 328)), ("simt", (8, 512))], ids=str)
def test_features_of_more_than_256_columns(launched, dtype, pair, packed):
    own: dict = {"head_dim": pair[0], "head_dim_v": pair[1], "dtype": dtype, "default_tiles": True}
    if packed:
        call = packed_call(**own, softcap=2.0)
    else:
        call = Call((19, 27), batch=2, **own, **featured_options("all", dtype))
    call.check_jvp()
    call.check_double_backward()


# ------------------------------------------------------------------------------------------------ float64's own tiles

#: Two warps of a block, two that share rows of more than 64 columns, sums in two halves, and row shifts that move.
TILES_64 = {
    "warps": {"lengths": (40, 70), "tile": TileConfig(32, 32, 2)},
    "sharers": {"lengths": (20, 37), "head_dim": 72, "head_dim_v": 24, "tile": TileConfig(16, 16, 2)},
    "halves": {"lengths": (20, 27), "head_dim": 72, "head_dim_v": 8},
    "large scores": {"lengths": (20, 70), "softmax_scale": 4.0},
}


@pytest.mark.sample(tiles=("sharers",), check=("check_double_backward",))
@pytest.mark.parametrize("family", ["sm80_float64"])
@pytest.mark.parametrize("tiles", TILES_64)
@pytest.mark.parametrize("check", ["check_jvp", *BACKWARDS])
def test_warps_of_float64(launched, tiles, check):
    getattr(Call(**TILES_64[tiles], causal=True), check)()


@pytest.mark.parametrize(
    ("pair", "family"),
    [
        *((pair, "simt") for pair in ((136, 8), (8, 136), (8, 88))),
        *((pair, "sm80_float64") for pair in ((8, 80), (128, 128))),
    ],
    ids=str,
)
def test_columns_that_warps_of_float64_do_not_hold_are_left_to_cuda_cores(pair, family):
    specs = second_order_specs(DeviceInfo.named("sm_90"), "float64", pair[0], head_dim_v=pair[1])
    assert {spec.family for spec in specs} == {None, ALL[family]}


# ----------------------------------------------------------------------------------------------------------- mutants


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", second_order.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    second_order.check_unbroken(mutant.family, mutant.call, mutant.check)
    of_numbers = {"numbers": (AssertionError, "Not equal to tolerance|exceed the bounds of|% of the allowed")}
    exception, text = (CATCHES | of_numbers)[mutant.caught_by]
    with pytest.raises(exception, match=text):
        second_order.run(mutant.family, mutant.call, mutant.check, mutant)
