"""Decoding on NumPy: results against the reference on the keys of each sequence, and refused arguments."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.decode_cases import BORDERS, WHOLE_PAGES, WINDOWS, Case, check, paged

import fa2cupy

pytestmark = pytest.mark.filterwarnings("error")

DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [None, 16, 48])
@pytest.mark.parametrize("num_new", [0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_lengths(dtype, num_new, page_size, layout):
    lengths = (0, 1, 47, 48, 90, 101)
    check(fa2cupy.decode, Case(dtype, lengths, num_new=num_new, page_size=page_size, layout=layout))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("num_new", [0, 1])
def test_equal_lengths_side_by_side(num_new, page_size):
    lengths = (0, 0, 128, 128, 128, 300, 300)
    check(fa2cupy.decode, Case("float32", lengths, heads=(4, 2), num_new=num_new, page_size=page_size))


@pytest.mark.parametrize("seqlen_q", [1, 3, 7])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_groups_of_heads_and_several_queries(seqlen_q, heads, causal):
    case = Case("float16", (0, 2, 33, 60), seqlen_q=seqlen_q, heads=heads, page_size=16, num_new=2)
    check(fa2cupy.decode, case, causal=causal)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (10, None), "causal": False},
        {"window": (3, 1), "causal": False},
        {"window": (20, 20)},
        {"softcap": 2.0},
        {"alibi_slopes": "head"},
        {"alibi_slopes": "batch"},
        {"sink": True},
        {"softmax_scale": -0.3},
        {"window": (9, 0), "softcap": 3.0, "alibi_slopes": "batch", "sink": True},
    ],
    ids=str,
)
def test_features(options):
    for dtype in ("float16", "float64"):
        check(fa2cupy.decode, Case(dtype, (0, 5, 40), seqlen_q=3, num_new=1, page_size=16), **options)


@pytest.mark.parametrize("shape", [(1, 2), (3, 1), (1, 1), (1,)], ids=str)
def test_slopes_are_broadcast(shape):
    q, k_cache, v_cache, lengths, options = Case("float32", (5, 0, 20), heads=(2, 1)).arguments()
    slopes = np.linspace(0.1, 0.5, 6, dtype="float32").reshape(3, 2)[: shape[0], : shape[-1]].reshape(shape)
    found, wanted = (
        fa2cupy.decode(q, k_cache, v_cache, lengths, **options, alibi_slopes=one)
        for one in (slopes, np.broadcast_to(slopes, (3, 2)))
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_windows_and_lengths_around_borders_of_tiles():
    for options in WINDOWS:
        check(fa2cupy.decode, BORDERS, **options)


@pytest.mark.parametrize("num_new", [0, 1])
def test_nothing_is_needed_behind_the_last_whole_page(num_new):
    check(fa2cupy.decode, dataclasses.replace(WHOLE_PAGES, num_new=num_new))


@pytest.mark.parametrize("head_dims", [(32, 8), (8, 32)], ids=str)
def test_v_with_a_head_dim_of_its_own(head_dims):
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    check(fa2cupy.decode, Case("float32", (5, 0, 20), num_new=1, page_size=16, **sizes))
    check(fa2cupy.decode, Case("bfloat16", (5, 20), seqlen_q=3, layout="bhsd", **sizes))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_v_in_the_first_columns_of_k(layout):
    sizes = {"head_dim": 576, "head_dim_v": 512, "heads": (3, 1), "layout": layout}
    check(fa2cupy.decode, Case("float32", (5, 0, 20), num_new=1, page_size=16, **sizes))
    q, k_cache, v_cache, lengths, options = Case("float16", (5, 20), num_new=1, **sizes).arguments()
    with pytest.raises(ValueError, match=r"^v_cache: beyond head_dim 512 expected the first columns of k_cache"):
        fa2cupy.decode(q, k_cache, v_cache.copy(), lengths, **options)
    with pytest.raises(ValueError, match=r"^v_cache: beyond head_dim 512 expected the first columns of k_cache"):
        fa2cupy.decode(q, k_cache, k_cache[..., 64:], lengths, **options)
    with pytest.raises(ValueError, match=r"^v: beyond head_dim 512 expected the first columns of k,"):
        fa2cupy.decode(q, k_cache, v_cache, lengths, **{**options, "v": options["v"].copy()})
    with pytest.raises(fa2cupy.UnsupportedProblemError, match="^v_cache: head_dim up to 512 is supported"):
        fa2cupy.decode(q, k_cache, k_cache, lengths)


def test_a_view_of_k_of_up_to_512_columns_is_read_like_any_array():
    q, k_cache, _, lengths, options = Case("float32", (5, 0, 20), heads=(3, 1), head_dim=320).arguments()
    values = k_cache[..., :256]
    for one, other in zip(
        fa2cupy.decode(q, k_cache, values, lengths, **options),
        fa2cupy.decode(q, k_cache, values.copy(), lengths, **options),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    new = q[:, :1, :1]
    with pytest.raises(ValueError, match="^v_cache: overlaps k_cache in memory"):
        fa2cupy.decode(q, k_cache, values, lengths - lengths, k=new, v=new[..., :256])


def test_caches_of_16_bit_data_whose_rows_do_not_begin_on_16_bytes_are_refused_by_name():
    q, k_cache, v_cache, lengths, _ = Case("float16", (5, 20), head_dim_v=20).arguments()
    with pytest.raises(
        fa2cupy.UnsupportedProblemError, match="^v_cache: for float16 a head_dim that is a multiple of 8"
    ):
        fa2cupy.decode(q, k_cache, v_cache, lengths)


def test_rows_behind_a_length_are_not_read_and_not_written():
    """`Case` fills them with NaN. Pages of no sequence stay unchanged, too."""
    case = Case("float32", (5, 20), num_new=1, page_size=16)
    q, k_cache, v_cache, lengths, options = case.arguments()
    before = k_cache.copy(), v_cache.copy()
    fa2cupy.decode(q, k_cache, v_cache, lengths, **options)
    for cache, old, new in zip((k_cache, v_cache), before, (options["k"], options["v"]), strict=True):
        for number, length in enumerate((5, 20)):
            page, row = options["block_table"][number, length // 16], length % 16
            np.testing.assert_array_equal(cache[page, row], new[number, 0])
            old[page, row] = new[number, 0]
        np.testing.assert_array_equal(cache, old)


def test_a_sequence_token_by_token_gives_what_all_of_it_gives():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 1, 40, 2, 16))
    whole, _ = fa2cupy.forward(q, k, v, causal=True)
    k_cache, v_cache = np.full((2, 1, 40, 2, 16), np.nan)
    lengths = np.zeros(1, "int32")
    for row in range(40):
        now = slice(row, row + 1)
        o, _ = fa2cupy.decode(q[:, now], k_cache, v_cache, lengths, k=k[:, now], v=v[:, now])
        lengths += 1
        np.testing.assert_allclose(o, whole[:, now], rtol=1e-12)
    np.testing.assert_array_equal(k_cache, k)


def test_out():
    q, k_cache, v_cache, lengths, _ = Case("float32", (5, 20)).arguments()
    out = np.empty_like(q), np.empty((2, q.shape[2], 1), "float32")
    o, lse = fa2cupy.decode(q, k_cache, v_cache, lengths, out=out)
    assert o is out[0] and lse is out[1]


@pytest.mark.parametrize("causal", [False, True])
def test_empty_batches_and_queries(causal):
    for case in (Case("float32", ()), Case("float32", (3, 4), seqlen_q=0), Case("float32", (3, 4), 0, num_new=1)):
        q, k_cache, v_cache, lengths, options = case.arguments()
        o, lse = fa2cupy.decode(q, k_cache, v_cache, lengths, causal=causal, **options)
        assert o.shape == q.shape and lse.size == 0


# ------------------------------------------------------------------------------------------------------------- refusals

CASE = Case("float32", (5, 20), num_new=1, page_size=16)


def changed(name: str, change):
    """Returns the arguments of `CASE` as a dict, with one of them changed."""
    q, k_cache, v_cache, lengths, options = CASE.arguments()
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths, **options}
    arguments[name] = change(arguments.get(name))
    return arguments


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("cache_seqlens", lambda x: x * 0 - 1, ValueError, "^cache_seqlens: expected lengths from 0 to 31.*got -1 for"),
        ("cache_seqlens", lambda x: x * 0 + 32, ValueError, "^cache_seqlens: .* 1 are for k and v.*got 32 for"),
        ("cache_seqlens", lambda x: x.astype("int64"), TypeError, "^cache_seqlens: expected dtype int32, got int64"),
        ("cache_seqlens", lambda x: x[:1], ValueError, r"^cache_seqlens: expected shape \(2,\)"),
        ("cache_seqlens", lambda x: [5, 20], TypeError, "^cache_seqlens: expected a numpy.ndarray"),
        ("block_table", lambda x: x + 100, ValueError, r"^block_table: expected numbers of the \d pages.* at \[0"),
        ("block_table", lambda x: x * 0 - 1, ValueError, "^block_table: expected numbers of .*, from 0 on, got -1"),
        ("block_table", lambda x: x.astype("int64"), TypeError, "^block_table: expected dtype int32"),
        ("block_table", lambda x: x[0], ValueError, "^block_table: expected shape"),
        ("block_table", lambda x: x[:1], ValueError, r"^block_table: expected shape \(2, 2\)"),
        ("block_table", lambda x: None, ValueError, r"^k_cache: expected shape \(2, rows, num_heads_kv, 32"),
        ("k_cache", lambda x: x[:, :8], ValueError, "^k_cache: expected pages of a multiple of 16 rows, got 8"),
        ("k_cache", lambda x: x[..., :8], ValueError, "^k_cache: expected shape"),
        ("k_cache", lambda x: x.astype("float64"), TypeError, "^k_cache: expected dtype float32 to match q"),
        ("k_cache", lambda x: x[0], ValueError, "^k_cache: expected 4 axes"),
        ("v_cache", lambda x: x[:1], ValueError, "^v_cache: expected shape .* to match k_cache"),
        ("v_cache", lambda x: x[..., :8], ValueError, r"^v: expected shape \(2, 1, 2, 8\) to match k and v_cache"),
        ("v_cache", lambda x: x[..., None], ValueError, "^v_cache: expected shape"),
        ("v", lambda x: x[..., :8], ValueError, r"^v: expected shape \(2, 1, 2, 32\) to match k"),
        ("v", lambda x: None, ValueError, "^v: rows are appended to both caches"),
        ("k", lambda x: None, ValueError, "^k: rows are appended to both caches"),
        ("k", lambda x: x[:, :, :1], ValueError, "^k: expected shape"),
        ("k", lambda x: x.astype("float64"), TypeError, "^k: expected dtype float32"),
        ("v", lambda x: x.astype("float64"), TypeError, "^v: expected dtype float32"),
        ("q", lambda x: x[0], ValueError, "^q: expected 4 axes"),
        ("q", lambda x: x[:, :, :3], ValueError, "^k_cache: the number of heads of q"),
        ("q", lambda x: None, TypeError, "^q: expected a numpy.ndarray"),
        ("causal", lambda x: 1, TypeError, "^causal: expected a bool"),
        ("layout", lambda x: "sbhd", ValueError, "^layout: expected"),
        ("num_splits", lambda x: 2, ValueError, "^num_splits: expected None or 1, got 2"),
        ("num_splits", lambda x: True, TypeError, "^num_splits: expected None or an int, got bool"),
        ("softcap", lambda x: -1.0, ValueError, "^softcap: expected a positive number"),
        ("window", lambda x: (-1, 0), ValueError, r"^window \(left\): expected at least 0"),
        ("sink", lambda x: np.zeros(3, "float32"), ValueError, "^sink: expected shape"),
        ("alibi_slopes", lambda x: np.zeros(4), TypeError, "^alibi_slopes: expected dtype float32"),
        ("softmax_scale", lambda x: float("nan"), ValueError, "^softmax_scale: expected a finite number"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(name, change, error, text):
    arguments = changed(name, change)
    before = None if arguments["k_cache"].ndim < 4 else arguments["k_cache"].copy()
    with pytest.raises(error, match=text):
        fa2cupy.decode(**arguments)
    if before is not None:
        np.testing.assert_array_equal(arguments["k_cache"], before)


def test_pages_behind_a_sequence_may_be_anything():
    arguments = changed("block_table", lambda table: table)
    arguments["block_table"][0, 1:] = -1  # sequence 0 has 6 rows, all in its first page
    fa2cupy.decode(**arguments)


def test_a_cache_that_cannot_be_written_to():
    arguments = changed("v_cache", lambda x: x)
    arguments["v_cache"].flags.writeable = False
    with pytest.raises(ValueError, match="^v_cache: the array is read-only, and cannot hold new rows"):
        fa2cupy.decode(**arguments)


def test_more_new_rows_than_a_sequence_can_have():
    q, k_cache, v_cache, lengths, _ = Case("float32", (0, 0), capacity=4).arguments()
    new = np.zeros((2, 5, *k_cache.shape[2:]), "float32")
    with pytest.raises(ValueError, match="^k: 5 rows are more than the 4"):
        fa2cupy.decode(q, k_cache, v_cache, lengths, k=new, v=new)


def test_a_paged_cache_holds_the_rows_of_the_dense_one():
    """Checks the pages and the table of `support.decode_cases.paged`."""
    rows = np.arange(2 * 32.0).reshape(2, 32, 1, 1)
    pages, table = paged(rows, 16, np.random.default_rng(0))
    np.testing.assert_array_equal(pages[table].reshape(2, 32, 1, 1), rows)
    assert len(pages) > 4


# --------------------------------------------------------------- caches are outputs, if rows are appended


@pytest.fixture(params=["NumPy", "GPU"])
def decode(request, monkeypatch):
    """Returns `decode` on NumPy, and on a GPU whose kernels do nothing; both take keywords."""
    if request.param == "NumPy":
        yield fa2cupy.decode
        return
    pytest.importorskip("cupy")
    from support import fake_gpu
    from support.fake_cupy import FakeArray

    def on_gpu(out=(None, None), **arrays):
        given = {name: array.view(FakeArray) for name, array in arrays.items()}
        return fake_gpu.decode(out=tuple(None if x is None else x.view(FakeArray) for x in out), **given)

    with fake_gpu.fake_gpu(monkeypatch, run=lambda launch: None) as launched:
        on_gpu.launched = launched
        yield on_gpu


def memory(*shape):
    """Returns zeros that lie as CuPy's allocations do."""
    nbytes = 4 * int(np.prod(shape))
    whole = np.zeros(nbytes + 512, "uint8")
    start = -whole.ctypes.data % 512
    return whole[start : start + nbytes].view("float32").reshape(shape)


