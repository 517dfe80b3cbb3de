"""Features in the kernels of every family, executed without a GPU.

Forward and both backward methods are compared with the reference. README.md of this folder has the checks of every
launch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.fake_gpu import delta as run_delta
from support.feature_cases import accumulator, booleans, numbers, options_of
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, reversed_columns, shifted

from fa2cupy import TileConfig, reference
from fa2cupy.families.operations import METHODS as OPERATIONS_OF
from fa2cupy.families.operations import TILED
from fa2cupy.gpu import signatures
from fa2cupy.problem import (
    philox,
    softcap,
)
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

METHODS = ("single_pass", "two_pass")
SMALL = TileConfig(32, 32, 2, 2)
#: dtype, head_dim and tiles of kernels, by name; Hopper has another backward above 128 columns.
FAMILIES = {
    "simt": ("float32", 24, TileConfig(8, 8, 2)),
    "simt double": ("float64", 24, TileConfig(8, 8, 2)),
    "sm80": ("float16", 24, {"backward": TileConfig(32, 32, 4, 2), "backward_dkdv": TileConfig(32, 32, 4, 2)}),
    "sm80 wide": ("bfloat16", 160, {"backward": TileConfig(32, 32, 4, 2), "backward_dkdv": TileConfig(32, 32, 4, 2)}),
    "sm90": (
        "float16",
        64,
        {
            "forward": TileConfig(128, 32, 12, 2),
            "backward_dq": TileConfig(128, 32, 12, 2),
            "backward_dkdv": TileConfig(32, 128, 12, 2),
        },
    ),
    "sm90 narrow": (
        "bfloat16",
        24,
        {
            "forward": TileConfig(128, 32, 12, 2),
            "backward": TileConfig(64, 128, 12, 2, 2),
            "backward_dq": TileConfig(128, 32, 12, 2),
            "backward_dkdv": TileConfig(64, 128, 12, 4, 2),
        },
    ),
    "sm90 middle": ("bfloat16", 96, {"forward": TileConfig(128, 48, 12, 2), "backward_dq": TileConfig(128, 48, 12, 3)}),
    "sm90 wide": ("float16", 192, {"forward": TileConfig(128, 48, 12, 2), "backward_dq": TileConfig(128, 48, 12, 2)}),
}
#: (seqlen_q, seqlen_k): ragged, several tiles, more keys than queries and the other way round.
LENGTHS = {"simt": ((21, 30), (30, 21)), "sm80": ((70, 90), (90, 45)), "sm90": ((150, 210), (290, 140))}


#: Families of tests of scores. Hopper kernels treat scores at head_dim 96 as at 64, and tests are slow: 96 is left out.
WITH_OWN_SCORES = [name for name in FAMILIES if name != "sm90 middle"]


def config_of(name: str) -> object:
    tiles = FAMILIES[name][2]
    return {"forward": SMALL, "backward_dq": SMALL, **tiles} if name.startswith("sm80") else tiles


@pytest.fixture(params=FAMILIES)
def family(request, monkeypatch):
    """Provides a key of `FAMILIES` and the stages that were launched."""
    with simulated_gpu(monkeypatch) as launched:
        yield request.param, launched


def draw(name: str, lengths: tuple[int, int], **sizes) -> tuple:
    dtype, head_dim, _ = FAMILIES[name]
    sizes = {"num_heads": 2, "num_heads_kv": 1, **sizes}
    inputs = make_inputs(dtype, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim, **sizes)
    return tuple(place(x) for x in inputs)


def results_by_method(
    name: str, inputs: tuple, methods: tuple = METHODS, *, dlse=None, **options
) -> Iterator[tuple[str, dict]]:
    """Yields the results of the forward, then those of each method of the backward, by name."""
    q, k, v, do = inputs
    own = {"config": config_of(name), "family": name.split()[0]}
    o, lse = forward(q, k, v, **own, **options)
    yield "forward", {"o": o, "lse": lse}
    for method in methods:
        # Only two passes give dbias in 16 bits; one pass would run them for it.
        given = [key for key in ("bias", "sink") if key in options and (key, method) != ("bias", "single_pass")]
        more = {f"return_d{key}": True for key in given}
        gradients = backward(q, k, v, o, lse, do, method=method, dlse=dlse, **more, **own, **options)
        yield method, dict(zip(("dq", "dk", "dv", *(f"d{key}" for key in given)), gradients, strict=True))


def check(
    family: tuple, inputs: tuple, *, used: str | None = None, methods: tuple = METHODS, dlse=None, **options
) -> None:
    """Checks all results of a call, and that its kernels are of the family and have the feature `used`."""
    name, launched = family
    expected = Expectation(*inputs, dlse=dlse, **options)
    for method, results in results_by_method(name, inputs, methods, dlse=dlse, **options):
        expected.check(spec=method, **results)
    specs = [stage.spec for stage in launched if stage.spec.operation in TILED]
    assert {spec.family_name for spec in specs} == {name.split()[0]}
    assert used is None or all(used in spec.features for spec in specs)


def lengths_of(name: str) -> tuple:
    return LENGTHS[name.split()[0]]


def windows() -> list:
    """Returns cases of (causal, window, family): all windows in simt and sm80, some in other families."""
    some = [(False, (9, 4)), (True, (9, None))]
    more = [(False, (0, 0)), (False, (None, 3)), (False, (70, None)), (True, (40, 70))]
    every = {"simt": some + more, "sm80": some + more, "sm90": some + more[1:2]}
    cases = [(*case, name) for name in FAMILIES for case in every.get(name, some)]
    return [pytest.param(*case, id="-".join(map(str, case))) for case in cases]


class TestWindow:
    @pytest.mark.matrix
    @pytest.mark.parametrize(("causal", "window", "family"), windows(), indirect=["family"])
    def test_against_the_reference(self, family, causal, window):
        # There are more keys than queries or fewer, in turn if calls are slow.
        lengths = lengths_of(family[0])
        for pair in lengths if family[0][:4] != "sm90" else lengths[causal:][:1]:
            check(family, draw(family[0], pair), causal=causal, window=window, used="window")

    @pytest.mark.sample(family=("simt", "sm80"))
    def test_keys_outside_the_band_are_not_loaded(self, family):
        name = family[0]
        rows = 40 if name.startswith("simt") else 300
        q, k, v, do = draw(name, (rows, rows), num_heads=1)
        own = {"config": config_of(name), "family": name.split()[0], "window": (3, 2)}
        o, lse = forward(q, k, v, **own)
        k[:, -1], v[:, -1] = np.nan, np.nan
        poisoned, _ = forward(q, k, v, **own)
        # NaN reaches only the last tiles, since it is part of their products.
        assert np.array_equal(poisoned[:, : rows // 4], o[:, : rows // 4])


#: Features by their names in `feature_cases.options_of`.
SCORES = (
    "softcap", "alibi", "alibi by batch", "bias", "bias of heads", "bias of keys", "bias of one row",
    "bias of queries", "mask", "mask of rows", "padding", "sink", "dropout",
)  # fmt: skip


def options_for(name: str, rows: tuple[str, ...], lengths: tuple[int, int], batch: int = 1, num_heads: int = 2) -> dict:
    """Returns the keywords of several rows, with arrays on the device."""
    sizes = {"batch": batch, "num_heads": num_heads, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    given = {key: x for row in rows for key, x in options_of(row, FAMILIES[name][0], sizes).items()}
    return {key: place(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}


def dlse_like(inputs: tuple) -> np.ndarray:
    batch, rows, heads, _ = inputs[0].shape
    return place(numbers((batch, heads, rows), accumulator(inputs[0].dtype.name)))


#: Rows for the same code in another width and type: each way to read an array, and features that depend on the type.
OF_OTHER_TYPES = ("softcap", "alibi by batch", "bias of heads", "mask", "padding", "sink", "dropout")
#: Rows on Hopper, where the same lines read a bias of any shape, and both backward kernels use the same weights.
OF_BOTH_ON_HOPPER = ("softcap", "dropout")
ON_HOPPER = (*OF_BOTH_ON_HOPPER, "bias", "mask of rows", "alibi by batch", "padding", "sink")


EVERY_FEATURE = ("softcap", "alibi", "bias of keys", "mask", "padding", "sink", "dropout", "window left")


def several_scores() -> list:
    pair, windowed = ("softcap", "dropout"), ("alibi by batch", "padding", "dropout", "window")
    arrays = ("softcap", "bias of heads", "mask of rows", "sink")
    cases = [(rows, name) for name in ("simt", "sm80") for rows in (pair, windowed, arrays, EVERY_FEATURE)]
    cases += [(windowed, "simt double"), (EVERY_FEATURE, "simt double"), (arrays, "sm80 wide")]
    cases += [(EVERY_FEATURE, "sm80 wide"), (pair, "sm90 wide"), (EVERY_FEATURE, "sm90"), (arrays, "sm90 narrow")]
    return [pytest.param(*case, id=f"{'+'.join(case[0])}-{case[1]}") for case in cases]


def each_score() -> list[tuple[str, str]]:
    skipped = dict.fromkeys(("sm90", "sm90 narrow"), set(SCORES) - set(ON_HOPPER))
    skipped["sm90 wide"] = set(SCORES) - set(OF_BOTH_ON_HOPPER)
    skipped |= dict.fromkeys(("simt double", "sm80 wide"), set(SCORES) - set(OF_OTHER_TYPES))
    return [(row, name) for row in SCORES for name in WITH_OWN_SCORES if row not in skipped.get(name, ())]


class TestScores:
    @pytest.mark.matrix
    @pytest.mark.parametrize(("row", "family"), each_score(), indirect=["family"])
    def test_each_feature(self, family, row):
        lengths = lengths_of(family[0])[0]
        inputs = draw(family[0], lengths)
        # A bias that is the same for all keys has the gradient 0 unless lse has one.
        dlse = dlse_like(inputs) if row == "bias of queries" else None
        check(family, inputs, causal=True, dlse=dlse, **options_for(family[0], (row,), lengths))

    @pytest.mark.sample(family=("sm80",), rows=(("sink", "softcap"),))
    @pytest.mark.parametrize(
        ("rows", "family"),
        [((), name) for name in WITH_OWN_SCORES if name != "sm90"]
        + [(("sink", "softcap"), name) for name in WITH_OWN_SCORES if name != "sm90 wide"],
        indirect=["family"],
        ids=str,
    )
    def test_a_gradient_for_lse(self, family, rows):
        lengths = lengths_of(family[0])[0]
        inputs = draw(family[0], lengths, batch=2)
        options = options_for(family[0], rows, lengths)
        check(family, inputs, dlse=dlse_like(inputs), **options)

    @pytest.mark.matrix
    @pytest.mark.parametrize("family", ["simt", "sm80", "sm90"], indirect=True)
    def test_hidden_elements_of_a_bias_are_ignored_and_a_sink_of_minus_infinity_is_none(self, family):
        lengths = (40, 50)
        inputs = draw(family[0], lengths)
        options = options_for(family[0], ("bias", "mask of rows"), lengths)
        bias, mask = options["bias"], options["mask"]
        behind = np.arange(50) > np.arange(40)[:, None] + 10
        hidden = np.broadcast_to(behind | ~np.asarray(mask), bias.shape)
        bias[hidden] = np.nan
        sink = place(np.array([-np.inf, 0.5], accumulator(inputs[0].dtype.name)))
        check(family, inputs, causal=True, sink=sink, **options)

    @pytest.mark.sample(family=("sm80",), rows=(EVERY_FEATURE,))
    @pytest.mark.parametrize(("rows", "family"), several_scores(), indirect=["family"])
    def test_several(self, family, rows):
        lengths = lengths_of(family[0])[0]
        batch = 1 if family[0].startswith("sm90") else 2  # sm90 is slow
        inputs = draw(family[0], lengths, batch=batch)
        check(family, inputs, **options_for(family[0], rows, lengths, batch=batch))


@pytest.mark.parametrize(
    "rows",
    (
        pytest.param(("window right", "alibi by batch", "bias of heads", "mask of rows"), marks=pytest.mark.matrix),
        ("window left", "softcap", "alibi", "bias of queries", "mask", "padding"),
    ),
    ids="+".join,
)
@pytest.mark.parametrize("family", ["simt"], indirect=True)
def test_arrays_of_all_shapes_and_windows_of_one_side(family, rows):
    """Checks groups of heads in two sequences: a wrong stride or number would take another element."""
    inputs = draw("simt", (21, 30), num_heads=4, num_heads_kv=2, batch=2)
    options = options_for("simt", rows, (21, 30), batch=2, num_heads=4)
    check(family, inputs, dlse=dlse_like(inputs), **options)


@pytest.mark.sample(rows=(("bias", "sink"),))
@pytest.mark.parametrize("rows", (("bias", "sink"), ("mask",)), ids="+".join)
@pytest.mark.parametrize("family", ["sm90"], indirect=True)
def test_arrays_that_hopper_copies_to_shared_memory(family, rows):
    """Checks rows aligned to 16 bytes, of several tiles. The matrix has the backward."""
    lengths = (70, 144)
    inputs = make_inputs("float16", seqlen_q=70, seqlen_k=144, num_heads=2, num_heads_kv=1, head_dim=8)
    options = options_for("sm90", rows, lengths)
    check(family, tuple(map(place, inputs)), methods=(), causal=True, **options)


ROWS_AND_KEYS = {"sm80": (48, 64), "sm90": (64, 128)}


def small_case(name: str, **sizes) -> tuple:
    return draw(name, ROWS_AND_KEYS[name], num_heads=1, **sizes)


def capped_lse(inputs: tuple, cap: float, tanh) -> np.ndarray:
    """Returns lse of capped scores, by any tanh, in float64."""
    q, k = (np.asarray(x[0, :, 0], "float64") for x in inputs[:2])
    scores = cap * tanh(q @ k.T / math.sqrt(q.shape[1]) / cap)
    return np.log(np.exp(scores).sum(axis=1))


def polynomial(x: np.ndarray) -> np.ndarray:
    fit = softcap.FITS[0]
    return x * (fit.a + fit.b * x**2 + fit.c * x**4)


@pytest.mark.parametrize("family", ROWS_AND_KEYS, indirect=True)
class TestCap:
    """Scores of a warp's 16 rows at a time are capped by a polynomial if all of them are small, else by tanh."""

    CAP = 8.0

    @pytest.mark.sample(family=("sm80",))
    def test_small_scores_and_large_ones_in_their_own_warps_and_in_one(self, family):
        inputs = small_case(family[0])
        inputs[0][:, 16:32] *= 30
        inputs[0][:, 37] *= 30
        check(family, inputs, softcap=self.CAP)

    @pytest.mark.sample(family=("sm80",))
    def test_small_scores_take_the_polynomial_and_no_others(self, family):
        inputs = small_case(family[0])
        q, k = inputs[0], inputs[1]
        k[...] = k[:, :1]  # a query has one score for all keys, and lse is log(keys) above it
        scores = np.asarray(q[0, :, 0], "float64") @ np.asarray(k[0, 0, 0], "float64") / math.sqrt(q.shape[3])
        wanted = np.where(np.arange(q.shape[1]) < 16, 0.9, 1.1) * softcap.FITS[0].largest * self.CAP
        q *= (wanted / abs(scores))[None, :, None, None].astype(q.dtype)
        _, lse = run_forward(family, inputs, softcap=self.CAP)
        by_polynomial, by_tanh = (capped_lse(inputs, self.CAP, tanh) for tanh in (polynomial, np.tanh))
        off_polynomial, off_tanh = abs(lse[0, 0] - by_polynomial), abs(lse[0, 0] - by_tanh)
        assert off_polynomial[:16].mean() < off_tanh[:16].mean() / 2  # products are rounded, too
        assert off_tanh[16:].mean() < off_polynomial[16:].mean() / 5

    @pytest.mark.sample(family=("sm80",))
    @pytest.mark.parametrize(("cap", "magnitude"), [(1e4, 12.0), (1e5, 5.0), (1e6, 1.0), (1e8, 1.0)])
    def test_a_large_cap_leaves_scores_as_they_are(self, family, cap, magnitude):
        """Errors of tanh are multiplied by the cap. Scores far below the cap must not have them."""
        inputs = small_case(family[0], magnitude=magnitude)
        expected = Expectation(*inputs, softcap=cap)
        o, lse = run_forward(family, inputs, softcap=cap)
        expected.check(o=o, lse=lse)

    @pytest.mark.sample(family=("sm90",), limits=({"window": (70, 9)},))
    @pytest.mark.parametrize("limits", [{}, {"causal": True}, {"window": (70, 9)}, {"window": (3, 0)}], ids=str)
    def test_limits(self, family, limits):
        """Checks key tiles with and without the mask, in odd and even numbers."""
        inputs = draw(family[0], (230, 290) if family[0].startswith("sm90") else (70, 90))
        check(family, inputs, methods=(), softcap=self.CAP, used="softcap", **limits)

    @pytest.mark.sample(family=("sm80",))
    def test_gradients_under_a_large_cap(self, family):
        check(family, small_case(family[0]), softcap=1e6)

    @pytest.mark.sample(family=("sm80",))
    def test_infinities_are_the_cap_and_nan_is_nan(self, family):
        inputs = small_case(family[0])
        q, k, v, _ = inputs
        q[..., 0] = np.where(q[..., 0] < 0, -1, 1)
        k[0, 5, 0, 0], k[0, 40, 0, 0], q[0, 3] = np.inf, -np.inf, np.nan
        o, lse = run_forward(family, inputs, softcap=2.0)
        assert np.isnan(np.asarray(o, "float32")[0, 3]).all() and np.isnan(lse[0, 0, 3])
        others = np.arange(q.shape[1]) != 3
        assert np.isfinite(np.asarray(o, "float32")[0, others]).all()
        np.testing.assert_allclose(lse[0, 0, others], capped_lse(inputs, 2.0, np.tanh)[others], rtol=0, atol=2e-5)


