"""``one_tile`` on a GPU: results, the choice of it, gradients of a bias that sequences share, and the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from support.feature_cases import numbers

import fa2cupy
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

NAMES = ("dq", "dk", "dv", "dbias")


def draw(dtype: str, head_dim: int, lengths: tuple[int, int], batch: int, heads: tuple[int, int] = (2, 2)) -> tuple:
    sizes = {"batch": batch, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    return make_inputs(dtype, **sizes, num_heads=heads[0], num_heads_kv=heads[1], head_dim=head_dim, xp=cp)


@pytest.mark.parametrize("family", (None, "sm80"))
@pytest.mark.parametrize(("dtype", "head_dim"), (("float16", 32), ("bfloat16", 64), ("float16", 96), ("bfloat16", 128)))
def test_against_float64(dtype, head_dim, family):
    for lengths in ((64, 64), (1, 1), (200, 128), (61, 37), (33, 100)):
        for causal, heads in ((False, (2, 2)), (True, (4, 2))):
            q, k, v, do = draw(dtype, head_dim, lengths, 3, heads)
            o, lse = fa2cupy.forward(q, k, v, causal=causal)
            gradients = fa2cupy.backward(q, k, v, o, lse, do, causal=causal, method="one_tile", family=family)
            expected = Expectation(q, k, v, do, causal=causal)
            expected.check(**dict(zip(NAMES[:3], gradients, strict=True)), spec=(lengths, causal))


@pytest.mark.parametrize("family", (None, "sm80"))
@pytest.mark.parametrize("shape", ((2, 49, 64), (1, 1, 49, 64), (49, 64), (300, 1, 49, 64)))
def test_dbias_that_sequences_share(shape, family):
    inputs = draw("bfloat16", 32, (49, 64), 300)
    q, k, v, do = inputs
    options = {"bias": cp.asarray(numbers(shape, "bfloat16"))}
    o, lse = fa2cupy.forward(q, k, v, **options)
    how = {"method": "one_tile", "return_dbias": True, "family": family, **options}
    first = fa2cupy.backward(q, k, v, o, lse, do, **how)
    Expectation(*inputs, **options).check(**dict(zip(NAMES, first, strict=True)))
    for _ in range(5):
        for one, other in zip(first, fa2cupy.backward(q, k, v, o, lse, do, **how), strict=True):
            np.testing.assert_array_equal(cp.asnumpy(one), cp.asnumpy(other))
