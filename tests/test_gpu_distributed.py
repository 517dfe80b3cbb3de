"""On several GPUs: every scheme, with features, against one call on one GPU; and the copies that schemes make."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from support import gpu_ranks

from fa2cupy.distributed.local.copies import copy
from fa2cupy.distributed.local.copy_kernel import copy_matrices
from fa2cupy.distributed.local.lanes import StreamLane
from fa2cupy.distributed.local.matrices import Matrix
from fa2cupy.distributed.local.sums import subtract, sum_into
from fa2cupy.families.device import device_count
from fa2cupy.problem.dtypes import ACCUMULATOR

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

#: Two GPUs; or four, which stand for two hosts of two.
RANKS = 4 if device_count() >= 4 else 2


@pytest.mark.several_gpus
@pytest.mark.parametrize(("scheme", "name"), gpu_ranks.CASES)
def test_ranks_compute_what_one_gpu_does(scheme, name):
    """The cases "graph" are compared with plain calls."""
    assert gpu_ranks.results(RANKS)[scheme, name] == ""


@pytest.mark.several_gpus
@pytest.mark.parametrize("how", gpu_ranks.FAILURES)
def test_ranks_do_not_wait_forever_if_one(how):
    assert gpu_ranks.results(RANKS, ("compile",), gpu_ranks.compile_ahead) == {"compile": ""}
    assert gpu_ranks.results(RANKS, (how,), gpu_ranks.fail, patience=60.0)[how] == ""


@pytest.mark.parametrize("dtype", ("bool", "float16", "float32", "float64"))
@pytest.mark.parametrize("columns", (64, 59))
@pytest.mark.parametrize("first", (0, 1))
def test_large_copies_between_strides(first, columns, dtype):
    whole = cp.random.default_rng(0).integers(0, 2, (8, 96, 6, columns + 8)).astype(dtype)
    source = whole[:, ::2, 1:5, first : first + columns].swapaxes(1, 2)
    target = cp.zeros((8, 4, 50, columns + first), dtype)
    copy(target[:, :, 1:49, :columns], source)
    assert cp.array_equal(target[:, :, 1:49, :columns], source)
    assert not (target[:, :, 0].any() or target[:, :, 49].any() or target[..., columns:].any())


@pytest.mark.parametrize("word", (16, 8, 4, 2, 1))
def test_copies_of_matrices(word):
    """Two matrices are larger than what a launch copies at a time, and 70 are small: there are two launches."""
    rng = np.random.default_rng(word)
    source, target = (cp.asarray(rng.integers(0, 256, 1 << 26).astype(np.uint8)) for _ in range(2))
    expected, data = target.get(), source.get()
    places = [(0, 4096 + word, 0, 8192 + word, 4096 - word, 8000), (1 << 25, 2048, 1 << 23, 1024, 1024, 9000)]
    places += [((1 << 26) - (n + 1) * 1024, 128, n * 1024, 64, 3 * word, 5) for n in range(70)]
    for to, to_pitch, of, of_pitch, width, height in places:
        for row in range(height):
            expected[to + row * to_pitch :][:width] = data[of + row * of_pitch :][:width]
    addresses = target.data.ptr, source.data.ptr
    copy_matrices(
        [Matrix(addresses[0] + to, to_pitch, addresses[1] + of, *others) for to, to_pitch, of, *others in places]
    )
    np.testing.assert_array_equal(target.get(), expected)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
@pytest.mark.parametrize("columns", (64, 59))
@pytest.mark.parametrize("count", (0, 1, 3, 64, 65))
def test_sums_of_shares(count, columns, dtype):
    """Small arrays, large ones as words, and large ones whose rows are not words."""
    wide, dtype = ACCUMULATOR[dtype], np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for rows in (4, 96):
        drawn = np.random.default_rng(rows).standard_normal((count, 8, rows + 1, 6, columns)).astype(dtype)
        target = cp.full((8, rows, 12, columns), 7, dtype)
        shares = [x[:, :rows] for x in cp.asarray(drawn)]
        sum_into(target[:, :, 4:10], shares, wide)
        expected = np.full(target.shape, 7, dtype)
        sum_into(expected[:, :, 4:10], [x[:, :rows] for x in drawn], wide)
        np.testing.assert_array_equal(target.get(), expected)


def test_what_lanes_allocate_in_a_capture_is_the_graphs():
    """Memory of CuPy's pool could be given to others while the graph writes to it."""
    main, other = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    pool = cp.get_default_memory_pool()
    with main:  # which waits for no other stream
        share, total = cp.ones((64, 1000), "float32"), cp.zeros((64, 1000), "float32")
        subtract(total, total, share)
        main.begin_capture()
        lanes = [StreamLane(stream, is_captured=True) for stream in (main, other)]
        lanes[1].wait(lanes[0].record())
        gc.collect()  # arrays of earlier tests would be freed meanwhile
        before = pool.total_bytes(), pool.used_bytes()
        for lane in (lanes[1], lanes[1]):
            lane(subtract, total, total, share)
        assert (pool.total_bytes(), pool.used_bytes()) == before
        lanes[0].wait(lanes[1].record())
        lanes[0](subtract, total, total, share)
        graph = main.end_capture()
        others = [cp.full((64, 1000), n, "float32") for n in range(8)]
        for launches in range(1, 4):
            graph.launch()
            assert (total == -1 - 3 * launches).all()
        assert all((x == n).all() for n, x in enumerate(others))
