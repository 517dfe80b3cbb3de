"""Packed sequences against a loop over them, and packed q, k and v, which are views."""

from __future__ import annotations

import contextlib
import inspect
import types

import numpy as np
import pytest
from support.feature_cases import METHODS, assert_bits_equal, assert_close, booleans, check, inputs_of, numbers, run

import fa2cupy
from fa2cupy import TileConfig
from fa2cupy import lengths as lengths_module
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.filterwarnings("error")

TILE = TileConfig(8, 8, 1)
LENGTHS = [(5, 9), (0, 3), (17, 17), (4, 0), (1, 30), (0, 0), (20, 6)]
ROWS = ("o", "dq"), ("dk", "dv")  # results with the rows of queries, and of keys


def packed(dtype: str = "float64", before: int = 0, behind: int = 0, **sizes) -> tuple[tuple, dict]:
    """Returns q, k, v and do of 3 axes, with rows of no sequence before and behind, and the offsets."""
    offsets = [np.cumsum([before, *lengths]).astype("int32") for lengths in zip(*LENGTHS, strict=True)]
    rows = {f"seqlen_{side}": int(ends[-1]) + behind for side, ends in zip("qk", offsets, strict=True)}
    q, k, v, do = inputs_of(dtype, batch=1, **rows, **sizes)
    return (q[0], k[0], v[0], do[0]), {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}


def part(name: str, array: np.ndarray, offsets: dict, number: int) -> np.ndarray:
    side = "cu_seqlens_k" if name in ("k", "v", "dk", "dv") else "cu_seqlens_q"
    rows = slice(*offsets[side][number : number + 2])
    return array[:, rows] if name in ("lse", "dlse") else array[rows]


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "softcap and sink": {"softcap": 0.7, "sink": np.array([0.1, -1.0, 2.0, 0.0])},
    "alibi": {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]), "causal": True},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("outside", [(0, 0), (3, 4)])
