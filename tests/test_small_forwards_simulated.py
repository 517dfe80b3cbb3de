"""Forwards of few query tiles, executed without a GPU: their results have the bits of those of many."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_gpu import forward
from support.simulated_problems import HOPPER, draw
from support.simulator import simulated_gpu

from fa2cupy.families.sm90 import SM90
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch, HOPPER) as stages:
        yield stages


@pytest.mark.sample(head_dim=(64,), causal=(True,))
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_results_have_the_same_bits_beside_many_other_sequences(launched, head_dim, causal):
    rows = SM90.tiles["forward"]
    few, many = (row.tile for row in rows if row.head_dim == head_dim and not row.features and not row.head_dim_v)
    for lengths in ((150, 150), (70, 230)):
        q, k, v, _ = draw("bfloat16", lengths, head_dim, (1, 1))
        launched.clear()
        o, lse = forward(q, k, v, causal=causal)
        assert [stage.spec.tile for stage in launched] == [few]
        Expectation(q, k, v, causal=causal).check(o=o, lse=lse)
        for mine, other in zip((o, lse), forward(q, k, v, causal=causal, config=many), strict=True):
            np.testing.assert_array_equal(mine, other)
