"""Features on the NumPy backend: each against the reference, pairs of them, and what must hold for each."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feature_cases import (
    METHODS,
    ROWS,
    SIZES,
    accumulator,
    assert_bits_equal,
    assert_close,
    booleans,
    check,
    inputs_of,
    keyword,
    numbers,
    options_of,
    run,
)

import fa2cupy
from fa2cupy import TileConfig
from fa2cupy.cpu import tiles as cpu_tiles
from fa2cupy.testing import make_inputs

# A legal input prints no warning, masked rows and infinities included.
pytestmark = pytest.mark.filterwarnings("error")

TILE = TileConfig(16, 8, 1)


class TestAgainstTheReference:
    @pytest.mark.sample(dtype=("bfloat16", "float32"))
    @pytest.mark.parametrize("name", ROWS)
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    def test_each_feature(self, dtype, name):
        # A bias that is the same for all keys has the gradient 0 unless lse has one, and 0 has no relative error.
        dlse = numbers((2, 4, 37), accumulator(dtype)) if name == "bias of queries" else None
        check(inputs_of(dtype), dlse=dlse, config=TILE, **options_of(name, dtype, SIZES))

    @pytest.mark.sample(lengths=((53, 37), (1, 40)))
    @pytest.mark.parametrize("name", ROWS)
    @pytest.mark.parametrize("lengths", [(53, 37), (1, 40), (40, 1), (64, 64)])
    def test_lengths(self, lengths, name):
        sizes = SIZES | dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True))
        check(inputs_of("float32", **sizes), **options_of(name, "float32", sizes))

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_a_gradient_for_lse(self, dtype):
        dlse = numbers((2, 4, 37), "float32")
        check(inputs_of(dtype), dlse=dlse, causal=True, config=TILE)
        check(inputs_of(dtype), dlse=dlse, config=TILE, **options_of("sink", dtype, SIZES))

    @pytest.mark.parametrize("head_dims", [(192, 128), (64, 128), (16, 1), (5, 40)])
    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    def test_values_with_a_head_dim_of_their_own(self, layout, head_dims):
        inputs = inputs_of("float16", head_dim=head_dims[0], head_dim_v=head_dims[1], layout=layout)
        check(inputs, config=TILE, causal=True, layout=layout)

    @pytest.mark.matrix
    @given(
        names=st.lists(st.sampled_from(ROWS), min_size=2, max_size=3, unique_by=keyword),
        dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
        seqlen_q=st.integers(0, 30),
        seqlen_k=st.integers(0, 30),
        num_heads_kv=st.integers(1, 2),
        group=st.integers(1, 3),
        head_dim_v=st.sampled_from([None, 4, 24]),
        with_dlse=st.booleans(),
        layout=st.sampled_from(["bshd", "bhsd"]),
        tile=st.builds(TileConfig, st.integers(1, 40), st.integers(1, 40), st.just(1)),
    )
    @settings(max_examples=150, deadline=None, derandomize=True)
    def test_combinations(self, names, dtype, num_heads_kv, group, head_dim_v, with_dlse, layout, tile, **lengths):
        if dtype in ("float16", "bfloat16"):
            # With few elements, our largest rounding error or the baseline's may be small by chance.
            lengths = {name: length + 10 for name, length in lengths.items()}
        sizes = {"batch": 2, "num_heads": group * num_heads_kv, "num_heads_kv": num_heads_kv, "head_dim": 8, **lengths}
        options = {key: value for name in names for key, value in options_of(name, dtype, sizes).items()}
        with_dlse |= "bias of queries" in names
        dlse = numbers((2, sizes["num_heads"], lengths["seqlen_q"]), accumulator(dtype)) if with_dlse else None
        inputs = make_inputs(dtype, **sizes, head_dim_v=head_dim_v, layout=layout)
        check(inputs, dlse=dlse, config=tile, layout=layout, **options)


class TestNothingChanges:
    NEUTRAL = {
        "window": {"window": (None, None)},
        "wide window": {"window": (52, 36)},
        "alibi": {"alibi_slopes": np.zeros(4)},
        "bias": {"bias": np.zeros((1, 1, 1, 1))},
        "mask": {"mask": np.ones((2, 4, 37, 53), bool)},
        "padding": {"key_padding_mask": np.ones((2, 53), bool)},
        "sink": {"sink": np.full(4, -np.inf)},
        "dropout": {"dropout_p": 0.0, "seed": 3},
        "nothing": {"softcap": None, "bias": None, "mask": None, "sink": None, "seed": None, "cu_seqlens_q": None},
    }

    @pytest.mark.parametrize("name", NEUTRAL)
    @pytest.mark.parametrize("method", METHODS)
    def test_neutral_values_give_the_bits_of_a_call_without(self, method, name):
        results = run(inputs_of(), method=method, config=TILE, causal=True, **self.NEUTRAL[name])
        plain = run(inputs_of(), method=method, config=TILE, causal=True)
        assert_bits_equal({key: results[key] for key in plain}, plain)

    def test_a_wide_cap_changes_little(self):
        assert_close(run(inputs_of(), softcap=1e6), run(inputs_of()), 1e-9)


class TestWindow:
    @pytest.mark.sample(lengths=((37, 53), (53, 37)), window=((0, 0), (9, 4), (None, 2)))
    @pytest.mark.parametrize("window", [(0, 0), (3, 0), (0, 5), (9, 4), (None, 2), (2, None), (100, 100)])
    @pytest.mark.parametrize("lengths", [(37, 53), (53, 37), (30, 30)])
    @pytest.mark.parametrize("causal", [False, True])
    def test_a_window_is_a_band_mask(self, causal, lengths, window):
        inputs = inputs_of(seqlen_q=lengths[0], seqlen_k=lengths[1])
        aligned = np.arange(lengths[0])[:, None] + lengths[1] - lengths[0]
        key = np.arange(lengths[1])
        band = np.ones(lengths, bool)
        for i, j in np.ndindex(lengths):
            left = window[0] is None or j >= i + lengths[1] - lengths[0] - window[0]
            right = window[1] is None or j <= i + lengths[1] - lengths[0] + window[1]
            band[i, j] = left and right
        mask = band & (key <= aligned) if causal else band
        for method in METHODS:
            results = run(inputs, window=window, causal=causal, config=TILE, method=method)
            assert_close(results, run(inputs, mask=mask, config=TILE, method=method))

    def test_causal_is_a_window(self):
        for method in METHODS:
            windowed = run(inputs_of(), window=(None, 0), config=TILE, method=method)
            assert_bits_equal(windowed, run(inputs_of(), causal=True, config=TILE, method=method))

    def test_tiles_outside_the_band_are_not_touched(self, monkeypatch):
        pairs = []
        original = cpu_tiles.Heads.scores

        def scores(head, q, k, queries, keys):
            pairs.append((queries.start, queries.stop, keys.start, keys.stop))
            return original(head, q, k, queries, keys)

        monkeypatch.setattr(cpu_tiles.Heads, "scores", scores)
        length, left, right = 256, 20, 8
        inputs = inputs_of(batch=1, seqlen_q=length, seqlen_k=length, num_heads=1, num_heads_kv=1)
        for method in METHODS:
            run(inputs, window=(left, right), config=TileConfig(16, 16, 1), method=method)
        assert pairs
        for first, after, first_key, after_key in pairs:  # each tile has a visible pair
            assert first_key <= after - 1 + right
            assert after_key - 1 >= first - left
        # Scores are computed five times; a row of tiles needs that of the diagonal, two before it and one behind it.
        assert len(pairs) <= 5 * (length // 16) * 4

    def test_values_outside_the_band_do_not_matter(self):
        q, k, v, do = inputs_of(seqlen_q=64, seqlen_k=64)
        poisoned = v.copy()
        poisoned[:, 32:] = np.nan
        window = {"window": (8, 0), "config": TileConfig(8, 8, 1)}
        np.testing.assert_array_equal(
            fa2cupy.forward(q, k, v, **window)[0][:, :32], fa2cupy.forward(q, k, poisoned, **window)[0][:, :32]
        )


class TestSink:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_sink_is_a_key_with_value_zero(self, method):
        # An additional column gives the sink's key the same score with every query, and adds 0 to all other scores.
        sink = np.array([-1.0, 0.5, 3.0, 0.0])
        q, k, v, do = inputs_of(num_heads_kv=4, seqlen_q=20, seqlen_k=30)
        results = run((q, k, v, do), sink=sink, softmax_scale=0.25, config=TILE, method=method)
        wide_q = np.concatenate([q, np.ones((2, 20, 4, 1))], axis=3)
        wide_k = np.zeros((2, 31, 4, 17))
        wide_k[:, :30, :, :16] = k
        wide_k[:, 30, :, 16] = sink / 0.25
        wide_v = np.concatenate([v, np.zeros((2, 1, 4, 16))], axis=1)
        with_key = run((wide_q, wide_k, wide_v, do), softmax_scale=0.25, config=TILE, method=method)
        with_key["dsink"] = with_key["dk"][:, 30, :, 16].sum(axis=0) / 0.25
        with_key["dq"] = with_key["dq"][..., :16]
        with_key["dk"], with_key["dv"] = with_key["dk"][:, :30, :, :16], with_key["dv"][:, :30]
        assert_close(results, with_key)

    def test_a_row_without_keys_has_the_sink(self):
        sink = np.array([0.5, -2.0, 0.0, 9.0])
        dlse = numbers((2, 4, 37), "float64")
        results = run(inputs_of(), sink=sink, mask=np.zeros((1, 1, 1, 1), bool), dlse=dlse)
        np.testing.assert_array_equal(results["lse"], np.broadcast_to(sink[:, None], (2, 4, 37)))
        for name in ("o", "dq", "dk", "dv"):
            assert not results[name].any(), name
        np.testing.assert_allclose(results["dsink"], dlse.sum(axis=(0, 2)), rtol=1e-13)
        check(inputs_of(seqlen_k=0), sink=sink, dlse=dlse)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_bad_sink_spoils_its_head(self, value):
        sink = np.array([0.0, value, 0.0, 0.0])
        for sizes, options in (({}, {"mask": np.zeros((1, 1), bool)}), ({"seqlen_k": 0}, {})):  # also without a key
            _, lse = fa2cupy.forward(*inputs_of(**sizes)[:3], sink=sink, **options)
            assert np.isnan(lse[:, 1]).all()
        results = run(inputs_of(), sink=sink)
        assert np.isnan(results["o"][:, :, 1]).all()
        assert np.isnan(results["lse"][:, 1]).all()
        for name in ("o", "dq"):
            assert np.isfinite(np.delete(results[name], 1, axis=2)).all()


class TestDropout:
    def test_the_mask_depends_on_no_tile_and_method(self):
        # Unit vectors as values make o equal P, and dv shows the mask of the backward.
        q, k, _, _ = inputs_of(seqlen_q=48, seqlen_k=48, num_heads_kv=4, head_dim=48)
        v = np.broadcast_to(np.eye(48)[None, :, None], (2, 48, 4, 48))
        options = {"dropout_p": 0.4, "seed": 5}
        seen = []
        for tile in (None, TileConfig(16, 16, 1), TileConfig(7, 5, 1), TileConfig(1, 48, 1), TileConfig(48, 3, 1)):
            o, lse = fa2cupy.forward(q, k, v, **options, config=tile)
            seen.append(o != 0)
            for method in METHODS:
                _, _, dv = fa2cupy.backward(q, k, v, o, lse, v, **options, config=tile, method=method)
                # do = v: dv[j, d] = sum over i of kept P_ij times do[i, d] = P_dj.
                seen.append(dv.transpose(0, 3, 2, 1) != 0)
        for mask in seen[1:]:
            np.testing.assert_array_equal(mask, seen[0])
        assert seen[0].mean() == pytest.approx(0.6, abs=0.01)
        other = fa2cupy.forward(q, k, v, dropout_p=0.4, seed=6)[0] != 0
        assert 0.4 < (other == seen[0]).mean() < 0.65

    @pytest.mark.matrix
    def test_results_are_unbiased(self):
        q, k, v, do = inputs_of(batch=1, seqlen_q=4, seqlen_k=6, num_heads=2, num_heads_kv=1, head_dim=4)
        plain = run((q, k, v, do))
        draws = [run((q, k, v, do), dropout_p=0.25, seed=seed) for seed in range(600)]
        for name in ("o", "dq", "dk", "dv"):
            stack = np.stack([draw[name] for draw in draws])
            error = abs(stack.mean(axis=0) - plain[name]) / (stack.std(axis=0) / len(draws) ** 0.5)
            assert error.max() < 5, name
        for draw in draws:
            np.testing.assert_array_equal(draw["lse"], plain["lse"])

    def test_delta_is_still_the_row_sum(self):
        q, k, v, do = inputs_of()
        options = {"dropout_p": 0.3, "seed": 1}
        o, lse = fa2cupy.forward(q, k, v, **options)
        given_delta = fa2cupy.backward(q, k, v, o, lse, do, **options, delta=fa2cupy.delta(o, do))
        for one, other in zip(given_delta, fa2cupy.backward(q, k, v, o, lse, do, **options), strict=True):
            np.testing.assert_array_equal(one, other)


class TestBias:
    def test_alibi_is_a_bias(self):
        slopes = np.array([0.1, 0.3, 0.5, 2.0])
        distance = abs(np.arange(37)[:, None] + 53 - 37 - np.arange(53))
        with_bias = run(inputs_of(), bias=-slopes[:, None, None] * distance, config=TILE)
        assert with_bias.pop("dbias").shape == (4, 37, 53)
        assert_close(run(inputs_of(), alibi_slopes=slopes, config=TILE), with_bias)

    def test_minus_infinity_is_a_mask(self):
        mask = booleans((2, 1, 37, 53))
        with_bias = run(inputs_of(), bias=np.where(mask, 0.0, -np.inf), config=TILE)
        assert not with_bias.pop("dbias")[~mask].any()
        assert_bits_equal(run(inputs_of(), mask=mask, config=TILE), with_bias)

    def test_padding_is_a_mask(self):
        padding = booleans((2, 53))
        results = run(inputs_of(), key_padding_mask=padding, config=TILE)
        assert_bits_equal(results, run(inputs_of(), mask=padding[:, None, None], config=TILE))

    @pytest.mark.parametrize("shape", [(1, 53), (2, 1), (1, 1), (53,), (1,)], ids=str)
    def test_padding_is_broadcast(self, shape):
        padding = booleans(shape)
        whole = np.broadcast_to(padding, (2, 53))
        assert_bits_equal(*(run(inputs_of(), key_padding_mask=one, config=TILE) for one in (padding, whole)))

    @pytest.mark.parametrize("shape", [(1, 4), (2, 1), (1, 1), (1,)], ids=str)
    def test_slopes_are_broadcast(self, shape):
        slopes = numbers(shape, "float64")
        whole = np.broadcast_to(slopes, (2, 4))
        assert_bits_equal(*(run(inputs_of(), alibi_slopes=one, config=TILE) for one in (slopes, whole)))

    @pytest.mark.parametrize(
        "shape", [(2, 4, 37, 1), (2, 1, 37, 53), (1, 4, 1, 53), (1, 1, 1, 1), (53,), (4, 1, 1), ()]
    )
    @pytest.mark.parametrize("method", METHODS)
    def test_its_gradient_is_summed_to_its_shape(self, method, shape):
        bias = numbers(shape, "float64")
        whole = run(inputs_of(), bias=np.broadcast_to(bias, (2, 4, 37, 53)), config=TILE, causal=True, method=method)
        results = run(inputs_of(), bias=bias, config=TILE, causal=True, method=method)
        full = (1,) * (4 - len(shape)) + shape
        axes = tuple(axis for axis in range(4) if full[axis] == 1)
        whole["dbias"] = whole["dbias"].sum(axis=axes, keepdims=True).reshape(shape)
        assert_close(results, whole)

    def test_one_for_all_keys_moves_lse_only(self):
        bias = numbers((2, 4, 37, 1), "float64")
        results, plain = run(inputs_of(), bias=bias, config=TILE), run(inputs_of(), config=TILE)
        assert abs(results.pop("dbias")).max() < 1e-13
        plain["lse"] = plain["lse"] + bias[..., 0]
        assert_close(results, plain)

    def test_any_strides(self):
        bias = numbers((53, 37, 4, 2), "float64").transpose(3, 2, 1, 0)
        mask = booleans((2, 4, 37, 106))[..., ::-2]
        results = run(inputs_of(), bias=bias, mask=mask, config=TILE)
        assert_bits_equal(results, run(inputs_of(), bias=bias.copy("C"), mask=mask.copy("C"), config=TILE))

    @pytest.mark.matrix
    def test_it_is_never_expanded(self):
        length = 4096
        q, k, v, do = make_inputs("float32", batch=1, seqlen_q=length, num_heads=1, head_dim=8)
        arrays = {"bias": numbers((length,), "float32"), "mask": booleans((length, 1))}
        tracemalloc.start()
        try:
            arrays |= {"softcap": 3.0, "dropout_p": 0.1, "seed": 1, "sink": numbers((1,), "float32")}
            o, lse = fa2cupy.forward(q, k, v, **arrays)
            for method in METHODS:
                fa2cupy.backward(q, k, v, o, lse, do, **arrays, return_dbias=True, method=method)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < length * length / 2  # bytes: half a boolean for each score