#: (axes along which a bias repeats, number of keys).
BIASES = (("", 61), ("", 64), ("b", 62), ("q", 61), ("k", 64), ("qk", 61), ("bhq", 64))


class TestDbias:
    """Elements share sums along axes that the bias repeats, and are added in pairs if rows begin on even elements.

    If it repeats along no axis, they are stored, in vectors if rows are contiguous and aligned.
    """

    @pytest.mark.sample(family=("sm80",))
    @pytest.mark.parametrize(
        ("family", "repeated", "keys"),
        [(name, *shape) for name in ("simt", "sm80") for shape in BIASES] + [("sm90", "", 64), ("sm90", "q", 61)],
        indirect=["family"],
    )
    def test_of_any_shape(self, family, repeated, keys):
        rows = 40
        inputs = draw(family[0], (rows, keys), batch=2)
        shape = tuple(1 if axis in repeated else n for axis, n in zip("bhqk", (2, 2, rows, keys), strict=True))
        # A bias that is the same for all keys has the gradient 0 unless lse has one.
        dlse = dlse_like(inputs) if "k" in repeated else None
        bias = place(numbers(shape, FAMILIES[family[0]][0]))
        check(family, inputs, methods=("two_pass",), dlse=dlse, causal=True, bias=bias)

    @pytest.mark.matrix
    @pytest.mark.parametrize("family", ["simt", "sm80", "sm90 wide"], indirect=True)
    def test_under_a_cap_that_takes_its_derivative_afterwards(self, family):
        inputs = draw(family[0], (40, 61))
        inputs[0][:, :16] *= 30  # these take tanh, others the polynomial
        bias = place(numbers((1, 2, 40, 61), FAMILIES[family[0]][0]))
        check(family, inputs, methods=("two_pass",), softcap=2.0, bias=bias)

    @pytest.mark.sample(family=("sm80",), view=(place,))
    @pytest.mark.parametrize(
        ("family", "view", "dtype"),
        [
            (name, *how)
            for name in ("simt", "sm80", "sm90", "sm90 wide")
            for how in ((place, "own"), (gapped, "own"), (reversed_columns, "float32"), (shifted, "own"))
            if name != "sm90 wide" or how[0] in (place, gapped)
        ],
        indirect=["family"],
        ids=lambda value: getattr(value, "__name__", value),
    )
    def test_of_a_full_bias_into_an_array_of_the_callers_with_tiles_that_are_skipped(self, family, view, dtype):
        name, launched = family
        rows, keys = {"simt": (40, 64), "sm80": (70, 200), "sm90": (150, 264)}[name.split()[0]]
        inputs = draw(name, (rows, keys))
        bias = place(numbers((1, 2, rows, keys), FAMILIES[name][0] if dtype == "own" else dtype))
        given = view(np.full(bias.shape, np.nan, bias.dtype))
        options = {"bias": bias, "window": (9, 4)}
        o, lse = reference.forward(*inputs[:3], **options)
        o, lse = place(o.astype(inputs[0].dtype)), place(lse.astype(accumulator(FAMILIES[name][0])))
        own = {"config": config_of(name), "family": name.split()[0], "return_dbias": True, "deterministic": True}
        *_, dbias = backward(*inputs[:3], o, lse, inputs[3], out=(None, None, None, given), **own, **options)
        assert dbias is given
        distances = np.arange(keys) - np.arange(rows)[:, None] - (keys - rows)
        assert not np.asarray(dbias, "float64")[..., (distances < -9) | (distances > 4)].any()
        Expectation(*inputs, **options).check(dbias=dbias)
        (stage,) = (stage for stage in launched if stage.spec.operation == "backward_dq")
        assert "full_dbias" in stage.spec.features


