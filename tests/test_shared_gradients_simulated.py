"""Gradients on Hopper beyond 256 columns, whose two warp groups share their rows, executed without a GPU.

README.md of this folder has the checks of every launch.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants import sm90_shared_gradients
from mutants.mutant import CATCHES, check_unbroken, run
from support.fake_cupy import place
from support.fake_gpu import backward
from support.simulated_problems import FEW_MULTIPROCESSORS, HOPPER, draw
from support.simulator import simulated_gpu
from support.traced_cases import on_gpu

from fa2cupy import TileConfig, reference
from fa2cupy.families.sm90 import SM90
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

#: Calls: both head dimensions, rows and keys, the tiles (rows of the other side, stages) if they are not those of the
#: table, and options of the call.
CALLS = {
    "one tile": {"columns": (512, 512), "lengths": (3, 20)},
    "two tiles": {"columns": (320, 264), "lengths": (64, 64)},
    "causal": {"columns": (512, 512), "lengths": (150, 200), "causal": True},
    "more queries": {"columns": (384, 384), "lengths": (210, 70), "causal": True, "dtype": "float16"},
    "wide v": {"columns": (24, 512), "lengths": (70, 150), "batch": 2},
    "wide k": {"columns": (512, 136), "lengths": (130, 150), "causal": True},
    "groups": {"columns": (264, 328), "lengths": (70, 100), "batch": 2, "heads": (4, 2)},
    "window": {"columns": (320, 320), "lengths": (200, 330), "window": (70, 20)},
    "narrow tiles": {"columns": (264, 264), "lengths": (70, 100), "tile": (16, 4)},
    "wide tiles": {"columns": (320, 320), "lengths": (150, 200), "tile": (64, 2)},
}


def check(
    columns: tuple[int, int],
    lengths: tuple[int, int],
    tile: tuple[int, int] | None = None,
    *,
    dtype: str = "bfloat16",
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    change=tuple,
    num_splits: int = 1,
    **options,
) -> None:
    """Checks a backward, whose inputs `change` changes."""
    device, order = options.pop("device", HOPPER), options.pop("order", None)
    q, k, v, do = inputs = draw(dtype, lengths, columns[0], heads, head_dim_v=columns[1], batch=batch)
    o, lse = reference.forward(q, k, v, **options)
    o, lse = place(o.astype(q.dtype)), place(lse.astype("float32"))
    expected = Expectation(*inputs, **options)
    q, k, v, do = change(inputs)
    config = None
    if tile is not None:
        rows, stages = tile
        config = {
            "backward_dq": TileConfig(64, rows, 12, stages),
            "backward_dkdv": TileConfig(rows, 64, 12, stages),
        }
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, device, seed=order) as launched:
        how = {"method": "two_pass", "config": config, "num_splits": num_splits}
        gradients = backward(q, k, v, o, lse, do, **how, **on_gpu(options))
        expected.check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    families = {stage.spec.operation: stage.spec.family for stage in launched}
    assert families["backward_dq"] is families["backward_dkdv"] is SM90


@pytest.mark.sample(name=("causal", "two tiles"))
@pytest.mark.parametrize("name", CALLS)
def test_backward(name):
    check(**CALLS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("columns", [(264, 512), (512, 512)], ids=str)
def test_any_order_of_the_warps_and_nan_in_rows_that_see_no_key(columns, order):
    def with_nan(inputs: tuple) -> tuple:
        for x in inputs[0], inputs[3]:
            x[:, :80] = np.nan
        return inputs

    how = {"change": with_nan, "causal": True, "order": order, "device": FEW_MULTIPROCESSORS}
    check(columns, (200, 120), heads=(2, 1), **how)


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (30, 5)}, {}], ids=str)
def test_shares_of_the_queries(options):
    check((320, 320), (130, 330), num_splits=3, heads=(2, 1), **options)
    check((320, 320), (20, 70), num_splits=5, heads=(2, 1), **options)  # more shares than steps


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (30, 5)}, {"num_splits": 2}], ids=str)
@pytest.mark.parametrize("order", [None, 1])
def test_packed_sequences(order, options):
    ends = {"cu_seqlens_q": [0, 0, 130, 130, 131, 300], "cu_seqlens_k": [0, 60, 60, 200, 230, 250]}
    how = {key: place(np.array(one, "int32")) for key, one in ends.items()}
    how |= {"order": order, "device": FEW_MULTIPROCESSORS, "heads": (2, 1), **options}
    check_packed((264, 320), (300, 250), **how)


def check_packed(columns: tuple[int, int], lengths: tuple[int, int], **how) -> None:
    """The same of packed sequences, one behind the other in arrays of three axes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        drawn = draw
        monkeypatch.setitem(globals(), "draw", lambda *a, **k: tuple(place(x[0]) for x in drawn(*a, **k)))
        check(columns, lengths, **how)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", sm90_shared_gradients.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    check_unbroken(mutant.operation, mutant.problem)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        run(mutant.operation, mutant.problem, mutant)
