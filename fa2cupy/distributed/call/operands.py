"""The arrays of a call with all their axes, whatever the caller's layout and number of axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...problem.array_types import Array
from ...problem.attention import canonical_view
from ...problem.options import CallOptions
from ..local.lanes import Lane
from ..local.sums import subtract
from .requests import OF_FEATURES, STATISTICS
from .run import Run
from .second_order import CALLS

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
    moved : mapping of ndarray
        The further arrays of a call of second order, by name, without those of features.
    """

    q: Array
    k: Array
    v: Array
    o: Array | None = None
    lse: Array | None = None
    do: Array | None = None
    delta: Array | None = None
    dlse: Array | None = None
    moved: Mapping[str, Array] = field(default_factory=dict, kw_only=True)

    @classmethod
    def of(cls, arrays: Mapping[str, Any], layout: str) -> Operands:
        """The operands of a call, from its arrays by name."""
        rank, of_features = arrays["q"].ndim, [name for names in CALLS.values() for name in names[3:]]
        given = {name: x for name, x in arrays.items() if x is not None and name not in of_features}
        views = {name: _view(name, x, layout, rank) for name, x in given.items()}
        own = {one.name: views.pop(one.name) for one in fields(cls) if one.name in views}
        return cls(**own, moved=views)

    def by_name(self) -> dict[str, Array]:
        """All arrays."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "moved"}
        return {name: x for name, x in own.items() if x is not None} | dict(self.moved)

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
            lane.kernels(run.backend.delta, o, do, result, CallOptions())
        if self.dlse is None:
            return result
        difference = run.empty(lse.shape, lse.dtype)
        lane(subtract, difference, result, self.dlse)
        return difference


def result_views(names: tuple[str, ...], arrays: tuple[Array, ...], layout: str, rank: int) -> list[Array]:
    """Views of the results; gradients of features stay as they are."""
    return [
        array if name in OF_FEATURES or "_args" in name else _view(name, array, layout, rank)
        for name, array in zip(names, arrays, strict=True)
    ]


def _view(name: str, array: Array, layout: str, rank: int) -> Array:
    if name in STATISTICS:
        return array[(None,) * (4 - rank)]
    return canonical_view(array, layout)