#: Rows and a tile for Hopper's kernels; rows of a bias are permuted or padded in shared memory.
HELD_BY = {
    "forward": (150, TileConfig(128, 64, 12, 2)),
    "forward padded": (150, TileConfig(128, 48, 12, 2)),
    "backward_dq": (150, TileConfig(128, 64, 12, 2)),
    "backward_dq padded": (90, TileConfig(64, 48, 8, 2, 2)),
    "single_pass": (150, None),
    "backward_dkdv": (150, None),
}


class TestArraysInSharedMemory:
    """Hopper's kernels copy rows of 16-bit biases and of masks that begin on 16 bytes, one step ahead."""

    @pytest.mark.matrix
    @pytest.mark.parametrize(("causal", "shape"), ((True, "bhqk"), (False, "hk")))
    @pytest.mark.parametrize("kernel", HELD_BY)
    @pytest.mark.parametrize("array", ("bias", "mask"))
    def test_against_the_reference(self, monkeypatch, array, kernel, causal, shape):
        rows, tile = HELD_BY[kernel]
        keys = 176  # so that rows begin on 16 bytes
        operation = kernel.split()[0]
        inputs = draw("sm90", (rows, keys), num_heads=4, num_heads_kv=2)
        shape = tuple(n if axis in shape else 1 for axis, n in zip("bhqk", (1, 4, rows, keys), strict=True))
        options = {array: place(numbers(shape, "float16") if array == "bias" else booleans(shape)), "causal": causal}
        with simulated_gpu(monkeypatch) as launched:
            self.check(operation, inputs, {operation: tile} if tile else None, options)
        (spec,) = {
            stage.spec for stage in launched if stage.spec.operation == operation.replace("single_pass", "backward")
        }
        without = dataclasses.replace(spec, features=tuple(name for name in spec.features if name != array))
        assert (spec.family_name, spec.shared_memory_bytes > without.shared_memory_bytes) == ("sm90", True)

    @staticmethod
    def check(operation: str, inputs: tuple, config: dict | None, options: dict, expected=None) -> None:
        expected = expected or Expectation(*inputs, **options)
        if operation == "forward":
            o, lse = forward(*inputs[:3], family="sm90", config=config, **options)
            expected.check(o=o, lse=lse)
            return
        o, lse = reference.forward(*inputs[:3], **options)
        o, lse = place(o.astype("float16")), place(lse.astype("float32"))
        method = "single_pass" if operation == "single_pass" else "two_pass"
        (*gradients,) = backward(*inputs[:3], o, lse, inputs[3], family="sm90", method=method, config=config, **options)
        expected.check(spec=operation, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))

    @pytest.mark.sample(causal=(True,), method=("single_pass",))
    @pytest.mark.parametrize("causal", (True, False))
    @pytest.mark.parametrize("method", METHODS)
    def test_two_blocks_of_a_multiprocessor(self, monkeypatch, method, causal):
        """They copy a bias for both parts of a tile's queries."""
        rows, keys = 330, 176
        inputs = draw("sm90 narrow", (rows, keys), num_heads=4, num_heads_kv=2)
        padding = {} if causal else {"key_padding_mask": place(booleans((1, keys)))}
        options = {"bias": place(numbers((1, 4, rows, keys), "bfloat16")), "causal": causal, **padding}
        with simulated_gpu(monkeypatch) as launched:
            o, lse = reference.forward(*inputs[:3], **options)
            o, lse = place(o.astype("bfloat16")), place(lse.astype("float32"))
            config = {name: FAMILIES["sm90 narrow"][2][name] for name in OPERATIONS_OF[method]}
            own = {"family": "sm90", "method": method, "config": config, "num_splits": 1}  # so that rings go round
            (*gradients,) = backward(*inputs[:3], o, lse, inputs[3], **own, **options)
        Expectation(*inputs, **options).check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
        (spec,) = {stage.spec for stage in launched if stage.spec.tile.blocks_per_sm == 2}
        without = dataclasses.replace(spec, features=tuple(name for name in spec.features if name != "bias"))
        assert spec.shared_memory_bytes > without.shared_memory_bytes

    @pytest.mark.matrix
    @pytest.mark.parametrize("array", ("bias", "mask"))
    def test_keys_past_the_end_of_a_row_are_not_read(self, monkeypatch, array):
        """Rows begin on 16 bytes and end elsewhere."""
        rows, keys, shape = 70, 85, (1, 2, 70, 96)
        inputs = draw("sm90", (rows, keys))
        wide = place(numbers(shape, "float16") if array == "bias" else booleans(shape))
        with simulated_gpu(monkeypatch):
            self.check("forward", inputs, {"forward": TileConfig(128, 64, 12, 2)}, {array: wide[..., :keys]})

    @pytest.mark.sample(operation=("forward",))
    @pytest.mark.parametrize("operation", ("forward", "backward_dkdv"))
    def test_any_byte_of_a_mask_but_zero_is_true(self, monkeypatch, operation):
        """Views of other types as booleans have such bytes."""
        rows, keys = 40, 48
        inputs = draw("sm90", (rows, keys))
        given = np.random.default_rng(0).choice(np.uint8([0, 1, 2, 127, 128, 255]), (1, 2, rows, keys))
        expected = Expectation(*inputs, mask=given != 0)
        config = {"forward": TileConfig(64, 64, 8, 2, 2)}
        with simulated_gpu(monkeypatch):
            self.check(operation, inputs, config, {"mask": place(given.view(bool))}, expected)


