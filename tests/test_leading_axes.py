"""Several leading axes: q of (..., seqlen, heads, head_dim), and arrays that are broadcast over the axes in front."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.feature_cases import booleans, numbers

import fa2cupy
from fa2cupy import reference
from fa2cupy.problem import strides
from fa2cupy.testing import Expectation, check_delta

LEADING = ((2, 3), (2, 1, 3), (1, 1))
HEADS, QUERIES, KEYS, COLUMNS = 4, 5, 7, 8


def tensor(leading: tuple, rows: int, heads: int, layout: str = "bshd", seed: int = 0, dtype: str = "float64"):
    """Returns an array with the axes of a layout behind leading ones."""
    inner = (rows, heads) if layout == "bshd" else (heads, rows)
    return numbers((*leading, *inner, COLUMNS), dtype, seed)


def inputs(leading: tuple, layout: str = "bshd", dtype: str = "float64") -> tuple:
    """Returns q, k, v and do, with two query heads for each K/V head."""
    sizes = ((QUERIES, HEADS), (KEYS, 2), (KEYS, 2), (QUERIES, HEADS))
    return tuple(tensor(leading, *size, layout, seed, dtype) for seed, size in enumerate(sizes))


def flat(array: np.ndarray, leading: tuple) -> np.ndarray:
    """Returns an array with its leading axes as one."""
    return array.reshape(math.prod(leading), *array.shape[len(leading) :])


def whole(array: np.ndarray, leading: tuple, *inner: int) -> np.ndarray:
    """Returns an array that is broadcast over leading and inner axes, with the leading ones as one."""
    return flat(np.broadcast_to(array, (*leading, *inner)), leading)


def of_pairs(leading: tuple) -> dict:
    """Returns features whose arrays repeat different leading axes."""
    last, first = leading[-1], leading[0]
    rest = (1,) * (len(leading) - 1)
    return {
        "bias": numbers((first, *rest, HEADS, QUERIES, KEYS), "float64", 5),
        "mask": booleans((last, 1, QUERIES, KEYS)) | (np.arange(KEYS) == 2),
        "key_padding_mask": booleans((*leading, KEYS)) | (np.arange(KEYS) == 2),
        "alibi_slopes": numbers((last, HEADS), "float64", 6),
        "sink": numbers((HEADS,), "float64", 7),
        "dropout_p": 0.3,
        "seed": 11,
        "score_mod": lambda score, b, h, q, k, table: score + table[b, h],
        "score_args": (numbers((math.prod(leading), HEADS), "float64", 8),),
        "mask_mod": lambda b, h, q, k: (b + q + k) % 5 != 0,
    }


def flattened(options: dict, leading: tuple) -> dict:
    """Returns the options of the same call with one leading axis."""
    inner = {
        "bias": (HEADS, QUERIES, KEYS),
        "mask": (1, QUERIES, KEYS),
        "key_padding_mask": (KEYS,),
        "alibi_slopes": (HEADS,),
    }
    return options | {name: whole(options[name], leading, *own) for name, own in inner.items() if name in options}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_results_are_those_of_one_leading_axis(leading, layout):
    """Also the bits, and thus the numbers of sequences that functions and dropout are given."""
    q, k, v, do = inputs(leading, layout)
    options = {**of_pairs(leading), "layout": layout}
    one = flattened(options, leading)
    o, lse = fa2cupy.forward(q, k, v, **options)
    flat_inputs = [flat(x, leading) for x in (q, k, v)]
    results = fa2cupy.forward(*flat_inputs, **one)
    dlse = numbers(lse.shape, "float64", 9)
    extra = {"return_dsink": True, "return_dscore_args": True}
    gradients = fa2cupy.backward(q, k, v, o, lse, do, dlse=dlse, return_dbias=True, **extra, **options)
    results += fa2cupy.backward(
        *flat_inputs, *results, flat(do, leading), dlse=flat(dlse, leading), return_dbias=True, **extra, **one
    )
    found = (o, lse, *gradients)
    assert [x.shape for x in found[:5]] == [q.shape, (*leading, HEADS, QUERIES), q.shape, k.shape, v.shape]
    for number, (mine, other) in enumerate(zip(found, results, strict=True)):
        if number == 5:
            assert mine.shape == options["bias"].shape
            split = other.reshape(*leading, *other.shape[1:])
            np.testing.assert_allclose(mine, split.sum(tuple(range(1, len(leading))), keepdims=True), atol=1e-12)
        elif number > 5:  # sums over sequences
            np.testing.assert_allclose(mine, other, atol=1e-12)
        else:
            assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [(2, 1, HEADS, QUERIES, KEYS), (3, 1, QUERIES, KEYS), (2, 3, 1, 1, KEYS), (2, 1, 1, QUERIES, 1), (HEADS, 1, 1)],
    ids=str,
)
def test_a_bias_against_the_reference(shape, dtype):
    q, k, v, do = inputs((2, 3), dtype=dtype)
    options = {"bias": numbers(shape, "float32"), "causal": True}
    expected = Expectation(q, k, v, do, **options)
    o, lse = fa2cupy.forward(q, k, v, **options, out=expected.unwritten("o", "lse"))
    names = ("dq", "dk", "dv", "dbias")
    gradients = fa2cupy.backward(q, k, v, o, lse, do, return_dbias=True, **options, out=expected.unwritten(*names))
    assert gradients[3].shape == shape
    expected.check(o=o, lse=lse, **dict(zip(names, gradients, strict=True)))
    check_delta(o, do, fa2cupy.delta(o, do))


def test_references_sum_over_shared_axes():
    """The reference's dbias is that of an expanded bias, summed."""
    leading = 2, 3
    q, k, v, do = inputs(leading)
    bias = numbers((2, 1, HEADS, QUERIES, KEYS), "float64")
    o, lse = reference.forward(q, k, v, bias=bias)
    expanded = np.broadcast_to(bias, (*leading, *bias.shape[2:])).copy()
    full = reference.backward(q, k, v, o, lse, do, bias=expanded, return_dbias=True)[3]
    shared = reference.backward(q, k, v, o, lse, do, bias=bias, return_dbias=True)[3]
    np.testing.assert_allclose(shared, full.sum(1, keepdims=True), atol=1e-12)
    naive = reference.baseline_backward(q, k, v, do, bias=bias, return_dbias=True)
    noise = reference.gradient_noise(q, k, v, o, lse, do, bias=bias, return_dbias=True)
    assert naive[3].shape == bias.shape and noise["dbias"] > 0


