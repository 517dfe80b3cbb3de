"""On a GPU: decoding and merging, against the reference, in graphs, and bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.decode_cases import Case, check, last_products
from support.feature_cases import HEAD_DIM_PAIRS

import fa2cupy
from fa2cupy import reference
from fa2cupy.problem.attention import MAX_HEAD_DIM
from fa2cupy.testing import make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")


def placed(options: dict) -> dict:
    return {name: cp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def on_gpu(q, k_cache, v_cache, lengths, **options) -> tuple:
    """Runs `decode` of NumPy arrays on the GPU, into NaN-filled arrays. New rows come back in the caches."""
    caches = cp.asarray(k_cache), cp.asarray(v_cache)
    given = placed(options)
    if np.shares_memory(k_cache, v_cache):
        caches = caches[0], caches[0][..., : v_cache.shape[-1]]
        given |= {"v": given["k"][..., : v_cache.shape[-1]]} if "k" in given else {}
    rows = q.shape[1] if options.get("layout", "bshd") == "bshd" else q.shape[2]
    heads = q.shape[2] if options.get("layout", "bshd") == "bshd" else q.shape[1]
    wide = "float64" if q.dtype.name == "float64" else "float32"
    shape = *q.shape[:-1], v_cache.shape[-1]
    out = cp.asarray(np.full(shape, np.nan, q.dtype)), cp.full((q.shape[0], heads, rows), np.nan, wide)
    o, lse = fa2cupy.decode(cp.asarray(q), *caches, cp.asarray(lengths), out=out, **given)
    k_cache[...], v_cache[...] = (cache.get() for cache in caches)
    return o.get(), lse.get()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("page_size", [None, 16, 64, 48])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_lengths(dtype, head_dim, page_size, layout):
    lengths = (0, 1, 47, 64, 90, 1023, 3000)
    check(on_gpu, Case(dtype, lengths, head_dim=head_dim, num_new=1, page_size=page_size, layout=layout))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("pair", HEAD_DIM_PAIRS, ids=str)
def test_two_head_dims(pair, page_size):
    sizes = {"head_dim": pair[0], "head_dim_v": pair[1], "page_size": page_size}
    for dtype in DTYPES:
        check(on_gpu, Case(dtype, (0, 1, 47, 1023, 3000), num_new=1, **sizes))
    check(on_gpu, Case("bfloat16", (9000, 20), heads=(16, 1), **sizes))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("pair", [(512, 512), (320, 264), (512, 64), (64, 512), (576, 512)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_more_than_256_columns(dtype, pair, page_size):
    """In the last pair, v is the first columns of k."""
    sizes = {"head_dim": pair[0], "head_dim_v": pair[1], "page_size": page_size}
    check(on_gpu, Case(dtype, (0, 1, 47, 1023, 3000), num_new=1, **sizes))
    check(on_gpu, Case(dtype, (9000, 20), heads=(16, 1), **sizes))
    check(on_gpu, Case(dtype, (500, 20), heads=(128, 1), **sizes), sink=True)


@pytest.mark.long
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_latent_attention(dtype, heads):
    """Tiles of 16, 32 and 64 rows, alone and in clusters, whole sequences and parts; results have equal bits."""
    sizes = {"head_dim": 576, "head_dim_v": 512, "heads": (heads, 1)}
    for lengths in ((0, 1, 47, 64, 1023, 3000), (20_000,), (*range(900, 1300, 4),)):
        check(on_gpu, Case(dtype, lengths, num_new=2, seqlen_q=2, page_size=16, **sizes), causal=True)
        check(on_gpu, Case(dtype, lengths, **sizes), window=(700, 0), sink=True, alibi_slopes="batch")
        q, *caches, ends, _ = Case(dtype, lengths, **sizes).arguments()
        found = [on_gpu(q, *caches, ends) for _ in range(2)]
        for one, other in zip(*found, strict=True):
            np.testing.assert_array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}"))


@pytest.mark.parametrize("seqlen_q", [1, 4, 9])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (8, 1), (16, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_groups_of_heads_and_several_queries(dtype, heads, seqlen_q):
    check(on_gpu, Case(dtype, (5000, 3, 700), heads=heads, seqlen_q=seqlen_q, head_dim=128))
    check(on_gpu, Case(dtype, (9000,), heads=heads, seqlen_q=seqlen_q, head_dim=64, num_new=2), causal=False)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, None), "causal": False},
        {"window": (1000, 1000)},
        {"softcap": 2.0},
        {"alibi_slopes": "batch"},
        {"sink": True},
        {"softmax_scale": -0.3},
        {"window": (300, 0), "softcap": 3.0, "alibi_slopes": "head", "sink": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features(dtype, options):
    check(on_gpu, Case(dtype, (0, 5, 4000), seqlen_q=3, num_new=1, page_size=16, head_dim=64), **options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_long_sequence(head_dim):
    check(on_gpu, Case("bfloat16", (70_000,), heads=(8, 1), head_dim=head_dim))


def test_the_same_bits_from_call_to_call():
    q, *caches, lengths, options = Case("bfloat16", (9000, 20, 333), head_dim=128, page_size=16).arguments()
    arrays, keywords = [cp.asarray(x) for x in (q, *caches, lengths)], placed(options)
    first = [x.get() for x in fa2cupy.decode(*arrays, **keywords)]
    for _ in range(20):
        for one, other in zip(first, fa2cupy.decode(*arrays, **keywords), strict=True):
            assert one.tobytes() == other.get().tobytes()


@pytest.mark.parametrize(("heads", "columns"), [((4, 2), (64, 64)), ((16, 1), (576, 512))], ids=str)
def test_generation_in_a_graph(heads, columns):
    """Lengths grow on the device from launch to launch, and each one appends a row; of 576 columns, v is the first."""
    steps, is_latent = 70, columns == (576, 512)
    sizes = {"num_heads": heads[0], "num_heads_kv": heads[1], "head_dim": columns[0], "head_dim_v": columns[1]}
    q, k, v, _ = make_inputs("float16", batch=2, seqlen_q=steps, seqlen_k=steps, **sizes)
    v = k[..., : columns[1]] if is_latent else v

    def keys_and_values(rows: int) -> list:
        found = [cp.full((2, rows, heads[1], n), cp.nan, "float16") for n in columns]
        return [found[0], found[0][..., : columns[1]]] if is_latent else found

    caches, (new_k, new_v) = keys_and_values(128), keys_and_values(1)
    lengths, new_q = cp.zeros(2, "int32"), cp.zeros((2, 1, heads[0], columns[0]), "float16")
    o, lse = cp.empty((2, 1, heads[0], columns[1]), "float16"), cp.empty((2, heads[0], 1), "float32")

    def step() -> None:
        fa2cupy.decode(new_q, *caches, lengths, k=new_k, v=new_v, out=(o, lse))

    step()
    cp.cuda.Device().synchronize()  # what the graph reads and overwrites was queued in another stream
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        step()
        cp.add(lengths, 1, out=lengths)
        graph = stream.end_capture()
    scale = columns[0] ** -0.5
    rows, keys = (x[..., :MAX_HEAD_DIM] for x in (q, k))
    beyond = last_products(q, k, scale)
    expected, _ = reference.forward(rows, keys, v, causal=True, softmax_scale=scale, bias=beyond)
    cp.cuda.Device().synchronize()
    for position in range(steps):
        with stream:
            for to, source in zip((new_q, new_k, new_v)[: 2 if is_latent else 3], (q, k, v), strict=False):
                to.set(np.ascontiguousarray(source[:, position : position + 1]))
            graph.launch(stream)
            found = o.get()
        np.testing.assert_allclose(found[:, 0].astype("float64"), expected[:, position], rtol=5e-3, atol=5e-3)
    assert lengths.get().tolist() == [steps, steps]


def test_lengths_and_pages_outside_of_the_cache_are_clamped():
    """Nothing outside is read: results are finite, whatever lengths and pages are."""
    cache = cp.zeros((4, 16, 2, 64), "float16")
    q = cp.ones((3, 1, 4, 64), "float16")
    table = cp.asarray(np.array([[10**6, -5], [0, 1], [2**31 - 1, 3]], "int32"))
    lengths = cp.asarray(np.array([2**31 - 1, -1, 32], "int32"))
    o, lse = fa2cupy.decode(q, cache, cache, lengths, block_table=table)
    assert bool(cp.isfinite(o.astype("float32")).all())
    np.testing.assert_allclose(lse.get()[:, 0, 0], [np.log(32), -np.inf, np.log(32)], rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_merged(dtype):
    q, k, v, _ = make_inputs(dtype, seqlen_q=70, seqlen_k=300, num_heads=4, num_heads_kv=2, head_dim=64, xp=cp)
    parts = [fa2cupy.forward(q, k[:, keys], v[:, keys]) for keys in (slice(0, 10), slice(10, 10), slice(10, 300))]
    o, lse = fa2cupy.merge(*zip(*parts, strict=True))
    whole, whole_lse = fa2cupy.forward(q, k, v)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 2e-6)
    np.testing.assert_allclose(o.get().astype("float64"), whole.get().astype("float64"), atol=tolerance)
    np.testing.assert_allclose(lse.get(), whole_lse.get(), rtol=1e-5)
