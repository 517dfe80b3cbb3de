"""Features that do not fit: the right exception, a text that names the argument, nothing written or launched."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from support.feature_cases import SIZES, inputs_of, numbers, options_of, run

import fa2cupy
from fa2cupy import UnsupportedProblemError, block_mask, mods
from fa2cupy.families import registry as families
from fa2cupy.families.operations import OF_DIRECTION
from fa2cupy.families.sm80 import SM80
from fa2cupy.jit.params import param_layout
from fa2cupy.problem import strides
from fa2cupy.problem.block_mask import KEY_LISTS, QUERY_LISTS
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.features import ARRAY_KEYWORDS, FEATURES, NO_SETTINGS, FeatureKeywords, FeatureSettings, Sizes
from fa2cupy.problem.function_checks import bound_function
from fa2cupy.problem.softcap import FITS, softcap_values
from fa2cupy.testing import make_inputs

OFFSETS = {"cu_seqlens_q": np.array([0, 20, 37], "int32"), "cu_seqlens_k": np.array([0, 53, 53], "int32")}


class OnlyDlpack:
    def __dlpack__(self):
        raise RuntimeError("not to be called")


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


WRONG = {
    "unknown": ({"windo": (1, 1)}, TypeError, "^unexpected keyword argument 'windo'; did you mean 'window'"),
    "window number": ({"window": 4}, TypeError, r"^window: expected a tuple \(left, right\), got int"),
    "window triple": ({"window": (1, 2, 3)}, TypeError, r"^window: expected a tuple \(left, right\), got 3 elements"),
    "window float": ({"window": (1.0, 2)}, TypeError, r"^window \(left\): expected an int or None, got float"),
    "window bool": ({"window": (1, True)}, TypeError, r"^window \(right\): expected an int or None, got bool"),
    "window -1": (
        {"window": (-1, 0)}, ValueError,
        r"^window \(left\): expected at least 0, or None for no limit, got -1",
    ),
    "softcap zero": ({"softcap": 0.0}, ValueError, "^softcap: expected a positive number, or None for no cap, got 0.0"),
    "softcap nan": ({"softcap": float("nan")}, ValueError, "^softcap: expected a positive number, got nan"),
    "softcap inf": ({"softcap": float("inf")}, ValueError, "^softcap: expected a positive number, got inf"),
    "softcap text": ({"softcap": "50"}, TypeError, "^softcap: expected a real number or None, got str"),
    "slopes list": (
        {"alibi_slopes": [0.1] * 4}, TypeError,
        "^alibi_slopes: expected a numpy.ndarray .* got list",
    ),
    "slopes dtype": (
        {"alibi_slopes": zeros(4, dtype="float64")}, TypeError,
        '^alibi_slopes: expected dtype float32, got float64; write alibi_slopes.astype."float32".',
    ),
    "slopes shape": (
        {"alibi_slopes": zeros(2)}, ValueError,
        r"^alibi_slopes: expected .* broadcast to \(batch, heads\) = \(2, 4\), got \(2,\)",
    ),
    "bias dlpack": ({"bias": OnlyDlpack()}, TypeError, "^bias: expected a numpy.ndarray .*from_dlpack"),
    "bias dtype": ({"bias": zeros(37, 53, dtype="float16")}, TypeError, "^bias: expected dtype float32, got float16"),
    "bias shape": (
        {"bias": zeros(4, 53, 37)}, ValueError,
        r"^bias: expected a shape that can be broadcast to \(batch, .*\) = \(2, 4, 37, 53\), got \(4, 53, 37\)",
    ),
    "bias heads": ({"bias": zeros(2, 2, 37, 53)}, ValueError, "^bias: expected a shape that can be broadcast"),
    "bias rank": ({"bias": zeros(1, 2, 4, 37, 53)}, ValueError, "^bias: expected a shape that can be broadcast"),
    "mask dtype": (
        {"mask": zeros(37, 53)}, TypeError,
        "^mask: expected dtype bool, got float32; write mask != 0 where ones are visible keys, or bias=mask where",
    ),
    "bias bool": (
        {"bias": zeros(37, 53, dtype="bool")}, TypeError,
        "^bias: expected dtype float32, got bool; write mask=bias where True is a visible key",
    ),
    "bias masked": (
        {"bias": np.ma.zeros((37, 53), "float32")}, TypeError,
        "^bias: expected an array without a mask of its own, got a numpy.ma.MaskedArray; pass numpy.ma.getdata of it",
    ),
    "mask masked": ({"mask": np.ma.ones((37, 53), "bool")}, TypeError, "^mask: expected an array without a mask"),
    "mask shape": ({"mask": zeros(37, 50, dtype="bool")}, ValueError, "^mask: expected a shape that can be broadcast"),
    "padding dtype": (
        {"key_padding_mask": zeros(2, 53, dtype="int8")}, TypeError,
        "^key_padding_mask: expected dtype bool, got int8; write key_padding_mask != 0 where ones are visible keys",
    ),
    "padding shape": (
        {"key_padding_mask": zeros(2, dtype="bool")}, ValueError,
        r"^key_padding_mask: expected .* broadcast to \(batch, seqlen_k\) = \(2, 53\), got \(2,\)",
    ),
    "sink dtype": ({"sink": zeros(4, dtype="float16")}, TypeError, "^sink: expected dtype float32, got float16"),
    "sink shape": ({"sink": zeros(1)}, ValueError, r"^sink: expected shape \(4,\) .* got \(1,\)"),
    "dropout one": (
        {"dropout_p": 1.0, "seed": 1}, ValueError,
        "^dropout_p: expected a number from 0 to below 1, got 1.0",
    ),
    "dropout negative": ({"dropout_p": -0.1, "seed": 1}, ValueError, "^dropout_p: expected a number from 0 to below 1"),
    "dropout nan": (
        {"dropout_p": float("nan"), "seed": 1}, ValueError,
        "^dropout_p: expected a number from 0 to below 1",
    ),
    "dropout None": ({"dropout_p": None, "seed": 1}, TypeError, "^dropout_p: expected a real number, got NoneType"),
    "dropout bool": ({"dropout_p": True, "seed": 1}, TypeError, "^dropout_p: expected a real number, got bool"),
    "seed missing": ({"dropout_p": 0.1}, ValueError, "^seed: dropout needs one"),
    "seed float": ({"dropout_p": 0.1, "seed": 1.0}, TypeError, "^seed: expected an int, got float"),
    "seed negative": (
        {"dropout_p": 0.1, "seed": -1}, ValueError,
        r"^seed: expected an int from 0 to below 2\*\*64, got -1",
    ),
    "seed large": ({"seed": 2**64}, ValueError, r"^seed: expected an int from 0 to below 2\*\*64"),
    "packed rank": (OFFSETS, ValueError, r"^cu_seqlens_q: packed sequences need q, k and v of 3 axes .*, got 4"),
    "lengths alone": (
        {"max_seqlen_k": 9}, ValueError,
        "^max_seqlen_k: is for packed sequences, which need cu_seqlens_q",
    ),
}  # fmt: skip
WRONG_PACKED = {
    "one alone": (
        {"cu_seqlens_k": None}, ValueError,
        "^cu_seqlens_k: packed sequences need it together with cu_seqlens_q",
    ),
    "other alone": (
        {"cu_seqlens_q": None}, ValueError,
        "^cu_seqlens_q: packed sequences need it together with cu_seqlens_k",
    ),
    "offsets dtype": (
        {"cu_seqlens_q": np.array([0, 20, 37])}, TypeError,
        '^cu_seqlens_q: expected dtype int32, got int64; write cu_seqlens_q.astype."int32". or .*fa2cupy.cu_seqlens',
    ),
    "offsets list": (
        {"cu_seqlens_q": [0, 20, 37]}, TypeError,
        "^cu_seqlens_q: expected a numpy.ndarray .* got list",
    ),
    "offsets rank": (
        {"cu_seqlens_q": zeros(3, 1, dtype="int32")}, ValueError,
        r"^cu_seqlens_q: expected shape \(batch \+ 1,\)",
    ),
    "offsets none": (
        {"cu_seqlens_q": zeros(0, dtype="int32")}, ValueError,
        r"^cu_seqlens_q: expected shape \(batch \+ 1,\)",
    ),
    "offsets lengths": (
        {"cu_seqlens_k": zeros(4, dtype="int32")}, ValueError,
        r"^cu_seqlens_k: expected shape \(3,\) to match cu_seqlens_q, got \(4,\)",
    ),
    "length float": ({"max_seqlen_q": 20.0}, TypeError, "^max_seqlen_q: expected an int or None, got float"),
    "length negative": ({"max_seqlen_q": -1}, ValueError, "^max_seqlen_q: expected at least 0, got -1"),
    "slopes batch": ({"alibi_slopes": zeros(3, 4)}, ValueError, r"^alibi_slopes: .* = \(2, 4\), got \(3, 4\)"),
    "padding batch": (
        {"key_padding_mask": zeros(3, 53, dtype="bool")}, ValueError,
        r"^key_padding_mask: .* = \(2, 53\), got \(3, 53\)",
    ),
    "bias lengths": (
        {"bias": zeros(37, 53), "max_seqlen_q": 20}, ValueError, r"^bias: .* = \(2, 4, 20, 53\), got \(37, 53\)"
    ),
}  # fmt: skip


def assert_refused(inputs: tuple, good: dict, options: dict, error: type, match: str) -> None:
    q, k, v, do = inputs
    o, lse = fa2cupy.forward(q, k, v, **good)
    out = np.full_like(o, 7), np.full_like(lse, 7)
    gradients = tuple(np.full_like(array, 7) for array in (q, k, v))
    for call in (
        lambda: fa2cupy.forward(q, k, v, **options, out=out),
        lambda: fa2cupy.backward(q, k, v, o, lse, do, **options, out=gradients),
        lambda: fa2cupy.attention(q, k, v, **options),
    ):
        with pytest.raises(error, match=match) as raised:
            call()
        assert raised.type is error
    assert all((array == 7).all() for array in (*out, *gradients))


@pytest.mark.parametrize("mistake", WRONG)
def test_features_that_do_not_fit(mistake):
    options, error, match = WRONG[mistake]
    assert_refused(inputs_of("float32"), {}, options, error, match)


@pytest.mark.parametrize("mistake", WRONG_PACKED)
def test_packed_sequences_that_do_not_fit(mistake):
    options, error, match = WRONG_PACKED[mistake]
    inputs = tuple(array[0] for array in inputs_of("float32", batch=1))
    assert_refused(inputs, OFFSETS, OFFSETS | options, error, match)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"return_dbias": True}, ValueError, "^return_dbias: there is no bias"),
        ({"return_dsink": True, "bias": zeros(1)}, ValueError, "^return_dsink: there is no sink"),
        ({"return_dbias": 1, "bias": zeros(1)}, TypeError, "^return_dbias: .*, got int; write return_dbias=True"),
        ({"dlse": np.ma.zeros((2, 4, 37), "float32")}, TypeError, "^dlse: expected an array without a mask of its own"),
        ({"dlse": zeros(2, 4, 36)}, ValueError, r"^dlse: expected shape \(2, 4, 37\) .* got \(2, 4, 36\)"),
        ({"dlse": zeros(2, 4, 37, dtype="float64")}, TypeError, "^dlse: expected dtype float32 .* got float64"),
        ({"dlse": 1.0}, TypeError, "^dlse: expected a numpy.ndarray or cupy.ndarray, got float"),
    ],
)
def test_options_of_backward(options, error, match):
    q, k, v, do = inputs_of("float32")
    o, lse = fa2cupy.forward(q, k, v)
    out = tuple(np.full_like(array, 7) for array in (q, k, v))
    with pytest.raises(error, match=match):
        fa2cupy.backward(q, k, v, o, lse, do, **options, out=out)
    assert all((array == 7).all() for array in out)


def test_outputs_have_one_array_for_each_gradient():
    q, k, v, do = inputs_of("float32")
    bias, sink = zeros(4, 1, 53), zeros(4)
    o, lse = fa2cupy.forward(q, k, v, bias=bias, sink=sink)
    options = {"bias": bias, "sink": sink, "return_dsink": True, "return_dbias": True}
    with pytest.raises(TypeError, match=r"^out: expected a tuple \(dq, dk, dv, dbias, dsink\) of arrays or None"):
        fa2cupy.backward(q, k, v, o, lse, do, **options, out=(None, None, None))
    with pytest.raises(ValueError, match=r"^out \(dbias\): expected shape \(4, 1, 53\) .* got \(4, 53\)"):
        fa2cupy.backward(q, k, v, o, lse, do, **options, out=(None, None, None, zeros(4, 53), None))
    with pytest.raises(ValueError, match=r"^out \(dbias\): overlaps bias in memory"):
        fa2cupy.backward(q, k, v, o, lse, do, **options, out=(None, None, None, bias, None))
    mine = np.full_like(sink, np.nan)
    results = fa2cupy.backward(q, k, v, o, lse, do, **options, out=(None, None, None, None, mine))
    assert len(results) == 5
    assert results[4] is mine
    assert np.isfinite(mine).all()


def test_a_bias_may_be_in_the_accumulators_dtype():
    q, k, v, do = inputs_of("float16")
    for dtype in ("float16", "float32"):
        assert run((q, k, v, do), bias=numbers((1, 53), dtype))["dbias"].dtype == dtype


def test_lower_ranks():
    q, k, v, do = make_inputs("float64", seqlen_q=6, seqlen_k=9, num_heads=2, head_dim=4)
    bias, padding, slopes = numbers((6, 9), "float64"), np.arange(9) < 7, np.array([0.1, 0.4])
    options = {"bias": bias, "alibi_slopes": slopes, "sink": slopes, "dropout_p": 0.3, "seed": 2}
    full = run((q, k, v, do), **options, key_padding_mask=padding[None])
    for mask in (padding, padding[None]):
        lower = run((q[0], k[0], v[0], do[0]), **options, key_padding_mask=mask)
        for name, result in lower.items():
            np.testing.assert_array_equal(result, full[name] if name in ("dbias", "dsink") else full[name][0])
    with pytest.raises(ValueError, match=r"^key_padding_mask: .* \(batch, seqlen_k\) = \(1, 9\), got \(2, 9\)$"):
        fa2cupy.forward(q[0], k[0], v[0], key_padding_mask=np.stack([padding, padding]))
    own = {"bias": bias, "alibi_slopes": slopes[:1], "sink": slopes[:1], "key_padding_mask": padding}
    single = run((q[0, :, 0], k[0, :, 0], v[0, :, 0], do[0, :, 0]), **own)
    with_heads = run(tuple(a[0, :, :1] for a in (q, k, v, do)), **own)
    np.testing.assert_array_equal(single["o"], with_heads["o"][:, 0])


# -------------------------------------------------------------------------------------- features and records of kernels


SCORE_MOD = bound_function("score_mod", mods.softcap(2.0), ())
MASK_MOD = bound_function("mask_mod", mods.neighborhood_2d(4, 1), ())
MAP = block_mask(mods.neighborhood_2d(4, 4), (), 1, 1, 8, 8).layout  # of intervals


def settings_of(**options) -> FeatureSettings:
    return problem_from_arrays(*inputs_of("float32")[:3], **options).settings


def test_a_function_that_is_a_soft_cap_is_that_setting():
    assert settings_of(score_mod=mods.softcap(2.0)) == settings_of(softcap=2.0)
    both = settings_of(score_mod=mods.softcap(2.0), softcap=3.0)
    assert (both.score_mod, both.softcap) == (SCORE_MOD, 3.0)


def test_every_feature_has_its_row_and_its_numbers():
    names = {"cu_seqlens" if name[:3] in ("cu_", "max") else name for name in FeatureKeywords.__annotations__}
    names -= {"seed", "score_args", "mask_args"}
    only_kernels = {
        "wide_bias",
        "dbias",
        "full_dbias",
        "dscore_args",
        "given_lse",
        "kept_bias",
        "boxes",
        "dlse",
        "bias_tangent",
        "sink_tangent",
    }
    of_direction = set(OF_DIRECTION)
    of_maps = {"intervals"}
    assert names | only_kernels | of_direction | of_maps == set(FEATURES)
    arrays = {
        array
        for name, need in FEATURES.items()
        if name not in only_kernels | of_direction | of_maps
        for array in need.arrays
    }
    assert arrays == {*ARRAY_KEYWORDS, KEY_LISTS, QUERY_LISTS}
    everything = dataclasses.replace(
        NO_SETTINGS, score_mod=SCORE_MOD, mask_mod=MASK_MOD, block_mask=MAP,
        window=(3, None), softcap=2.0, dropout_p=0.5, seed=2**40 + 7, num_sequences=2,
        max_seqlen_q=8, max_seqlen_k=9, arrays=ARRAY_KEYWORDS, tangents="qkvo", **dict.fromkeys(only_kernels, True),
    )  # fmt: skip
    assert everything.features == tuple(FEATURES)
    assert everything.record(Sizes(100, 200, everything.window, 0.25)) == {
        "window_left": 3, "window_right": 100, **softcap_values(2.0, 1.0),  # a score function gets scaled products
        "alibi_scale": math.log2(math.e) / softcap_values(2.0, 1.0)["capped_log2"],
        "dropout_threshold": 0x80008000, "dropout_scale": 2.0, "dropout_head": 0, "dropout_query_word": 0,
        "max_seqlen_q": 8, "max_seqlen_k": 9,
        "total_q": 100, "total_k": 200, "num_sequences": 2,
    }  # fmt: skip
    flags = [feature.flag for feature in FEATURES.values()]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("scale", [0.3, 1e-3, 1e-9, 0.0, -0.3, 1e9])
@pytest.mark.parametrize("cap", [1e-9, 0.7, 50.0, 300.0, 3e3, 1e4, 1e6, 1e9])
def test_a_cap_is_tanh_within_its_bound_and_float32(cap, scale):
    exact = softcap_values(cap, scale)
    values = {name: np.float32(x) for name, x in exact.items()}
    assert values["scale_over_softcap"] == np.float32(scale / cap)
    assert values["capped_log2"] > 0, "a maximum is found before this is multiplied"
    for number in values.values():
        assert np.isfinite(number) and (number == 0 or abs(number) >= np.finfo("float32").tiny)
    assert exact["capped_log2"] * exact["tanh_limit"] == pytest.approx(exact["softcap_log2"], 1e-12)
    product = np.linspace(-1, 1, 1001, dtype="float32") * values["tanh_largest"]
    if scale <= 0 or cap == 1e9:
        assert values["tanh_largest"] < 0
    if 0.7 <= cap <= 1e4 and scale in (0.3, 1e-3):
        assert values["tanh_largest"] > 0
    if values["tanh_largest"] > 0:
        # The error of a score is that of the fit, and that of float32 in proportion to the score.
        scores = cap * np.tanh(product.astype("float64") * (scale / cap))
        square = product * product + values["tanh_shift"]
        capped = cap * (values["tanh_unit"] * (product * (square * square + values["tanh_rest"]))).astype("float64")
        assert np.all(abs(capped - scores) <= 1.05e-4 + 3e-7 * abs(scores))
        assert values["tanh_largest"] * scale / cap == pytest.approx(
            next(fit.largest for fit in FITS if cap * fit.error <= 1e-4)
        )


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: str(fit.largest))
def test_fits_of_tanh_have_the_errors_that_they_say(fit):
    x = np.linspace(0, fit.largest, 20001)
    error = abs(x * (fit.a + fit.b * x**2 + fit.c * x**4) - np.tanh(x)).max()
    assert 0.9 * fit.error < error < 1.02 * fit.error


def test_slopes_are_in_units_of_products_without_a_cap():
    features = dataclasses.replace(NO_SETTINGS, arrays=("alibi_slopes",))
    assert features.record(Sizes(5, 6, (None, None), 0.25)) == {"alibi_scale": pytest.approx(4.0)}
    assert features.record(Sizes(5, 6, (None, None), -1.0)) == {"alibi_scale": 0.0}


def test_neutral_values_need_nothing():
    assert NO_SETTINGS.features == ()
    assert NO_SETTINGS.record(Sizes(5, 6, (None, None), 1.0)) == {}
    assert settings_of(window=(None, None), softcap=None, dropout_p=0, seed=5, bias=None, sink=None) == NO_SETTINGS


def test_lengths_are_not_part_of_what_is_compiled():
    assert settings_of(window=(10**12, 0)).features == settings_of(window=(1, 1)).features == ("window",)
    assert settings_of().record(Sizes(37, 53, (10**12, 0), 1.0)) == {}
    assert settings_of(window=(1, 1)).record(Sizes(37, 53, (10**12, 0), 1.0)) == {"window_left": 53, "window_right": 0}
    # Large and missing limits are clamped to lengths that hide nothing: the left one to the keys, the right one to the
    # queries.
    for seqlen_q, seqlen_k in ((37, 53), (53, 37)):
        for band in ((10**12, 10**12), (None, None)):
            record = settings_of(window=(1, 1)).record(Sizes(seqlen_q, seqlen_k, band, 1.0))
            assert record == {"window_left": seqlen_k, "window_right": seqlen_q}


def test_causal_is_the_right_limit_of_a_window():
    problem = problem_from_arrays(*inputs_of("float32")[:3], causal=True, window=(3, 9))
    assert problem.feature_values == {"window_left": 3, "window_right": 0}


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("bias", (2, 4, 5, 7), (140, 35, 7, 1)),
        ("bias", (2, 1, 5, 7), (35, 0, 7, 1)),
        ("bias", (4, 5, 7), (0, 35, 7, 1)),
        ("bias", (5, 1), (0, 0, 1, 0)),
        ("mask", (7,), (0, 0, 0, 1)),
        ("mask", (), (0, 0, 0, 0)),
        ("key_padding_mask", (2, 7), (7, 0, 0, 1)),
        ("key_padding_mask", (7,), (0, 0, 0, 1)),
        ("alibi_slopes", (2, 4), (4, 1, 0, 0)),
        ("alibi_slopes", (4,), (0, 1, 0, 0)),
        ("alibi_slopes", (2, 1), (1, 0, 0, 0)),
        ("sink", (4,), (0, 1, 0, 0)),
    ],
    ids=str,
)
def test_where_the_elements_of_an_array_lie_over_the_scores(name, shape, wanted):
    """Checks strides of (batch, head, query, key): 0 where the array repeats, for any strides of axes of length 1."""
    array = np.zeros(shape, bool if "mask" in name else "float32")
    assert strides.score_strides(name, array) == wanted
    assert strides.score_strides(name, np.repeat(array, 2, -1)[..., ::2] if shape else array) == tuple(
        2 * n for n in wanted
    )
    if name == "bias":
        assert strides.contiguous_score_strides(shape) == wanted


@pytest.mark.parametrize(
    ("dtype", "bias_dtype", "kind"),
    [("float16", "float16", "input"), ("float16", "float32", "input_accum"), ("float64", "float64", "input")],
)
def test_a_bias_is_read_in_its_own_dtype(dtype, bias_dtype, kind):
    q, k, v, _ = inputs_of(dtype)
    needs = problem_from_arrays(q, k, v, bias=zeros(37, 53).astype(bias_dtype)).features
    kinds = {field.name: field.kind for field in param_layout("forward", SM80, dtype, needs).fields}
    assert kinds["bias"] == kind


@pytest.fixture
def launched(monkeypatch):
    pytest.importorskip("cupy")
    from support.fake_gpu import fake_gpu

    with fake_gpu(monkeypatch) as stages:
        yield stages


GPU_ROWS = ("window", "softcap", "alibi", "bias", "mask", "padding", "sink", "dropout")
GPU_FEATURES = {name: options_of(name, "float16", SIZES) for name in GPU_ROWS}


@pytest.fixture
def without_features(monkeypatch):
    """Removes all features from all families."""
    for family in families.FAMILIES:
        monkeypatch.setattr(type(family), "features", ())


@pytest.mark.parametrize("name", GPU_FEATURES)
def test_kernels_refuse_a_feature_that_they_do_not_have(launched, without_features, name):
    from support.fake_cupy import place
    from support.fake_gpu import backward, forward

    options = {key: place(x) if isinstance(x, np.ndarray) else x for key, x in GPU_FEATURES[name].items()}
    (need,) = problem_from_arrays(*inputs_of("float16")[:3], **GPU_FEATURES[name]).features
    q, k, v, do = (place(array) for array in inputs_of("float16"))
    o, lse = forward(q, k, v)
    launched.clear()
    match = rf"^{need}: no kernel family for (forward|backward) with float16 on H100 \(sm_90\) has it; NumPy arrays"
    with pytest.raises(UnsupportedProblemError, match=match):
        forward(q, k, v, **options)
    with pytest.raises(UnsupportedProblemError, match=match):
        backward(q, k, v, o, lse, do, **options)
    with pytest.raises(UnsupportedProblemError, match="^dlse: no kernel family for backward"):
        backward(q, k, v, o, lse, do, dlse=lse)
    with pytest.raises(ValueError, match="^return_dbias: there is no bias"):
        backward(q, k, v, o, lse, do, return_dbias=True)
    with pytest.raises(UnsupportedProblemError, match=rf"^{need}: family 'sm80' for forward"):
        forward(q, k, v, family="sm80", **options)
    assert not launched


def test_kernels_refuse_packed_sequences(launched, without_features):
    from support.fake_cupy import place
    from support.fake_gpu import forward

    q, k, v, _ = (place(array[0]) for array in inputs_of("float16", batch=1))
    offsets = {name: place(array) for name, array in OFFSETS.items()}
    with pytest.raises(UnsupportedProblemError, match="^cu_seqlens: no kernel family for forward"):
        forward(q, k, v, **offsets)
    assert not launched


def test_gpu_calls_check_before_they_refuse(launched):
    from support.fake_cupy import place
    from support.fake_gpu import forward

    q, k, v, _ = (place(array) for array in inputs_of("float16"))
    elsewhere = place(zeros(4))
    elsewhere.device_id = 1
    for options, error, match in (
        ({"softcap": -1.0}, ValueError, "^softcap: "),
        ({"bias": [0.0]}, TypeError, "^bias: expected a numpy.ndarray"),
        ({"sink": elsewhere}, ValueError, "^sink: expected an array on device 0 like q, got device 1"),
    ):
        with pytest.raises(error, match=match):
            forward(q, k, v, **options)
    assert not launched
    forward(q, k, v, window=(None, None), dropout_p=0.0)
    assert len(launched) == 1


def test_a_family_with_the_feature_is_taken():
    from fa2cupy.families.device import DeviceInfo
    from fa2cupy.families.sm80 import Sm80

    class Part(Sm80):
        features = ("softcap", "window")

    device = DeviceInfo.named("sm_90")
    assert Part().supports("forward", "float16", device, ("window",))
    assert not Part().supports("forward", "float16", device, ("window", "bias"))
