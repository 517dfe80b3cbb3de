"""The NumPy backend: results against the reference and against itself in another form, and how it works."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fa2cupy
from fa2cupy import TileConfig
from fa2cupy.cpu import attention as cpu
from fa2cupy.cpu import tiles as cpu_tiles
from fa2cupy.testing import Expectation, check_delta, make_inputs

# A legal input prints no warning, masked rows and infinities included.
pytestmark = pytest.mark.filterwarnings("error")

METHODS = ["single_pass", "two_pass"]
LENGTHS = [
    (1, 1), (3, 3), (64, 1), (1, 147), (113, 203), (128, 217), (108, 256), (256, 512), (512, 256), (799, 3), (3, 799)
]  # fmt: skip


def check_all(inputs: tuple, tile: TileConfig | None = None, **options) -> None:
    """Checks forward, delta and both backward methods, written into arrays of NaN, against the reference."""
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, **options)
    o, lse = fa2cupy.forward(q, k, v, **options, config=tile, out=expected.unwritten("o", "lse"))
    expected.check(o=o, lse=lse, spec=tile)
    layout = options.get("layout", "bshd")
    check_delta(o, do, fa2cupy.delta(o, do, layout=layout), layout=layout)
    for method in METHODS:
        out = expected.unwritten("dq", "dk", "dv")
        dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, **options, method=method, config=tile, out=out)
        expected.check(dq=dq, dk=dk, dv=dv, spec=(method, tile))


def run(q, k, v, do, **options) -> tuple:
    """Returns o, lse, dq, dk, dv."""
    o, lse = fa2cupy.forward(q, k, v, **options)
    return o, lse, *fa2cupy.backward(q, k, v, o, lse, do, **options)


def assert_bits_equal(results: tuple, others: tuple) -> None:
    for one, other in zip(results, others, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_close(results: tuple, others: tuple, tolerance: float = 1e-12) -> None:
    for one, other in zip(results, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


class TestAgainstTheReference:
    @pytest.mark.sample(dtype=("float32",))
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_lengths(self, dtype, seqlen_q, seqlen_k, causal):
        inputs = make_inputs(dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=2, num_heads_kv=1, head_dim=32)
        check_all(inputs, causal=causal)

    @pytest.mark.matrix
    @pytest.mark.parametrize("seqlens", [(1023, 1024), (1024, 1023), (2048, 2048)])
    def test_long_sequences(self, seqlens):
        inputs = make_inputs("float32", seqlen_q=seqlens[0], seqlen_k=seqlens[1], num_heads=1, head_dim=16)
        check_all(inputs, causal=True)

    @pytest.mark.sample(head_dim=(1, 59, 64, 160))
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("head_dim", [1, 8, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256])
    def test_dtypes_and_head_dims(self, head_dim, dtype):
        inputs = make_inputs(dtype, batch=2, seqlen_q=33, seqlen_k=50, num_heads=2, head_dim=head_dim)
        check_all(inputs, causal=True)

    @pytest.mark.sample(tile=((7, 13), (64, 5)))
    @pytest.mark.parametrize("tile", [(1, 1), (16, 8), (7, 13), (64, 5), (5, 64), (256, 512)])
    @pytest.mark.parametrize("seqlens", [(50, 50), (37, 61), (61, 37)])
    def test_tiles_that_do_not_divide(self, seqlens, tile):
        sizes = {"seqlen_q": seqlens[0], "seqlen_k": seqlens[1], "num_heads": 4, "num_heads_kv": 2, "head_dim": 8}
        inputs = make_inputs("float64", **sizes)
        for causal in (False, True):
            check_all(inputs, TileConfig(*tile, num_warps=1), causal=causal)

    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    @pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_heads_and_layouts(self, dtype, heads, layout):
        sizes = {"batch": 2, "seqlen_q": 40, "seqlen_k": 29, "num_heads": heads[0], "num_heads_kv": heads[1]}
        inputs = make_inputs(dtype, **sizes, head_dim=16, layout=layout)
        check_all(inputs, TileConfig(16, 8, 1), causal=True, layout=layout)

    @pytest.mark.parametrize("softmax_scale", [0, 1.0, -0.3, np.float32(0.5), 3])
    def test_softmax_scales(self, softmax_scale):
        inputs = make_inputs("float32", seqlen_q=30, seqlen_k=40, head_dim=8)
        check_all(inputs, causal=True, softmax_scale=softmax_scale)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_inputs_of_large_magnitude(self, dtype):
        check_all(make_inputs(dtype, seqlen_q=60, seqlen_k=70, head_dim=64, magnitude=5), TileConfig(16, 16, 1))

    @given(
        dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
        batch=st.integers(1, 2),
        seqlen_q=st.integers(1, 40),
        seqlen_k=st.integers(1, 40),
        num_heads_kv=st.integers(1, 3),
        group=st.integers(1, 3),
        head_dim=st.integers(4, 40),
        layout=st.sampled_from(["bshd", "bhsd"]),
        causal=st.booleans(),
        tile=st.builds(TileConfig, st.integers(1, 50), st.integers(1, 50), st.just(1)),
    )
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_any_shape(self, dtype, num_heads_kv, group, causal, tile, **sizes):
        inputs = make_inputs(dtype, num_heads=group * num_heads_kv, num_heads_kv=num_heads_kv, **sizes)
        check_all(inputs, tile, causal=causal, layout=sizes["layout"])


class TestArrays:
    @pytest.mark.parametrize("rank", [2, 3])
    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    def test_lower_ranks_give_the_same_numbers(self, layout, rank):
        heads = 1 if rank == 2 else 4
        sizes = {"seqlen_q": 9, "seqlen_k": 7, "num_heads": heads, "num_heads_kv": max(1, heads // 2), "head_dim": 8}
        full = make_inputs(**sizes, layout=layout)
        axes = (0,) if rank == 3 else (0, 2) if layout == "bshd" else (0, 1)
        lower = tuple(a.squeeze(axes) for a in full)
        results = run(*lower, causal=True, layout=layout)
        assert [a.ndim for a in results] == [rank, rank - 1, rank, rank, rank]
        o, lse, *gradients = run(*full, causal=True, layout=layout)
        lower_lse = lse[0] if rank == 3 else lse[0, 0]
        assert_bits_equal(results, (o.squeeze(axes), lower_lse, *(g.squeeze(axes) for g in gradients)))
        delta = fa2cupy.delta(results[0], lower[3], layout=layout)
        assert_bits_equal((delta,), (fa2cupy.delta(o, full[3], layout=layout).reshape(delta.shape),))

    def test_views_give_the_numbers_of_copies(self):
        rng = np.random.default_rng(0)
        packed = rng.standard_normal((2, 20, 4, 4, 16), dtype=np.float32)
        views = {
            "packed": [packed[:, :, i] for i in range(4)],
            "rows backwards": [packed[:, ::-1, i] for i in range(4)],
            "every second row": [packed[:, ::2, i] for i in range(4)],
            "columns backwards": [packed[:, :, i, :, ::-1] for i in range(4)],
            "one head for all": [np.broadcast_to(packed[:, :, i, :1], (2, 20, 4, 16)) for i in range(4)],
            "Fortran order": [np.asfortranarray(packed[:, :, i]) for i in range(4)],
        }
        for name, arrays in views.items():
            assert not any(a.flags.c_contiguous for a in arrays), name
            assert_bits_equal(run(*arrays, causal=True), run(*(a.copy("C") for a in arrays), causal=True))

    def test_results_are_contiguous_and_of_the_promised_dtypes(self):
        for dtype, accumulator in (("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")):
            inputs = make_inputs(dtype, seqlen_q=5, num_heads=3, head_dim=8, layout="bhsd")
            results = (*run(*inputs, layout="bhsd"), fa2cupy.delta(inputs[0], inputs[3], layout="bhsd"))
            assert all(a.flags.c_contiguous for a in results)
            assert [a.dtype.name for a in results] == [dtype, accumulator, dtype, dtype, dtype, accumulator]

    def test_inputs_are_not_written(self):
        inputs = make_inputs("float32", seqlen_q=20, num_heads=1, head_dim=8)
        copies = [a.copy() for a in inputs]
        o, lse, *_ = run(*inputs, causal=True)
        kept = o.copy(), lse.copy()
        delta = fa2cupy.delta(o, inputs[3])
        kept_delta = delta.copy()
        fa2cupy.backward(*inputs[:3], o, lse, inputs[3], causal=True, delta=delta)
        assert_bits_equal((*inputs, o, lse, delta), (*copies, *kept, kept_delta))

    def test_out_takes_any_strides_and_nothing_else_is_written(self):
        q, k, v, do = make_inputs("float16", batch=2, seqlen_q=9, seqlen_k=11, num_heads=4, num_heads_kv=2, head_dim=8)
        o, lse, dq, dk, dv = run(q, k, v, do)
        delta = fa2cupy.delta(o, do)

        def spread(like):
            backing = np.full((*(2 * n for n in like.shape[:-1]), like.shape[-1] + 3), 7, like.dtype)
            view = backing[(*(slice(None, None, 2),) * (like.ndim - 1), slice(1, -2))]
            return backing, view[..., ::-1]

        for results, call in (
            ((o, lse), lambda out: fa2cupy.forward(q, k, v, out=out)),
            ((dq, dk, dv), lambda out: fa2cupy.backward(q, k, v, o, lse, do, out=out)),
            ((delta,), lambda out: (fa2cupy.delta(o, do, out=out[0]),)),
        ):
            backings, outputs = zip(*map(spread, results), strict=True)
            returned = call(outputs)
            assert all(a is b for a, b in zip(returned, outputs, strict=True))
            assert_bits_equal(returned, results)
            for backing, result in zip(backings, results, strict=True):
                assert (backing == 7).sum() >= backing.size - result.size

    def test_out_may_name_some_results(self):
        q, k, v, do = make_inputs(seqlen_q=9, head_dim=8)
        o, lse, dq, dk, dv = run(q, k, v, do)
        given = np.full_like(dk, np.nan)
        returned = fa2cupy.backward(q, k, v, o, lse, do, out=(None, given, None))
        assert returned[1] is given
        assert_bits_equal(returned, (dq, dk, dv))

    def test_outputs_may_be_interleaved_in_one_array(self):
        q, k, v, do = make_inputs(batch=2, seqlen_q=9, num_heads=3, head_dim=8)
        o, lse, dq, dk, dv = run(q, k, v, do)
        packed = np.full((2, 9, 3, 3, 8), np.nan, np.float32)
        fa2cupy.backward(q, k, v, o, lse, do, out=tuple(packed[:, :, i] for i in range(3)))
        assert_bits_equal(tuple(packed[:, :, i] for i in range(3)), (dq, dk, dv))

    def test_other_byte_orders_keep_their_precision(self):
        inputs = make_inputs("float64", seqlen_q=9, head_dim=8)
        swapped = tuple(a.astype(a.dtype.newbyteorder()) for a in inputs)
        assert_close(run(*swapped), run(*inputs), 1e-14)


class TestEdges:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k", "num_heads"])
    def test_empty_axes(self, empty, causal):
        sizes = {"batch": 2, "seqlen_q": 3, "seqlen_k": 4, "num_heads": 2, "num_heads_kv": 1, "head_dim": 5, empty: 0}
        check_all(make_inputs("float32", **sizes), causal=causal)

    @pytest.mark.parametrize("num_heads_kv", [0, 2])
    def test_no_heads_at_all(self, num_heads_kv):
        inputs = make_inputs("float32", num_heads=0, num_heads_kv=num_heads_kv, seqlen_q=3, head_dim=5)
        check_all(inputs)
        q, k, v, do = inputs
        none = np.zeros(0, "float32")
        o, backprop = fa2cupy.attention(q, k, v, sink=none)
        ot, lset = fa2cupy.jvp(q, k, v, q, None, None, sink=none, sink_tangent=none)[2:]
        assert o.size == ot.size == lset.size == 0 and not any(x.any() for x in backprop(do))

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("tile", [None, TileConfig(2, 1, 1)])
    def test_rows_without_a_visible_key(self, tile, method):
        q, k, v, do = make_inputs("float32", seqlen_q=8, seqlen_k=3, head_dim=8)
        o, lse = fa2cupy.forward(q, k, v, causal=True, config=tile)
        assert not o[:, :5].any()
        assert (lse[..., :5] == -np.inf).all()
        visible = fa2cupy.forward(q[:, 5:], k, v, causal=True, config=tile)
        assert_close((o[:, 5:], lse[..., 5:]), visible, 1e-6)
        do[:, :5] = 1e6
        dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, causal=True, method=method, config=tile)
        assert not dq[:, :5].any()
        others = fa2cupy.backward(q[:, 5:], k, v, *visible, do[:, 5:], causal=True, method=method, config=tile)
        assert_close((dq[:, 5:], dk, dv), others, 1e-5)

    @pytest.mark.parametrize("tile", [None, TileConfig(2, 2, 1)])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_bad_query_spoils_its_row_only(self, value, tile):
        inputs = make_inputs(seqlen_q=5, seqlen_k=9, head_dim=8)
        clean = run(*inputs, config=tile)
        inputs[0][0, 3, 1, 2] = value
        o, lse, dq, dk, dv = run(*inputs, config=tile)
        assert np.isnan(o[0, 3, 1]).all()
        assert np.isnan(lse[0, 1, 3])
        assert np.isnan(dq[0, 3, 1]).all()
        assert np.isnan(dk[0, :, 1]).all()
        assert np.isnan(dv[0, :, 1]).all()
        # Everything else is as before.
        for dirty, before, spoilt in ((o, clean[0], (0, 3, 1)), (lse, clean[1], (0, 1, 3)), (dq, clean[2], (0, 3, 1))):
            dirty[spoilt] = before[spoilt]
            np.testing.assert_allclose(dirty, before, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("tile", [None, TileConfig(2, 2, 1)])
    def test_a_nan_key_spoils_every_row_that_sees_it(self, tile):
        q, k, v, do = make_inputs(seqlen_q=6, num_heads=1, head_dim=8)
        k[0, 3, 0, 2] = np.nan
        o, lse, dq, dk, dv = run(q, k, v, do, causal=True, config=tile)
        for result in (o[0, 3:], lse[0, :, 3:], dq[0, 3:], dk[0, 3], dv[0, 3]):
            assert np.isnan(result).all()
        assert np.isfinite(lse[0, :, :3]).all()

    @pytest.mark.parametrize("tile", [None, TileConfig(2, 2, 1)])
    def test_an_infinite_score_is_nan_and_minus_infinity_is_a_mask(self, tile):
        q, k, v, _ = make_inputs("float64", seqlen_q=20, seqlen_k=7, num_heads=1, head_dim=4)
        without = fa2cupy.forward(q, np.delete(k, 4, 1), np.delete(v, 4, 1), config=tile)
        k[0, 4, 0, 1] = np.inf
        o, lse = fa2cupy.forward(q, k, v, config=tile)
        positive = q[0, :, 0, 1] > 0
        assert positive.any()
        assert not positive.all()
        assert np.isnan(o[0, positive]).all()
        assert np.isnan(lse[0, 0, positive]).all()
        assert_close((o[0, ~positive], lse[0, 0, ~positive]), (without[0][0, ~positive], without[1][0, 0, ~positive]))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_bad_value_spoils_its_column_only(self, value):
        q, k, v, _ = make_inputs(seqlen_q=5, seqlen_k=9, head_dim=8)
        o, lse = fa2cupy.forward(q, k, v)
        v[0, 4, 1, 2] = value
        dirty, dirty_lse = fa2cupy.forward(q, k, v)
        assert not np.isfinite(dirty[0, :, 1, 2]).any()
        dirty[0, :, 1, 2] = o[0, :, 1, 2]
        assert_close((dirty, dirty_lse), (o, lse), 1e-6)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_bad_output_gradient_spoils_what_it_reaches(self, value, method):
        q, k, v, do = make_inputs(seqlen_q=5, seqlen_k=9, head_dim=8)
        o, lse = fa2cupy.forward(q, k, v)
        do[0, 3, 1, 2] = value
        dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, method=method)
        assert np.isnan(dq[0, 3, 1]).all()
        assert not np.isfinite(dk[0, :, 1]).any()
        assert not np.isfinite(dv[0, :, 1, 2]).any()
        assert np.isfinite(dq[0, :3]).all()
        assert np.isfinite(dk[0, :, 0]).all()
        assert np.isfinite(dv[0, :, 0]).all()

    def test_results_that_overflow_are_infinite(self):
        q, k, v, do = make_inputs("float16", seqlen_q=9, seqlen_k=1, num_heads=1, head_dim=4)
        _, _, dv = fa2cupy.backward(q, k, v, *fa2cupy.forward(q, k, v), abs(do) + np.float16(60000))
        assert (dv == np.inf).all()


class TestProperties:
    """Properties of exact attention, in float64 so that they must hold closely."""

    def test_the_methods_agree(self):
        sizes = {"batch": 2, "seqlen_q": 70, "seqlen_k": 90, "num_heads": 4, "num_heads_kv": 2, "head_dim": 16}
        q, k, v, do = make_inputs("float64", **sizes)
        forward = fa2cupy.forward(q, k, v, causal=True)
        first, second = (fa2cupy.backward(q, k, v, *forward, do, causal=True, method=m) for m in METHODS)
        assert_close(first, second)

    @pytest.mark.parametrize("method", METHODS)
    def test_results_are_reproducible(self, method):
        q, k, v, do = make_inputs("float32", seqlen_q=300, seqlen_k=600, num_heads=2, head_dim=64)
        forward = fa2cupy.forward(q, k, v, causal=True)
        options = {"causal": True, "method": method}
        first = fa2cupy.backward(q, k, v, *forward, do, **options)
        for _ in range(3):
            assert_bits_equal(fa2cupy.forward(q, k, v, causal=True), forward)
            assert_bits_equal(fa2cupy.backward(q, k, v, *forward, do, **options), first)

    @pytest.mark.parametrize("tile", [None, TileConfig(8, 8, 1)])
    def test_adding_to_all_scores_moves_lse_only(self, tile):
        q, k, v, do = make_inputs("float64", seqlen_q=30, seqlen_k=40, head_dim=8)
        options = {"causal": True, "softmax_scale": 0.5, "config": tile}
        o, lse, dq, dk, dv = run(q, k, v, do, **options)
        shift = 600.0  # of the scores; exp(600) overflows float32, and exp(1200) float64

        def widen(array, value):
            return np.concatenate([array, np.full((*array.shape[:-1], 1), value)], axis=-1)

        others = run(widen(q, 2.0), widen(k, shift), widen(v, 0.0), widen(do, 0.0), **options)
        assert_close(tuple(a[..., :8] for a in (others[0], *others[2:])), (o, dq, dk, dv), 1e-11)
        np.testing.assert_allclose(others[1], lse + shift, rtol=1e-14)

    def test_the_order_of_keys_does_not_matter(self):
        q, k, v, do = make_inputs("float64", seqlen_q=30, seqlen_k=50, head_dim=8)
        order = np.random.default_rng(1).permutation(50)
        tile = TileConfig(8, 8, 1)
        o, lse, dq, dk, dv = run(q, k, v, do, config=tile)
        permuted = run(q, k[:, order], v[:, order], do, config=tile)
        assert_close(permuted, (o, lse, dq, dk[:, order], dv[:, order]))

    @pytest.mark.parametrize("causal", [False, True])
    def test_grouped_heads_are_repeated_heads(self, causal):
        q, k, v, do = make_inputs("float64", batch=2, seqlen_q=30, seqlen_k=50, num_heads=6, num_heads_kv=2, head_dim=8)
        o, lse, dq, dk, dv = run(q, k, v, do, causal=causal)
        repeated = run(q, np.repeat(k, 3, axis=2), np.repeat(v, 3, axis=2), do, causal=causal)
        summed = tuple(a.reshape(2, 50, 2, 3, 8).sum(axis=3) for a in repeated[3:])
        assert_close((*repeated[:3], *summed), (o, lse, dq, dk, dv))

    def test_gradients_of_a_group_are_summed_in_float32(self):
        # 256 equal float16 numbers: added up in float16 they stop growing, and in any order they lose bits.
        q, k, v, do = make_inputs("float16", seqlen_q=1, seqlen_k=1, num_heads=256, num_heads_kv=1, head_dim=4)
        do[:] = np.float16(11.01)
        _, _, dv = fa2cupy.backward(q, k, v, *fa2cupy.forward(q, k, v), do)
        np.testing.assert_array_equal(dv, (np.float64(do[0, 0, 0]) * 256).astype("float16")[None, None, None])

    def test_a_causal_row_is_full_attention_on_its_prefix(self):
        q, k, v, _ = make_inputs("float64", seqlen_q=20, seqlen_k=33, num_heads=2, head_dim=8)
        o, lse = fa2cupy.forward(q, k, v, causal=True, config=TileConfig(8, 4, 1))
        for i in range(20):
            visible = i + 1 + 33 - 20
            row, row_lse = fa2cupy.forward(q[:, i : i + 1], k[:, :visible], v[:, :visible])
            assert_close((o[:, i : i + 1], lse[..., i : i + 1]), (row, row_lse))

    def test_causal_results_do_not_depend_on_later_keys(self):
        q, k, v, _ = make_inputs("float64", seqlen_q=40, head_dim=8)
        o, lse = fa2cupy.forward(q, k, v, causal=True, config=TileConfig(8, 8, 1))
        prefix = fa2cupy.forward(q[:, :17], k[:, :17], v[:, :17], causal=True, config=TileConfig(8, 8, 1))
        assert_close((o[:, :17], lse[..., :17]), prefix)

    def test_scale_zero_is_the_mean(self):
        q, k, v, do = make_inputs("float64", seqlen_q=9, seqlen_k=11, head_dim=8)
        o, lse, dq, dk, dv = run(q, k, v, do, softmax_scale=0)
        assert_close((o,), (np.broadcast_to(v.mean(axis=1, keepdims=True), o.shape),))
        assert_close((lse,), (np.full(lse.shape, np.log(11)),))
        assert_close((dv,), (np.broadcast_to(do.sum(axis=1, keepdims=True) / 11, dv.shape),))
        assert not dq.any()
        assert not dk.any()

    def test_a_negative_scale_is_a_negative_query(self):
        q, k, v, do = make_inputs("float64", seqlen_q=9, seqlen_k=11, head_dim=8)
        o, lse, dq, dk, dv = run(q, k, v, do, softmax_scale=-0.4)
        assert_close(run(-q, k, v, do, softmax_scale=0.4), (o, lse, -dq, dk, dv))


class TestOptions:
    def test_attention_is_forward_with_backward(self):
        q, k, v, do = make_inputs("float32", seqlen_q=20, seqlen_k=30, num_heads=4, num_heads_kv=2, head_dim=8)
        options = {"causal": True, "softmax_scale": 0.3}
        o, backprop = fa2cupy.attention(q, k, v, **options, method="two_pass")
        expected, lse = fa2cupy.forward(q, k, v, **options)
        assert_bits_equal((o,), (expected,))
        assert_bits_equal(backprop(do), fa2cupy.backward(q, k, v, o, lse, do, **options, method="two_pass"))
        Expectation(q, k, v, do, **options).check(**dict(zip(("dq", "dk", "dv"), backprop(do), strict=True)))

    def test_attention_gives_lse_and_takes_its_gradient(self):
        q, k, v, do = make_inputs("float64", seqlen_q=20, seqlen_k=30, num_heads=4, num_heads_kv=2, head_dim=8)
        o, lse, backprop = fa2cupy.attention(q, k, v, causal=True, return_lse=True)
        assert_bits_equal((o, lse), fa2cupy.forward(q, k, v, causal=True))
        dlse = 2 * lse / lse.size  # the gradient of a z-loss, the mean of lse**2
        wanted = fa2cupy.backward(q, k, v, o, lse, do, causal=True, dlse=dlse)
        assert_bits_equal(backprop(do, dlse), wanted)
        assert_bits_equal(backprop(do, dlse=dlse), wanted)
        assert not np.array_equal(backprop(do)[0], wanted[0])
        with pytest.raises(TypeError, match="^return_lse: expected a bool, got int"):
            fa2cupy.attention(q, k, v, return_lse=1)

    def test_a_given_delta_is_used(self):
        q, k, v, do = make_inputs("float64", seqlen_q=20, head_dim=8)
        o, lse, dq, dk, dv = run(q, k, v, do)
        delta = fa2cupy.delta(o, do)
        assert_bits_equal(fa2cupy.backward(q, k, v, o, lse, do, delta=delta), (dq, dk, dv))
        moved = fa2cupy.backward(q, k, v, o, lse, do, delta=delta + 1)
        # dS decreases by P and dQ by softmax_scale P K, where P K is the forward with k instead of v.
        assert_close(moved[:1], (dq - 8**-0.5 * fa2cupy.forward(q, k, k)[0],))
        assert_close(moved[2:], (dv,))

    def test_one_pass_is_the_default(self, monkeypatch):
        q, k, v, do = make_inputs("float32", seqlen_q=20, head_dim=8)
        o, lse = fa2cupy.forward(q, k, v)
        products = record_tiles(monkeypatch)
        fa2cupy.backward(q, k, v, o, lse, do)
        one_pass = len(products)
        fa2cupy.backward(q, k, v, o, lse, do, method="two_pass")
        assert len(products) == 3 * one_pass

    def test_config_is_taken_by_operation(self, monkeypatch):
        q, k, v, do = make_inputs("float32", seqlen_q=64, num_heads=1, head_dim=8)
        tiles = {
            "forward": TileConfig(32, 16, 1),
            "backward": TileConfig(16, 8, 1),
            "backward_dq": TileConfig(8, 32, 1),
            "backward_dkdv": TileConfig(64, 4, 1),
        }
        products = record_tiles(monkeypatch)
        o, lse = fa2cupy.forward(q, k, v, config=tiles)
        assert set(products) == {(32, 16)}
        products.clear()
        fa2cupy.backward(q, k, v, o, lse, do, config=tiles)
        assert set(products) == {(16, 8)}
        products.clear()
        fa2cupy.backward(q, k, v, o, lse, do, config=tiles, method="two_pass")
        assert set(products) == {(8, 32), (64, 4)}
        products.clear()
        fa2cupy.backward(q, k, v, o, lse, do, config=TileConfig(4, 2, 1), method="two_pass")
        assert set(products) == {(4, 2)}
        products.clear()
        monkeypatch.setattr(cpu._Gradient, "by_key_tiles", lambda *_, **__: None)
        fa2cupy.backward(q, k, v, o, lse, do, config=tiles, method="two_pass")
        assert set(products) == {(8, 32)}

    def test_tiles_above_the_diagonal_are_skipped(self, monkeypatch):
        q, k, v, do = make_inputs("float32", seqlen_q=64, seqlen_k=64, num_heads=1, head_dim=8)
        tile = TileConfig(8, 8, 1)
        products = record_tiles(monkeypatch)
        o, lse = fa2cupy.forward(q, k, v, causal=True, config=tile)
        assert len(products) == 8 * 9 // 2
        products.clear()
        fa2cupy.backward(q, k, v, o, lse, do, causal=True, config=tile)
        assert len(products) == 8 * 9 // 2
        products.clear()
        fa2cupy.forward(q, k[:, :8], v[:, :8], causal=True, config=tile)
        assert len(products) == 1

    def test_the_family_is_ignored(self):
        q, k, v, _ = make_inputs(seqlen_q=5, head_dim=8)
        assert_bits_equal(fa2cupy.forward(q, k, v, family="sm80"), fa2cupy.forward(q, k, v))


def record_tiles(monkeypatch) -> list[tuple[int, int]]:
    """Returns a list that collects the shapes of the score tiles computed from now on."""
    shapes = []
    original = cpu_tiles.Heads.scores

    def scores(*arguments):
        result = original(*arguments)
        shapes.append(result[0].shape[1:])  # of each K/V head
        return result

    monkeypatch.setattr(cpu_tiles.Heads, "scores", scores)
    return shapes


@pytest.mark.parametrize(("num_heads", "num_heads_kv"), [(1, 1), (4, 1)])
def test_memory_does_not_grow_with_the_score_matrix(num_heads, num_heads_kv):
    seqlen_q, seqlen_k = 512 // num_heads, 32768
    q, k, v, do = make_inputs(
        "float16", seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads, num_heads_kv=num_heads_kv, head_dim=8
    )
    score_matrix = 4 * num_heads * seqlen_q * seqlen_k
    tracemalloc.start()
    try:
        o, lse = fa2cupy.forward(q, k, v, causal=True)
        _, forward_peak = tracemalloc.get_traced_memory()
        for method in METHODS:
            fa2cupy.backward(q, k, v, o, lse, do, causal=True, method=method)
        _, backward_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert forward_peak < score_matrix / 10
    assert backward_peak < score_matrix / 6