def test_it_is_a_loop_over_sequences_bit_for_bit(outside, name, method):
    options = OPTIONS[name]
    inputs, offsets = packed(before=outside[0], behind=outside[1])
    dlse = numbers((4, len(inputs[0])), "float64")
    results = run(inputs, **offsets, **options, dlse=dlse, config=TILE, method=method)
    dsink = np.zeros(4)
    inside = {True: np.zeros(len(inputs[0]), bool), False: np.zeros(len(inputs[1]), bool)}
    for number in range(len(LENGTHS)):
        own = tuple(part(n, a, offsets, number) for n, a in zip(("q", "k", "v", "do"), inputs, strict=True))
        single = run(own, **options, dlse=part("dlse", dlse, offsets, number), config=TILE, method=method)
        dsink += single.pop("dsink", 0)
        assert_bits_equal({n: part(n, results[n], offsets, number) for n in single}, single)
        for of_queries, side in ((True, "cu_seqlens_q"), (False, "cu_seqlens_k")):
            inside[of_queries][slice(*offsets[side][number : number + 2])] = True
    for of_queries, names in zip((True, False), ROWS, strict=True):
        for result in names:
            assert not results[result][~inside[of_queries]].any()
    assert (results["lse"][:, ~inside[True]] == -np.inf).all()
    if "sink" in options:
        np.testing.assert_allclose(results["dsink"], dsink, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_against_the_reference(layout, dtype):
    inputs, offsets = packed(dtype, behind=3)
    if layout == "bhsd":
        inputs = tuple(array.transpose(1, 0, 2) for array in inputs)
    wide = "float64" if dtype == "float64" else "float32"
    features = {
        "bias": numbers((4, 20, 30), dtype),
        "mask": booleans((7, 1, 20, 30)),
        "sink": numbers((4,), wide),
        "alibi_slopes": abs(numbers((7, 4), wide)),
        "key_padding_mask": booleans((7, 30), 3),
    }
    lengths = {"max_seqlen_q": 20, "max_seqlen_k": 30}
    check(inputs, **offsets, **lengths, **features, layout=layout, causal=True, softcap=2.0, config=TILE)
    check(inputs, **offsets, layout=layout, window=(6, 3), dropout_p=0.2, seed=9, config=TILE)


@pytest.mark.parametrize("method", METHODS)
def test_equal_lengths_are_a_batch(method):
    q, k, v, do = inputs_of(batch=3, seqlen_q=11, seqlen_k=13)
    features = {
        "bias": numbers((3, 1, 11, 13), "float64"), "mask": booleans((3, 4, 11, 13)), "sink": numbers((4,), "float64"),
        "alibi_slopes": abs(numbers((3, 4), "float64")), "key_padding_mask": booleans((3, 13), 3), "softcap": 1.5,
        "dropout_p": 0.3, "seed": 4, "causal": True, "config": TILE, "method": method,
    }  # fmt: skip
    batch = run((q, k, v, do), **features)
    rows = tuple(array.reshape(-1, *array.shape[2:]) for array in (q, k, v, do))
    offsets = {"cu_seqlens_q": np.arange(4, dtype="int32") * 11, "cu_seqlens_k": np.arange(4, dtype="int32") * 13}
    results = run(rows, **offsets, max_seqlen_q=11, max_seqlen_k=13, **features)
    batch["lse"] = batch["lse"].transpose(1, 0, 2)
    assert_bits_equal({name: result.reshape(batch[name].shape) for name, result in results.items()}, batch)


def test_a_bias_for_all_sequences_gets_the_sum_of_their_gradients():
    inputs, offsets = packed()
    bias = numbers((4, 20, 30), "float64")
    lengths = {"max_seqlen_q": 20, "max_seqlen_k": 30}
    results = run(inputs, **offsets, **lengths, bias=bias, config=TILE)
    total = np.zeros_like(bias)
    for number, (rows, keys) in enumerate(LENGTHS):
        own = tuple(part(n, a, offsets, number) for n, a in zip(("q", "k", "v", "do"), inputs, strict=True))
        total[:, :rows, :keys] += run(own, bias=bias[:, :rows, :keys], config=TILE)["dbias"]
    np.testing.assert_allclose(results["dbias"], total, rtol=1e-12, atol=1e-14)
    assert results["dbias"].any()


@pytest.mark.parametrize("lengths", [(5, 300), (300, 5), (5, 150, 300)], ids=str)
def test_a_bias_for_sequences_of_very_different_lengths_gets_the_sum_of_their_gradients(lengths):
    """NumPy computes several heads of a short sequence at a time, and one of a long sequence."""
    ends = np.cumsum([0, *lengths]).astype("int32")
    inputs = [x[0] for x in make_inputs("float64", seqlen_q=int(ends[-1]), num_heads=4, head_dim=8)]
    bias = np.random.default_rng(0).standard_normal((4, max(lengths), max(lengths)))
    options = {"bias": bias, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths))
    o, lse = fa2cupy.forward(*inputs[:3], **options)
    *_, dbias = fa2cupy.backward(*inputs[:3], o, lse, inputs[3], return_dbias=True, **options)
    Expectation(*inputs, **options).check(dbias=dbias)


@pytest.mark.parametrize("method", METHODS)
def test_a_map_of_one_sequence_or_head_is_that_of_all(method):
    inputs, offsets = packed()
    longest = {"max_seqlen_q": 20, "max_seqlen_k": 30}
    tiles = booleans((1, 1, 3, 4))
    own = fa2cupy.BlockMask(tiles, 20, 30, (8, 8))
    of_each = fa2cupy.BlockMask(np.repeat(np.repeat(tiles, len(LENGTHS), axis=0), 4, axis=1), 20, 30, (8, 8))
    results, wanted = (
        run(inputs, **offsets, **longest, block_mask=one, config=TILE, method=method) for one in (own, of_each)
    )
    assert_bits_equal(results, wanted)
    mask = np.repeat(np.repeat(tiles, 8, axis=2), 8, axis=3)[:, :, :20, :30]
    assert_close(results, run(inputs, **offsets, **longest, mask=mask, config=TILE, method=method))


def test_rows_of_no_sequence_reach_nothing():
    inputs, offsets = packed(before=2, behind=5)
    clean = run(inputs, **offsets, causal=True, config=TILE)
    dirty = tuple(array.copy() for array in inputs)
    for array in dirty:
        array[:2] = array[-5:] = np.nan
    assert_bits_equal(run(dirty, **offsets, causal=True, config=TILE), clean)


def test_no_sequence_at_all():
    inputs, _ = packed()
    none = np.zeros(1, "int32")
    results = run(inputs, cu_seqlens_q=none, cu_seqlens_k=none)
    assert not any(results[name].any() for name in ("o", "dq", "dk", "dv"))
    assert (results["lse"] == -np.inf).all()