class TestAlibi:
    @pytest.mark.matrix
    @pytest.mark.parametrize("lengths", [(48, 96), (112, 40)], ids=str)
    @pytest.mark.parametrize("rows", [("alibi",), ("softcap", "alibi")], ids="+".join)
    @pytest.mark.parametrize("family", ROWS_AND_KEYS, indirect=True)
    def test_on_both_sides_of_the_diagonal(self, family, rows, lengths):
        """Checks slopes of both signs."""
        inputs = draw(family[0], lengths, num_heads_kv=2)
        options = options_for(family[0], rows, lengths)
        assert (np.sign(options["alibi_slopes"]) == (1, -1)).all()
        check(family, inputs, **options)

    @pytest.mark.matrix
    def test_a_scale_that_is_not_positive(self, monkeypatch):
        with simulated_gpu(monkeypatch):
            q, k, v, do = small_case("sm80")
            for rows in (("alibi", "mask"), ("alibi", "softcap")):
                options = options_for("sm80", rows, ROWS_AND_KEYS["sm80"])
                options["alibi_slopes"] = options["alibi_slopes"][:1]
                options = {key: x[:, :1] if key == "mask" else x for key, x in options.items()}
                for scale in (-0.3, 0.0):
                    expected = Expectation(q, k, v, do, softmax_scale=scale, **options)
                    o, lse = forward(q, k, v, scale=scale, config=SMALL, **options)
                    expected.check(o=o, lse=lse)
                    gradients = backward(q, k, v, o, lse, do, scale=scale, method="two_pass", config=SMALL, **options)
                    expected.check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.sample(layout=("bhsd",), name=("sm80",), head_dims=((20, 24),))
