"""The states of the tiles of a mask function, and its intervals, on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..functions.evaluation import Evaluation
from ..functions.tracing import Program
from ..problem.block_mask import EMPTY, FULL, MIXED, NO_INTERVALS, Intervals, MapLayout, may_have_intervals

__all__ = ["copied", "tile_states"]

#: The function is evaluated for about so many elements of a strip of tiles at a time.
_CHUNK = 2**20


def copied(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Copies of arrays."""
    return tuple(array.copy() for array in arrays)


def tile_states(
    layout: MapLayout, like: np.ndarray | None, keywords: Mapping[str, Any]
) -> tuple[np.ndarray, Intervals]:
    """`fa2cupy.block_mask` on NumPy arrays: the function is evaluated for strips of a row of tiles.

    Parameters
    ----------
    layout : MapLayout
        The map without its states.
    like : ndarray or None
        An array on the device of the result, if there are no others.
    keywords : mapping
        The map's function and its arrays.

    Returns
    -------
    states : ndarray of uint8, of the layout's shape
        0 for an empty tile, 1 for a mixed one, 2 for a full one.
    intervals : Intervals
        Calls on NumPy arrays do not need them: they evaluate the function.
    """
    program, tile, arrays = layout.program, layout.tile, keywords["mask_args"]
    assert program is not None, "a map without a function is given"
    states = np.zeros(layout.shape, "uint8")
    edges = [_Edges(*layout.shape[:2], n) for n in (layout.seqlen_q, layout.seqlen_k)]
    for index in np.ndindex(layout.shape[:3]):
        rows = slice(index[2] * tile[0], min((index[2] + 1) * tile[0], layout.seqlen_q))
        for columns in _chunks(layout.seqlen_k, tile):
            first = columns.start // tile[1]
            visible = _visible(program, arrays, index[0], index[1], rows, columns)
            found = _states_of(visible, tile[1])
            states[index][first : first + len(found)] = found
            edges[0].add(index[:2], rows, columns.start, visible)
            edges[1].add(index[:2], columns, rows.start, visible.T)
    if not may_have_intervals(layout):
        return states, NO_INTERVALS
    return states, Intervals(edges[0].intervals(layout.seqlen_k), edges[1].intervals(layout.seqlen_q))


def _chunks(seqlen_k: int, tile: tuple[int, int]) -> Iterator[slice]:
    """Whole tiles of keys at a time."""
    step = max(1, _CHUNK // (tile[0] * tile[1])) * tile[1]
    for start in range(0, seqlen_k, step):
        yield slice(start, min(start + step, seqlen_k))


def _visible(program: Program, arrays: Sequence[np.ndarray], b: int, h: int, rows: slice, columns: slice) -> np.ndarray:
    """The truth values of the function for some rows and keys."""
    queries, keys = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)
    with np.errstate(all="ignore"):
        visible = Evaluation(program, arrays, "float32", np, b=b, h=h, q=queries, k=keys).result()
    return np.broadcast_to(visible, (len(queries), len(keys)))


def _states_of(visible: np.ndarray, width: int) -> np.ndarray:
    """The states of the tiles of some keys along a row of tiles."""
    queries, keys = visible.shape
    starts = np.arange(0, keys, width)
    visible_elements = np.add.reduceat(visible.sum(axis=0), starts)
    elements = queries * np.diff(np.append(starts, keys))
    return np.where(visible_elements == elements, FULL, np.where(visible_elements > 0, MIXED, EMPTY))


class _Edges:
    """Where visibility begins and ends in the rows, or in the columns, of all heads: see kernels/common/map_edges.cuh.

    Positions along a row must come in ascending order.
    """

    def __init__(self, batch: int, heads: int, length: int):
        self._seen = np.zeros((batch, heads, length), bool)  # at the last position
        self._rises = np.zeros((batch, heads, length), "int32")
        self._ends = np.zeros((batch, heads, length, 4), "int32")
        self._is_many = False  # some row has more than two rises

    def add(self, place: tuple[int, ...], rows: slice, first: int, visible: np.ndarray) -> None:
        """Adds some positions of some rows of a head, from `first` on."""
        if self._is_many:
            return
        seen, rises, ends = (array[place][rows] for array in (self._seen, self._rises, self._ends))
        before = np.concatenate([seen[:, None], visible[:, :-1]], axis=1)
        for edge, edges in enumerate((visible & ~before, before & ~visible)):
            has = edges.any(axis=1)
            # A fall is never at 0, so that a first one of 0 is none; the first rise is known by the number of rises.
            is_first = has & ((ends[:, 1] == 0) if edge else (rises == 0))
            ends[is_first, edge] = first + edges[is_first].argmax(axis=1)
            ends[has, 2 + edge] = first + edges.shape[1] - 1 - edges[has, ::-1].argmax(axis=1)
        rises += (visible & ~before).sum(axis=1, dtype="int32")
        self._is_many = bool((rises > 2).any())
        seen[...] = visible[:, -1]

    def intervals(self, length: int) -> np.ndarray | None:
        """The intervals of rows of this length, or None if some row has more than two."""
        if self._is_many:
            return None
        self._ends[self._seen, 3] = length
        self._ends[self._seen & (self._ends[..., 1] == 0), 1] = length
        self._ends[self._rises < 2, 2:] = 0
        return self._ends
