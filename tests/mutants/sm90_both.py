"""Both passes of `two_pass` in one launch on Hopper: what they do beside the kernels of each pass, dropped once."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support.fake_cupy import place
from support.fake_gpu import backward
from support.simulated_problems import draw
from support.simulator import simulated_gpu

from fa2cupy import reference
from fa2cupy.families import choice
from fa2cupy.testing import Expectation

from .mutant import Mutant

OPERATION = "backward_both"
#: Calls by name: length, head_dim, options.
CALLS = {
    "plain": (300, 64, {}),
    "causal": (300, 40, {"causal": True}),
    "dlse": (140, 16, {"causal": True, "given": "dlse"}),
    "delta": (140, 64, {"given": "delta"}),
    "heads": (70, 24, {"heads": 3, "batch": 2, "dtype": "bfloat16", "causal": True}),
    "one row": (1, 8, {"causal": True}),
    "one tile": (128, 64, {"layout": "bhsd"}),
}


def results_of(
    call: str, patch: Mutant | None = None, *, out=None, seed: int | None = None, in_one: bool = True, **simulation
) -> list[np.ndarray]:
    """Makes a call alone, from the reference's o and lse, checks its gradients against float64 and returns them."""
    length, head_dim, options = CALLS[call]
    how = {"heads": 1, "batch": 1, "dtype": "float16", "given": None, **options}
    heads, batch, dtype, given = (how.pop(name) for name in ("heads", "batch", "dtype", "given"))
    q, k, v, do = draw(dtype, (length, length), head_dim, (heads, heads), batch=batch)
    if how.get("layout") == "bhsd":
        q, k, v, do = (place(x.transpose(0, 2, 1, 3)) for x in (q, k, v, do))
    o, lse = reference.forward(q, k, v, **how)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
    dlse = place(np.random.default_rng(1).standard_normal(lse.shape, np.float32))
    more = {
        "dlse": {"dlse": dlse},
        "delta": {"delta": place((reference.delta(o, do, layout=how.get("layout", "bshd")) - dlse).astype("float32"))},
    }.get(given, {})
    if out is not None:
        out = tuple(out(np.full_like(x, np.nan)) for x in (q, k, v))
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        simulated_gpu(monkeypatch, seed=seed, patch=patch, **simulation) as launched,
    ):
        if not in_one:
            monkeypatch.setattr(choice, "IN_ONE_LAUNCH", {})
        gradients = backward(q, k, v, o, lse, do, out=out, method="two_pass", **how, **more)
        assert ([stage.spec.operation for stage in launched] == [OPERATION]) == in_one
    expected = Expectation(q, k, v, do, **(how if given is None else {**how, "dlse": dlse}))
    expected.check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    return [np.array(x) for x in gradients]


@functools.lru_cache(maxsize=None)
def check_unbroken(call: str) -> None:
    results_of(call)


#: With the call that runs each.
MUTANTS = (
    (
        "causal",
        Mutant("both: delta is read before it is there", OPERATION, "OwnDelta<Spec>::wait();", ";", "race"),
    ),
    (
        "causal",
        Mutant(
            "both: delta of the first query tile is missing",
            OPERATION,
            "put_from(own_.tiles.begin * kBr,",
            "put_from((own_.tiles.begin + 1) * kBr,",
            "uninitialised",
        ),
    ),
    (
        "plain",
        Mutant("both: delta of a quarter", OPERATION, "sum += common::row_sum<4>(has(i)", "sum += (has(i)", "numbers"),
    ),
    (
        "plain",
        Mutant(
            "both: delta of other rows", OPERATION, "row + i * kConsumers / 4;", "row + i * kConsumers / 8;", "race"
        ),
    ),
    (
        "delta",
        Mutant(
            "both: the caller's delta is not read",
            OPERATION,
            "if (params_.delta != nullptr && is_needed) sum",
            "if (false) sum",
            "numbers",
        ),
    ),
    (
        "dlse",
        Mutant(
            "both: dlse is not subtracted", OPERATION, "sum - common::dlse_of<Spec>(params_, index)", "sum", "numbers"
        ),
    ),
    (
        "heads",
        Mutant("both: query tiles of key tiles", OPERATION, "block - tiles);", "(block - tiles) / 2);", "blocks"),
    ),
)