@pytest.mark.parametrize("head_dims", [(24, 16), (20, 24), (64, 80)], ids=str)
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("name", ("simt", "sm80"))
def test_values_with_a_head_dim_of_their_own(monkeypatch, name, layout, head_dims):
    sizes = {"seqlen_q": 20, "seqlen_k": 27, "num_heads": 2, "num_heads_kv": 1, "layout": layout}
    inputs = make_inputs(FAMILIES[name][0], head_dim=head_dims[0], head_dim_v=head_dims[1], **sizes)
    with simulated_gpu(monkeypatch) as launched:
        check((name, launched), tuple(map(place, inputs)), layout=layout, causal=True)


#: (queries, keys) of each sequence, some of them 0.
SHORT = ((5, 9), (0, 3), (40, 17), (4, 0), (1, 70), (0, 0), (35, 37))
SEQUENCES = {"simt": SHORT, "sm80": SHORT, "sm90": ((5, 9), (0, 3), (190, 150), (4, 0), (1, 90), (0, 0), (40, 170))}


#: Unused rows before the first sequence: more than a tile of queries and of keys, and a multiple of neither.
AHEAD = {"simt": 19, "sm80": 67, "sm90": 195}
#: (queries, keys) that some sequences exceed, so that tiles are cut or left out.
LONGEST = {"simt": (30, 20), "sm80": (30, 40), "sm90": (140, 100)}
RESULTS = {"o", "lse", "dq", "dk", "dv"}  # with a row for each row of an input

PACKED_FAMILIES = [name for name in FAMILIES if name != "sm90 middle"]


@pytest.fixture(params=PACKED_FAMILIES)
def packed_family(request, monkeypatch):
    with simulated_gpu(monkeypatch) as launched:
        yield request.param, launched


def packed_cases() -> list:
    """Returns cases of (family, options, True if the longest lengths are given), the last in turn if calls are slow."""
    options = ({}, {"causal": True}, {"window": (6, 3)})
    cases = [(name, given, longest) for name in PACKED_FAMILIES for given in options for longest in (False, True)]
    cases = [case for case in cases if case[0] in ("simt", "sm80") or case[2] != bool(case[1].get("causal"))]
    return [pytest.param(*case, id=f"{case[0]}-{case[1]}-{'known' if case[2] else 'unknown'}") for case in cases]


def longest_of(name: str) -> dict[str, int]:
    queries, keys = (max(lengths) for lengths in zip(*SEQUENCES[name.split()[0]], strict=True))
    return {"max_seqlen_q": queries, "max_seqlen_k": keys}


