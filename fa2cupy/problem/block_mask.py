"""Sparse maps: which tiles of the scores are hidden, visible in part, or visible as a whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..functions.tracing import Program
from .arguments import array_backend, check_int
from .array_types import AnyArray, Array
from .conversions import explains_absence

__all__ = [
    "COLUMN_INTERVALS",
    "DEFAULT_TILE",
    "EMPTY",
    "FULL",
    "INTERVAL_STRIDES",
    "KEY_LISTS",
    "LIST_STRIDES",
    "MIXED",
    "MOST_INTERVALS",
    "NO_INTERVALS",
    "QUERY_LISTS",
    "ROW_INTERVALS",
    "BlockMask",
    "Intervals",
    "MapLayout",
    "TileLists",
    "check_block_mask",
    "check_length",
    "check_map",
    "check_tile",
    "function_of_map",
    "is_captured",
    "may_have_intervals",
]

#: States of a tile: all keys are hidden from its queries, some are, or none is.
EMPTY, MIXED, FULL = 0, 1, 2
#: Arrays that kernels read in place of a map: the key tiles of each query tile, and the query tiles of each key tile.
#: The numbers of their layout (kernels/common/tile_lists.cuh).
KEY_LISTS, QUERY_LISTS = "key_lists", "query_lists"
LIST_STRIDES = ("list_batch_stride", "list_head_stride", "list_stride")
#: The arrays that kernels read in place of the function, and the numbers of their layout, in rows of four numbers.
ROW_INTERVALS, COLUMN_INTERVALS = "row_intervals", "column_intervals"
#: The array of the most intervals of a row and of a column.
MOST_INTERVALS = "most_intervals"
INTERVAL_STRIDES = ("interval_batch_stride", "interval_head_stride", "interval_rows")
#: The most bytes of a map's intervals.
_LARGEST_INTERVALS = 2**28
#: Queries and keys of a map's tiles, unless the caller says otherwise.
DEFAULT_TILE = (128, 128)
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


class Intervals(NamedTuple):
    """Where a function shows at most two intervals of keys to each query, and each key to at most two of queries.

    Attributes
    ----------
    rows : ndarray of int32, shape (batch, heads, seqlen_q, 4), or None
        Begin and end of the first interval of keys of a query, then of the second. Ends are exclusive, and intervals
        that a query does not have are 0, 0. None if some query has more.
    columns : ndarray of int32, shape (batch, heads, seqlen_k, 4), or None
        The same of the queries of a key.
    """

    rows: Array | None = None
    columns: Array | None = None


#: Of a map whose function decides in all mixed tiles.
NO_INTERVALS = Intervals()


class MapLayout(NamedTuple):
    """A map without the states of its tiles: plans and kernels depend on all of it.

    Attributes
    ----------
    shape : tuple of int
        (batch, heads, query tiles, key tiles); batch and heads are 1 where all have the same tiles.
    seqlen_q, seqlen_k : int
    tile : tuple of int
        Queries and keys of a tile.
    program : Program or None
        The function that the map was made from.
    intervals : tuple of bool
        Whether it has intervals of rows, and of columns.
    """

    shape: tuple[int, int, int, int]
    seqlen_q: int
    seqlen_k: int
    tile: tuple[int, int]
    program: Program | None
    intervals: tuple[bool, bool] = (False, False)

    def takes(self, b_r: int, b_c: int) -> bool:
        """True if a kernel can have tiles of `b_r` queries and `b_c` keys.

        Where such a tile overlaps several of the map's, the function decides which keys are visible. Without one, no
        tile may overlap several.
        """
        return self.program is not None or self.divides(b_r, b_c)

    def divides(self, b_r: int, b_c: int) -> bool:
        """True if each of a kernel's tiles lies in one of the map's."""
        return self.tile[0] % b_r == 0 and self.tile[1] % b_c == 0


class BlockMask:
    """A sparse map of the scores, for ``block_mask=``. `block_mask` makes it from a function.

    Parameters
    ----------
    tiles : ndarray of bool, shape (batch, heads, query tiles, key tiles)
        True for the tiles that are computed, such as those of a top-k selection. The first two axes may have the length
        1, for all sequences and all heads, or be omitted. It is an array of the calls' library: of NumPy, or of CuPy on
        the device of q.
    seqlen_q, seqlen_k : int
        Lengths of the sequences; for packed ones, the longest lengths (`max_seqlen_q`, `max_seqlen_k`).
    tile : tuple of int, optional
        Queries and keys of a tile.

    Attributes
    ----------
    states : ndarray of uint8
        For each tile 0 (empty), 1 (mixed) or 2 (full). Do not write into it: calls keep what follows from it.
    layout : MapLayout
    intervals : Intervals
        What kernels compare in mixed tiles in place of the function, where that is possible.
    arguments : tuple of ndarray
        The map's own copies of the arrays of its function.
    kept : dict or None
        What calls on the GPU make of the states and keep with the map: see ``gpu/kept_lists.py``. None if each launch
        of a CUDA graph writes the states anew.

    Examples
    --------
    >>> import numpy as np
    >>> print(BlockMask(np.eye(3, dtype=bool), 300, 300))
    BlockMask 300 x 300 in tiles of 128 x 128, density 0.33
    #
     #
      #
    """

    arguments: tuple[Array, ...] = ()
    _copied: tuple[Array, ...] = ()
    kept: dict[int, Any] | None = None

    def __init__(self, tiles: AnyArray, seqlen_q: int, seqlen_k: int, tile: tuple[int, int] = DEFAULT_TILE):
        array_backend({"tiles": tiles})
        seqlen_q, seqlen_k = check_length("seqlen_q", seqlen_q), check_length("seqlen_k", seqlen_k)
        tile = check_tile(tile)
        if tiles.dtype.kind != "b":
            raise TypeError(f"tiles: expected dtype bool, got {tiles.dtype}; write tiles != 0")
        wanted = tuple(-(-n // size) for n, size in zip((seqlen_q, seqlen_k), tile, strict=True))
        if not 2 <= tiles.ndim <= 4 or tiles.shape[-2:] != wanted:
            raise ValueError(
                f"tiles: expected shape (batch, heads, {wanted[0]}, {wanted[1]}) for {seqlen_q} queries and "
                f"{seqlen_k} keys in tiles of {tile}, got {tiles.shape}"
            )
        shape = (1,) * (4 - tiles.ndim) + tiles.shape
        self._set(tiles.astype("uint8", order="C").reshape(shape) * np.uint8(FULL), seqlen_q, seqlen_k, tile, None)

    def _set(
        self,
        states: Array,
        seqlen_q: int,
        seqlen_k: int,
        tile: tuple[int, int],
        program: Program | None,
        intervals: Intervals = NO_INTERVALS,
    ) -> None:
        self.states, self.intervals = states, intervals
        of_rows, of_columns = (side is not None for side in intervals)
        self.layout = MapLayout(states.shape, seqlen_q, seqlen_k, tile, program, (of_rows, of_columns))
        self.kept = None if is_captured(states) else {}

    @classmethod
    def of_states(
        cls,
        states: Array,
        seqlen_q: int,
        seqlen_k: int,
        tile: tuple[int, int],
        program: Program | None,
        arguments: Sequence[Array] = (),
        copied: Sequence[Array] = (),
        intervals: Intervals = NO_INTERVALS,
    ) -> BlockMask:
        """A map from the states of its tiles, an array of uint8 of its shape in C order, and its function, if any.

        `arguments` are the arrays of the function, and `copied` those of the caller that they are copies of. The map
        keeps these too, so that no other array can have their addresses. `intervals` are those of the function.
        """
        made = cls.__new__(cls)
        made._set(states, seqlen_q, seqlen_k, tile, program, intervals)
        made.arguments, made._copied = tuple(arguments), tuple(copied or arguments)
        return made

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, query tiles, key tiles); batch and heads are 1 where all have the same tiles."""
        return self.layout.shape

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        return self.layout.tile

    @property
    def program(self) -> Program | None:
        """The function that the map was made from."""
        return self.layout.program

    @property
    def density(self) -> float:
        """Fraction of the tiles that are computed. Waits for the GPU."""
        return float((self.states != EMPTY).sum()) / max(1, self.states.size)

    @property
    def has_mixed_tiles(self) -> bool:
        """True if the function must decide which keys are visible. Waits for the GPU."""
        return bool((self.states == MIXED).any())

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
        states = self._on_host()
        found = (states if side == "queries" else states.swapaxes(2, 3)) == (FULL if full else MIXED)
        counts = found.sum(axis=-1, dtype="int32")
        ends = np.cumsum(counts, dtype="int32").reshape(counts.shape)
        starts = np.concatenate([ends[..., :1] - counts[..., :1], ends], axis=-1)
        return TileLists(starts, np.nonzero(found)[-1].astype("int32"))

    def part(self, number: int, heads: slice) -> Array:
        """The states of the tiles of one sequence and some heads: 0 empty, 1 mixed, 2 full."""
        own = self.states[0 if len(self.states) == 1 else number]
        return own[[0] * (heads.stop - heads.start)] if len(own) == 1 else own[heads]

    def function_for(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """`mask_mod` and `mask_args` of a call with the map: its own arrays, and its function unless one is given.

        Parameters
        ----------
        keywords : mapping
            Those of the call.

        Raises
        ------
        ValueError
            `mask_args` has other arrays than those that the map was made from.
        """
        given = keywords.get("mask_args", ())
        if self.program is None or not isinstance(given, tuple | list) or len(given) not in (0, len(self.arguments)):
            return {}  # further checks name what does not fit
        for number, array in enumerate(given):
            if not (array is self.arguments[number] or _same_memory(array, self._copied[number])):
                name = f"mask_args[{number}]"
                array_backend({"block_mask": self.states, name: array})
                raise ValueError(
                    f"{name}: block_mask was made from another array, of which it has a copy; pass that one, or no "
                    "mask_args, or make a map of this one by fa2cupy.block_mask"
                )
        function = keywords.get("mask_mod")
        return {"mask_mod": self.program if function is None else function, "mask_args": self.arguments}

    def _on_host(self) -> np.ndarray:
        return self.states if isinstance(self.states, np.ndarray) else self.states.get()

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
        extent = (0, self.layout.seqlen_k, self.layout.seqlen_q, 0)
        batch, heads, *_ = self.shape
        states = self._on_host()[number if batch > 1 else 0, head if heads > 1 else 0]
        axes.imshow(states, cmap="Greys", vmin=EMPTY, vmax=FULL, extent=extent)
        axes.set(xlabel="key", ylabel="query", title=self._summary())
        return axes

    def _summary(self) -> str:
        _, seqlen_q, seqlen_k, (rows, columns), _, intervals = self.layout
        sides = [side for side, has in zip(("rows", "columns"), intervals, strict=True) if has]
        of_sides = f", intervals of {' and '.join(sides)}" if sides else ""
        return f"BlockMask {seqlen_q} x {seqlen_k} in tiles of {rows} x {columns}, density {self.density:.2f}{of_sides}"

    def __repr__(self) -> str:
        return f"<{self._summary()}>"

    def __str__(self) -> str:
        """The summary, and the pattern of the first sequence and head: ``#`` full, ``+`` mixed or of several kinds."""
        if not self.states.size:
            return self._summary()
        states = self._on_host()[0, 0]
        steps = [-(-n // _LARGEST_PATTERN) for n in states.shape]
        starts = [np.arange(0, n, step) for n, step in zip(states.shape, steps, strict=True)]
        low, high = (
            reduce.reduceat(reduce.reduceat(states, starts[0], axis=0), starts[1], axis=1)
            for reduce in (np.minimum, np.maximum)
        )
        lines = _PATTERN[np.where(low == high, low, MIXED)]
        return "\n".join((self._summary(), *("".join(line).rstrip() for line in lines)))


explains_absence(BlockMask.__init__)


def function_of_map(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """What the keywords of a call become by its map: see `BlockMask.function_for`."""
    given = keywords["block_mask"]
    return given.function_for(keywords) if isinstance(given, BlockMask) else {}


def may_have_intervals(layout: MapLayout) -> bool:
    """True if a map has tiles, its function is not as fast as intervals, and these have no more than 256 MiB.

    On an H200, a window or a prefix took 0.93 to 1.0 of the time of its intervals.
    """
    if layout.program is None or layout.program.is_cheap:
        return False
    batch, heads, *_ = layout.shape
    nbytes = 16 * batch * heads * (layout.seqlen_q + layout.seqlen_k)
    return 0 not in layout.shape and nbytes <= _LARGEST_INTERVALS


def is_captured(array: Any) -> bool:
    """True if a CUDA graph captures the current work on the array's device."""
    if isinstance(array, np.ndarray):
        return False
    with array.device:
        stream = sys.modules["cupy"].cuda.get_current_stream()
    return stream.ptr not in (0, 1) and stream.is_capturing()  # graphs cannot capture these


def _same_memory(array: Any, other: Array) -> bool:
    """True if both are one array, or views of the same elements."""
    return array is other or (type(array) is type(other) and _memory(array) == _memory(other))


def _memory(array: Any) -> tuple[object, ...]:
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return address, array.shape, array.strides, array.dtype


def check_block_mask(keywords: Mapping[str, Any], problem: object) -> dict[str, Any]:
    """``block_mask=``: a map, or the layout of one."""
    given = keywords.get("block_mask")
    if given is None:
        return {}
    if isinstance(given, MapLayout):
        return {"block_mask": given}
    if not isinstance(given, BlockMask):
        hint = "; write fa2cupy.BlockMask(tiles, seqlen_q, seqlen_k)" if hasattr(given, "dtype") else ""
        if callable(given):
            hint = "; pass the function as mask_mod, and the map that fa2cupy.block_mask makes of it as block_mask"
        raise TypeError(f"block_mask: expected a fa2cupy.BlockMask or None, got {type(given).__name__}{hint}")
    return {"block_mask": given.layout}


def check_map(given: MapLayout, score_shape: tuple[int, int, int, int], mask_mod: Program | None) -> None:
    """Checks a map against the scores and the mask function of a call."""
    batch, heads, seqlen_q, seqlen_k = score_shape
    if (given.seqlen_q, given.seqlen_k) != (seqlen_q, seqlen_k):
        got = f"one for {given.seqlen_q} and {given.seqlen_k}"
        raise ValueError(f"block_mask: expected a map for {seqlen_q} queries and {seqlen_k} keys, got {got}")
    for axis, own, full in (("batch", given.shape[0], batch), ("heads", given.shape[1], heads)):
        if own not in (1, full):
            raise ValueError(f"block_mask: expected a map for {axis} of {full}, or of 1 for all, got one for {own}")
    if given.program is not None and given.program != mask_mod:
        raise ValueError("block_mask: the map was made from another function than mask_mod")


def check_length(name: str, value: object) -> int:
    """A length or a number of tiles or heads. Raises TypeError or ValueError unless it is an int of at least 0."""
    length = check_int(name, value)
    if length < 0:
        raise ValueError(f"{name}: expected at least 0, got {length}")
    return length


def check_tile(tile: object) -> tuple[int, int]:
    """``tile=``: queries and keys. Raises TypeError or ValueError unless both are ints of at least 1."""
    if not isinstance(tile, tuple | list) or len(tile) != 2:
        hint = f"; write tile=({tile}, {tile})" if isinstance(tile, int) else ""
        raise TypeError(f"tile: expected a tuple (queries, keys), got {tile!r}{hint}")
    rows, columns = (check_length("tile", size) for size in tile)
    if not (rows and columns):
        raise ValueError(f"tile: expected at least 1 query and 1 key, got {tile}")
    return rows, columns
