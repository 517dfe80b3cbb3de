"""The kernels of second order: each term of the formulas is dropped once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
from support.second_order_calls import CURVED, Call
from support.simulator import simulated_gpu

from fa2cupy.jit.spec import KernelSpec

from .mutant import replace_once

#: The calls that run mutants, by name.
CALLS = {
    "plain": {},
    "causal": {"lengths": (37, 21), "causal": True},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "curved": CURVED,
}


@dataclass(frozen=True)
class Mutant:
    """A kernel, a change of its source, the error that must catch it, a key of `CALLS`, and a check of `Call`."""

    name: str
    operation: str
    old: str
    new: str
    caught_by: str = "numbers"
    call: str = "plain"
    check: str = "check_jvp"

    def __call__(self, spec: KernelSpec, text: str) -> str:
        """Returns the source, patched if it is this kernel's."""
        return replace_once(spec, text, self.old, self.new) if spec.operation == self.operation else text


def run(call: str, check: str, patch: Mutant | None = None) -> None:
    """Makes a call and checks its results."""
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, patch=patch):
        getattr(Call(**CALLS[call]), check)()


@functools.lru_cache(maxsize=None)
def check_unbroken(call: str, check: str) -> None:
    run(call, check)


def dropped(operation: str, *terms: tuple[str, ...], **how: str) -> list[Mutant]:
    """Returns a mutant for each text to leave out, or to replace by a second one."""
    return [Mutant(f"{operation}: {old}", operation, old, *(new or ("",)), **how) for old, *new in terms]


#: Barriers by their comments.
BARRIERS = (("jvp", "Q, K and their tangents are there"), ("jvp", "V and its tangent are there"))

MUTANTS = (
    *dropped(
        "jvp",
        ("if (x.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
        ("if (y.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
        ("tangents(i, j) *= natural_scale<Spec>(params);",),
        ("lse_tangent[i] * rescale[i] + share", "lse_tangent[i] + share"),
        ("(lse_tangent[i]) * inverse_sum[i]", "(lse_tangent[i])"),
        ("moved.scale(rescale);",),
        ("moved.scale(inverse_sum);",),
        ("moved.subtract(lse_tangent, output);",),
        ("Tile::accumulate(sums, posted, y.rows, lane);",),
        ("Tile::accumulate(sums, posted, y.tangent(), lane);",),
    ),
    *dropped(
        "jvp",
        ("common::drop<Spec>(p, params, score_tile);",),
        ("common::drop<Spec>(tangents, params, score_tile);",),
        ("inverse_sum[i] *= common::kept_scale<Spec>(params);",),
        ("(lse_tangent[i]) * inverse_sum[i]", "(lse_tangent[i]) * inverse_sum[i] * common::kept_scale<Spec>(params)"),
        call="dropout",
    ),
    *dropped("jvp", ("slope * mod.derivative(capped);", "slope;"), ("*= slope * mod", "*= mod"), call="curved"),
    *(
        Mutant(f"{operation}: no {what}, {comment}", operation, old, new, "race")
        for operation, comment in BARRIERS
        for what, old, new in (
            (
                "wait",
                f"wait_for_copies();\n            __syncthreads();  // {comment}",
                f"__syncthreads();  // {comment}",
            ),
            ("barrier", f"__syncthreads();  // {comment}", f"// {comment}"),
        )
    ),
)
