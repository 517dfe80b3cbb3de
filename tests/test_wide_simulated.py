"""Maps, functions and broadcast biases beyond 256 columns, executed without a GPU, with default tiles."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import options_of
from support.simulated_problems import HOPPER, draw
from support.simulator import simulated_gpu
from support.traced_cases import on_gpu

import fa2cupy
from fa2cupy import mods
from fa2cupy.testing import Expectation

pytestmark = [pytest.mark.simulated, pytest.mark.matrix]

LENGTHS = (150, 170)
DOCUMENTS = np.sort(np.random.default_rng(3).integers(0, 3, (1, max(LENGTHS))), axis=1).astype("int32")


def check(launched: list, more: dict | None = None, **options) -> None:
    """Checks the results of a forward and of a deterministic backward, whose gradients `more` adds to."""
    inputs = draw("float16", LENGTHS, 264, (2, 1), head_dim_v=328, view=place)
    expected = Expectation(*inputs, **options)
    q, k, v, do = inputs
    options = on_gpu(options)
    o, lse = forward(q, k, v, **options)
    expected.check(o=o, lse=lse)
    gradients = backward(q, k, v, o, lse, do, deterministic=True, **(more or {}), **options)
    names = ("dq", "dk", "dv", *(name.removeprefix("return_") for name in more or {}))
    expected.check(**dict(zip(names, gradients, strict=True)))
    of_families = {(stage.spec.operation == "forward", stage.spec.family_name) for stage in launched}
    assert of_families <= {(True, "sm90"), (False, "sm80"), (False, "common")}


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch, HOPPER) as stages:
        yield stages


def test_maps(launched):
    given = fa2cupy.block_mask(mods.document, (DOCUMENTS,), 1, 2, *LENGTHS, tile=(64, 64))
    check(launched, mask_mod=mods.document, mask_args=(DOCUMENTS,), block_mask=given)


def test_dropout_of_weights_of_any_sign(launched):
    arguments = (np.array([1.5, -1.0, 0.0], "float32"),)
    check(launched, score_mod=lambda s, b, h, q, k, t: s * t[k % 3], score_args=arguments, dropout_p=0.4, seed=3)


def test_the_gradient_of_a_broadcast_bias(launched):
    sizes = {"batch": 1, "num_heads": 2, "seqlen_q": LENGTHS[0], "seqlen_k": LENGTHS[1]}
    check(launched, {"return_dbias": True}, **options_of("bias of keys", "float16", sizes))
    assert launched[-1].spec.operation == "dbias"
