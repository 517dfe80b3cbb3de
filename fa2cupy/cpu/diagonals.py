"""What depends on the distance of a query and a key alone, on a tile: it is computed once for each diagonal.

A tile has nearly as many diagonals as rows and columns together. They are counted from the last query and the first key
on, so that distances, q - k, fall by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from ..functions.derivatives import Scatter
from ..functions.distances import of_distance_alone
from ..functions.evaluation import Evaluation, GradientPart
from ..functions.expressions import Node
from ..functions.linear import DISTANCE
from ..functions.tracing import Program

__all__ = ["DiagonalPart", "TileEvaluation", "diagonal_sums", "distances", "spread"]


def distances(queries: slice, keys: slice) -> np.ndarray:
    """The distance of each diagonal of a tile, of the axes (diagonal, head of the group, key)."""
    return np.arange(queries.stop - 1 - keys.start, queries.start - keys.stop, -1)[:, None, None]


def spread(values: np.ndarray, num_keys: int) -> np.ndarray:
    """A view (..., query, head, key) of values (..., diagonal, head, 1)."""
    return sliding_window_view(values[..., 0], num_keys, axis=-2)[..., ::-1, :, :]


def diagonal_sums(tile: np.ndarray) -> np.ndarray:
    """The sums of a tile (K/V head, query, head, key) along its diagonals: (K/V head, diagonal, head, 1)."""
    num_shared, num_queries, size, num_keys = tile.shape
    # Each row is shifted by one more than the next, so that diagonals become columns.
    shifted = np.zeros((num_shared, num_queries, size, num_queries + num_keys - 1), tile.dtype)
    of_shared, of_query, of_head, of_key = shifted.strides
    strides = (of_shared, of_query - of_key, of_head, of_key)
    as_strided(shifted[..., num_queries - 1 :], tile.shape, strides)[...] = tile
    return shifted.sum(axis=1).swapaxes(1, 2)[..., None]


class DiagonalPart(GradientPart):
    """Derivatives by elements that the distance decides: indices are for the sums of diagonals (`diagonal_sums`)."""


class TileEvaluation(Evaluation):
    """A program on a tile (K/V head, query, head, key) of consecutive queries and keys.

    Parameters
    ----------
    program, arguments, dtype, **inputs
        As for `Evaluation`, without q and k.
    queries, keys : slice
    """

    def __init__(
        self, program: Program, arguments: Sequence[Any], dtype: Any, queries: slice, keys: slice, **inputs: Any
    ):
        positions = {"q": np.arange(queries.start, queries.stop)[:, None, None], "k": np.arange(keys.start, keys.stop)}
        super().__init__(program, arguments, dtype, np, **positions, **inputs)
        self._num_keys = keys.stop - keys.start
        # The same with an element for each diagonal: its distance in place of q, and 0 in place of k.
        self._diagonals = Evaluation(program, arguments, dtype, np, q=distances(queries, keys), k=0, **inputs)

    def _operands(self, node: Node) -> tuple[Node, ...]:
        return () if _is_of_distance(node) else node.operands

    def _result_of(self, node: Node) -> Any:
        if not _is_of_distance(node):
            return super()._result_of(node)
        return spread(self._diagonals.value(node), self._num_keys)

    def _parts_of(self, scatter: Scatter) -> Iterator[GradientPart]:
        if scatter.axes or not any(map(_is_of_distance, scatter.indices)) or not of_distance_alone(scatter.indices):
            yield from super()._parts_of(scatter)
        else:
            indices = tuple(map(self._diagonals.value, scatter.indices))
            yield DiagonalPart(scatter.argument, indices, self.value(scatter.derivative))


def _is_of_distance(node: Node) -> bool:
    return DISTANCE in node.depends and of_distance_alone([node]) and not node.varies
