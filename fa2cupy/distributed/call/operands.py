"""The arrays of a call with all their axes, whatever the caller's layout and number of axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...problem.array_types import Array
from ...problem.attention import SOURCE_AXES
from ...problem.options import CallOptions
from ..local.lanes import Lane
from ..local.sums import subtract
from .run import Run

__all__ = ["Operands", "result_views"]


@dataclass(frozen=True)
class Operands:
    """Views of this rank's arrays.

    Attributes
    ----------
    q, k, v : ndarray, shape (batch, row, head, column)
    o, do : ndarray or None
        The same; None in a forward.
    lse, delta, dlse : ndarray or None, shape (batch, head, row)
    """

    q: Array
    k: Array
    v: Array
    o: Array | None = None
    lse: Array | None = None
    do: Array | None = None
    delta: Array | None = None
    dlse: Array | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, Any], layout: str) -> Operands:
        """The operands of a call, from its arrays by name."""
        rank = arrays["q"].ndim
        return cls(**{name: None if x is None else _view(name, x, layout, rank) for name, x in arrays.items()})

    @property
    def of_backward(self) -> tuple[Array, Array, Array]:
        """The arrays o, lse and do, which a backward has."""
        assert self.o is not None and self.lse is not None and self.do is not None
        return self.o, self.lse, self.do

    def row_delta(self, run: Run, lane: Lane) -> Array:
        """Delta with dlse subtracted, queued on a lane."""
        o, lse, do = self.of_backward
        result = self.delta
        if result is None:
            result = run.empty(lse.shape, lse.dtype)
            lane(run.backend.delta, o, do, result, CallOptions())
        if self.dlse is None:
            return result
        difference = run.empty(lse.shape, lse.dtype)
        lane(subtract, difference, result, self.dlse)
        return difference


def result_views(names: tuple[str, ...], arrays: tuple[Array, ...], layout: str, rank: int) -> list[Array]:
    """Views of the results; gradients of features stay as they are."""
    return [
        _view(name, array, layout, rank) if name in ("o", "lse", "dq", "dk", "dv") else array
        for name, array in zip(names, arrays, strict=True)
    ]


def _view(name: str, array: Array, layout: str, rank: int) -> Array:
    if name in ("lse", "delta", "dlse"):
        return array[(None,) * (4 - rank)]
    batch, row, head, column = SOURCE_AXES[layout, rank]
    view = array.transpose([axis for axis in (batch, row, head, column) if axis is not None])
    if head is None:
        view = view[:, None, :]
    return view if batch is not None else view[None]