class TestPackedSequences:
    @staticmethod
    def draw(name: str, before: int = 0, behind: int = 0, **sizes) -> tuple[tuple, dict]:
        sequences = SEQUENCES[name.split()[0]]
        offsets = [np.cumsum([before, *lengths]).astype("int32") for lengths in zip(*sequences, strict=True)]
        rows = [int(ends[-1]) + behind for ends in offsets]
        inputs = tuple(place(x[0]) for x in draw(name, tuple(rows), **sizes))
        for x, of_queries in zip(
            inputs, (True, False, False, True), strict=True
        ):  # rows of no sequence must not affect results
            x[:before], x[offsets[not of_queries][-1] :] = np.nan, np.nan
        return inputs, {"cu_seqlens_q": place(offsets[0]), "cu_seqlens_k": place(offsets[1])}

    @pytest.mark.sample(packed_family=("simt", "sm80"), options=({"causal": True},), longest=(False,))
    @pytest.mark.parametrize(("packed_family", "options", "longest"), packed_cases(), indirect=["packed_family"])
    def test_against_the_reference(self, packed_family, options, longest):
        inputs, offsets = self.draw(packed_family[0], before=AHEAD[packed_family[0].split()[0]], behind=4)
        lengths = longest_of(packed_family[0]) if longest else {}
        dlse = place(numbers(inputs[0].shape[1::-1], accumulator(inputs[0].dtype.name)))
        check(packed_family, inputs, used="cu_seqlens", dlse=dlse, **offsets, **lengths, **options)

    @pytest.mark.sample(method=("two_pass",))
    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("family", ["sm90"], indirect=True)
    def test_short_ones_on_hopper(self, family, method):
        """Checks sequences without a query, whose kernels write no gradient, without a key, and of several tiles."""
        sequences = ((5, 9), (0, 7), (70, 140), (4, 0), (1, 1))
        offsets = [np.cumsum([2, *lengths]).astype("int32") for lengths in zip(*sequences, strict=True)]
        inputs = make_inputs("float16", seqlen_q=85, seqlen_k=160, num_heads=4, num_heads_kv=2, head_dim=8)
        given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(place, offsets), strict=True))
        check(family, tuple(place(x[0]) for x in inputs), used="cu_seqlens", methods=(method,), causal=True, **given)

    @pytest.mark.matrix
    @pytest.mark.parametrize("packed_family", [name for name in PACKED_FAMILIES if name != "sm90 wide"], indirect=True)
    def test_with_features(self, packed_family):
        name = packed_family[0]
        inputs, offsets = self.draw(name, behind=2, num_heads=4, num_heads_kv=2)
        longest = longest_of(name)
        rows, keys = longest.values()
        sizes = {"batch": len(SHORT), "num_heads": 4, "seqlen_q": rows, "seqlen_k": keys}
        names = ("bias of heads", "mask of rows", "alibi by batch", "sink", "dropout")
        features = {key: x for row in names for key, x in options_of(row, FAMILIES[name][0], sizes).items()}
        features["key_padding_mask"] = numbers((len(SHORT), keys), "float32", 3) < 0.7
        features = {key: place(x) if isinstance(x, np.ndarray) else x for key, x in features.items()}
        check(packed_family, inputs, **longest, **offsets, **features, causal=True, softcap=2.0)

    @pytest.mark.sample(packed_family=("sm80",))
    @pytest.mark.parametrize("packed_family", [name for name in PACKED_FAMILIES if name != "sm90 wide"], indirect=True)
    def test_a_bias_of_each_sequence(self, packed_family):
        """Its gradient is zero where a sequence has no row or no key."""
        name = packed_family[0]
        inputs, offsets = self.draw(name, behind=2)
        longest = longest_of(name)
        longest["max_seqlen_k"] = -(-longest["max_seqlen_k"] // 8) * 8  # so that rows begin on 16 bytes
        shape = (len(SHORT), 2, *longest.values())
        bias = place(numbers(shape, FAMILIES[name][0]))
        check(packed_family, inputs, methods=("two_pass",), bias=bias, causal=True, **longest, **offsets)

    @pytest.mark.matrix
    @pytest.mark.parametrize("packed_family", [name for name in PACKED_FAMILIES if name != "sm90 wide"], indirect=True)
    def test_rows_beyond_the_longest_length_are_of_no_sequence(self, packed_family):
        """Checks this with arrays over scores, which have the shape of the longest lengths."""
        name = packed_family[0]
        longest = LONGEST[name.split()[0]]
        inputs, offsets = self.draw(name, before=AHEAD[name.split()[0]], behind=2)
        firsts = [np.asarray(x[:-1]) for x in offsets.values()]
        lengths = [
            np.minimum(np.diff(x), most) for x, most in zip(map(np.asarray, offsets.values()), longest, strict=True)
        ]
        of_queries, of_keys = (
            np.concatenate([first + np.arange(n) for first, n in zip(*side, strict=True)])
            for side in zip(firsts, lengths, strict=True)
        )
        rows = {
            name: of_keys if name in ("k", "v", "dk", "dv") else of_queries for name in ("q", "k", "v", "do", *RESULTS)
        }
        alone = tuple(place(x[rows[n]]) for n, x in zip(("q", "k", "v", "do"), inputs, strict=True))
        for n, x in zip(("q", "k", "v", "do"), inputs, strict=True):
            x[np.isin(np.arange(len(x)), rows[n], invert=True)] = np.nan
        scores = ("mask of rows", "alibi by batch", "bias of heads", "dropout")
        options = options_for(name, scores, longest, batch=len(SHORT)) | {"causal": True}
        options["key_padding_mask"] = place(numbers((len(SHORT), longest[1]), "float32", 3) < 0.7)
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True))
        own = {key: place(np.cumsum([0, *n]).astype("int32")) for key, n in zip(offsets, lengths, strict=True)}
        expected = Expectation(*alone, **own, **options)
        for method, results in results_by_method(name, inputs, **offsets, **options):
            for key in results.keys() & RESULTS:
                axis = 1 if key == "lse" else 0
                rest = np.delete(np.asarray(results[key], "float32"), rows[key], axis)
                assert np.isneginf(rest).all() if key == "lse" else not rest.any()
                results[key] = results[key].take(rows[key], axis)
            expected.check(spec=method, **results)

    @pytest.mark.sample(packed_family=("sm80",))
    def test_no_sequence_at_all(self, packed_family):
        name = packed_family[0]
        lengths = (45, 70)
        inputs = tuple(place(x[0]) for x in draw(name, lengths))
        options = options_for(name, ("bias of one row", "sink"), lengths)
        options |= {"mask": place(np.ones((1, 2, *lengths), bool))}
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), place(np.zeros(1, "int32")))
        for _, results in results_by_method(name, inputs, **options):
            assert np.isneginf(results.pop("lse", -np.inf)).all()
            assert not any(np.asarray(x, "float32").any() for x in results.values())

    @pytest.mark.sample(packed_family=("sm80",), wrong=((0, 50, 20, 85),))
    @pytest.mark.parametrize(
        ("packed_family", "wrong"),
        [
            (name, wrong)
            for name in PACKED_FAMILIES
            for wrong in ((0, 50, 20, 85), (-7, 9, 15, 40), (3, 10, 2**31 - 1, 60), (90, 95, 99, 120))
            if name in ("simt", "sm80", "sm90") or wrong[0] == -7
        ],
        indirect=["packed_family"],
    )
    def test_offsets_that_lie_reach_nothing_outside(self, packed_family, wrong, monkeypatch):
        name = packed_family[0]
        q, k, v, do = (place(x[0]) for x in draw(name, (85, 85)))
        offsets = {"cu_seqlens_q": place(np.array(wrong, "int32")), "cu_seqlens_k": place(np.array(wrong, "int32"))}
        own = {"config": config_of(name), "family": name.split()[0], "causal": True, **offsets}
        with simulated_gpu(monkeypatch, block_races=False):  # sequences that share rows are written by several blocks
            o, lse = forward(q, k, v, **own)
            for method in METHODS:
                backward(q, k, v, o, lse, do, method=method, **own)  # the interpreter refuses access outside arrays

    @pytest.mark.sample(packed_family=("sm80",))
    def test_offsets_are_not_read_on_the_host(self, packed_family):
        inputs, offsets = self.draw(packed_family[0])
        q, k, v, _ = inputs
        own = {"config": config_of(packed_family[0]), "family": packed_family[0].split()[0], "causal": True}
        o, _ = forward(q, k, v, **own, **offsets)
        for array in offsets.values():
            array[1:] = array[-1]  # one sequence and six empty ones, in the prepared call
        again, _ = forward(q, k, v, **own, **offsets)
        assert not np.array_equal(o, again)
        Expectation(q, k, v, causal=True, **offsets).check(o=again)


# -------------------------------------------------------------------------------------------------------- before Hopper


@pytest.fixture
def on_ampere(monkeypatch):
    with simulated_gpu(monkeypatch, "sm_80") as launched:
        yield launched
        assert {stage.spec.arch for stage in launched} == {"sm_80"}


