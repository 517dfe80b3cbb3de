"""On several GPUs: every scheme, with features, against one call on one GPU; and the copies that schemes make."""

from __future__ import annotations

import pytest
from support import gpu_ranks

from fa2cupy.distributed.copies import copy
from fa2cupy.families.device import device_count

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

#: Two GPUs, or four: two hosts of two, as it were.
RANKS = 4 if device_count() >= 4 else 2


@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("scheme", "name"), gpu_ranks.CASES)
def test_ranks_compute_what_one_gpu_does(scheme, name):
    """The cases "graph" are compared with plain calls."""
    assert gpu_ranks.results(RANKS)[scheme, name] == ""


@pytest.mark.parametrize("dtype", ("bool", "float16", "float32", "float64"))
@pytest.mark.parametrize("columns", (64, 59))
@pytest.mark.parametrize("first", (0, 1))
def test_large_copies_between_strides(first, columns, dtype):
    whole = cp.random.default_rng(0).integers(0, 2, (2, 96, 6, columns + 8)).astype(dtype)
    source = whole[:, ::2, 1:5, first : first + columns].swapaxes(1, 2)
    target = cp.zeros((2, 4, 50, columns + first), dtype)
    copy(target[:, :, 1:49, :columns], source)
    assert cp.array_equal(target[:, :, 1:49, :columns], source)
    assert not (target[:, :, 0].any() or target[:, :, 49].any() or target[..., columns:].any())
