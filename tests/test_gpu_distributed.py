"""On several GPUs: every scheme, with features, against one call on one GPU."""

from __future__ import annotations

import pytest
from support import gpu_ranks

from fa2cupy.families.device import device_count

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

#: Two GPUs, or four: two hosts of two, as it were.
RANKS = 4 if device_count() >= 4 else 2


@pytest.mark.skipif(device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("scheme", "name"), gpu_ranks.CASES)
def test_ranks_compute_what_one_gpu_does(scheme, name):
    assert gpu_ranks.results(RANKS)[scheme, name] == ""
