"""On a GPU: strides, views, out= arrays, and mathematical properties of any inputs."""

from __future__ import annotations

import numpy as np
import pytest

import fa2cupy
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

METHODS = ("single_pass", "two_pass")


def inputs_of(dtype: str, **options) -> tuple:
    """Returns inputs on the GPU."""
    return make_inputs(
        dtype, **{"batch": 2, "seqlen_q": 130, "seqlen_k": 150, "num_heads": 4, "num_heads_kv": 2} | options, xp=cp
    )


def gradients(q, k, v, do, **options) -> tuple:
    """Returns (o, lse, dq, dk, dv)."""
    method = options.pop("method", "two_pass")
    o, lse = fa2cupy.forward(q, k, v, **options)
    return o, lse, *fa2cupy.backward(q, k, v, o, lse, do, method=method, **options)


def packed(x, step: int):
    """Returns the same numbers as every `step`-th head of a larger array, rows still aligned."""
    wide = cp.full((*x.shape[:2], x.shape[2] * step, x.shape[3]), np.nan, x.dtype)
    wide[:, :, ::step] = x
    return wide[:, :, ::step]


def shifted(x):
    """Returns the same numbers at an address that is not a multiple of 16."""
    flat = cp.empty(x.size + 1, x.dtype)
    view = flat[1:].reshape(x.shape)
    view[...] = x
    return view


