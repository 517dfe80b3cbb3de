"""On a GPU: fa2cupy.distributed with one rank, whose messages stay on it, against calls without a communicator."""

from __future__ import annotations

import numpy as np
import pytest

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.testing import make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def comm() -> dist.Communicator:
    from cupy.cuda import nccl

    if not getattr(nccl, "available", False):
        pytest.skip("CuPy finds no NCCL")
    return dist.Communicator.from_env({"RANK": "0", "WORLD_SIZE": "1"})


def bits(array: cp.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.get()).view("uint8")


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("heads", {}), ("heads", {"window": (100, 0)}), ("heads", {"dropout_p": 0.1, "seed": 3}), ("gather", {}),
        ("gather", {"window": (100, 0)}), ("gather", {"dropout_p": 0.1, "seed": 3}), ("ring", {}),
    ],
)  # fmt: skip
def test_one_rank_gives_what_a_call_without_a_communicator_does(comm, scheme, options):
    q, k, v, do = make_inputs("bfloat16", batch=2, seqlen_q=1024, num_heads=8, num_heads_kv=2, head_dim=64, xp=cp)
    keywords = {"causal": True, **options}
    o, lse = fa2cupy.forward(q, k, v, **keywords)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, method="two_pass", **keywords)
    for _ in range(3):  # memory of one call serves the next while kernels still run
        found = dist.forward(comm, q, k, v, scheme=scheme, **keywords)
        assert all(np.array_equal(bits(x), bits(wanted)) for x, wanted in zip(found, (o, lse), strict=True))
        own = dist.backward(comm, q, k, v, *found, do, scheme=scheme, method="two_pass", **keywords)
        for name, x, wanted in zip(("dq", "dk", "dv"), own, gradients, strict=True):
            x, wanted = (array.astype("float32") for array in (x, wanted))
            assert float(abs(x - wanted).max()) <= 1e-2 * float(abs(wanted).max()), name