@pytest.mark.matrix
class TestBeforeHopper:
    """Code for sm_80 adds up dQ and dbias by other instructions than code of the same kernels for sm_90."""

    @pytest.mark.parametrize(
        ("name", "row"),
        [("sm80", row) for row in ("window", "bias", "bias of heads", "bias of keys", "bias of queries", "dropout")]
        + [("sm80 wide", row) for row in ("softcap", "bias", "mask")],
    )
    def test_each_feature(self, on_ampere, name, row):
        lengths = (40, 64) if row == "bias" else (37, 53)  # dbias in pairs, and an element at a time
        inputs = draw(name, lengths)
        dlse = dlse_like(inputs) if row == "bias of queries" else None
        check((name, on_ampere), inputs, dlse=dlse, causal=row != "window", **options_for(name, (row,), lengths))

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("keys", [61, 64])
    def test_dbias_in_each_dtype(self, on_ampere, dtype, keys):
        name = "sm80" if dtype == "float16" else "sm80 wide"
        inputs = draw(name, (40, keys))
        bias = place(numbers((1, 2, 40, keys), dtype))
        check((name, on_ampere), inputs, methods=("two_pass",), causal=True, bias=bias)

    def test_packed_sequences(self, on_ampere):
        inputs, offsets = TestPackedSequences.draw("sm80", before=AHEAD["sm80"], behind=4)
        check(("sm80", on_ampere), inputs, used="cu_seqlens", causal=True, softcap=2.0, **offsets)

    def test_several(self, on_ampere):
        rows = ("softcap", "alibi", "bias of keys", "mask", "padding", "sink", "dropout", "window left")
        inputs = draw("sm80", (37, 53))
        check(("sm80", on_ampere), inputs, **options_for("sm80", rows, (37, 53)))


# ------------------------------------------------------------------------------------------------------ strided arrays

VIEWS = (gapped, reversed_columns)


