"""Functions of scores in kernels, executed without a GPU: forward and both backward methods against the reference."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import accumulator, extras, gradient_names, numbers
from support.simulator import simulated_gpu
from support.traced_cases import on_gpu, ready_made

from fa2cupy import TileConfig, UnsupportedProblemError
from fa2cupy.families.operations import TILED
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

METHODS = ("single_pass", "two_pass")
SHAPE = (2, 2, 21, 30)
NAMES = tuple(ready_made(*SHAPE))
SMALL = TileConfig(32, 32, 2, 2)
#: Tiles by family.
TILES = {
    "simt": TileConfig(8, 8, 2),
    "sm80": {
        "forward": SMALL, "backward_dq": SMALL, "backward": TileConfig(32, 32, 4, 2),
        "backward_dkdv": TileConfig(32, 32, 4, 2),
    },
    "sm90": {
        "forward": TileConfig(64, 48, 8, 2, 2), "backward_dq": TileConfig(64, 48, 8, 2, 2),
        "backward": TileConfig(128, 128, 12, 2), "backward_dkdv": TileConfig(16, 128, 12, 2),
    },
}  # fmt: skip
KINDS = {
    "simt float32": "float32", "simt float64": "float64", "sm80 float16": "float16", "sm80 bfloat16": "bfloat16",
    "sm90 float16": "float16", "sm90 bfloat16": "bfloat16",
}  # fmt: skip
BEFORE_HOPPER = tuple(kind for kind in KINDS if not kind.startswith("sm90"))
ON_HOPPER = tuple(kind for kind in KINDS if kind.startswith("sm90"))
FAMILIES = ("simt float32", "sm80 float16", "sm90 float16")


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch) as stages:
        yield stages


def draw(dtype: str, shape: tuple = SHAPE, **sizes) -> tuple:
    batch, heads, rows, keys = shape
    sizes = {"num_heads": heads, "num_heads_kv": 1, "head_dim": 24, **sizes}
    return make_inputs(dtype, batch=batch, seqlen_q=rows, seqlen_k=keys, **sizes)


def check(
    launched: list,
    kind: str,
    inputs: tuple,
    used: tuple,
    methods: tuple = METHODS,
    dlse=None,
    with_default_tiles: bool = False,
    **options,
) -> None:
    """Checks all results of a call, and that kernels of the family have the features."""
    family = kind.split()[0]
    expected = Expectation(*inputs, dlse=dlse, **options)
    q, k, v, do = map(place, inputs)
    own = {**on_gpu(options), "config": None if with_default_tiles else TILES[family], "family": family}
    o, lse = forward(q, k, v, **own)
    expected.check(o=o, lse=lse)
    switches, names = extras(options), gradient_names(options)
    for method in methods:
        more = {} if dlse is None else {"dlse": place(dlse)}
        gradients = backward(q, k, v, o, lse, do, method=method, **more, **own)
        expected.check(spec=method, **dict(zip(names[:3], gradients, strict=True)))
        if switches and (family == "simt" or method == "two_pass"):  # in 16 bits only two_pass gives them
            gradients = backward(q, k, v, o, lse, do, method=method, **more, **own, **switches)
            expected.check(spec=method, **dict(zip(names, gradients, strict=True)))
    specs = [stage.spec for stage in launched if stage.spec.operation in TILED]
    assert {spec.family_name for spec in specs} == {family}
    assert all(set(used) <= set(spec.features) for spec in specs)


@pytest.mark.sample(kind=("sm80 float16",), name=("alibi",))
@pytest.mark.parametrize("kind", BEFORE_HOPPER)
@pytest.mark.parametrize("name", NAMES)
def test_ready_made_functions(launched, name, kind):
    check_ready_made(launched, name, kind)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "kind"), [(name, ON_HOPPER[i % 2]) for i, name in enumerate(NAMES)])
def test_ready_made_functions_on_hopper(launched, name, kind):
    check_ready_made(launched, name, kind)


def check_ready_made(launched: list, name: str, kind: str) -> None:
    dtype = KINDS[kind]
    case = ready_made(*SHAPE, wide=accumulator(dtype))[name]
    # Functions that are a soft cap or the causal mask run as these keywords do.
    used = {"softcap": ("softcap",), "causal": ()}.get(name, (case.role,))
    check(launched, kind, draw(dtype), used, **case.options)


def low_rank(score, b, h, q, k, x, y, ids, scale):
    return score * scale - np.where(ids[b, k] > 0, np.dot(x[b, h, q], y[h, k]), np.tanh(score))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAMILIES)
def test_arrays_of_all_ranks_and_strides_and_all_other_features(launched, kind):
    x = np.asfortranarray(numbers((2, 2, 21, 4), "float16"))
    arrays = (
        x,
        numbers((2, 30, 4), "float64"),
        np.arange(60, dtype="int64").reshape(2, 30) % 3,
        np.array(0.7, "float32"),
    )
    options = {
        "causal": True, "window": (20, None), "softcap": 3.0, "alibi_slopes": numbers((2,), "float32"),
        "dropout_p": 0.25, "seed": 7,
        "bias": numbers((21, 30), KINDS[kind]), "mask": numbers((21, 30), "float32") < 1.5,
        "sink": numbers((2,), "float32"), "mask_mod": lambda b, h, q, k, t: (q + k + b) % t[h] != 0,
        "mask_args": (np.array([3, 5], "int8"),),
    }  # fmt: skip
    inputs = draw(KINDS[kind])
    check(launched, kind, inputs, ("score_mod", "mask_mod"), score_mod=low_rank, score_args=arrays, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_distance_has_its_own_terms(launched, kind):
    """Checks tiles of the default sizes, in which a lane receives terms from all lanes, in several sets."""
    shape = (1, 2, 140, 170)
    options = ready_made(*shape, wide=accumulator(KINDS[kind]))["relative"].options
    check(launched, kind, draw(KINDS[kind], shape), ("score_mod",), with_default_tiles=True, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAMILIES)
def test_each_head_has_its_own_terms(launched, kind):
    def scaled(score, b, h, q, k, scale, shift):
        return score * np.exp(scale[b, h]) + shift[h] * q

    wide = accumulator(KINDS[kind])
    arrays = (numbers((2, 2), wide), 0.1 * numbers((2,), wide))
    options = {"score_mod": scaled, "score_args": arrays, "alibi_slopes": 0.1 * numbers((2,), wide, 1)}
    check(launched, kind, draw(KINDS[kind]), ("score_mod", "alibi_slopes"), **options)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences(launched, method, kind):
    offsets = {"cu_seqlens_q": np.array([0, 9, 9, 21], "int32"), "cu_seqlens_k": np.array([0, 13, 20, 30], "int32")}
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (3, 30)), axis=1)
    inputs = tuple(x[0] for x in draw(KINDS[kind], (1, 2, 21, 30)))
    check(
        launched, kind, inputs, ("score_mod", "mask_mod"), methods=(method,), **offsets,
        score_mod=lambda score, b, h, q, k, t: score + t[b, h, k], score_args=(numbers((3, 2, 30), "float32"),),
        mask_mod=lambda b, h, q, k, ids: ids[b, q] == ids[b, k], mask_args=(ids,),
    )  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("head_dim", (24, 136))
def test_dropout_of_weights_of_any_sign(launched, kind, head_dim):
    """Checks weights that two warps with the same keys exchange in 16 bits (sm80, and sm90 above head_dim 128)."""
    options = {"score_mod": lambda score, b, h, q, k, t: score * t[k % 3], "dropout_p": 0.4, "seed": 3}
    arrays = (np.array([1.5, -1.0, 0.0], "float32"),)
    inputs = draw(KINDS[kind], (1, 2, 40, 70), head_dim=head_dim)
    used = ("score_mod", "dropout_p")
    check(launched, kind, inputs, used, with_default_tiles=head_dim > 128, score_args=arrays, **options)


@pytest.mark.matrix
@pytest.mark.parametrize("array", ("bias", "mask"))
def test_arrays_over_scores_beside_a_function_on_hopper(launched, array):
    """Checks arrays that warps would hold in shared memory if no other feature needed registers."""
    arrays = {"bias": numbers((21, 30), "float16"), "mask": numbers((21, 30), "float32") < 1.5}
    options = ready_made(*SHAPE)["bounded"].options | {array: arrays[array]}
    check(launched, "sm90 float16", draw("float16"), ("score_mod", array), **options)


@pytest.mark.sample(kind=FAMILIES[1:2])
@pytest.mark.parametrize("kind", FAMILIES)
def test_derivatives_of_hidden_keys_may_be_infinite(launched, kind):
    def rooted(score, b, h, q, k):
        return score * np.sqrt(q + 9 - k)

    options = {"score_mod": rooted, "mask_mod": lambda b, h, q, k: k < q + 9}
    check(launched, kind, draw(KINDS[kind]), ("score_mod", "mask_mod"), methods=("two_pass",), **options)


@pytest.mark.matrix
def test_blocks_that_share_tiles(launched):
    options = ready_made(*SHAPE)["t5_relative"].options | ready_made(*SHAPE)["document"].options
    inputs = draw("float16")
    expected = Expectation(*inputs, **options)
    q, k, v, do = map(place, inputs)
    own = {**on_gpu(options), "config": TILES["sm80"], "family": "sm80", "num_splits": 2}
    o, lse = forward(q, k, v, **own)
    expected.check(o=o, lse=lse)
    for method in METHODS:
        gradients = backward(q, k, v, o, lse, do, method=method, **own)
        expected.check(spec=method, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    assert {spec.is_split for spec in (stage.spec for stage in launched) if spec.operation == "backward"} == {True}


def test_functions_of_the_same_expression_share_kernels_and_prepared_calls(launched):
    q, k, v, _ = map(place, draw("float32"))

    def scaled(factor: float) -> np.ndarray:
        return forward(q, k, v, score_mod=lambda score, b, h, q, k: factor * score, config=TILES["simt"])[0]

    results = [scaled(2.0), scaled(2.0), scaled(3.0)]
    specs = [stage.spec for stage in launched]
    assert specs[0] == specs[1] != specs[2]
    assert len({spec.symbol for spec in specs}) == 2
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_what_kernels_refuse(launched):
    q, k, v, do = map(place, draw("float32"))
    own = on_gpu(ready_made(*SHAPE)["alibi"].options)
    o, lse = forward(q, k, v, config=TILES["simt"], **own)
    launched.clear()
    with pytest.raises(UnsupportedProblemError, match="^return_dscore_args: GPUs sum them atomically; not with det"):
        backward(q, k, v, o, lse, do, return_dscore_args=True, deterministic=True, **own)
    with pytest.raises(ValueError, match=r"^score_args\[0\]: expected at least one element, got shape \(0,\)"):
        forward(q, k, v, score_mod=own["score_mod"], score_args=(place(numbers((0,), "float32")),))
    elsewhere = place(numbers((2,), "float32"))
    elsewhere.device_id = 1
    with pytest.raises(ValueError, match=r"^score_args\[0\]: expected an array on device 0 like q, got device 1"):
        forward(q, k, v, score_mod=own["score_mod"], score_args=(elsewhere,))
    assert not launched
