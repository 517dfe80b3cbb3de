"""Calls of one kernel of second order on a simulated Hopper GPU, and their check against the reference in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from support.second_order_calls import Call
from support.simulated_problems import HOPPER
from support.simulator import Patch, simulated_gpu

from fa2cupy import TileConfig, reference
from fa2cupy.families import choice
from fa2cupy.families.device import DeviceInfo
from fa2cupy.plan import plans
from fa2cupy.plan.stages import Stage

__all__ = [
    "CAUSAL",
    "HIDING",
    "JVP_CHECKS",
    "ONE_GROUP",
    "TWO_GROUPS",
    "call_on_hopper",
    "check_alone",
    "check_jvp",
    "check_output_jvp",
    "run_alone",
    "without_rows",
]

ONE_GROUP, TWO_GROUPS = TileConfig(64, 32, 8, 2, 2), TileConfig(128, 48, 12, 2)
#: A call of several tiles of queries and keys, with rows that see no key.
CAUSAL = {"lengths": (150, 110), "heads": (2, 1), "causal": True}
#: The first 100 rows see no key: all of a tile, and some of the next. Blocks of `HOPPER` take several tiles.
HIDING = {**CAUSAL, "lengths": (230, 130)}


def call_on_hopper(
    lengths: tuple[int, int] = (70, 75),
    heads: tuple[int, int] = (1, 1),
    head_dim: int = 64,
    head_dim_v: int | None = None,
    *,
    given: str = "qkvo",
    dtype: str = "bfloat16",
    tile: TileConfig = ONE_GROUP,
    **options,
) -> Call:
    """Returns a call with the tangents of these letters of q, k, v and o (for dO)."""
    call = Call(lengths, heads, head_dim, head_dim_v, dtype=dtype, tile=tile, **options)
    for letter, name in {"q": "q", "k": "k", "v": "v", "o": "do"}.items():
        if letter not in given:
            del call.direction[name]
    return call


def run_alone(
    operation: str, call: Call, patch: Patch | None = None, order: int | None = None
) -> tuple[tuple[np.ndarray, ...], list[Stage]]:
    """Launches only one kernel of `backward_jvp` and those ahead of it; returns its results and the stages.

    `order` is the seed of a random order of the warps, here and below: a call may have a seed of dropout.
    """
    how = {"seed": order, "patch": patch}
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, HOPPER, **how) as launched:
        monkeypatch.setitem(choice.SEVERAL, "backward_jvp", (operation,))
        results = call.backward_jvp()
    return _own_results(operation, results), launched


def _own_results(operation: str, results: tuple) -> tuple[np.ndarray, ...]:
    """Those of a kernel among the results of `backward_jvp`."""
    dqt, dkt, dvt, *others = map(np.asarray, results)
    return (dqt, *others) if operation == "dq_jvp" else (dkt, dvt)


def check_alone(operation: str, call: Call, patch: Patch | None = None) -> list[Stage]:
    """Checks the results of a kernel by the errors of the formulas in the same precision; returns the stages."""
    results, launched = run_alone(operation, call, patch)
    wanted = (_own_results(operation, one) for one in (call.backward_jvp(reference), call.naive_backward_jvp()))
    _check(results, *wanted)
    return launched


def _check(results: Iterable[np.ndarray], exact: Iterable[np.ndarray], naive: Iterable[np.ndarray]) -> None:
    """Checks results by the errors of the formulas in the same precision."""
    for one, other, formula in zip(map(np.asarray, results), exact, naive, strict=True):
        if one.size:
            error, allowed = (abs(x.astype("float64") - other).max() for x in (one, formula))
            allowed = 3 * allowed + 1e-6 * abs(other).max()
            assert error <= allowed, f"the error is {error / allowed:.0%} of the allowed"


def without_rows(operation: str, call: Call, rows: int, patch: Patch | None = None, order: int | None = None) -> None:
    """Checks that the first rows, which see no key, contribute nothing even if they have NaN."""
    wanted, _ = run_alone(operation, call, order=order)
    for arrays in (call.arrays, call.direction):
        for name in ("q", "do"):
            if name in arrays:
                arrays[name][:, :rows] = np.nan
    found, _ = run_alone(operation, call, patch, order)
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one.astype("float32"), other.astype("float32")), "100% of the allowed"


def check_jvp(
    call: Call,
    patch: Patch | None = None,
    nan_rows: int = 0,
    device: DeviceInfo | str = "sm_90",
    order: int | None = None,
) -> list[Stage]:
    """Checks the results of `jvp`; returns the stages. The first `nan_rows` rows see no key, and are NaN on the GPU."""
    exact, naive = call.jvp(reference)[2:], call.naive_jvp()
    how = {"seed": order, "patch": patch}
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, device, **how) as launched:
        tangents = _with_nan(call, nan_rows).checked_jvp()
    _check(tangents, exact, naive)
    return launched


def check_output_jvp(
    call: Call,
    patch: Patch | None = None,
    nan_rows: int = 0,
    device: DeviceInfo | str = "sm_90",
    order: int | None = None,
) -> list[Stage]:
    """The same of O' and lse' of `double_backward`, of which only their kernel is launched."""
    exact, naive, of_rows = call.double_backward(reference)[3:5], call.naive_double_backward()[3:5], plans._of_rows
    how = {"seed": order, "patch": patch}
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, device, **how) as launched:
        monkeypatch.setitem(choice.SEVERAL, "double_backward", ("output_jvp",))
        monkeypatch.setattr(plans, "_of_rows", lambda *how: dataclasses.replace(of_rows(*how), blocks=0))
        found = _with_nan(call, nan_rows).double_backward()[3:5]
    _check(found, exact, naive)
    return launched


def _with_nan(call: Call, rows: int) -> Call:
    for arrays in (call.arrays, call.direction):
        if "q" in arrays:
            arrays["q"][:, :rows] = np.nan
    return call


#: The checks of tangents of the forward, by their kernels' operations.
JVP_CHECKS = {"jvp": check_jvp, "output_jvp": check_output_jvp}