BAD_OFFSETS = {
    "falls": ([0, 9, 5, 47], [0, 10, 20, 65], r"^cu_seqlens_q: expected offsets that grow .* got \[0, 9, 5"),
    "negative": ([-1, 9, 15, 47], [0, 10, 20, 65], "^cu_seqlens_q: expected offsets that grow"),
    "too far": ([0, 9, 15, 47], [0, 10, 20, 66], "^cu_seqlens_k: expected offsets that grow from 0 to at most 65"),
}


@pytest.mark.parametrize("mistake", BAD_OFFSETS)
def test_offsets_that_lie_are_refused(mistake):
    q, k, v, do = packed()[0]
    *offsets, match = BAD_OFFSETS[mistake]
    good = {"cu_seqlens_q": np.array([0, 9, 15, 47], "int32"), "cu_seqlens_k": np.array([0, 10, 20, 65], "int32")}
    o, lse = fa2cupy.forward(q, k, v, **good)
    bad = dict(zip(good, (np.array(numbers, "int32") for numbers in offsets), strict=True))
    out = np.full_like(o, 7), np.full_like(lse, 7)
    with pytest.raises(ValueError, match=match):
        fa2cupy.forward(q, k, v, **bad, out=out)
    gradients = tuple(np.full_like(array, 7) for array in (q, k, v))
    with pytest.raises(ValueError, match=match):
        fa2cupy.backward(q, k, v, o, lse, do, **bad, out=gradients)
    assert all((array == 7).all() for array in (*out, *gradients))


@pytest.mark.parametrize("side", ["q", "k"])
def test_longer_sequences_than_promised_are_refused(side):
    inputs, offsets = packed()
    longest = max(lengths["qk".index(side)] for lengths in LENGTHS)
    fa2cupy.forward(*inputs[:3], **offsets, **{f"max_seqlen_{side}": longest})
    with pytest.raises(ValueError, match=f"^max_seqlen_{side}: a sequence has {longest} rows, more than {longest - 1}"):
        fa2cupy.forward(*inputs[:3], **offsets, **{f"max_seqlen_{side}": longest - 1})


class TestPackedProjections:
    """Views of the parts of qkv, of shape (batch, seqlen, 3, heads, head_dim), and of its gradient."""

    @pytest.mark.parametrize("method", METHODS)
    def test_in_a_batch(self, method):
        qkv = numbers((2, 30, 3, 4, 8), "float32")
        do = numbers((2, 30, 4, 8), "float32", 9)
        views = tuple(qkv[:, :, part] for part in range(3))
        copies = tuple(view.copy() for view in views)
        o, lse = fa2cupy.forward(*views, causal=True)
        dqkv = np.full_like(qkv, np.nan)
        out = tuple(dqkv[:, :, part] for part in range(3))
        returned = fa2cupy.backward(*views, o, lse, do, causal=True, method=method, out=out)
        assert all(a is b for a, b in zip(returned, out, strict=True))
        expected = fa2cupy.backward(*copies, *fa2cupy.forward(*copies, causal=True), do, causal=True, method=method)
        np.testing.assert_array_equal(dqkv, np.stack(expected, axis=2))

    def test_with_packed_sequences_and_grouped_heads(self):
        qkv = numbers((47, 6, 8), "float64")  # four query heads, a key and a value head
        do = numbers((47, 4, 8), "float64", 9)
        views = qkv[:, :4], qkv[:, 4:5], qkv[:, 5:]
        offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), np.array([0, 20, 21, 47], "int32"))
        dqkv = np.full_like(qkv, np.nan)
        o, lse = fa2cupy.forward(*views, **offsets, causal=True)
        fa2cupy.backward(*views, o, lse, do, **offsets, causal=True, out=(dqkv[:, :4], dqkv[:, 4:5], dqkv[:, 5:]))
        results = run((*(view.copy() for view in views), do), **offsets, causal=True)
        np.testing.assert_array_equal(dqkv, np.concatenate([results["dq"], results["dk"], results["dv"]], axis=1))


def test_the_closure_takes_features():
    q, k, v, do = make_inputs("float64", seqlen_q=9, seqlen_k=12, head_dim=4)
    features = {"bias": numbers((9, 12), "float64"), "sink": np.ones(2), "dropout_p": 0.2, "seed": 3, "causal": True}
    o, backprop = fa2cupy.attention(q, k, v, **features, return_dbias=True, return_dsink=True)
    results = run((q, k, v, do), **features)
    names = ("dq", "dk", "dv", "dbias", "dsink")
    assert_close({"o": o, **dict(zip(names, backprop(do), strict=True))}, {n: results[n] for n in ("o", *names)}, 0)