def gapped(x):
    """Returns the same numbers with a last axis that is not contiguous."""
    wide = cp.empty((*x.shape, 2), x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def reversed_rows(x):
    """Returns the same numbers with a negative stride."""
    return cp.ascontiguousarray(x[:, ::-1])[:, ::-1]


def odd_rows(x):
    """Returns the same numbers in rows that do not start on 16 bytes."""
    wide = cp.empty((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    wide[..., :-1] = x
    return wide[..., :-1]


VIEWS = (lambda x: packed(x, 3), shifted, gapped, reversed_rows, odd_rows, lambda x: cp.asfortranarray(x))
VIEW_NAMES = ("packed heads", "shifted", "gapped", "reversed", "odd rows", "fortran")


def family_of(view, dtype: str, head_dim: int) -> str | None:
    """Returns the family that gives the last bits of a call on the view.

    On Hopper, arrays that TMA does not take go to the older kernels, unless they are copied.
    """
    return "sm80" if view is reversed_rows and dtype == "float16" and head_dim % 8 == 0 else None


@pytest.mark.parametrize("view", VIEWS, ids=VIEW_NAMES)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("head_dim", (64, 59))
def test_views_give_the_same_bits_as_contiguous_arrays(dtype, view, head_dim):
    inputs = inputs_of(dtype, head_dim=head_dim)
    wanted = gradients(*inputs, causal=True, family=family_of(view, dtype, head_dim))
    got = gradients(*[view(x) for x in inputs], causal=True)
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), wanted, got, strict=True):
        assert bool(cp.all(a == b)), name


@pytest.mark.parametrize("view", VIEWS, ids=VIEW_NAMES)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("head_dim", (64, 59))
def test_results_are_written_into_any_view_and_nowhere_else(dtype, view, head_dim):
    q, k, v, do = inputs_of(dtype, head_dim=head_dim)
    family = family_of(view, dtype, head_dim)
    wanted = fa2cupy.forward(q, k, v, family=family)
    wanted += fa2cupy.backward(q, k, v, *wanted, do, method="two_pass", family=family)
    nan = [cp.full(x.shape, np.nan, x.dtype) for x in wanted]
    out = [view(x) if x.ndim == 4 else cp.stack([x, x], -1)[..., 0] for x in nan]
    bases = [x.base if x.base is not None else x for x in out]
    before = [int(cp.isnan(b.astype("float32")).sum()) for b in bases]
    o, lse = fa2cupy.forward(q, k, v, out=(out[0], out[1]))
    fa2cupy.backward(q, k, v, o, cp.ascontiguousarray(lse), do, method="two_pass", out=tuple(out[2:]))
    for name, a, b, base, nans in zip(("o", "lse", "dq", "dk", "dv"), wanted, out, bases, before, strict=True):
        assert bool(cp.all(a == b)), name
        if name != "lse":
            assert int(cp.isnan(base.astype("float32")).sum()) == nans - a.size, f"{name}: wrote outside of the view"


def test_broadcast_keys_and_values_are_read_through_stride_zero():
    q, k, v, do = inputs_of("float16", batch=3)
    k, v = (cp.broadcast_to(x[:1], x.shape) for x in (k, v))
    wanted = gradients(q, cp.ascontiguousarray(k), cp.ascontiguousarray(v), do, family="sm80")
    for a, b in zip(wanted, gradients(q, k, v, do), strict=True):
        assert bool(cp.all(a == b))


def test_packed_qkv_without_a_copy():
    qkv = cp.stack(inputs_of("bfloat16", seqlen_k=130, num_heads_kv=4)[:3], axis=2)
    do = inputs_of("bfloat16", seqlen_k=130, num_heads_kv=4, seed=1)[3]
    q, k, v = (qkv[:, :, i] for i in range(3))
    dqkv = cp.full_like(qkv, np.nan)
    o, lse = fa2cupy.forward(q, k, v, causal=True)
    fa2cupy.backward(q, k, v, o, lse, do, causal=True, out=tuple(dqkv[:, :, i] for i in range(3)))
    Expectation(q, k, v, do, causal=True).check(o=o, lse=lse, dq=dqkv[:, :, 0], dk=dqkv[:, :, 1], dv=dqkv[:, :, 2])


def test_overlapping_and_foreign_outputs_are_refused_untouched():
    q, k, v, do = inputs_of("float16", seqlen_k=130, num_heads_kv=4)
    o, lse = fa2cupy.forward(q, k, v)
    kept = q.copy()
    with pytest.raises(ValueError, match=r"out \(o\)|o: overlaps q"):
        fa2cupy.forward(q, k, v, out=(q, None))
    buffer = cp.empty((2, 130, 5, 64), "float16")
    with pytest.raises(ValueError, match="overlaps"):
        fa2cupy.backward(q, k, v, o, lse, do, out=(buffer[:, :, :4], buffer[:, :, 1:], None))
    with pytest.raises(TypeError, match="dtype"):
        fa2cupy.forward(q, k, v, out=(cp.empty(q.shape, "float32"), None))
    with pytest.raises(TypeError, match="numpy"):
        fa2cupy.forward(q, k, cp.asnumpy(v))
    assert bool(cp.all(q == kept))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
@pytest.mark.parametrize("method", METHODS)
def test_grouped_heads_are_repeated_keys_and_values(dtype, method):
    q, k, v, do = inputs_of(dtype)
    o, lse, dq, _, _ = gradients(q, k, v, do, causal=True, method="two_pass")
    repeated = [cp.repeat(x, 2, axis=2) for x in (k, v)]
    full = gradients(q, *repeated, do, causal=True, method="two_pass")
    assert bool(cp.all(o == full[0])) and bool(cp.all(lse == full[1])) and bool(cp.all(dq == full[2]))
    Expectation(q, k, v, do, causal=True).check(
        **dict(zip(("dq", "dk", "dv"), gradients(q, k, v, do, causal=True, method=method)[2:], strict=True))
    )


@pytest.mark.parametrize(("dtype", "precision"), [("float16", None), ("float32", "ieee"), ("float32", "split")])
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_causal_rows_see_a_prefix_only(dtype, precision, head_dim):
    q, k, v, _ = inputs_of(dtype, seqlen_q=300, seqlen_k=300, head_dim=head_dim)
    whole, _ = fa2cupy.forward(q, k, v, causal=True, precision=precision)
    poisoned = [x.copy() for x in (k, v)]
    for x in poisoned:
        x[:, 201:] = 99
    again, _ = fa2cupy.forward(q, *poisoned, causal=True, precision=precision)
    # Float16 pairs share a scale in 64 rows, and some of these may be hidden.
    tolerance = 1e-6 if precision == "split" else 0.0
    assert float(abs(whole[:, :201] - again[:, :201]).max()) <= tolerance
    assert bool(cp.any(whole[:, 201:] != again[:, 201:]))


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_permuting_the_keys_changes_nothing_but_rounding(dtype):
    q, k, v, do = inputs_of(dtype)
    order = cp.asarray(np.random.default_rng(3).permutation(k.shape[1]))
    wanted = gradients(q, k, v, do)
    got = gradients(q, k[:, order], v[:, order], do)
    back = cp.argsort(order)
    got = (*got[:3], got[3][:, back], got[4][:, back])
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    for a, b in zip(wanted, got, strict=True):
        assert float(abs(a - b).max()) <= tolerance * float(abs(a).max())


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_a_shift_of_all_scores_moves_lse_alone(dtype):
    """One more column, constant in the keys, adds the same to every score of a row."""
    q, k, v, _ = inputs_of(dtype, head_dim=63)
    plain, lse = fa2cupy.forward(q, k, v, softmax_scale=0.1)
    wider = [
        cp.concatenate([x, cp.full((*x.shape[:-1], 1), c, x.dtype)], -1) for x, c in ((q, 2.0), (k, 5.0), (v, 0.0))
    ]
    moved, moved_lse = fa2cupy.forward(*wider, softmax_scale=0.1)
    tolerance = 2e-5 if dtype == "float32" else 1e-13
    assert float(abs(moved[..., :63] - plain).max()) < tolerance
    assert float(abs(moved_lse - lse - 1.0).max()) < tolerance


def test_attention_closes_over_its_forward():
    q, k, v, do = inputs_of("float16")
    o, backprop = fa2cupy.attention(q, k, v, causal=True, deterministic=True)
    wanted = gradients(q, k, v, do, causal=True)
    assert bool(cp.all(o == wanted[0]))
    for a, b in zip(wanted[2:], backprop(do), strict=True):
        assert bool(cp.all(a == b))


def in_rows(x, batch: int):
    """Returns an array with its first axis as two, (batch, rows)."""
    return x.reshape(batch, -1, *x.shape[1:])


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
def test_arrays_that_leading_axes_share(dtype):
    """Bits are those of arrays that are expanded for each sequence; the gradient of a bias is summed over them."""
    inputs = inputs_of(dtype, batch=6, seqlen_q=144, seqlen_k=144)
    q, k, v, do = (in_rows(x, 2) for x in inputs)
    rng = cp.random.default_rng(0)
    wide = "float64" if dtype == "float64" else "float32"
    options = {
        "bias": rng.standard_normal((2, 1, 4, 144, 144)).astype(q.dtype),
        "mask": (rng.random((3, 1, 144, 144)) < 0.9) | (cp.arange(144) == 3),
        "key_padding_mask": (rng.random((2, 1, 144)) < 0.9) | (cp.arange(144) == 3),
        "alibi_slopes": rng.standard_normal((3, 4)).astype(wide),
    }
    inner = {"bias": (4, 144, 144), "mask": (1, 144, 144), "key_padding_mask": (144,), "alibi_slopes": (4,)}
    for names in (("bias",), ("mask",), tuple(options)):
        given = {name: options[name] for name in names}
        expanded = {
            name: cp.ascontiguousarray(cp.broadcast_to(x, (2, 3, *inner[name])).reshape(6, *inner[name]))
            for name, x in given.items()
        }
        for mine, other in zip(gradients(q, k, v, do, **given), gradients(*inputs, **expanded), strict=True):
            assert bool(cp.all(mine == other.reshape(mine.shape))), names
        if "bias" in names:
            o, lse = fa2cupy.forward(q, k, v, **given)
            *_, dbias = fa2cupy.backward(q, k, v, o, lse, do, return_dbias=True, **given)
            assert dbias.shape == given["bias"].shape
            Expectation(q, k, v, do, **given).check(dbias=dbias)


def test_leading_axes_without_a_common_stride():
    inputs = (in_rows(x, 2) for x in inputs_of("float16", batch=6))
    q, k, v, do = (cp.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in inputs)
    rows = cp.random.default_rng(0).standard_normal((150,)).astype("float16")
    bias = cp.broadcast_to(rows, (3, 2, 4, 130, 150)).swapaxes(0, 1)[::-1, :, ::-1, :, ::-1]
    wanted = gradients(*map(cp.ascontiguousarray, (q, k, v, do)), bias=cp.ascontiguousarray(bias))
    out = cp.full((3, 2, *q.shape[2:]), np.nan, "float16").swapaxes(0, 1)
    fa2cupy.forward(q, k, v, bias=bias, out=(out, None))
    assert bool(cp.all(out == wanted[0]))
    for mine, other in zip(gradients(q, k, v, do, bias=bias), wanted, strict=True):
        assert bool(cp.all(mine == other))
