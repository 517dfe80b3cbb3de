"""The lse that a forward computes again for the other kernels of a call, in their own arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..problem.attention import AttentionProblem
from .stages import Stage

__all__ = ["OWN_LSE", "with_given_lse", "with_own_lse"]

#: The workspace of that lse.
OWN_LSE = "own_lse"


def with_given_lse(problem: AttentionProblem) -> AttentionProblem:
    """The problem of a backward whose first kernel recomputes lse for all."""
    return problem.with_settings(replace(problem.settings, given_lse=True))


def with_own_lse(tiled: Iterable[Stage]) -> list[Stage]:
    """The tiled kernels of a backward. The first recomputes lse for itself and the others."""
    of_first: dict[str, str | None] = {"given_lse": "lse", "lse": OWN_LSE, "o": None}
    of_others: dict[str, str | None] = {"lse": OWN_LSE}
    return [replace(stage, renamed=of_first if "given_lse" in stage.spec.features else of_others) for stage in tiled]
