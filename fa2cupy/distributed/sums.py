"""The arithmetic between attention calls: sums of shares, in the dtype of lse and in a fixed order, and merges."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from ..problem.array_types import Array

__all__ = ["add", "clear", "merge_into", "start", "store", "subtract", "sum_into"]


def clear(target: Array) -> None:
    """Writes zeros."""
    target[...] = 0


def store(target: Array, total: Array) -> None:
    """Rounds a sum to the dtype of the target."""
    target[...] = total


def start(total: Array, share: Array) -> None:
    """Begins a sum with a share."""
    total[...] = share


def add(total: Array, share: Array) -> None:
    """Adds a share to a sum."""
    total += share.astype(total.dtype, copy=False)


def subtract(target: Array, first: Array, second: Array) -> None:
    """Writes a difference."""
    target[...] = first - second


def sum_into(target: Array, shares: Sequence[Array], wide: str) -> None:
    """Writes the sum of shares, which is added up in the dtype `wide` and rounded once."""
    total = shares[0].astype(wide)
    for share in shares[1:]:
        add(total, share)
    store(target, total)


def merge_into(xp: ModuleType, total: Array, total_lse: Array, o: Array, lse: Array) -> None:
    """Merges the results for further keys into those so far.

    Parameters
    ----------
    xp : module
    total, o : ndarray, shape (batch, row, head, column)
        `total` is in the dtype of lse.
    total_lse, lse : ndarray, shape (batch, head, row)
    """
    top = xp.maximum(total_lse, lse)
    # Without a visible key, 0 is subtracted instead: exp(-inf - -inf) would be NaN.
    shift = xp.where(top == -xp.inf, 0, top).astype(top.dtype, copy=False)
    old, new = xp.exp(total_lse - shift), xp.exp(lse - shift)
    both = old + new
    inverse = 1 / xp.where(both == 0, 1, both).astype(top.dtype, copy=False)
    for_rows = [(weight * inverse).swapaxes(1, 2)[..., None] for weight in (old, new)]
    total *= for_rows[0]
    total += o.astype(total.dtype, copy=False) * for_rows[1]
    total_lse[...] = xp.where(both == 0, -xp.inf, shift + xp.log(xp.where(both == 0, 1, both)))
