"""The reference against independent results: finite differences, patterns written by hand, plain loops."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest

from fa2cupy import reference
from fa2cupy.numerics import arrays
from fa2cupy.testing import make_inputs

pytestmark = pytest.mark.filterwarnings("error")

# Equal and unequal lengths; (5, 2) has rows without a visible key when causal.
LENGTHS = [(4, 4), (2, 5), (5, 2), (1, 3), (3, 1)]


def uniform_attention(seqlen_q: int, seqlen_k: int, **options):
    """Returns P and lse for scores of 0; the values are unit vectors, so that o is P."""
    q = np.zeros((1, seqlen_q, 1, seqlen_k))
    v = np.eye(seqlen_k)[None, :, None, :]
    o, lse = reference.forward(q, v, v, **options)
    return o[0, :, 0], lse[0, 0]


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "rows"),
    [
        (2, 5, "11110 11111"),
        (5, 2, "00 00 00 10 11"),
        (3, 3, "100 110 111"),
        (1, 4, "1111"),
        (4, 1, "0 0 0 1"),
    ],
)
def test_causal_mask_is_aligned_to_the_bottom_right(seqlen_q, seqlen_k, rows):
    visible = np.array([[int(digit) for digit in row] for row in rows.split()])
    seen = visible.sum(axis=1)
    p, lse = uniform_attention(seqlen_q, seqlen_k, causal=True)
    np.testing.assert_allclose(p, visible / np.maximum(seen, 1)[:, None], rtol=1e-15)
    expected = [math.log(n) if n else -math.inf for n in seen]
    np.testing.assert_allclose(lse, expected, rtol=1e-15)


def test_without_a_mask_every_key_is_visible():
    p, lse = uniform_attention(5, 2)
    np.testing.assert_allclose(p, 0.5, rtol=1e-15)
    np.testing.assert_allclose(lse, math.log(2), rtol=1e-15)


def test_forward_is_the_sum_written_out():
    q, k, v, _ = make_inputs("float64", batch=2, seqlen_q=3, seqlen_k=4, num_heads=4, num_heads_kv=2, head_dim=5)
    o, lse = reference.forward(q, k, v, softmax_scale=0.7)
    for b, i, h in np.ndindex(2, 3, 4):
        scores = [0.7 * sum(q[b, i, h, d] * k[b, j, h // 2, d] for d in range(5)) for j in range(4)]
        total = sum(math.exp(s) for s in scores)
        assert lse[b, h, i] == pytest.approx(math.log(total), abs=1e-13)
        row = sum(math.exp(s) / total * v[b, j, h // 2] for j, s in enumerate(scores))
        np.testing.assert_allclose(o[b, i, h], row, atol=1e-13)


def test_softmax_scale_defaults_to_the_root_of_head_dim():
    q, k, v, _ = make_inputs("float64", seqlen_q=3, head_dim=16)
    defaults, explicit = reference.forward(q, k, v), reference.forward(q, k, v, softmax_scale=0.25)
    np.testing.assert_array_equal(defaults[0], explicit[0])
    np.testing.assert_array_equal(defaults[1], explicit[1])


def test_delta_is_the_row_sum():
    o, _, _, do = make_inputs("float16", batch=2, seqlen_q=3, num_heads=2, head_dim=4)
    delta = reference.delta(o, do)
    for b, i, h in np.ndindex(2, 3, 2):
        row = sum(float(o[b, i, h, d]) * float(do[b, i, h, d]) for d in range(4))
        assert delta[b, h, i] == pytest.approx(row, abs=1e-13)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_gradients_are_central_differences(seqlen_q, seqlen_k, causal, heads):
    options = {"causal": causal, "softmax_scale": 0.6}
    num_heads, num_heads_kv = heads
    q, k, v, do = make_inputs(
        "float64", seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=num_heads, num_heads_kv=num_heads_kv, head_dim=3
    )
    gradients = reference.backward(q, k, v, *reference.forward(q, k, v, **options), do, **options)
    step = 1e-5
    for array, gradient in zip((q, k, v), gradients, strict=True):
        assert gradient.shape == array.shape
        for index in np.ndindex(array.shape):
            value = array[index]
            losses = []
            for shifted in (value + step, value - step):
                array[index] = shifted
                losses.append((reference.forward(q, k, v, **options)[0] * do).sum())
            array[index] = value
            assert gradient[index] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-8)


def test_rows_without_a_visible_key_give_nothing():
    q, k, v, do = make_inputs("float64", seqlen_q=5, seqlen_k=2, head_dim=4)
    o, lse = reference.forward(q, k, v, causal=True)
    assert not o[:, :3].any()
    assert (lse[..., :3] == -np.inf).all()
    assert np.isfinite(lse[..., 3:]).all()
    before = reference.backward(q, k, v, o, lse, do, causal=True)
    do[:, :3] = 100
    after = reference.backward(q, k, v, o, lse, do, causal=True)
    assert not after[0][:, :3].any()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k", "num_heads"])
def test_empty_axes(empty):
    sizes = {"batch": 2, "seqlen_q": 3, "seqlen_k": 4, "num_heads": 2, "num_heads_kv": 1, "head_dim": 5, empty: 0}
    q, k, v, do = make_inputs("float64", **sizes)
    o, lse = reference.forward(q, k, v)
    assert not o.any()
    assert (lse == -np.inf).all()
    for array, gradient in zip((q, k, v), reference.backward(q, k, v, o, lse, do), strict=True):
        assert gradient.shape == array.shape
        assert not gradient.any()


def test_layouts_and_ranks_agree():
    q, k, v, do = make_inputs("float64", seqlen_q=4, seqlen_k=6, num_heads=4, num_heads_kv=2, head_dim=3)

    def results(*arrays, layout):
        q, k, v, do = arrays
        o, lse = reference.forward(q, k, v, causal=True, layout=layout)
        gradients = reference.backward(q, k, v, o, lse, do, causal=True, layout=layout)
        return o, *gradients, lse, reference.delta(o, do, layout=layout)

    expected = results(q, k, v, do, layout="bshd")
    *swapped, lse, delta = results(*(a.transpose(0, 2, 1, 3) for a in (q, k, v, do)), layout="bhsd")
    for one, other in zip(expected, (*(a.transpose(0, 2, 1, 3) for a in swapped), lse, delta), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(expected, results(q[0], k[0], v[0], do[0], layout="bshd"), strict=True):
        np.testing.assert_array_equal(one[0], other)
    one_head, *_ = results(q[0, :, 3], k[0, :, 1], v[0, :, 1], do[0, :, 3], layout="bhsd")
    np.testing.assert_array_equal(expected[0][0, :, 3], one_head)


def test_shapes_are_checked():
    q, k, v, do = make_inputs("float64", seqlen_q=3, head_dim=4)
    o, lse = reference.forward(q, k, v)
    with pytest.raises(ValueError, match="^lse: expected shape"):
        reference.backward(q, k, v, o, lse[..., :1], do)
    with pytest.raises(ValueError, match="^k: expected shape"):
        reference.forward(q, k[..., :3], v)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_baseline_rounds_every_matrix_product(dtype):
    q, k, v, do = make_inputs(dtype, seqlen_q=6, seqlen_k=7, num_heads=1, head_dim=8)

    def rounded(matrix):
        return matrix.astype(q.dtype).astype("float32")

    q32, k32, v32, do32 = (a[0, :, 0].astype("float32") for a in (q, k, v, do))
    scale = 0.25  # a power of two changes no rounding
    s = scale * rounded(q32 @ k32.T)
    lse = np.log(np.exp(s).sum(axis=1, keepdims=True))
    p = rounded(np.exp(s - lse))
    o = rounded(p @ v32)
    ds = p * (rounded(do32 @ v32.T) - (o * do32).sum(axis=1, keepdims=True))
    products = (o, scale * rounded(rounded(ds) @ k32), scale * rounded(rounded(ds).T @ q32), rounded(p.T @ do32))
    options = {"softmax_scale": scale}
    results = (reference.baseline_forward(q, k, v, **options)[0], *reference.baseline_backward(q, k, v, do, **options))
    spacing = float(np.finfo("float16").eps) if dtype == "float16" else 2.0**-7
    for expected, result in zip(products, results, strict=True):
        assert result.dtype == q.dtype
        difference = abs(expected - result[0, :, 0].astype("float32"))
        # Sums in another order may change a few roundings.
        assert (difference == 0).mean() > 0.9
        assert difference.max() <= spacing * abs(expected).max()


@pytest.mark.parametrize(
    ("dtype", "digits"), [("float64", 1e-13), ("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 1e-1)]
)
def test_baseline_errs_by_the_precision_of_the_dtype(dtype, digits):
    q, k, v, do = make_inputs(dtype, seqlen_q=20, seqlen_k=30, num_heads=4, num_heads_kv=2, head_dim=16)
    o, lse = reference.forward(q, k, v, causal=True)
    wanted = (o, *reference.backward(q, k, v, o, lse, do, causal=True))
    base = (reference.baseline_forward(q, k, v, causal=True)[0], *reference.baseline_backward(q, k, v, do, causal=True))
    for right, naive in zip(wanted, base, strict=True):
        error = abs(naive.astype("float64") - right).max() / abs(right).max()
        assert error < digits
        if dtype != "float64":
            assert error > digits / 1000


def test_gradient_noise_bounds_what_cancellation_leaves():
    # With one key the exact dq and dk are 0, and float32 arithmetic leaves rounding errors.
    q, k, v, do = make_inputs("float32", batch=4, seqlen_q=64, seqlen_k=1, num_heads=4, head_dim=64)
    noise = reference.gradient_noise(q, k, v, *reference.forward(q, k, v), do)
    noise = [np.finfo("float32").eps * noise[name] for name in ("dq", "dk")]
    leftovers = [abs(a).max() for a in reference.baseline_backward(q, k, v, do)[:2]]
    assert all(0 < left <= bound for left, bound in zip(leftovers, noise, strict=True))


def test_gradient_noise_is_small_where_nothing_cancels():
    q, k, v, do = make_inputs("float32", seqlen_q=256, seqlen_k=300, head_dim=64)
    o, lse = reference.forward(q, k, v)
    noise = reference.gradient_noise(q, k, v, o, lse, do)
    noise = [np.finfo("float32").eps * noise[name] for name in ("dq", "dk")]
    gradients = reference.backward(q, k, v, o, lse, do)[:2]
    assert all(bound < 0.3 * 1e-5 * abs(g).max() for bound, g in zip(noise, gradients, strict=True))


def test_without_cublas_the_host_multiplies(monkeypatch):
    class OnDevice:
        """The part of CuPy's arrays that a product without cuBLAS needs."""

        def __init__(self, host):
            self.host = host

        def get(self):
            return self.host

    monkeypatch.setattr(arrays, "has_cublas", lambda: False)
    monkeypatch.setattr(arrays, "array_module", lambda array: types.SimpleNamespace(asarray=OnDevice))
    a, b = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(arrays.matmul(OnDevice(a), OnDevice(b)).host, a @ b)
