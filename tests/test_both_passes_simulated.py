"""Both passes of a backward in one launch on Hopper, executed without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward
from support.simulated_problems import draw
from support.simulator import simulated_gpu
from support.strided_arrays import gapped

from fa2cupy import reference
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch) as stages:
        yield stages


def check(length: int, head_dim: int, *, heads=1, batch=1, dtype="float16", out=None, with_dlse=False, **options):
    """Computes gradients from the reference's o and lse, and checks them against float64."""
    q, k, v, do = draw(dtype, (length, length), head_dim, (heads, heads), batch=batch)
    features = {"causal": options["causal"]} if "causal" in options else {}
    o, lse = reference.forward(q, k, v, **features)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
    dlse = place(np.random.default_rng(1).standard_normal(lse.shape, np.float32)) if with_dlse else None
    expected = Expectation(q, k, v, do, dlse=dlse, **features)
    if out is not None:
        out = tuple(out(np.full_like(x, np.nan)) for x in (q, k, v))
    gradients = backward(q, k, v, o, lse, do, dlse=dlse, out=out, **options)
    expected.check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    return list(gradients)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(("length", "head_dim"), ((1, 8), (300, 64), (128, 40)))
def test_both_passes(launched, length, head_dim, causal):
    """Checks ragged edges, and lengths of one tile."""
    check(length, head_dim, causal=causal, deterministic=True, out=gapped)
    assert [stage.spec.operation for stage in launched] == ["backward_both"]
