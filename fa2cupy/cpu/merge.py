"""Merging partial results on NumPy arrays."""

from __future__ import annotations

import numpy as np

from ..problem.attention import AttentionProblem
from ..problem.checks import check_merge
from ..problem.options import CallOptions
from .results import results_for

__all__ = ["merge"]


def merge(
    o_parts: np.ndarray, lse_parts: np.ndarray, out: tuple[np.ndarray | None, ...] | None, options: CallOptions
) -> tuple[np.ndarray, ...]:
    """`fa2cupy.merge` on NumPy arrays."""
    inputs = {"o_parts": o_parts, "lse_parts": lse_parts}
    request = check_merge(inputs, options)
    o, lse = results_for(request.results, out, inputs)
    with np.errstate(all="ignore"):
        largest = lse_parts.max(axis=0, initial=-np.inf)
        # Without a visible key, 0 is subtracted instead: exp(-inf - -inf) would be NaN.
        shift = np.where(largest == -np.inf, 0, largest)
        weights = np.exp(lse_parts - shift)
        # The builtin adds up in the order of the parts; NumPy's order depends on the other axes.
        total = sum(weights, start=np.zeros_like(lse))
        lse[...] = np.where(total == 0, -np.inf, shift + np.log(total))
        weights /= np.where(total == 0, 1, total)
        merged = np.zeros(o.shape, lse.dtype)
        for part, weight in zip(o_parts, weights, strict=True):
            of_row = _like_rows(request.problem, weight)
            # A part without a visible key counts for nothing, even if it has NaN.
            merged += np.where(of_row == 0, 0, of_row * part.astype(lse.dtype))
        o[...] = merged
    return o, lse


def _like_rows(problem: AttentionProblem, statistic: np.ndarray) -> np.ndarray:
    """A view of a statistic of each row that is broadcast over the columns of o."""
    whole = statistic[..., None]
    return whole.swapaxes(-2, -3) if problem.layout == "bshd" and problem.rank > 2 else whole