# -------------------------------------------------------------------------------------------- from lengths to offsets


@pytest.mark.parametrize(
    "lengths",
    [[5, 0, 17, 4], (5, 0, 17, 4), *(np.array([5, 0, 17, 4], dtype) for dtype in ("int8", "uint64", "int64"))],
    ids=["list", "tuple", "int8", "uint64", "int64"],
)
def test_lengths_become_offsets(lengths):
    offsets, longest = fa2cupy.cu_seqlens(lengths)
    assert offsets.dtype == "int32"
    assert offsets.tolist() == [0, 5, 5, 22, 26]
    assert longest == 17
    assert type(longest) is int


def test_the_offsets_of_lengths_are_what_calls_take():
    inputs, offsets = packed()
    made = [fa2cupy.cu_seqlens(lengths) for lengths in zip(*LENGTHS, strict=True)]
    longest = {f"max_seqlen_{side}": length for side, (_, length) in zip("qk", made, strict=True)}
    for own, (made_offsets, _) in zip(offsets.values(), made, strict=True):
        np.testing.assert_array_equal(made_offsets, own)
    named = dict(zip(offsets, (made_offsets for made_offsets, _ in made), strict=True))
    assert_bits_equal(run(inputs, **named, **longest), run(inputs, **offsets))


@pytest.mark.parametrize("lengths", [[], np.zeros(0, "int32")], ids=["list", "array"])
def test_no_lengths_are_no_sequences(lengths):
    offsets, longest = fa2cupy.cu_seqlens(lengths)
    assert (offsets.tolist(), offsets.dtype, longest) == ([0], np.dtype("int32"), 0)


@pytest.mark.parametrize(
    ("lengths", "error", "match"),
    [
        ([2**30, 2**30], ValueError, r"^lengths: expected a sum below 2\*\*31, .*, got 2147483648"),
        (np.full(4, 2**62), ValueError, rf"^lengths: expected a sum below 2\*\*31, .*, got {2**64}"),
        (np.full(3, 2**63, "uint64"), ValueError, r"^lengths: expected a sum below 2\*\*31"),
        ([True, False], TypeError, "^lengths: expected integers, got dtype bool"),
        (["1"], TypeError, "^lengths: expected integers, got dtype <U1"),
        ([[1, 2]], ValueError, r"^lengths: expected shape \(batch,\), got \(1, 2\)"),
        (np.ma.array([1, 2]), TypeError, "^lengths: expected an array without a mask of its own"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, error, match):
    with pytest.raises(error, match=match):
        fa2cupy.cu_seqlens(lengths)


def test_a_sum_that_int32_just_holds_is_one():
    offsets, longest = fa2cupy.cu_seqlens([2**31 - 2, 1])
    assert (offsets.tolist(), longest) == ([0, 2**31 - 2, 2**31 - 1], 2**31 - 2)


def test_lengths_of_another_module_become_offsets_of_it(monkeypatch):
    """Checks lengths like CuPy's, as far as possible without a GPU."""

    class Lengths:
        device = contextlib.nullcontext()

        def get(self) -> np.ndarray:
            return np.array([5, 0, 17])

    lengths = Lengths()
    module = types.SimpleNamespace(asarray=lambda array: (lengths, array))
    monkeypatch.setattr(lengths_module, "array_module", lambda array: module)
    (module_of, offsets), longest = fa2cupy.cu_seqlens(lengths)
    assert module_of is lengths
    assert (offsets.tolist(), offsets.dtype, longest) == ([0, 5, 5, 22], np.dtype("int32"), 17)


@pytest.mark.gpu
def test_lengths_on_a_gpu_become_offsets_there():
    import cupy

    offsets, longest = fa2cupy.cu_seqlens(cupy.array([5, 0, 17]))
    assert isinstance(offsets, cupy.ndarray)
    assert (offsets.get().tolist(), offsets.dtype, longest) == ([0, 5, 5, 22], np.dtype("int32"), 17)


def test_backprop_says_what_it_takes_and_gives():
    q, k, v, _ = inputs_of("float32")
    _, backprop = fa2cupy.attention(q, k, v)
    text = inspect.getdoc(backprop.__call__)
    for part_of_it in ("do : ndarray, shape of o", "dlse : ndarray", "dq, dk, dv : ndarray", "fa2cupy.backward"):
        assert part_of_it in text