def strided(options: dict, view) -> dict:
    return {key: view(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}


class TestStridedArrays:
    """Neighbouring keys of an array over scores, and heads of slopes and sinks, need not be neighbours in memory."""

    @pytest.mark.sample(view=(gapped,), row=("bias",))
    @pytest.mark.parametrize("view", (*VIEWS, shifted), ids=lambda view: view.__name__)
    @pytest.mark.parametrize("row", ["bias", "mask", "padding"])
    @pytest.mark.parametrize("family", ["sm80"], indirect=True)
    def test_each_array_that_is_read_in_pairs(self, family, row, view):
        lengths = (40, 64)  # rows would be read in pairs if contiguous and aligned
        inputs = draw(family[0], lengths)
        options = strided(options_for(family[0], (row,), lengths), view)
        check(family, inputs, methods=("two_pass",), causal=True, **options)

    @pytest.mark.sample(family=("sm80",), view=(gapped,))
    @pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
    @pytest.mark.parametrize("family", ["simt", "sm80", "sm90"], indirect=True)
    def test_all_arrays(self, family, view):
        lengths = (21, 30) if family[0] == "simt" else (37, 61)
        inputs = draw(family[0], lengths, batch=2)
        rows = ("bias", "mask", "padding", "alibi by batch", "sink")
        check(family, inputs, causal=True, **strided(options_for(family[0], rows, lengths, batch=2), view))

    @pytest.mark.matrix
    @pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
    @pytest.mark.parametrize("packed_family", ["simt"], indirect=True)
    def test_offsets(self, packed_family, view):
        inputs, offsets = TestPackedSequences.draw(packed_family[0], before=3, behind=4)
        check(packed_family, inputs, **strided(offsets, view))

    @pytest.mark.matrix
    @pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
    def test_statistics(self, monkeypatch, view):
        """Checks lse, delta and a gradient for lse, alone and together, as slices of larger arrays."""
        with simulated_gpu(monkeypatch):
            q, k, v, do = draw("simt", (21, 30))
            own = {"method": "two_pass", "config": config_of("simt")}
            o, lse = forward(q, k, v, config=config_of("simt"))
            dlse, delta = dlse_like((q,)), run_delta(o, do)
            cases = (
                {"lse": view(lse)},
                {"dlse": view(dlse)},
                {"delta": view(delta)},
                {"delta": view(delta), "dlse": view(dlse)},
            )
            for given in cases:
                expected = Expectation(q, k, v, do, dlse=given.get("dlse"))
                gradients = backward(q, k, v, o, given.pop("lse", lse), do, **given, **own)
                expected.check(spec=tuple(given), **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


# ---------------------------------------------------------------------------------------- hidden rows, extreme scores


class TestHiddenByMasks:
    @pytest.mark.sample(family=("sm80",), causal=(False,))
    @pytest.mark.parametrize(
        ("family", "causal"),
        [
            (name, causal)
            for name in WITH_OWN_SCORES
            for causal in (False, True)
            if name[:4] != "sm90" or causal == (name == "sm90")
        ],
        indirect=["family"],
    )
    def test_rows_and_the_tiles_at_either_end_of_a_row(self, family, causal):
        """Some rows see no key in the first tiles from either end, and some see no key at all."""
        name = family[0]
        rows, keys = {"simt": (21, 30), "sm80": (70, 101), "sm90": (70, 210)}[name.split()[0]]
        tile = {"simt": 8, "sm80": 32, "sm90": 32}[name.split()[0]]
        inputs = draw(name, (rows, keys))
        mask = np.ones((1, 2, rows, keys), bool)
        mask[:, :, 1::4, keys - tile - 3 :] = False
        mask[:, :, 2::4, : tile + 3] = False
        mask[:, :, 3::4, :tile] = mask[:, :, 3::4, keys // tile * tile :] = False
        mask[:, :, 4] = np.arange(keys) == keys // 2
        hidden = np.arange(rows) // (rows // 4) == 1  # rows of a whole warp among them
        mask[:, :, hidden] = False
        sink = place(np.array([-np.inf, 0.5], accumulator(inputs[0].dtype.name)))
        for options in ({}, {"sink": sink}):
            expected = Expectation(*inputs, mask=mask, causal=causal, **options)
            for method, results in results_by_method(name, inputs, mask=place(mask), causal=causal, **options):
                expected.check(spec=method, **results)
                if method == "forward":
                    assert np.isneginf(results["lse"][0, 0, hidden]).all()
                assert not any(
                    np.asarray(results[key][:, hidden], "float32").any() for key in results.keys() & {"o", "dq"}
                )

    @pytest.mark.matrix
    @pytest.mark.parametrize("row", ["padding", "bias"])
    @pytest.mark.parametrize("family", ["simt", "sm80", "sm90"], indirect=True)
    def test_a_sequence_without_a_key(self, family, row):
        lengths = (21, 30) if family[0] == "simt" else (37, 61)
        inputs = draw(family[0], lengths, batch=2)
        options = options_for(family[0], (row,), lengths, batch=2)
        for array in options.values():
            array[0] = False if row == "padding" else -np.inf
        check(family, inputs, methods=("two_pass",), **options)


#: Logits of two heads, above and below all scores; exponentials of the dtype do not reach those of the first head.
SINKS = {"float32": ((200.0, 12.0), (-200.0, -12.0)), "float64": ((2000.0, 12.0), (-2000.0, -12.0))}


class TestSink:
    @pytest.mark.sample(family=("sm80",))
    @pytest.mark.parametrize("family", WITH_OWN_SCORES, indirect=True)
    def test_far_above_and_below_all_scores(self, family):
        name = family[0]
        lengths = (21, 30) if name.startswith("simt") else (70, 90)
        inputs = draw(name, lengths)
        dtype = accumulator(inputs[0].dtype.name)
        for values in SINKS[dtype]:
            check(family, inputs, methods=("two_pass",), causal=True, sink=place(np.array(values, dtype)))

    @pytest.mark.sample(family=("sm80",))
    @pytest.mark.parametrize("family", ["simt", "simt double", "sm80"], indirect=True)
    def test_its_gradient_over_more_rows_than_a_block_has_threads(self, family):
        name, launched = family
        inputs = draw(name, (301, 9), batch=2)
        options = options_for(name, ("sink", "softcap"), (301, 9), batch=2)
        check(family, inputs, methods=("two_pass",), **options)
        assert max(stage.threads for stage in launched if stage.spec.operation == "dsink") < 301


# ---------------------------------------------------------------------------------------------------------- properties


def run_forward(family: tuple, inputs: tuple, **options) -> tuple:
    name = family[0]
    own = {"config": config_of(name), "family": name.split()[0]}
    return forward(*inputs[:3], **own, **options)


class TestProperties:
    @pytest.mark.matrix
    @pytest.mark.parametrize("origin", [(0, 0), (5, 48)], ids=["whole", "part"])
    def test_dropout_is_the_definition_bit_for_bit(self, family, origin):
        """With q = 0 all P are equal, and with the identity for v and do, o and dv show which were kept.

        A part has the heads and queries of a whole call from `origin` on, like a rank of fa2cupy.distributed.
        """
        name = family[0]
        head_dim = FAMILIES[name][1]
        q, k, v, do = draw(name, (head_dim, head_dim), num_heads_kv=2)
        q[...], v[...], do[...] = 0, *[np.eye(head_dim)[:, None].astype(v.dtype)] * 2
        options = {"dropout_p": 0.4, "seed": 2**40 + 77, "dropout_origin": origin}
        o, lse = run_forward(family, (q, k, v), **options)
        heads, rows = (slice(first, first + length) for first, length in zip(origin, (2, head_dim), strict=True))
        kept = philox.kept(0.4, 2**40 + 77, 0, heads, rows, slice(0, head_dim))
        assert np.array_equal(np.asarray(o[0], "float32").transpose(1, 0, 2) != 0, kept)
        options |= {"config": config_of(name), "family": name.split()[0]}
        for method in METHODS:
            _, _, dv = backward(q, k, v, o, lse, do, method=method, **options)
            assert np.array_equal(np.asarray(dv[0], "float32").transpose(1, 2, 0) != 0, kept), method

    @pytest.mark.matrix
    def test_neutral_values_change_no_bit(self, family):
        name = family[0]
        inputs = draw(name, lengths_of(name)[0])
        keys = lengths_of(name)[0][1]
        plain = run_forward(family, inputs)
        for options in ({"window": (keys, keys)}, {"dropout_p": 0.0, "seed": 3}):
            for result, wanted in zip(run_forward(family, inputs, **options), plain, strict=True):
                assert np.array_equal(result, wanted), options

    @pytest.mark.sample(family=("simt",))
    def test_a_sink_of_minus_infinity_is_none(self, family):
        inputs = draw(family[0], lengths_of(family[0])[1])
        sink = place(np.full(2, -np.inf, accumulator(FAMILIES[family[0]][0])))
        o, lse = run_forward(family, inputs, sink=sink, causal=True)
        Expectation(*inputs, causal=True).check(o=o, lse=lse)

    def test_a_seed_travels_with_the_call(self, monkeypatch):
        with simulated_gpu(monkeypatch):
            inputs = tuple(place(x) for x in make_inputs("float32", seqlen_q=8, head_dim=8))
            tile = {"config": TileConfig(8, 8, 2)}
            results = [forward(*inputs[:3], dropout_p=0.5, seed=seed, **tile)[0] for seed in (1, 2**63, 1)]
            assert len(signatures._prepared) == 1
        assert np.array_equal(results[0], results[2]) and not np.array_equal(results[0], results[1])


class TestGradients:
    INPUTS = {"seqlen_q": 20, "seqlen_k": 30, "num_heads": 2, "num_heads_kv": 1, "head_dim": 16}

    def test_a_given_delta_and_a_gradient_for_lse(self, monkeypatch):
        with simulated_gpu(monkeypatch) as launched:
            q, k, v, do = (place(x) for x in make_inputs("float32", **self.INPUTS))
            own = {"config": TileConfig(8, 8, 2), "causal": True}
            o, lse = forward(q, k, v, **own)
            dlse = place(numbers((1, 2, 20), "float32"))
            delta = run_delta(o, do)
            launched.clear()
            gradients = backward(q, k, v, o, lse, do, delta=delta, dlse=dlse, **own)
            assert "delta" not in [stage.spec.operation for stage in launched]
            Expectation(q, k, v, do, dlse=dlse, causal=True).check(
                **dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            )
            with pytest.raises(ValueError, match="^dlse: expected shape"):
                backward(q, k, v, o, lse, do, delta=delta, dlse=place(numbers((1, 1, 20), "float32")), **own)

    @pytest.mark.matrix
    def test_results_into_arrays_of_the_callers(self, monkeypatch):
        with simulated_gpu(monkeypatch):
            q, k, v, do = (place(x) for x in make_inputs("float16", **self.INPUTS))
            bias, sink = place(numbers((2, 1, 30), "float16")), place(numbers((2,), "float32"))
            options = {"bias": bias, "sink": sink, "causal": True}
            expected = Expectation(q, k, v, do, **options)
            o, lse = forward(q, k, v, family="sm80", **options)
            names = ("dq", "dk", "dv", "dbias", "dsink")
            out = tuple(map(place, expected.unwritten(*names)))
            more = {"return_dbias": True, "return_dsink": True}
            results = backward(q, k, v, o, lse, do, family="sm80", out=out, **more, **options)
            assert all(result is given for result, given in zip(results, out, strict=True))
            expected.check(**dict(zip(names, results, strict=True)))
            with pytest.raises(ValueError, match=r"^out \(dbias\): overlaps bias"):
                backward(q, k, v, o, lse, do, family="sm80", out=(None, None, None, bias, None), **more, **options)