def call_of(k_cache, v_cache, **changed):
    """Returns a call with sequences of 5 and 20 rows, to which a row of ones is appended."""
    q, k, v = memory(2, 1, 4, 32), memory(2, 1, 2, 32) + 1, memory(2, 1, 2, 32) + 1
    lengths = np.array([5, 20], "int32")
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths, "k": k, "v": v, **changed}


def calls_over_shared_memory() -> dict:
    """Returns calls that would write where they must not, each with the message."""
    one, other, pair = memory(2, 32, 2, 32), memory(2, 32, 2, 32), memory(2, 33, 2, 32)

    def strided(*strides):
        return np.lib.stride_tricks.as_strided(one, strides=strides)

    batch, row, head, column = one.strides
    ints = one.view("int32")[0, 0, 0, :2]
    twice = {"block_table": np.array([[0, 1], [1, 0]], "int32")}
    pages = np.lib.stride_tricks.as_strided(one, (2, 16, 2, 32), (0, row, head, column))
    return {
        "one row for all": (call_of(strided(0, row, head, column), other), "^k_cache: elements share memory"),
        "one head": (call_of(other, strided(batch, row, 0, column)), "^v_cache: elements share memory"),
        "sequences a row apart": (call_of(other, strided(row, row, head, column)), "^v_cache: elements share memory"),
        "one page": (call_of(pages, other[:, :16], **twice), "^k_cache: elements share memory"),
        "the same twice": (call_of(one, one), "^v_cache: overlaps k_cache in memory$"),
        "a row apart": (call_of(pair[:, 1:], pair[:, :-1]), "^v_cache: overlaps k_cache in memory$"),
        "new keys": (call_of(one, other, k=one[:, 5:6]), "^k_cache: overlaps k in memory$"),
        "new keys in the values": (call_of(one, other, k=other[:, 5:6]), "^v_cache: overlaps k in memory$"),
        "queries": (call_of(one, other, q=other[:, 9:10]), "^v_cache: overlaps q in memory$"),
        "lengths": (call_of(one, other, cache_seqlens=ints), "^k_cache: overlaps cache_seqlens in"),
        "a sink": (call_of(one, other, sink=other[0, 0, 0, :4]), "^v_cache: overlaps sink in memory$"),
        "o": (call_of(one, other, out=(one.reshape(-1)[:256].reshape(2, 1, 4, 32), None)), r"overlaps .* in memory$"),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls_over_shared_memory())
