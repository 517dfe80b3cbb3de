"""The states of the tiles of a mask function on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..functions.evaluation import Evaluation
from ..functions.tracing import Program
from ..problem.block_mask import EMPTY, FULL, MIXED, MapLayout

__all__ = ["copied", "tile_states"]

#: The function is evaluated for about so many elements of a strip of tiles at a time.
_CHUNK = 2**20


def copied(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Copies of arrays."""
    return tuple(array.copy() for array in arrays)


def tile_states(layout: MapLayout, like: np.ndarray | None, keywords: Mapping[str, Any]) -> np.ndarray:
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
    """
    program, tile, arrays = layout.program, layout.tile, keywords["mask_args"]
    assert program is not None, "a map without a function is given"
    states = np.zeros(layout.shape, "uint8")
    for index in np.ndindex(layout.shape[:3]):
        rows = slice(index[2] * tile[0], min((index[2] + 1) * tile[0], layout.seqlen_q))
        for columns in _chunks(layout.seqlen_k, tile):
            first = columns.start // tile[1]
            found = _states_of(program, arrays, index[0], index[1], rows, columns, tile[1])
            states[index][first : first + len(found)] = found
    return states


def _chunks(seqlen_k: int, tile: tuple[int, int]) -> Iterator[slice]:
    """Whole tiles of keys at a time."""
    step = max(1, _CHUNK // (tile[0] * tile[1])) * tile[1]
    for start in range(0, seqlen_k, step):
        yield slice(start, min(start + step, seqlen_k))


def _states_of(
    program: Program, arrays: Sequence[np.ndarray], b: int, h: int, rows: slice, columns: slice, width: int
) -> np.ndarray:
    """The states of the tiles of some keys along a row of tiles."""
    queries, keys = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)
    with np.errstate(all="ignore"):
        visible = Evaluation(program, arrays, "float32", np, b=b, h=h, q=queries, k=keys).result()
    by_key = np.broadcast_to(visible, (len(queries), len(keys))).sum(axis=0)
    starts = np.arange(0, len(keys), width)
    visible_elements = np.add.reduceat(by_key, starts)
    elements = len(queries) * np.diff(np.append(starts, len(keys)))
    return np.where(visible_elements == elements, FULL, np.where(visible_elements > 0, MIXED, EMPTY))