def test_calls_of_second_order():
    q, k, v, do = inputs((2, 3))
    qt, kt, vt, dot = (np.roll(x, 1, -1) for x in (q, k, v, do))
    bias, tangent = (numbers((2, 1, HEADS, QUERIES, KEYS), "float64", seed) for seed in (3, 4))
    options = {"bias": bias, "mask": booleans((3, 1, 1, KEYS)) | (np.arange(KEYS) == 2)}

    def results_of(library) -> tuple:
        o, lse, *moved = library.jvp(q, k, v, qt, kt, vt, bias_tangent=tangent, **options)
        given = q, k, v, o, lse, do, qt, kt, vt
        return (
            *(o, lse, *moved),
            *library.backward_jvp(*given, *moved, dot, bias_tangent=tangent, return_dbias=True, **options),
            *library.double_backward(*given, gdbias=tangent, return_dbias=True, **options),
        )

    for found, wanted in zip(results_of(fa2cupy), results_of(reference), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-10)


def test_a_closure_and_merged_parts():
    leading = 2, 3
    q, k, v, do = inputs(leading)
    o, backprop = fa2cupy.attention(q, k, v, bias=numbers((3, HEADS, 1, KEYS), "float64"))
    assert [x.shape for x in backprop(do)] == [q.shape, k.shape, v.shape]
    parts = [fa2cupy.forward(q, k[..., rows, :, :], v[..., rows, :, :]) for rows in (slice(0, 3), slice(3, None))]
    merged = fa2cupy.merge(*zip(*parts, strict=True))
    for one, other in zip(merged, fa2cupy.forward(q, k, v), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("own", [1, 6])
def test_a_sparse_map_has_one_axis_of_sequences(own):
    leading = 2, 3
    q, k, v = tensor(leading, QUERIES, HEADS), *(tensor(leading, 20, 2, seed=seed) for seed in (1, 2))
    sparse = fa2cupy.BlockMask(booleans((own, 1, 1, 2)) | [False, True], QUERIES, 20, tile=(32, 16))
    o, lse = fa2cupy.forward(q, k, v, block_mask=sparse)
    other, _ = fa2cupy.forward(*(flat(x, leading) for x in (q, k, v)), block_mask=sparse)
    assert o.tobytes() == other.tobytes()
    with pytest.raises(ValueError, match="block_mask: expected a map for batch of 6, or of 1 for all, got one for 2"):
        fa2cupy.forward(q, k, v, block_mask=fa2cupy.BlockMask(booleans((2, 1, 1, 2)), QUERIES, 20, tile=(32, 16)))


@pytest.mark.parametrize("leading", [(0, 3), (2, 0, 3), (1, 1, 1, 1)], ids=str)
def test_axes_of_no_or_one_sequence(leading):
    q, k, v, do = inputs(leading)
    bias = numbers((*leading, 1, QUERIES, KEYS), "float64")
    o, lse = fa2cupy.forward(q, k, v, bias=bias)
    *_, dbias = fa2cupy.backward(q, k, v, o, lse, do, bias=bias, return_dbias=True)
    assert o.shape == q.shape and lse.shape == (*leading, HEADS, QUERIES) and dbias.shape == bias.shape
    assert fa2cupy.backward(q, k, v, o, lse, do, bias=bias[:1], return_dbias=True)[3].shape == bias[:1].shape


def test_no_array_is_expanded_or_copied():
    """Strides of 0 and negative ones in any axis: the arrays have fewer elements than the scores."""
    leading = 3, 2
    q, k, v, do = (x.transpose(1, 0, *range(2, 5)) for x in inputs(leading[::-1]))
    row = numbers((2, 1, 1, 1, KEYS), "float64")
    bias = np.broadcast_to(row, (2, 3, HEADS, QUERIES, KEYS)).swapaxes(0, 1)[::-1, :, ::-1, :, ::-1]
    mask = np.broadcast_to(np.arange(KEYS) != 3, (3, 1, 1, 1, KEYS))[..., ::-1]
    o, lse = fa2cupy.forward(q, k, v, bias=bias, mask=mask)
    expected = Expectation(*map(np.ascontiguousarray, (q, k, v, do)), bias=bias.copy(), mask=mask.copy())
    gradients = fa2cupy.backward(q, k, v, o, lse, do, bias=bias, mask=mask, return_dbias=True)
    names = ("dq", "dk", "dv", "dbias")
    expected.check(o=o, lse=lse, **dict(zip(names, gradients, strict=True)))


def test_results_may_have_any_strides():
    q, k, v, _ = inputs((2, 3))
    o = np.full((3, 2, *q.shape[2:]), np.nan).swapaxes(0, 1)[:, ::-1]
    lse = np.full((HEADS, 2, 3, QUERIES), np.nan).transpose(1, 2, 0, 3)
    found = fa2cupy.forward(q, k, v, out=(o, lse))
    for one, array, wanted in zip(found, (o, lse), fa2cupy.forward(q, k, v), strict=True):
        assert one is array and np.array_equal(array, wanted)


MESSAGES = {
    "k: expected shape (2, 3, seqlen_k, num_heads_kv, 8) to match q (2, 3, 5, 4, 8), got (3, 2, 7, 2, 8)": {
        "k": np.zeros((3, 2, KEYS, 2, COLUMNS)),
    },
    "k: expected 5 axes like q, got shape (6, 7, 2, 8)": {"k": np.zeros((6, KEYS, 2, COLUMNS))},
    "bias: expected a shape that can be broadcast to (..., heads, seqlen_q, seqlen_k) = (2, 3, 4, 5, 7), got "
    "(2, 3, 5, 7); write bias[:, :, None] if its first axes are those of the batch": {
        "bias": np.zeros((2, 3, QUERIES, KEYS)),
    },
    "mask: expected a shape that can be broadcast to (..., heads, seqlen_q, seqlen_k) = (2, 3, 4, 5, 7), got "
    "(2, 3, 7); write mask[:, :, None, None] if its first axes are those of the batch": {
        "mask": np.zeros((2, 3, KEYS), bool),
    },
    "bias: expected a shape that can be broadcast to (..., heads, seqlen_q, seqlen_k) = (2, 3, 4, 5, 7), got "
    "(1, 2, 3, 4, 5, 7)": {"bias": np.zeros((1, 2, 3, HEADS, QUERIES, KEYS))},
    "key_padding_mask: expected a shape that can be broadcast to (..., seqlen_k) = (2, 3, 7), got (6, 7)": {
        "key_padding_mask": np.zeros((6, KEYS), bool),
    },
    "alibi_slopes: expected a shape that can be broadcast to (..., heads) = (2, 3, 4), got (2, 4)": {
        "alibi_slopes": np.zeros((2, HEADS)),
    },
    "sink: expected shape (4,) to match q and k, got (3, 4)": {"sink": np.zeros((3, HEADS))},
    "cu_seqlens_q: packed sequences need q, k and v of 3 axes (total, heads, head_dim), got 5": {
        "cu_seqlens_q": np.zeros(2, "int32"),
        "cu_seqlens_k": np.zeros(2, "int32"),
    },
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_name_the_argument(message):
    q, k, v, _ = inputs((2, 3))
    arguments = {"q": q, "k": k, "v": v} | MESSAGES[message]
    arrays = [arguments.pop(name) for name in ("q", "k", "v")]
    with pytest.raises(ValueError) as error:
        fa2cupy.forward(*arrays, **arguments)
    assert str(error.value) == message


def test_decode_and_several_gpus_take_four_axes():
    q, k, v, _ = inputs((2, 3))
    with pytest.raises(ValueError, match=r"^q: expected 4 axes"):
        fa2cupy.decode(q, k, v, np.full(2, 3, "int32"))

    def on_ranks(comm):
        with pytest.raises(ValueError, match=r"^q: expected up to 4 axes on several ranks, got shape \(2, 3, 5, 4"):
            fa2cupy.distributed.forward(comm, q, k, v)

    fa2cupy.distributed.simulate(2, on_ranks)


def test_a_function_of_windows():
    """`b` is the flattened number of a sequence."""
    q, k, v, _ = inputs((2, 3))
    first = np.array([0, 0, 2, 0, 0, 3])
    o, _ = fa2cupy.forward(q, k, v, mask_mod=lambda b, h, i, j, first: j >= first[b], mask_args=(first,))
    mask = np.arange(KEYS) >= first.reshape(2, 3, 1, 1, 1)
    np.testing.assert_allclose(o, fa2cupy.forward(q, k, v, mask=mask)[0], atol=1e-12)


axes = st.lists(st.tuples(st.integers(1, 4), st.integers(-9, 9), st.booleans()), min_size=1, max_size=4)


@given(axes)
def test_terms_are_the_distances_of_sequences(axes):
    """For any lengths and strides, those that flatten into one and those that repeat axes among them."""
    lengths = [length for length, *_ in axes]
    own, inner = [], 1
    for length, stride, is_nested in reversed(axes):
        own.insert(0, inner if is_nested else stride)
        inner = length * own[0]
    terms = strides.batch_terms(lengths, own)
    for number, index in enumerate(itertools.product(*map(range, lengths))):
        wanted = sum(i * stride for i, stride in zip(index, own, strict=True))
        assert sum(number // divisor * distance for divisor, distance in terms.items()) == wanted
    assert len(terms) <= len(axes) and 0 not in terms.values()
    flat_stride = strides.flat_stride(lengths, own)
    assert (flat_stride is None) == bool(terms.keys() - {1})


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(-2, 2))
def test_kernels_divide_by_multiplication(divisor, number, near):
    factor, shift = strides._division(divisor)
    assert factor < 2**32 and shift < 32
    for b in {number, number // divisor * divisor + near, 2**31 - 1}:
        if 0 <= b < 2**31:
            assert (2 * b * factor >> 32) >> shift == b // divisor


def test_strides_of_an_array_with_several_leading_axes():
    bias = np.zeros((2, 1, HEADS, QUERIES, KEYS))
    head, pairs = QUERIES * KEYS, HEADS * QUERIES * KEYS
    of_sequence = head, KEYS, 1
    assert strides.score_strides("bias", bias, (2, 3)) == (*of_sequence, pairs, 3)
    assert strides.contiguous_score_strides(bias.shape, (2, 3)) == strides.score_strides("bias", bias, (2, 3))
    assert strides.score_strides("bias", np.zeros((2, 3, *bias.shape[2:])), (2, 3)) == (pairs, *of_sequence)
    assert strides.score_strides("bias", bias[0, 0], (2, 3)) == (0, *of_sequence)
    padding = strides.score_strides("key_padding_mask", np.zeros((3, KEYS), bool), (2, 3))
    assert padding == (0, 0, 1, KEYS, 1, -3 * KEYS, 3)
    plain, nested = (5, *of_sequence), (*of_sequence, 7, 3)
    assert [strides.num_terms(one) for one in (plain, nested, padding)] == [0, 1, 2]
    by_one, by_three = strides._division(1), strides._division(3)
    assert strides.recorded_strides(plain, 0) == plain
    assert strides.recorded_strides(plain, 2) == (*of_sequence, 5, *by_one, 0, 0, 0)
    assert strides.recorded_strides(nested, 1) == (*of_sequence, 7, *by_three)
    assert strides.recorded_strides(nested, 2) == (*of_sequence, 7, *by_three, 0, 0, 0)
