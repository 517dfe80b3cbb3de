"""float32 on tensor cores (``precision="split"``), executed without a GPU.

The tests check results of all kernels, the heads that are left to IEEE arithmetic, and the promised accuracy, with sums
cut as the hardware cuts them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

pytest.importorskip("cupy")

from common.accuracy import KINDS, MIXTURES, check_promise, data, mixture, orders_of
from support.fake_cupy import place
from support.fake_gpu import backward, delta, forward
from support.feature_cases import extras, gradient_names, numbers, options_of
from support.float32_parts import columns_of_part, split_parts
from support.launch_record import Launch
from support.simulated_problems import HOPPER, draw
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, packed, shifted
from support.traced_cases import on_gpu, ready_made

from fa2cupy import TileConfig, reference
from fa2cupy.errors import UnsupportedProblemError
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.operations import METHODS, TILED
from fa2cupy.gpu.copies import CopyingCall
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

GRADIENTS = ("dq", "dk", "dv")


class Kernels(NamedTuple):
    """The family and method of kernels, and the GPU that they are for."""

    family: str
    method: str
    device: DeviceInfo


BY_NAME = {
    "sm90, single_pass": Kernels("sm90", "single_pass", HOPPER),
    "sm90, two_pass": Kernels("sm90", "two_pass", HOPPER),
    "sm80, two_pass": Kernels("sm80", "two_pass", DeviceInfo.named("sm_80")),
}


#: Kernels of a test in the sample; its other kernels are for the matrix.
of_hopper = pytest.mark.sample(kernels=("sm90, single_pass",))
of_mma = pytest.mark.sample(kernels=("sm80, two_pass",))
of_both = pytest.mark.sample(kernels=("sm90, single_pass", "sm80, two_pass"))


@pytest.fixture(params=BY_NAME)
def kernels(request) -> Kernels:
    return BY_NAME[request.param]


def in_turn(name: str, values):
    """Parametrises a test with the values, each with one of the kernels, in turn."""
    cases = [(tuple(BY_NAME)[i % len(BY_NAME)], value) for i, value in enumerate(values)]
    return pytest.mark.parametrize(("kernels", name), cases, indirect=["kernels"])


@pytest.fixture
def launched(monkeypatch, kernels):
    with simulated_gpu(monkeypatch, kernels.device) as stages:
        yield stages


def run(inputs: tuple, kernels: Kernels, *, dlse=None, given_delta=None, out=(None, None), **options) -> dict:
    q, k, v, do = inputs
    options["family"] = kernels.family
    results = dict(zip(("o", "lse"), forward(q, k, v, out=out[0], **options), strict=True))
    switches = extras(options)
    if kernels.method == "single_pass":  # only two passes give the others; one pass would run them
        switches = {name: True for name in switches if name == "return_dsink"}
    more = {"dlse": dlse, "delta": given_delta, "out": out[1], "method": kernels.method}
    gradients = backward(q, k, v, results["o"], results["lse"], do, **switches, **more, **options)
    return results | dict(zip(gradient_names(options, switches), gradients, strict=True))


def check(inputs: tuple, launched: list, kernels: Kernels, **options) -> dict:
    """Checks all results, and that kernels of the family and of the fallback were launched."""
    launched.clear()
    expected = Expectation(*inputs, **options)
    results = run(inputs, kernels, **options)
    expected.check(**results)
    if inputs[0].size and inputs[1].size:
        tiled = [stage.spec for stage in launched if stage.spec.operation in TILED]
        own = kernels.family
        assert [spec.family_name for spec in tiled] == [
            own,
            "simt",
            *[own] * len(METHODS[kernels.method]),
            *["simt"] * len(METHODS[kernels.method]),
        ]
        assert [spec.is_fallback for spec in tiled] == [spec.family_name == "simt" for spec in tiled]
    return results


#: (seqlen_q, seqlen_k): less than a block of rows that share a unit, whole blocks, ragged tiles, and so many more
#: queries than keys that whole tiles see no key under the causal mask.
LENGTHS = ((1, 1), (64, 64), (70, 150), (290, 140))


@of_both
@pytest.mark.sample(head_dim=(59,), causal=(True,))
@pytest.mark.parametrize(
    ("kernels", "head_dim", "causal"),
    [(name, 59, True) for name in BY_NAME]
    + [
        ("sm90, single_pass", 1, True), ("sm80, two_pass", 1, True), ("sm90, two_pass", 32, False),
        ("sm80, two_pass", 59, False), ("sm90, two_pass", 64, True), ("sm90, single_pass", 96, False),
        ("sm80, two_pass", 96, False), ("sm90, two_pass", 128, True), ("sm80, two_pass", 128, True),
    ],
    indirect=["kernels"],
)  # fmt: skip
def test_every_head_dim(launched, kernels, head_dim, causal):
    for lengths in LENGTHS:
        check(draw("float32", lengths, head_dim), launched, kernels, causal=causal)


@pytest.mark.matrix
@in_turn(
    "heads_and_layout",
    [((3, 3), "bshd"), ((4, 2), "bshd"), ((3, 1), "bshd"), ((4, 2), "bhsd"), ((3, 1), "bhsd"), ((3, 3), "bhsd")],
)
def test_head_groups_in_both_layouts(launched, kernels, heads_and_layout):
    heads, layout = heads_and_layout
    check(draw("float32", (70, 130), 40, heads, batch=2, layout=layout), launched, kernels, layout=layout, causal=True)


@of_mma
@pytest.mark.sample(view=(gapped,), head_dim=(59,))
@pytest.mark.parametrize(
    ("kernels", "head_dim", "view"),
    [(name, 59, gapped) for name in BY_NAME]
    + [(name, 64, view) for name, view in zip(BY_NAME, (packed, shifted, gapped), strict=True)]
    + [(name, 59, view) for name, view in zip(BY_NAME, (shifted, packed, shifted), strict=True)],
    indirect=["kernels"],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_strided_arrays_are_read_and_written_only_where_they_are(launched, kernels, head_dim, view):
    inputs = draw("float32", (70, 130), head_dim, batch=2, view=view)
    q, k, v, _ = inputs
    gradients = tuple(view(np.full_like(x, np.nan)) for x in (q, k, v))
    out = ((view(np.full_like(q, np.nan)), None), gradients)
    results = run(inputs, kernels, causal=True, out=out)
    assert results["o"] is out[0][0] and all(results[name] is x for name, x in zip(GRADIENTS, gradients, strict=True))
    Expectation(*inputs, causal=True).check(**results)


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", (64, 96, 128))
def test_the_methods_have_the_same_keys_and_values(monkeypatch, head_dim):
    """dk and dv are the same bit for bit; dq is summed in another order, and from dS of another scale."""
    inputs = draw("float32", (150, 290), head_dim, (4, 2))
    with simulated_gpu(monkeypatch, HOPPER):
        one, two = (run(inputs, BY_NAME[f"sm90, {method}"], causal=True) for method in ("single_pass", "two_pass"))
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    assert not np.array_equal(one["dq"], two["dq"])


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", (64, 80, 128))
def test_tiles_for_less_shared_memory(monkeypatch, head_dim):
    """Checks the tiles of Ada, and of Ampere other than the A100."""
    kernels = BY_NAME["sm80, two_pass"]
    with simulated_gpu(monkeypatch, "sm_86") as launched:
        check(draw("float32", (200, 230), head_dim, (4, 2)), launched, kernels, causal=True)
        assert not [spec for spec in (stage.spec for stage in launched) if spec.shared_memory_bytes > 99 * 1024]


@pytest.mark.matrix
@pytest.mark.parametrize("empty", ("seqlen_q", "seqlen_k"))
def test_lengths_of_zero(launched, kernels, empty):
    lengths = (0, 70) if empty == "seqlen_q" else (70, 0)
    check(draw("float32", lengths, 64), launched, kernels)


@pytest.mark.matrix
@in_turn("seed", (1, 2, 3))
def test_warps_may_take_turns_in_any_order(monkeypatch, kernels, seed):
    with simulated_gpu(monkeypatch, kernels.device, seed=seed) as launched:
        check(draw("float32", (330, 200), 64), launched, kernels, causal=True)


FEATURES = (
    "window", "softcap", "alibi", "bias", "bias of keys", "mask of rows", "padding", "sink", "dropout",
)  # fmt: skip


def features_of(names: tuple, lengths: tuple[int, int], batch: int = 1) -> dict:
    sizes = {"batch": batch, "num_heads": 2, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    given = {key: x for name in names for key, x in options_of(name, "float32", sizes).items()}
    return {key: place(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}


@pytest.mark.matrix
@in_turn("feature", FEATURES)
def test_every_feature(launched, kernels, feature):
    lengths = (150, 210)
    inputs = draw("float32", lengths, 64)
    dlse = place(numbers((1, 2, 150), "float32"))
    results = check(inputs, launched, kernels, dlse=dlse, **features_of((feature,), lengths))
    assert ("dsink" in results) == (feature == "sink")


@pytest.mark.matrix
def test_features_together(launched, kernels):
    lengths = (140, 170)
    names = ("softcap", "alibi", "bias of keys", "mask of rows", "padding", "sink", "dropout", "window left")
    check(draw("float32", lengths, 128), launched, kernels, causal=True, **features_of(names, lengths))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("repeated", "head_dim", "softcap"),
    (("", 64, None), ("b", 64, None), ("hq", 64, None), ("hq", 64, 2.0), ("k", 64, None)),
)
@pytest.mark.parametrize("kernels", ["sm90, two_pass", "sm80, two_pass"], indirect=True)
def test_the_gradient_of_a_bias(launched, kernels, repeated, head_dim, softcap):
    check_dbias(launched, kernels, repeated, head_dim, softcap)


def check_dbias(
    launched: list,
    kernels: Kernels,
    repeated: str,
    head_dim: int,
    softcap: float | None,
    head_dim_v: int | None = None,
) -> None:
    """Checks dbias in an array of the caller, with skipped tiles and heads that are left to IEEE arithmetic."""
    lengths = (150, 210)
    inputs = draw("float32", lengths, head_dim, (2, 2), batch=2, head_dim_v=head_dim_v)
    inputs[1][1, 70, 1] *= np.float32(1e-5)  # too small beside its neighbours
    shape = tuple(1 if axis in repeated else n for axis, n in zip("bhqk", (2, 2, *lengths), strict=True))
    options = {"bias": place(numbers(shape, "float32")), "window": (9, 70), "softcap": softcap}
    # A bias that is the same for all keys has the gradient 0 unless lse has one.
    dlse = place(numbers((2, 2, 150), "float32")) if "k" in repeated else None
    expected = Expectation(*inputs, dlse=dlse, **options)
    given = place(np.full(shape, np.nan, "float32"))
    results = run(inputs, kernels, dlse=dlse, out=((None, None), (None, None, None, given)), **options)
    assert results["dbias"] is given
    expected.check(**results)
    specs = [stage.spec for stage in launched if stage.spec.operation == "backward_dq"]
    assert [(spec.family_name, spec.is_fallback) for spec in specs] == [(kernels.family, False), ("simt", True)]
    assert all(("full_dbias" in spec.features) == (not repeated) for spec in specs)


@pytest.mark.matrix
@in_turn("name", ready_made(1, 2, 150, 210))
def test_ready_made_functions(launched, kernels, name):
    check(draw("float32", (150, 210), 64), launched, kernels, **on_gpu(ready_made(1, 2, 150, 210)[name].options))


@pytest.mark.matrix
@pytest.mark.parametrize("kernels", ["sm90, two_pass", "sm80, two_pass"], indirect=True)
def test_the_gradient_of_a_functions_array(launched, kernels):
    """Checks it with heads that are left to IEEE arithmetic, a soft cap behind the function, and dropout."""
    lengths = (150, 210)
    inputs = draw("float32", lengths, 64, (2, 2), batch=2)
    inputs[1][1, 70, 1] *= np.float32(1e-5)  # too small beside its neighbours
    options = {"softcap": 2.0, "dropout_p": 0.3, "seed": 5, "score_args": (place(numbers((2, 3), "float32")),)}
    check(inputs, launched, kernels, score_mod=lambda score, b, h, q, k, t: score * t[h, (q + k) % 3], **options)


@pytest.mark.matrix
@in_turn("options", ({}, {"causal": True}, {"window": (6, 3)}))
def test_packed_sequences(launched, kernels, options):
    """Checks empty sequences, some of several tiles, and rows of no sequence, which must not affect results."""
    inputs, given = packed_inputs(64)
    check(inputs, launched, kernels, **given, **options)


def packed_inputs(head_dim: int, head_dim_v: int | None = None) -> tuple[tuple, dict]:
    sequences = ((5, 9), (0, 3), (190, 150), (4, 0), (1, 90), (0, 0), (40, 170))
    offsets = [np.cumsum([70, *lengths]).astype("int32") for lengths in zip(*sequences, strict=True)]
    lengths = tuple(int(ends[-1]) + 3 for ends in offsets)
    inputs = tuple(place(x[0]) for x in draw("float32", lengths, head_dim, head_dim_v=head_dim_v))
    for x, ends in zip(inputs, (offsets[0], offsets[1], offsets[1], offsets[0]), strict=True):
        x[: ends[0]], x[ends[-1] :] = np.nan, np.nan
    return inputs, dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(place, offsets), strict=True))


@pytest.mark.sample(kernels=("sm90, two_pass",))
def test_a_head_of_packed_sequences_that_parts_do_not_represent_is_left_to_ieee_arithmetic(monkeypatch, kernels):
    """One row of one sequence decides for all. The last sequence has one row, in a block of parts of its own."""
    sequences = ((5, 9), (70, 62), (0, 3), (4, 0), (1, 1))
    offsets = [np.cumsum([2, *lengths]).astype("int32") for lengths in zip(*sequences, strict=True)]
    inputs = tuple(place(x[0]) for x in draw("float32", (82, 77), 8, (4, 2)))
    inputs[1][20, 0] *= np.float32(1e-5)  # too small beside its neighbours
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(place, offsets), strict=True))
    left = left_heads(monkeypatch, inputs, kernels, slice(2, 76), **given)
    assert left == heads_by_result(kernels, [[True, True, False, False]], [[True, False]])


@pytest.mark.matrix
@of_mma
def test_a_head_of_one_sequence_that_parts_do_not_represent_is_left_to_ieee_arithmetic(monkeypatch, kernels):
    inputs = draw("float32", (40, 70), 8, (4, 2), batch=2)
    inputs[1][1, 20, 0] *= np.float32(1e-5)  # too small beside its neighbours
    left = left_heads(monkeypatch, inputs, kernels, slice(None))
    assert left == heads_by_result(kernels, [[False] * 4, [True, True, False, False]], [[False] * 2, [True, False]])


def heads_by_result(kernels: Kernels, of_queries: list, of_keys: list) -> list:
    """Lists heads for o, dq, dk and dv. A backward of one pass has no dq of its own: that is a sum."""
    with_dq = [of_queries] if kernels.method == "two_pass" else []
    return [of_queries, *with_dq, of_keys, of_keys]


def left_heads(monkeypatch, inputs: tuple, kernels: Kernels, rows: slice, **options) -> list:
    """Checks a call. Returns, for each kernel that multiplies parts and each of its results, which heads it leaves."""
    left = []

    def look(launch: Launch) -> None:
        own = launch.spec.family_name == kernels.family and not launch.spec.is_fallback
        if own and launch.spec.operation in TILED:
            results = [launch.array(name) for name in ("o", "dq", "dk", "dv") if name in launch.pointers]
            is_left = [np.isnan(x) | (x == 0) for x in results]  # `single_pass` clears what it leaves
            left.extend(x[:, rows].all(axis=(1, 3)).tolist() for x in is_left)

    expected = Expectation(*inputs, causal=True, **options)
    o, *gradients = (place(np.full_like(x, np.nan)) for x in (inputs[0], *inputs[:3]))
    with simulated_gpu(monkeypatch, kernels.device, after=look):
        expected.check(**run(inputs, kernels, out=((o, None), tuple(gradients)), causal=True, **options))
    return left


@pytest.mark.sample(head_dim_v=(72,))
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), ((59, 72), (59, 130), (128, None), (250, None), (32, None), (8, 19), (32, 40), (1, 256))
)
def test_parts_are_scaled_and_lie_as_they_should(monkeypatch, head_dim, head_dim_v):
    """Compares bit for bit, including the zeros beyond the rows and the columns."""
    found = {}

    def look(launch: Launch) -> None:
        if launch.spec.operation == "split_inputs":
            for name in ("q", "k", "v"):
                blocks = launch.values["q_strips" if name == "q" else "k_strips"]
                x = launch.array(name)
                expected = split_parts(x, blocks, columns_of_part(launch.spec, x.shape[-1]))
                for kind, wanted in zip(("parts", "units"), expected, strict=True):
                    found[name, kind] = launch.array(f"{name}_{kind}").copy(), wanted.ravel()

    with simulated_gpu(monkeypatch, after=look):
        inputs = draw("float32", (70, 130), head_dim, (4, 2), batch=2, head_dim_v=head_dim_v)
        forward(*inputs[:3], family="sm90", causal=True)
    assert len(found) == 6
    for name, (own, wanted) in found.items():
        np.testing.assert_array_equal(own, wanted, err_msg=str(name))


# -------------------------------------------------------------------------------------------------- two head dimensions

#: Pairs of head_dims of q and v, of which the last three are beyond 128: these have two passes alone.
PAIRS = ((40, 72), (96, 64), (64, 128), (128, 64), (192, 128), (192, 64), (40, 200))
#: For each kind of kernels, the pairs that they take.
CASES = [(name, pair) for name in BY_NAME for pair in PAIRS if "two_pass" in name or max(pair) <= 128]
CASES = [(name, pair) for name, pair in CASES if "sm90" in name or (sum(pair) <= 256 and pair[1] <= 128)]


def among_nan(x: np.ndarray) -> np.ndarray:
    """Returns a copy in every second head of an array whose other heads are NaN."""
    wide = place(np.full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), np.nan, x.dtype))
    wide[:, :, ::2] = x
    return wide[:, :, ::2]


@pytest.fixture
def without_copies(monkeypatch):
    """Makes calls fail that copy an array."""

    def refuse(self, name: str, array: np.ndarray) -> None:
        raise AssertionError(f"the call copies {name}")

    monkeypatch.setattr(CopyingCall, "_copy", refuse)


def check_pair(launched: list, pair: tuple[int, int]) -> None:
    """Checks that kernels of this pair were launched, and no others."""
    specs = [stage.spec for stage in launched if stage.spec.operation in TILED]
    assert {(spec.head_dim, spec.head_dim_v) for spec in specs} == {pair}


@pytest.mark.usefixtures("without_copies")
@pytest.mark.matrix
@pytest.mark.parametrize(("kernels", "pair"), CASES, indirect=["kernels"], ids=str)
def test_pairs_of_head_dims_in_strided_arrays(launched, kernels, pair):
    inputs = draw("float32", (70, 140), pair[0], head_dim_v=pair[1], view=among_nan)
    q, k, v, do = inputs
    o, *gradients = (among_nan(np.full_like(x, np.nan)) for x in (do, q, k, v))
    results = run(inputs, kernels, causal=True, out=((o, None), tuple(gradients)))
    Expectation(*inputs, causal=True).check(spec=pair, **results)
    check_pair(launched, pair)


@pytest.mark.matrix
@pytest.mark.usefixtures("without_copies")
@pytest.mark.parametrize("call", ("groups", "features", "packed", "dbias"))
def test_calls_of_two_head_dims(launched, kernels, call):
    pair = {"sm90, single_pass": (40, 72), "sm90, two_pass": (136, 72), "sm80, two_pass": (136, 40)}[
        next(name for name, one in BY_NAME.items() if one is kernels)
    ]
    if call == "dbias":
        if kernels.method == "single_pass":
            pytest.skip("only two passes give it")
        check_dbias(launched, kernels, "", pair[0], 2.0, pair[1])
    elif call == "packed":
        inputs, options = packed_inputs(*pair)
        check(inputs, launched, kernels, causal=True, **options)
    else:
        names = ("softcap", "alibi", "bias of keys", "mask of rows", "padding", "sink", "dropout", "window left")
        lengths = (70, 140)
        options = features_of(names, lengths, batch=2) if call == "features" else {"causal": True}
        heads = (2, 1) if call == "features" else (4, 2)
        inputs = draw("float32", lengths, pair[0], heads, batch=2, head_dim_v=pair[1])
        check(inputs, launched, kernels, **options)
    check_pair(launched, pair)


# ------------------------------------------------------------------------------------------------ beyond head_dim 128

of_wide_rows = pytest.mark.parametrize("kernels", ["sm90, two_pass"], indirect=True)


@of_wide_rows
@pytest.mark.matrix
@pytest.mark.parametrize(("head_dim", "causal"), ((130, False), (192, False), (256, True)))
def test_every_wide_head_dim(launched, kernels, head_dim, causal):
    for lengths in LENGTHS:
        check(draw("float32", lengths, head_dim), launched, kernels, causal=causal)


@of_wide_rows
@pytest.mark.matrix
def test_rings_of_few_pieces(launched, kernels):
    tiles = {"forward": (128, 64), "backward_dq": (64, 64), "backward_dkdv": (64, 64)}
    config = {name: TileConfig(*rows, 12, 1) for name, rows in tiles.items()}
    inputs = draw("float32", (150, 200), 200)
    results = run(inputs, kernels, causal=True, config=config)
    Expectation(*inputs, causal=True).check(**results)
    assert {
        stage.spec.tile for stage in launched if stage.spec.family_name == "sm90" and stage.spec.operation in TILED
    } == {*config.values()}


@of_wide_rows
@pytest.mark.matrix
def test_head_groups_of_wide_rows(launched, kernels):
    inputs = draw("float32", (130, 200), 250, (4, 2), batch=2, layout="bhsd")
    check(inputs, launched, kernels, layout="bhsd", causal=True)


@of_wide_rows
@pytest.mark.matrix
def test_the_gradient_of_a_bias_of_wide_rows(launched, kernels):
    check_dbias(launched, kernels, "", 160, 2.0)


@of_wide_rows
@pytest.mark.matrix
@pytest.mark.parametrize("features", (("window", "bias"), ("softcap", "sink", "dropout")), ids="+".join)
def test_features_of_wide_rows(launched, kernels, features):
    """Checks several features at a time: these kernels are the largest, and narrow rows test each feature alone."""
    lengths = (90, 140)
    inputs = draw("float32", lengths, 256)
    dlse = place(numbers((1, 2, 90), "float32"))
    results = check(inputs, launched, kernels, dlse=dlse, **features_of(features, lengths))
    assert ("dsink" in results) == ("sink" in features)


@of_wide_rows
@pytest.mark.matrix
def test_packed_sequences_of_wide_rows(launched, kernels):
    inputs, given = packed_inputs(256)
    check(inputs, launched, kernels, **given, window=(70, 3))


@of_wide_rows
@pytest.mark.matrix
def test_warps_of_wide_rows_may_take_turns_in_any_order(monkeypatch, kernels):
    with simulated_gpu(monkeypatch, HOPPER, seed=1) as launched:
        check(draw("float32", (330, 200), 192, (4, 2)), launched, kernels, causal=True)


@of_wide_rows
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ("large terms", "infinity"))
def test_wide_heads_that_parts_do_not_represent_are_left_to_ieee_arithmetic(launched, kernels, kind):
    inputs = spoil(draw("float32", (100, 110), 200, (4, 2)), kind)
    check_exception(inputs, kind, kernels)


@of_wide_rows
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ("normal", "positive", "channels", "opposite magnitudes", "spread rows"))
def test_errors_of_wide_rows_are_those_of_float32(monkeypatch, kernels, kind):
    check_errors(monkeypatch, kind, 150, 256, kernels)


@of_wide_rows
@pytest.mark.matrix
def test_wide_rows_have_two_passes_by_default_and_no_other_method(launched):
    inputs = draw("float32", (70, 130), 256)
    q, k, v, do = inputs
    own = {"family": "sm90", "causal": True}
    o, lse = forward(q, k, v, **own)
    with pytest.raises(UnsupportedProblemError, match="head_dim=256 is above the 128 of 'single_pass'"):
        backward(q, k, v, o, lse, do, method="single_pass", **own)
    assert launched[-1].spec.operation != "delta"  # nothing has been launched
    launched.clear()
    backward(q, k, v, o, lse, do, **own)
    tiled = [stage.spec.operation for stage in launched if stage.spec.operation in TILED and not stage.spec.is_fallback]
    assert tiled == list(METHODS["two_pass"])


# ---------------------------------------------------------------------------------------- heads left to IEEE arithmetic


def spoil(inputs: tuple, kind: str) -> tuple:
    """Makes the second of two K/V heads an exception, by one of its inputs."""
    q, k, v, do = inputs
    if kind == "small rows":
        k[:, 5:9, 1] *= np.float32(1e-5)
    elif kind == "small columns":
        q[..., 2:, 3] *= np.float32(1e-5)
    elif kind == "tiny":
        v[:, :, 1] *= np.float32(1e-25)
    elif kind == "large terms":
        q[:, :, 2:, 5] *= 12
        k[:, :, 1, 5] *= 12
    elif kind == "large":
        q[:, :, 2:] *= np.float32(1e15)
    else:
        (do if kind == "infinity" else k)[:, 70, -1, 3] = np.inf if kind == "infinity" else np.nan
    return inputs


@pytest.mark.matrix
@in_turn("kind", ("small rows", "small columns", "tiny", "large terms", "large", "infinity", "nan"))
def test_heads_that_parts_do_not_represent_are_left_to_ieee_arithmetic(launched, kernels, kind):
    """All query heads of a group are left, or none: their results have the bits of IEEE arithmetic.

    The fallback of `single_pass` sums lse in other tiles than a forward: last bits of gradients differ.
    """
    check_exception(spoil(draw("float32", (100, 110), 40, (4, 2)), kind), kind, kernels)


def spoiled_dout() -> tuple:
    """Returns data in which only dO of the second K/V head is an exception: the forward multiplies its parts."""
    inputs = draw("float32", (100, 110), 40, (4, 2))
    inputs[3][:, 5:9, 2:] *= np.float32(1e-5)
    return inputs


@pytest.mark.matrix
def test_a_head_that_only_the_backward_leaves_gets_the_lse_of_ieee_arithmetic(launched, kernels):
    """Weights from the lse of parts would all be a little too large, or too small."""
    q, k, v, do = inputs = spoiled_dout()
    own = run(inputs, kernels, causal=True)
    o, lse = forward(q, k, v, causal=True, precision="ieee")
    options = {"causal": True, "precision": "ieee", "method": kernels.method}
    of_ieee = backward(q, k, v, o, lse, do, **options)[2]
    of_parts = backward(q, k, v, o, own["lse"], do, **options)[2]
    assert not np.array_equal(own["lse"][:, 2:], lse[:, 2:])
    assert not np.array_equal(of_parts[:, :, 1], of_ieee[:, :, 1])
    if kernels.method == "two_pass":
        np.testing.assert_array_equal(own["dv"][:, :, 1], of_ieee[:, :, 1])
    else:  # which computes lse in other tiles than the forward
        of_own, of_given = (np.abs(own["dv"] - x)[:, :, 1].sum() for x in (of_ieee, of_parts))
        assert 2 * of_own < of_given


@pytest.mark.matrix
def test_a_head_that_only_the_backward_leaves_keeps_an_lse_of_more_keys(launched, kernels):
    """Parts of the keys may lie on several GPUs, or in a cache."""
    q, k, v, do = inputs = spoiled_dout()
    expected = Expectation(*inputs)
    results = run(inputs, kernels)
    for part in (slice(0, 70), slice(70, 110)):
        more = {"family": kernels.family, "method": kernels.method}
        dk, dv = backward(q, k[:, part], v[:, part], results["o"], results["lse"], do, **more)[1:]
        results["dk"][:, part], results["dv"][:, part] = dk, dv
    expected.check(**results)


def check_exception(inputs: tuple, kind: str, kernels: Kernels) -> None:
    q, k, v, do = inputs
    with np.errstate(invalid="ignore"):
        o, lse = forward(q, k, v, causal=True, precision="ieee")
        given = delta(o, do)  # that of parts has other last bits
        gradients = backward(q, k, v, o, lse, do, delta=given, causal=True, precision="ieee", method=kernels.method)
    results = run(inputs, kernels, given_delta=given, causal=True)
    ieee = dict(zip(("o", "lse", *GRADIENTS), (o, lse, *gradients), strict=True))
    in_forward = kind != "infinity"  # an infinity is in dO alone
    for name, own in results.items():
        heads = own.shape[1] if name == "lse" else own.shape[2]
        axis = 1 if name == "lse" else 2
        first, second = (np.take(x, range(heads // 2), axis) for x in (own, ieee[name]))
        assert np.isfinite(first).all() and not np.array_equal(first, second), name
        if in_forward or name in GRADIENTS:
            last, same = (np.take(x, range(heads // 2, heads), axis) for x in (own, ieee[name]))
            if in_forward and kernels.method == "single_pass" and name in GRADIENTS:
                np.testing.assert_allclose(last, same, 0, 2**-19 * np.nanmax(np.abs(same)), err_msg=name)
            elif in_forward:
                np.testing.assert_array_equal(last, same, err_msg=name)
            else:
                assert np.array_equal(np.isnan(last), np.isnan(same)), name


@of_mma
def test_a_delta_far_beyond_all_products_of_tiny_values_and_gradients(launched, kernels):
    """Sums of dP start from delta in units of V and dO, unless float32 does not hold it there."""
    inputs = draw("float32", (70, 66), 59, (1, 1))
    for x in inputs[2:]:
        x *= np.float32(2.0**-47)
    dlse = place(numbers((1, 1, 70), "float32") * np.float32(2.0**15))
    results = check(inputs, launched, kernels, dlse=dlse, causal=True)
    assert abs(results["dq"]).max() > 1


@pytest.mark.matrix
def test_rows_and_columns_of_zeros_are_no_exception(launched, kernels):
    inputs = draw("float32", (100, 110), 59)
    for x in inputs:
        x[:, 7:70], x[..., 5] = 0, 0
    expected = Expectation(*inputs, causal=True)
    results = run(inputs, kernels, causal=True)
    expected.check(**results)
    o, _ = forward(*inputs[:3], causal=True, precision="ieee")
    assert not np.array_equal(results["o"], o)


# ---------------------------------------------------------------------------------------------------------- accuracy


@of_hopper
@pytest.mark.sample(kind=("positive",), rows=(33,))
@pytest.mark.parametrize(
    ("kind", "rows"),
    [(kind, 130) for kind in KINDS] + [(kind, n) for kind in ("normal", "positive", "channels") for n in (33, 400)],
)
def test_errors_are_those_of_float32(monkeypatch, kernels, kind, rows):
    check_errors(monkeypatch, kind, rows, 59, kernels)


def check_errors(monkeypatch, kind: str, rows: int, head_dim: int, kernels: Kernels) -> None:
    with simulated_gpu(monkeypatch, kernels.device, cuts_sums=True):
        inputs = tuple(map(place, data(kind, rows, head_dim)))
        results = run(inputs, kernels, causal=True)
        del results["lse"]
        if kind == "subnormal":  # its products with small numbers are 0 in float32
            results = {name: results[name] for name in ("o", "dv")}
        check_promise(inputs, results, True, orders_of(kind))


@pytest.mark.matrix
@pytest.mark.parametrize("kernels", ["sm80, two_pass"], indirect=True)
def test_errors_of_sums_over_many_columns(monkeypatch, kernels):
    """Cuts add up if all products of dP have one sign: one chain of 128 columns would have too many on Ampere."""
    check_errors(monkeypatch, "positive", 400, 128, kernels)


@pytest.mark.matrix
@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_errors_are_those_of_float32_for_mixtures(monkeypatch, arch, turn):
    """Checks mixtures drawn by hypothesis, new ones in each turn."""

    @seed(turn)
    @settings(max_examples=2, deadline=None, database=None)
    @given(
        how=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in MIXTURES.items()}),
        rows=st.integers(1, 300),
        causal=st.booleans(),
    )
    def run(how, rows, causal):
        inputs = tuple(map(place, mixture(turn, rows, 64, **how)))
        q, k, v, do = inputs
        o, lse = forward(q, k, v, causal=causal)
        gradients = backward(q, k, v, o, lse, do, causal=causal)
        check_promise(inputs, {"o": o, **dict(zip(GRADIENTS, gradients, strict=True))}, causal, orders_of("mixture"))

    with simulated_gpu(monkeypatch, arch, cuts_sums=True):
        run()


@pytest.mark.matrix
@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_sums_over_keys_are_cut_in_chunks(monkeypatch, arch):
    """Sums over all keys on tensor cores would be an order of magnitude beyond the promise where V is positive."""
    with simulated_gpu(monkeypatch, arch, cuts_sums=True):
        q, k, v, _ = data("positive", 2048, 64)
        q = q[:, :128]
        o, _ = forward(*map(place, (q, k, v)), precision="split")
    exact, plain = (reference_of(q, k, v, dtype) for dtype in ("float64", "float32"))
    error, usual = (float(abs(x - exact).max()) for x in (o[0, :, 0], plain))
    assert error <= 2 * usual + 1e-6 * abs(exact).max(), (error, usual)


def reference_of(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> np.ndarray:
    q, k, v = (x[0, :, 0].astype(dtype) for x in (q, k, v))
    scores = (q @ k.T) * np.dtype(dtype).type(q.shape[1] ** -0.5)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p @ v / p.sum(axis=1, keepdims=True)


@of_mma
def test_the_backward_takes_lse_of_any_precision(launched, kernels):
    inputs = draw("float32", (70, 130), 59)
    q, k, v, do = inputs
    expected = Expectation(*inputs, causal=True)
    o, lse = reference.forward(q, k, v, causal=True)
    o, lse = place(o.astype("float32")), place(lse.astype("float32"))
    gradients = backward(q, k, v, o, lse, do, causal=True, family=kernels.family, method=kernels.method)
    expected.check(**dict(zip(GRADIENTS, gradients, strict=True)))
