"""Sparse maps: which tiles of the scores are hidden, visible in part, or visible as a whole."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedProblemError
from ..functions.evaluation import Evaluation
from ..functions.tracing import Program
from .array_types import Array
from .function_checks import program_of

__all__ = ["EMPTY", "FULL", "MIXED", "BlockMask", "TileLists", "block_mask", "check_block_mask", "check_map"]

#: States of a tile: all keys are hidden from its queries, some are, or none is.
EMPTY, MIXED, FULL = 0, 1, 2
_TILE = (128, 128)
#: Elements of a strip of tiles that the function is evaluated for at a time.
_CHUNK = 2**20
#: Characters of empty, mixed and full tiles.
_PATTERN = np.array([" ", "+", "#"])
#: The most rows and columns of a printed pattern.
_LARGEST_PATTERN = 32


class TileLists(NamedTuple):
    """For each tile along one side of the scores, the tiles along the other side that it meets.

    Attributes
    ----------
    offsets : ndarray of int32, shape (batch, heads, tiles + 1)
        The list of tile ``i`` has the elements from ``offsets[..., i]`` to ``offsets[..., i + 1]``; lists of all
        sequences and heads lie one behind the other.
    indices : ndarray of int32
        Numbers of tiles, growing within each list.
    """

    offsets: np.ndarray
    indices: np.ndarray


class BlockMask:
    """A sparse map of the scores, for ``block_mask=``. `block_mask` makes it from a function.

    Parameters
    ----------
    tiles : ndarray of bool, shape (batch, heads, query tiles, key tiles)
        True for the tiles that are computed, such as those of a top-k selection. The first two axes may have the length
        1, for all sequences and all heads, or be omitted.
    seqlen_q, seqlen_k : int
        Lengths of the sequences, of packed ones the longest lengths (`max_seqlen_q`, `max_seqlen_k`).
    tile : tuple of int, optional
        Queries and keys of a tile.

    Attributes
    ----------
    program : Program or None
        The function that the map was made from.
    seqlen_q, seqlen_k : int
    tile : tuple of int

    Examples
    --------
    >>> import numpy as np
    >>> print(BlockMask(np.eye(3, dtype=bool), 300, 300))
    BlockMask 300 x 300 in tiles of 128 x 128, density 0.33
    #
     #
      #
    """

    def __init__(self, tiles: np.ndarray, seqlen_q: int, seqlen_k: int, tile: tuple[int, int] = _TILE):
        self.seqlen_q, self.seqlen_k = _length("seqlen_q", seqlen_q), _length("seqlen_k", seqlen_k)
        self.tile = _checked_tile(tile)
        self.program: Program | None = None
        if not isinstance(tiles, np.ndarray):
            raise TypeError(f"tiles: expected a numpy.ndarray, got {type(tiles).__module__}.{type(tiles).__qualname__}")
        if tiles.dtype.kind != "b":
            raise TypeError(f"tiles: expected dtype bool, got {tiles.dtype}; write tiles != 0")
        wanted = tuple(-(-n // size) for n, size in zip((self.seqlen_q, self.seqlen_k), self.tile, strict=True))
        if not 2 <= tiles.ndim <= 4 or tiles.shape[-2:] != wanted:
            raise ValueError(
                f"tiles: expected shape (batch, heads, {wanted[0]}, {wanted[1]}) for {self.seqlen_q} queries and "
                f"{self.seqlen_k} keys in tiles of {self.tile}, got {tiles.shape}"
            )
        shape = (1,) * (4 - tiles.ndim) + tiles.shape
        self._states = np.where(tiles, np.uint8(FULL), np.uint8(EMPTY)).reshape(shape)

    @classmethod
    def _of_states(
        cls, states: np.ndarray, seqlen_q: int, seqlen_k: int, tile: tuple[int, int], program: Program
    ) -> BlockMask:
        made = cls(states != EMPTY, seqlen_q, seqlen_k, tile)
        made._states, made.program = states, program
        return made

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, query tiles, key tiles); batch and heads are 1 where all have the same tiles."""
        batch, heads, rows, columns = self._states.shape
        return batch, heads, rows, columns

    @property
    def density(self) -> float:
        """Fraction of the tiles that are computed."""
        return float(np.count_nonzero(self._states)) / max(1, self._states.size)

    @property
    def has_mixed_tiles(self) -> bool:
        """True if the function is needed to tell which keys are visible."""
        return bool((self._states == MIXED).any())

    def lists(self, side: str, full: bool) -> TileLists:
        """The full or the mixed tiles that each tile of one side meets.

        Parameters
        ----------
        side : {"queries", "keys"}
            The side that has one list for each of its tiles.
        full : bool
            True for tiles that are visible as a whole, False for mixed ones.
        """
        if side not in ("queries", "keys"):
            raise ValueError(f"side: expected 'queries' or 'keys', got {side!r}")
        states = self._states if side == "queries" else self._states.swapaxes(2, 3)
        found = states == (FULL if full else MIXED)
        counts = found.sum(axis=-1, dtype="int32")
        ends = np.cumsum(counts, dtype="int32").reshape(counts.shape)
        starts = np.concatenate([ends[..., :1] - counts[..., :1], ends], axis=-1)
        return TileLists(starts, np.nonzero(found)[-1].astype("int32"))

    def part(self, number: int, heads: slice) -> np.ndarray:
        """The states of the tiles of one sequence and some heads: 0 empty, 1 mixed, 2 full."""
        own = self._states[0 if len(self._states) == 1 else number]
        return np.broadcast_to(own, (heads.stop - heads.start, *own.shape[1:])) if len(own) == 1 else own[heads]

    def plot(self, number: int = 0, head: int = 0) -> Any:
        """Draws the tiles of one sequence and head with Matplotlib.

        Parameters
        ----------
        number, head : int, optional

        Returns
        -------
        axes : matplotlib.axes.Axes
            White tiles are empty, grey ones mixed, black ones full.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("BlockMask.plot needs Matplotlib: pip install matplotlib") from error
        axes = plt.gca()
        extent = (0, self.seqlen_k, self.seqlen_q, 0)
        axes.imshow(self.part(number, slice(head, head + 1))[0], cmap="Greys", vmin=EMPTY, vmax=FULL, extent=extent)
        axes.set(xlabel="key", ylabel="query", title=self._summary())
        return axes

    def _summary(self) -> str:
        rows, columns = self.tile
        return f"BlockMask {self.seqlen_q} x {self.seqlen_k} in tiles of {rows} x {columns}, density {self.density:.2f}"

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def __str__(self) -> str:
        """The summary, and the pattern of the first sequence and head: ``#`` full, ``+`` mixed or of several kinds."""
        if not self._states.size:
            return self._summary()
        states = self._states[0, 0]
        steps = [-(-n // _LARGEST_PATTERN) for n in states.shape]
        starts = [np.arange(0, n, step) for n, step in zip(states.shape, steps, strict=True)]
        low, high = (
            reduce.reduceat(reduce.reduceat(states, starts[0], axis=0), starts[1], axis=1)
            for reduce in (np.minimum, np.maximum)
        )
        lines = _PATTERN[np.where(low == high, low, MIXED)]
        return "\n".join((self._summary(), *("".join(line).rstrip() for line in lines)))


def block_mask(
    mask_mod: Any,
    mask_args: Sequence[Array],
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    tile: tuple[int, int] = _TILE,
) -> BlockMask:
    """The sparse map of a mask function, for ``block_mask=`` of `fa2cupy.forward` and `fa2cupy.backward`.

    Calls with the map skip tiles without a visible key, and do not evaluate the function where all keys are visible.

    Parameters
    ----------
    mask_mod : callable
        ``mask_mod(b, h, q, k, *mask_args)``, as for `fa2cupy.forward`.
    mask_args : sequence of ndarray
        Its arrays; an empty tuple if there are none.
    batch, num_heads, seqlen_q, seqlen_k : int
        Sizes of the scores. With packed sequences, their number and the longest lengths.
    tile : tuple of int, optional
        Queries and keys of a tile.

    Returns
    -------
    BlockMask
        It has one row of tiles for all sequences or all heads where the function does not depend on them.

    Raises
    ------
    TypeError, ValueError
        As for `fa2cupy.forward`; a size is negative.
    IndexError
        The function reads outside an array.
    UnsupportedProblemError
        `mask_args` are CuPy arrays.

    Notes
    -----
    The function is evaluated for strips of a row of tiles. Memory is that of the map, one byte for each tile, and of a
    strip.

    Examples
    --------
    >>> import fa2cupy
    >>> print(block_mask(fa2cupy.mods.sliding_window(200), (), 1, 8, 512, 512))
    BlockMask 512 x 512 in tiles of 128 x 128, density 0.56
    +
    ++
    +++
     +++
    """
    program = program_of("mask_mod", mask_mod, mask_args)
    if any(not isinstance(array, np.ndarray) for array in mask_args):
        raise UnsupportedProblemError("mask_args: maps are made on NumPy arrays only; write array.get()")
    seqlen_q, seqlen_k = _length("seqlen_q", seqlen_q), _length("seqlen_k", seqlen_k)
    batch, num_heads = _length("batch", batch), _length("num_heads", num_heads)
    tile = _checked_tile(tile)
    shape = (
        batch if program.depends_on("b") else 1,
        num_heads if program.depends_on("h") else 1,
        -(-seqlen_q // tile[0]),
        -(-seqlen_k // tile[1]),
    )
    states = np.zeros(shape, "uint8")
    for index in np.ndindex(shape[:3]):
        rows = slice(index[2] * tile[0], min((index[2] + 1) * tile[0], seqlen_q))
        for columns in _chunks(seqlen_k, tile):
            first = columns.start // tile[1]
            found = _states_of(program, mask_args, index[0], index[1], rows, columns, tile[1])
            states[index][first : first + len(found)] = found
    return BlockMask._of_states(states, seqlen_q, seqlen_k, tile, program)


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


def check_block_mask(keywords: Mapping[str, Any], problem: object) -> dict[str, Any]:
    """``block_mask=``."""
    given = keywords.get("block_mask")
    if given is None:
        return {}
    if not isinstance(given, BlockMask):
        hint = "; write fa2cupy.BlockMask(tiles, seqlen_q, seqlen_k)" if hasattr(given, "dtype") else ""
        raise TypeError(f"block_mask: expected a fa2cupy.BlockMask or None, got {type(given).__name__}{hint}")
    return {"block_mask": given.tile}


def check_map(given: BlockMask, score_shape: tuple[int, int, int, int], mask_mod: Program | None) -> None:
    """Checks a map against the scores and the mask function of a call."""
    batch, heads, seqlen_q, seqlen_k = score_shape
    if (given.seqlen_q, given.seqlen_k) != (seqlen_q, seqlen_k):
        got = f"one for {given.seqlen_q} and {given.seqlen_k}"
        raise ValueError(f"block_mask: expected a map for {seqlen_q} queries and {seqlen_k} keys, got {got}")
    for axis, own, full in (("batch", given.shape[0], batch), ("heads", given.shape[1], heads)):
        if own not in (1, full):
            raise ValueError(f"block_mask: expected a map for {axis} of {full}, or of 1 for all, got one for {own}")
    if given.program is not None and mask_mod is None:
        raise ValueError("block_mask: the map was made from a function; pass it as mask_mod, with its mask_args")
    if given.program is not None and given.program != mask_mod:
        raise ValueError("block_mask: the map was made from another function than mask_mod")


def _length(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name}: expected at least 0, got {value}")
    return int(value)


def _checked_tile(tile: object) -> tuple[int, int]:
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        raise TypeError(f"tile: expected a tuple (queries, keys), got {tile!r}")
    rows, columns = (_length("tile", size) for size in tile)
    if not (rows and columns):
        raise ValueError(f"tile: expected at least 1 query and 1 key, got {tile}")
    return rows, columns