def test_appended_rows_need_memory_of_their_own(decode, name):
    call, text = calls_over_shared_memory()[name]
    with pytest.raises(ValueError, match=text):
        decode(**call)
    assert not call["k_cache"].any() and not call["v_cache"].any()
    assert not getattr(decode, "launched", ())


def test_overlaps_are_found_after_a_call_of_the_same_shapes(decode):
    one, other = memory(2, 32, 2, 32), memory(2, 32, 2, 32)
    decode(**call_of(one, other))
    with pytest.raises(ValueError, match="^v_cache: overlaps k_cache in memory$"):
        decode(**call_of(one, one))


@pytest.mark.parametrize("num_new", [None, 0])
def test_caches_that_are_only_read_may_share_memory(decode, num_new):
    """Such as a prefix of all sequences, or values that are the keys."""
    none = {"k": memory(2, 0, 2, 32), "v": memory(2, 0, 2, 32)}
    for call, _ in calls_over_shared_memory().values():
        if "out" in call:
            continue
        for array in (call["k_cache"], call["v_cache"]):
            array.flags.writeable = False
        given = {name: array for name, array in call.items() if name not in ("k", "v")}
        o, _ = decode(**given, **({} if num_new is None else none))
        assert o.shape == call["q"].shape


def test_caches_in_one_array(decode):
    """Keys and values of a row beside each other, and of a sequence behind each other."""
    by_row, by_sequence = memory(2, 32, 2, 2, 32), memory(2, 2, 32, 2, 32)
    for k_cache, v_cache in ((by_row[:, :, 0], by_row[:, :, 1]), (by_sequence[:, 0], by_sequence[:, 1])):
        o, _ = decode(**call_of(k_cache, v_cache))
        assert o.shape == (2, 1, 4, 32)


