"""The backward of sequences whose keys are one tile: all of it from one kernel, also on Hopper."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")

from support.fake_gpu import backward, forward
from support.simulated_problems import HOPPER, draw
from support.simulator import simulated_gpu

from fa2cupy import TileConfig
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch) as stages:
        yield stages


def check(inputs: tuple, launched: list, **options) -> None:
    """Runs the backward, and checks its results and that one kernel gave them all."""
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, **{name: options[name] for name in ("causal",) if name in options})
    o, lse = forward(q, k, v, family="sm80")
    del o, lse
    o, lse = forward(q, k, v, family="sm80", **{name: options[name] for name in ("causal",) if name in options})
    launched.clear()
    gradients = backward(q, k, v, o, lse, do, method="one_tile", family="sm80", **options)
    expected.check(spec="two_pass", **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    assert [stage.spec.operation for stage in launched] == ["backward_one_tile"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (32, 32), (37, 29), (90, 32), (5, 30), (61, 17)])
def test_every_query_of_one_tile_of_keys(launched, lengths, causal):
    check(draw("float16", lengths, 64), launched, causal=causal, config=TileConfig(32, 32, 4))
