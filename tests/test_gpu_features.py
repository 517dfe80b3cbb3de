"""On a GPU: every feature on every family that has it, against the float64 reference, and further properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.feature_cases import (
    HEAD_DIM_PAIRS,
    METHODS,
    ROWS,
    accumulator,
    booleans,
    check_extreme_biases,
    extras,
    keyword,
    numbers,
    options_of,
)

import fa2cupy
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.registry import FAMILIES
from fa2cupy.problem import philox
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

HALF, WIDE = ("float16", "bfloat16"), ("float32", "float64")
LENGTHS = ((113, 203), (300, 170), (1, 147), (513, 512))
#: Head dimensions with different main loops: Hopper's backward of whole and of divided key tiles, sm80's forward of
# whole and split rows.
HEAD_DIMS = (64, 128, 256)


def families_of(dtype: str) -> list[str | None]:
    """Returns the families that the device can run: None for its default, then the names of the others."""
    device = DeviceInfo.current()
    found = [one for one in FAMILIES if one.supports("forward", dtype, device) and not one.multiplies_parts]
    return [None, *(one.public_name for one in found[1:])]


def on_device(options: dict) -> dict:
    return {name: cp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def draw(dtype: str, lengths: tuple, head_dim: int, **sizes) -> tuple:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, **sizes}
    return make_inputs(dtype, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=head_dim, xp=cp, **sizes)


def check(inputs: tuple, families: list[str | None], *, dlse=None, **options) -> None:
    """Checks forward and both methods of each family, written into NaN-filled arrays; dbias in a fixed order, too."""
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, dlse=dlse, **options)
    more = extras(options)
    names = ("dq", "dk", "dv", *(name.removeprefix("return_") for name in more))
    ways = [{"method": method} for method in METHODS] + [{"deterministic": True}] * ("return_dbias" in more)
    for family in families:
        o, lse = fa2cupy.forward(q, k, v, **options, out=expected.unwritten("o", "lse"), family=family)
        expected.check(spec=family, o=o, lse=lse)
        for way in ways:
            gradients = fa2cupy.backward(
                q, k, v, o, lse, do, dlse=dlse, family=family, out=expected.unwritten(*names), **way, **more, **options
            )
            expected.check(spec=(way, family), **dict(zip(names, gradients, strict=True)))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_each_feature_in_half_precision(head_dim, name):
    """Checks the default family and, since compiling takes most of the time, only one of the others, in turn."""
    turn = HEAD_DIMS.index(head_dim) + ROWS.index(name)
    lengths, dtype = LENGTHS[turn % len(LENGTHS)], HALF[turn % 2]
    first, *others = families_of(dtype)
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    dlse = cp.asarray(numbers((2, 4, lengths[0]), "float32")) if name == "bias of queries" else None
    families = [first, *others[turn % len(others) : turn % len(others) + 1]] if others else [first]
    check(draw(dtype, lengths, head_dim), families, dlse=dlse, **on_device(options_of(name, dtype, sizes)))


@pytest.mark.parametrize("shapes", [((1, 203), (2, 1)), ((203,), (1, 4)), ((2, 1), (1,))], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_axes_of_one_are_shared(dtype, shapes):
    padding, slopes = booleans(shapes[0]), numbers(shapes[1], accumulator(dtype))
    options = on_device({"key_padding_mask": padding, "alibi_slopes": slopes})
    check(draw(dtype, (113, 203), 64), families_of(dtype), **options)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", WIDE)
def test_each_feature_in_ieee_arithmetic(dtype, name):
    for lengths in LENGTHS[:3]:
        sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
        dlse = cp.asarray(numbers((2, 4, lengths[0]), accumulator(dtype))) if name == "bias of queries" else None
        check(draw(dtype, lengths, 48), families_of(dtype), dlse=dlse, **on_device(options_of(name, dtype, sizes)))


@pytest.mark.parametrize("dtype", ("float16", "float64"))
@pytest.mark.parametrize("head_dim", (64, 192))
def test_all_at_once(dtype, head_dim):
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 260, "seqlen_k": 390}
    rows = ("window", "softcap", "alibi by batch", "bias of heads", "mask of rows", "padding", "sink", "dropout")
    options = {key: value for row in rows for key, value in options_of(row, dtype, sizes).items()}
    dlse = cp.asarray(numbers((2, 4, 260), accumulator(dtype)))
    check(draw(dtype, (260, 390), head_dim), families_of(dtype), dlse=dlse, **on_device(options | {"window": (90, 40)}))


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize(
    ("family", "dtype"), [(None, "bfloat16"), ("sm80", "float16"), ("simt", "float32"), (None, "float64")]
)
def test_pairs_drawn_by_hypothesis(family, dtype, turn):
    """Checks pairs of features on each family. A turn draws its own, so that turns can be compiled in parallel."""

    @seed(turn)
    @settings(max_examples=2, deadline=None, database=None)
    @given(
        pair=st.lists(st.sampled_from(ROWS), min_size=2, max_size=2, unique_by=keyword),
        lengths=st.sampled_from(LENGTHS),
        head_dim=st.sampled_from(HEAD_DIMS),
    )
    def run(pair, lengths, head_dim):
        head_dim = 48 if dtype in WIDE else head_dim
        sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
        options = {key: value for name in pair for key, value in options_of(name, dtype, sizes).items()}
        dlse = cp.asarray(numbers((2, 4, lengths[0]), accumulator(dtype))) if "bias of queries" in pair else None
        check(draw(dtype, lengths, head_dim), [family], dlse=dlse, **on_device(options))

    run()


@pytest.mark.parametrize("window", [(0, 0), (31, 0), (128, 128), (None, 64), (700, None)], ids=str)
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_windows(head_dim, causal, window):
    for lengths in ((1024, 1024), (300, 900), (900, 300)):
        check(draw("bfloat16", lengths, head_dim, batch=1), [None], causal=causal, window=window)


@pytest.mark.parametrize("name", ROWS)
def test_each_feature_with_two_head_dims(name):
    """Checks each pair and dtype in turn, on all families."""
    turn = ROWS.index(name)
    pair, lengths = HEAD_DIM_PAIRS[turn % len(HEAD_DIM_PAIRS)], LENGTHS[turn % len(LENGTHS)]
    dtype = (*HALF, "float32")[turn % 3]
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    dlse = cp.asarray(numbers((2, 4, lengths[0]), "float32")) if name == "bias of queries" else None
    inputs = draw(dtype, lengths, pair[0], head_dim_v=pair[1])
    check(inputs, families_of(dtype), dlse=dlse, **on_device(options_of(name, dtype, sizes)))


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_dropout_is_the_definition_bit_for_bit(dtype):
    """With q = 0 all P are equal, and with the identity for v, o shows which were kept."""
    length = 96
    q, k, v, _ = draw(dtype, (length, length), length, batch=2, num_heads_kv=4)
    q[...], v[...] = 0, cp.eye(length, dtype="float32")[:, None].astype(v.dtype)
    kept = np.stack([philox.kept(0.4, 77, b, slice(0, 4), slice(0, length), slice(0, length)) for b in range(2)])
    for family in families_of(q.dtype.name):
        o, _ = fa2cupy.forward(q, k, v, dropout_p=0.4, seed=77, family=family)
        assert np.array_equal(o.transpose(0, 2, 1, 3).get() != 0, kept)


@pytest.mark.parametrize("method", METHODS)
def test_a_new_seed_is_no_new_kernel(method):
    from fa2cupy.gpu import signatures

    inputs = draw("float16", (128, 128), 64)
    q, k, v, do = inputs
    outputs = []
    for number in (1, 2, 1):
        o, lse = fa2cupy.forward(q, k, v, dropout_p=0.5, seed=number)
        outputs.append((o, *fa2cupy.backward(q, k, v, o, lse, do, dropout_p=0.5, seed=number, method="two_pass")))
        prepared = len(signatures._prepared)
    assert len(signatures._prepared) == prepared
    assert not cp.array_equal(outputs[0][0], outputs[1][0])
    assert all(cp.array_equal(a, b) for a, b in zip(outputs[0], outputs[2], strict=True))


# --------------------------------------------------------------------------------------------------- packed sequences

SEQUENCES = ((5, 9), (0, 3), (400, 170), (4, 0), (1, 700), (0, 0), (350, 370), (128, 128))


def packed(dtype: str, head_dim: int, before: int = 0, behind: int = 0, **sizes) -> tuple[tuple, dict]:
    offsets = [np.cumsum([before, *lengths]).astype("int32") for lengths in zip(*SEQUENCES, strict=True)]
    inputs = draw(dtype, tuple(int(ends[-1]) + behind for ends in offsets), head_dim, batch=1, **sizes)
    names = ("cu_seqlens_q", "cu_seqlens_k")
    for x, ends in zip(inputs, (offsets[0], offsets[1], offsets[1], offsets[0]), strict=True):
        x[0, :before] = x[0, int(ends[-1]) :] = np.nan  # rows of no sequence must not affect results
    return tuple(x[0] for x in inputs), dict(zip(names, map(cp.asarray, offsets), strict=True))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 30)}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("head_dim", (64, 192))
@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
def test_packed_sequences(dtype, head_dim, options):
    inputs, offsets = packed(dtype, head_dim, before=3, behind=40)
    check_packed(inputs, **offsets, **options)
    check_packed(inputs, **offsets, **options, max_seqlen_q=400, max_seqlen_k=700)


@pytest.mark.parametrize("pair", HEAD_DIM_PAIRS[:4], ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_packed_sequences_with_two_head_dims(dtype, pair):
    inputs, offsets = packed(dtype, pair[0], before=3, behind=40, head_dim_v=pair[1])
    check_packed(inputs, **offsets, causal=True)


def check_packed(inputs: tuple, **options) -> None:
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, **options)
    o, lse = fa2cupy.forward(q, k, v, **options, out=expected.unwritten("o", "lse"))
    expected.check(o=o, lse=lse)
    for method in METHODS:
        out = expected.unwritten("dq", "dk", "dv")
        fa2cupy.backward(q, k, v, o, lse, do, method=method, out=out, **options)
        expected.check(spec=method, **dict(zip(("dq", "dk", "dv"), out, strict=True)))


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", (64, 128, 192))
def test_packed_sequences_are_a_loop_over_them_bit_for_bit(head_dim, causal):
    """Tiles start with the sequences, so that the same numbers are added up in the same order, by one block each."""
    inputs, offsets = packed("bfloat16", head_dim, before=3, behind=40)
    options = {"causal": causal, "num_splits": 1}
    o, lse = fa2cupy.forward(*inputs[:3], **offsets, **options)
    gradients = fa2cupy.backward(*inputs[:3], o, lse, inputs[3], deterministic=True, **offsets, **options)
    ends = [array.get() for array in offsets.values()]
    for number, (rows, keys) in enumerate(SEQUENCES):
        queries, columns = (slice(*side[number : number + 2]) for side in ends)
        if rows == 0 or keys == 0:
            continue
        q, k, v, do = (x[s] for x, s in zip(inputs, (queries, columns, columns, queries), strict=True))
        alone = fa2cupy.forward(q, k, v, **options)
        assert cp.array_equal(alone[0], o[queries]) and cp.array_equal(alone[1], lse[:, queries])
        ours = (x[s] for x, s in zip(gradients, (queries, columns, columns), strict=True))
        for x, wanted in zip(ours, fa2cupy.backward(q, k, v, *alone, do, deterministic=True, **options), strict=True):
            assert cp.array_equal(x, wanted)


def test_packed_sequences_are_captured_in_a_graph():
    """Code that reads offsets on the host could not be captured."""
    (q, k, v, do), offsets = packed("float16", 64)
    options = {**offsets, "causal": True}
    o, lse = fa2cupy.forward(q, k, v, **options)
    plain = fa2cupy.backward(q, k, v, o, lse, do, method="two_pass", **options)
    cp.cuda.Device().synchronize()  # what the graph reads and overwrites was queued in another stream
    stream = cp.cuda.Stream(non_blocking=True)
    out = tuple(cp.empty_like(x) for x in (o, lse, *plain))
    with stream:
        stream.begin_capture()
        fa2cupy.forward(q, k, v, **options, out=out[:2])
        fa2cupy.backward(q, k, v, *out[:2], do, method="two_pass", out=out[2:], **options)
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    for result, wanted in zip(out, (o, lse, *plain), strict=True):
        assert cp.array_equal(result, wanted)


@pytest.mark.parametrize(
    "wrong", [(0, 500, 20, 850), (-7, 90, 15, 400), (3, 10, 2**31 - 1, 600), (900, 950, 990, 1200)]
)
def test_offsets_that_lie_do_not_stop_the_device(wrong):
    q, k, v, do = (x[0] for x in draw("float16", (850, 850), 64, batch=1))
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cp.asarray(wrong, dtype="int32"))
    o, lse = fa2cupy.forward(q, k, v, **offsets)
    for method in METHODS:
        fa2cupy.backward(q, k, v, o, lse, do, method=method, **offsets)
    cp.cuda.Device().synchronize()


@pytest.mark.parametrize("name", ROWS)
def test_each_feature_of_few_columns(name):
    """On Hopper, two blocks of a multiprocessor own key tiles if sequences are short."""
    turn = ROWS.index(name)
    lengths, dtype, head_dim = LENGTHS[turn % len(LENGTHS)], HALF[turn % 2], (24, 32)[turn // 2 % 2]
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    dlse = cp.asarray(numbers((2, 4, lengths[0]), "float32")) if name == "bias of queries" else None
    check(draw(dtype, lengths, head_dim), [None], dlse=dlse, **on_device(options_of(name, dtype, sizes)))


@pytest.mark.parametrize("head_dim", (8, 32))
def test_a_bias_of_few_columns_that_begins_on_16_bytes(head_dim):
    """Its tiles are copied to shared memory. Steps are so many that each buffer is used several times."""
    padding = cp.arange(520) < cp.asarray([[517], [40]])
    for options in ({}, {"causal": True}, {"key_padding_mask": padding}):
        bias = cp.asarray(numbers((4, 700, 520), "bfloat16"))
        check(draw("bfloat16", (700, 520), head_dim), [None], bias=bias, **options)


@pytest.mark.parametrize("seqlen", (1, 49, 64, 256, 257, 384, 512, 768, 1000))
@pytest.mark.parametrize(("dtype", "head_dim"), [*((one, 32) for one in HALF), ("bfloat16", 64)])
def test_a_bias_that_many_sequences_share(dtype, head_dim, seqlen):
    """On Hopper, blocks keep it on chip, for several sequences at a time if they have few columns."""
    batch = -(-1100 // (4 * -(-seqlen // 64)))  # of as many query tiles as keeping the bias needs
    sizes = {"batch": batch, "num_heads": 4, "num_heads_kv": 4}
    q, k, v, do = draw(dtype, (seqlen, seqlen), head_dim, **sizes)
    bias = cp.asarray(numbers((4, seqlen, seqlen), dtype))
    padding = cp.arange(seqlen) <= cp.arange(batch)[:, None] * 7 % seqlen
    for options in ({}, {"key_padding_mask": padding}, {"causal": True}, {"bias": bias[:, :1]}):
        keywords = {"bias": bias, **options}
        expected = Expectation(q, k, v, do, **keywords)
        o, lse = fa2cupy.forward(q, k, v, **keywords, out=expected.unwritten("o", "lse"))
        expected.check(o=o, lse=lse)


@pytest.mark.parametrize("scale", (None, 1.0, 4.0))
@pytest.mark.parametrize("head_dim", (32, 64, 128))
@pytest.mark.parametrize("shape", [(2, 70, 139), (7, 2, 70, 139)], ids=str)
def test_biases_whose_quotient_by_the_scale_has_no_float(head_dim, shape, scale):
    """Hopper's forwards start their products from the quotient."""

    def call(*arrays, bias, softmax_scale):
        arrays, bias = map(cp.asarray, arrays), cp.asarray(bias)
        return tuple(x.get() for x in fa2cupy.forward(*arrays, bias=bias, softmax_scale=softmax_scale))

    sizes = {"batch": 7, "num_heads": 2, "num_heads_kv": 2, "seqlen_q": 70, "seqlen_k": 139, "head_dim": head_dim}
    q, k, v, _ = make_inputs("bfloat16", xp=np, **sizes)
    check_extreme_biases(call, q, k, v, numbers(shape, "bfloat16"), softmax_scale=scale)