def test_a_page_of_two_sequences():
    """It may be read by both; NumPy refuses to append to it."""
    k_cache, v_cache = memory(4, 16, 2, 32), memory(4, 16, 2, 32)
    call = call_of(k_cache, v_cache, cache_seqlens=np.array([16, 20], "int32"))
    fa2cupy.decode(**call, block_table=np.array([[3, 1, 9], [3, 2, 1]], "int32"))
    assert k_cache[1, 0].all() and k_cache[2, 4].all() and k_cache.any((1, 2, 3)).sum() == 2
    k_cache[...] = v_cache[...] = 0
    for table, place in (([[3, 2], [0, 2]], "0, 1"), ([[3, 1], [1, 2]], "0, 1"), ([[3, 0], [2, 3]], "1, 1")):
        with pytest.raises(ValueError, match=rf"^block_table: .* where new rows are written, got . at \[{place}\]"):
            fa2cupy.decode(**call, block_table=np.array(table, "int32"))
        assert not k_cache.any() and not v_cache.any()


def test_a_sequence_may_have_a_page_twice():
    """A ring of pages behind a window: rows that the window hides are written over."""
    rng = np.random.default_rng(2)
    k_cache, v_cache = rng.standard_normal((2, 2, 16, 2, 32), dtype="float32")
    q, k, v = rng.standard_normal((3, 1, 1, 2, 32), dtype="float32")
    lengths, table = np.array([32], "int32"), np.array([[0, 1, 0]], "int32")
    rows = [np.concatenate([x[0, 1:], x[1], new[0]])[None] for x, new in ((k_cache, k), (v_cache, v))]
    o, _ = fa2cupy.decode(q, k_cache, v_cache, lengths, k=k, v=v, block_table=table, window=(16, 0))
    np.testing.assert_allclose(o, fa2cupy.forward(q, *rows, window=(16, 0))[0], rtol=1e-5, atol=1e-6)
