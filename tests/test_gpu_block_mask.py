"""On a GPU: sparse maps and the kernels that visit their tiles, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

import fa2cupy
from fa2cupy import BlockMask, mods
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.registry import FAMILIES
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

METHODS = ("single_pass", "two_pass")
ROWS, KEYS, HEADS = 500, 612, 4


def families_of(dtype: str) -> list[str]:
    """Returns the names of the families that have maps."""
    device = DeviceInfo.current()
    return [one.public_name for one in FAMILIES if one.supports("forward", dtype, device, ("block_mask", "mask_mod"))]


def check(dtype: str, head_dim: int, *, num_splits: int | None = None, **options) -> None:
    """Checks forward and both methods of each family, written into NaN-filled arrays."""
    sizes = {"batch": 2, "seqlen_q": ROWS, "seqlen_k": KEYS, "num_heads": HEADS, "num_heads_kv": 2}
    q, k, v, do = make_inputs(dtype, head_dim=head_dim, xp=cp, **sizes)
    expected = Expectation(q, k, v, do, **options)
    for family in families_of(dtype):
        own = {**options, "family": family, "num_splits": num_splits if dtype in ("float16", "bfloat16") else None}
        o, lse = fa2cupy.forward(q, k, v, **own, out=expected.unwritten("o", "lse"))
        expected.check(spec=family, o=o, lse=lse)
        for method in METHODS:
            out = expected.unwritten("dq", "dk", "dv")
            dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, method=method, out=out, **own)
            expected.check(spec=(method, family), dq=dq, dk=dk, dv=dv)


def documents(longest: int) -> cp.ndarray:
    return cp.asarray(np.sort(np.random.default_rng(3).integers(0, 6, (2, longest)), axis=1))


def random_tiles(heads: int, density: float) -> BlockMask:
    tiles = np.random.default_rng(1).random((2, heads, 4, 5)) < density
    tiles[0, :, 1], tiles[1, ..., 2] = False, False
    return BlockMask(cp.asarray(tiles), ROWS, KEYS)


@pytest.mark.parametrize("tile", [(128, 128), (64, 32), (40, 200)])
@pytest.mark.parametrize("name", ["document", "frames", "window", "dilated", "prefix"])
def test_maps_are_those_of_numpy(name, tile):
    function, arrays = {
        "document": (mods.document, (documents(KEYS),)),
        "frames": (lambda b, h, q, k: q // 70 >= k // 70, ()),
        "window": (mods.sliding_window(150, 20), ()),
        "dilated": (mods.dilated_window(200, 3), ()),
        "prefix": (mods.prefix_lm, (cp.asarray([77, 300]),)),
    }[name]
    found = fa2cupy.block_mask(function, arrays, 2, HEADS, ROWS, KEYS, tile=tile, like=cp.empty(1))
    wanted = fa2cupy.block_mask(function, tuple(map(cp.asnumpy, arrays)), 2, HEADS, ROWS, KEYS, tile=tile)
    np.testing.assert_array_equal(found.states.get(), wanted.states)
    assert (found.layout, found.density, str(found)) == (wanted.layout, wanted.density, str(wanted))
    for own, other in zip(found.intervals, wanted.intervals, strict=True):
        assert (own is None) is (other is None)
        np.testing.assert_array_equal(0 if own is None else own.get(), 0 if other is None else other)


@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (200, 10)}])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bfloat16", 64), ("float16", 128), ("float16", 256), ("float32", 64), ("float64", 64)]
)
def test_maps_of_functions(dtype, head_dim, band):
    ids = documents(KEYS)
    own = {"mask_mod": mods.document, "mask_args": (ids,)}
    check(dtype, head_dim, **own, **band, block_mask=fa2cupy.block_mask(mods.document, (ids,), 2, HEADS, ROWS, KEYS))


@pytest.mark.parametrize("function", [mods.causal(KEYS - ROWS), mods.sliding_window(150, 20, KEYS - ROWS)])
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float16", 256), ("float32", 64), ("float64", 64)])
def test_functions_that_are_keywords(dtype, head_dim, function):
    own = {"mask_mod": function}
    check(dtype, head_dim, **own, block_mask=fa2cupy.block_mask(function, (), 1, 1, ROWS, KEYS, like=cp.empty(1)))


def halves(b, h, q, k, sizes):
    """Block diffusion by blocks of several sizes: two intervals in rows and columns. The first queries see no key."""
    n, size = 306, sizes[b, h]
    of_query, of_key = q % n // size, k % n // size
    noisy = (q < n) & (k < n) & (of_query == of_key)
    return (q > 3) & (noisy | (k >= n) & ((q < n) & (of_query > of_key) | (q >= n) & (of_query >= of_key)))


def by_ends(b, h, q, k, ends):
    """Two intervals of keys for each query, and many of queries for a key."""
    own = [ends[b, h, q, i] for i in range(4)]
    return (own[0] <= k) & (k < own[1]) | (own[2] <= k) & (k < own[3])


@pytest.mark.parametrize(("function", "intervals"), [(halves, (True, True)), (by_ends, (True, False))])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bfloat16", 64), ("float16", 128), ("float16", 256), ("float32", 64), ("float64", 64)]
)
def test_two_intervals(dtype, head_dim, function, intervals):
    """Checks heads and sequences with intervals of their own, and a side without intervals, with features beside."""
    rng = np.random.default_rng(5)
    ends = np.sort(rng.integers(0, KEYS + 1, (2, HEADS, ROWS, 4)), axis=-1)
    own = {"mask_mod": function, "mask_args": (cp.asarray(ends if function is by_ends else ends[:, :, 0, 0] % 60 + 5),)}
    sparse = fa2cupy.block_mask(function, own["mask_args"], 2, HEADS, ROWS, KEYS)
    assert sparse.layout.intervals == intervals
    check(dtype, head_dim, **own, block_mask=sparse)
    check(dtype, head_dim, **own, block_mask=sparse, softcap=3.0, dropout_p=0.2, seed=5, causal=True)


def test_functions_give_the_results_of_intervals():
    """Checks that results have the same bits, and that a map that a graph captures keeps the function."""
    q, k, v, do = make_inputs("bfloat16", seqlen_q=ROWS, seqlen_k=KEYS, num_heads=HEADS, head_dim=128, batch=2, xp=cp)
    ids = documents(KEYS)
    made = fa2cupy.block_mask(mods.document, (ids,), 2, HEADS, ROWS, KEYS)
    wanted = fa2cupy.forward(q, k, v, block_mask=made)
    gradients = fa2cupy.backward(q, k, v, *wanted, do, block_mask=made, deterministic=True)
    cp.cuda.Device().synchronize()  # `ids` was written in another stream
    with cp.cuda.Stream(non_blocking=True) as stream:
        fa2cupy.block_mask(mods.document, (ids,), 2, HEADS, ROWS, KEYS)  # loads the kernels
        stream.begin_capture()
        captured = fa2cupy.block_mask(mods.document, (ids,), 2, HEADS, ROWS, KEYS)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    assert (made.layout.intervals, captured.layout.intervals) == ((True, True), (False, False))
    found = fa2cupy.forward(q, k, v, block_mask=captured)
    found += fa2cupy.backward(q, k, v, *found, do, block_mask=captured, deterministic=True)
    for one, other in zip(found, (*wanted, *gradients), strict=True):
        assert bool((one == other).all())


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bfloat16", 64), ("float16", 128), ("float16", 192), ("float32", 64), ("float64", 64)]
)
def test_given_maps(dtype, head_dim, heads):
    check(dtype, head_dim, block_mask=random_tiles(heads, 0.4))
    check(dtype, head_dim, block_mask=random_tiles(heads, 0.4), num_splits=3, causal=True)


def test_other_features():
    ids = documents(KEYS)
    own = {"mask_mod": mods.document, "mask_args": (ids,)}
    sparse = fa2cupy.block_mask(mods.document, (ids,), 2, HEADS, ROWS, KEYS)
    more = {"softcap": 3.0, "dropout_p": 0.2, "seed": 5, "score_mod": lambda score, b, h, q, k: score - 0.01 * q}
    check("float16", 64, **own, block_mask=sparse, **{name: more[name] for name in ("softcap", "dropout_p", "seed")})
    check("float32", 64, **own, block_mask=sparse, **more)


def test_results_are_the_same_from_run_to_run():
    q, k, v, do = make_inputs("bfloat16", seqlen_q=ROWS, seqlen_k=KEYS, num_heads=2, head_dim=128, batch=2, xp=cp)
    own = {"block_mask": random_tiles(1, 0.5)}
    o, lse = fa2cupy.forward(q, k, v, **own)
    first = fa2cupy.backward(q, k, v, o, lse, do, deterministic=True, **own)
    for _ in range(5):
        for one, other in zip(first, fa2cupy.backward(q, k, v, o, lse, do, deterministic=True, **own), strict=True):
            assert bool((one == other).all())


def test_an_array_that_changes_later_changes_no_map():
    ids = documents(KEYS)
    own = {"mask_mod": mods.document, "mask_args": (ids,)}
    sparse = fa2cupy.block_mask(mods.document, (ids,), 2, HEADS, ROWS, KEYS)
    q, k, v, _ = make_inputs("bfloat16", seqlen_q=ROWS, seqlen_k=KEYS, num_heads=HEADS, head_dim=64, batch=2, xp=cp)
    wanted = fa2cupy.forward(q, k, v, **own, block_mask=sparse)
    ids[...] = cp.arange(KEYS) // 7
    for one, other in zip(fa2cupy.forward(q, k, v, **own, block_mask=sparse), wanted, strict=True):
        assert bool((one == other).all())
    with pytest.raises(ValueError, match=r"^mask_args\[0\]: block_mask was made from another array"):
        fa2cupy.forward(q, k, v, mask_mod=mods.document, mask_args=(ids.copy(),), block_mask=sparse)


def test_streams_and_graphs_read_the_lists_of_a_map():
    """Checks streams that begin while the first call's kernels run, and graphs captured before and after it."""
    q, k, v, _ = make_inputs("bfloat16", seqlen_q=ROWS, seqlen_k=KEYS, num_heads=HEADS, head_dim=64, batch=2, xp=cp)
    expected = Expectation(q, k, v, block_mask=random_tiles(1, 0.4))
    fa2cupy.forward(q, k, v, block_mask=random_tiles(1, 0.4))  # loads the kernels
    cp.cuda.get_current_stream().synchronize()
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(3)]
    for captured_first in (False, True):
        sparse = random_tiles(1, 0.4)
        cp.cuda.get_current_stream().synchronize()
        graphs = []

        def capture(sparse=sparse, graphs=graphs):
            with streams[0] as stream:
                stream.begin_capture()
                results = fa2cupy.forward(q, k, v, block_mask=sparse)
                graphs.append((stream.end_capture(), results))

        if captured_first:
            capture()
            assert not sparse.kept
        found = []
        for stream in streams:
            with stream:
                found.append(fa2cupy.forward(q, k, v, block_mask=sparse))
        capture()
        assert len(sparse.kept) == 1
        cp.cuda.Device().synchronize()
        for graph, (o, lse) in graphs:
            o.fill(np.nan)
            lse.fill(np.nan)
            cp.cuda.Device().synchronize()
            graph.launch(streams[1])
            streams[1].synchronize()
            found.append((o, lse))
        for o, lse in found:
            expected.check(o=o, lse=lse)


def test_a_large_map_takes_the_memory_of_its_tiles():
    ids = cp.asarray(np.repeat(np.arange(16, dtype="int32"), 8192)[None])
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes()
    sparse = fa2cupy.block_mask(mods.document, (ids,), 1, 8, 131072, 131072)
    assert sparse.shape == (1, 1, 1024, 1024)
    intervals = 16 * (131072 + 131072)  # of rows and of columns
    assert pool.used_bytes() - before <= 2 * 1024 * 1024 + intervals
    assert sparse.density == 1 / 16
    assert not sparse.has_mixed_tiles
