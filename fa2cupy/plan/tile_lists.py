"""What kernels read of a sparse map: the lists of the tiles that they visit, and the intervals of mixed ones."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UnsupportedProblemError
from ..families.tile import TileConfig
from ..problem.attention import AttentionProblem
from ..problem.block_mask import INTERVAL_STRIDES, KEY_LISTS, LIST_STRIDES, QUERY_LISTS, MapLayout
from ..problem.dtypes import ITEMSIZE
from .stages import Plan, Stage, Workspace

__all__ = [
    "LIST_OPERATIONS",
    "LIST_WARPS",
    "ListLayout",
    "interval_strides",
    "list_layout",
    "list_values",
    "list_workspaces",
    "of_side",
    "stages_of_map",
]

#: By the side that a kernel's blocks own: the operations that write its lists and order them, and their workspace.
LIST_OPERATIONS = {
    "queries": ("list_keys", "order_keys", KEY_LISTS),
    "keys": ("list_queries", "order_queries", QUERY_LISTS),
}
#: Warps of a block that writes or orders lists, one each.
LIST_WARPS = 4
#: Numbers of a list besides its tiles: how many are in its first part, and in all, a scheduled tile, and the tile after
#: the last.
_BESIDES_TILES = 4
#: An entry has 24 bits for the tile and 7 for the head of the group.
_MAX_GROUP, _MAX_TILES = 2**7, 2**24


class ListLayout(NamedTuple):
    """The lists of one kernel (``kernels/common/tile_lists.cuh``).

    Attributes
    ----------
    batches, heads : int
        1 where all sequences, or all heads, have the same lists. Lists of query tiles are those of K/V heads.
    tiles : int
        Lists of a head: one for each tile that blocks own.
    entries : int
        The most tiles of a list.
    """

    batches: int
    heads: int
    tiles: int
    entries: int

    @property
    def num_lists(self) -> int:
        """All lists."""
        return self.batches * self.heads * self.tiles

    @property
    def stride(self) -> int:
        """Numbers from one list to the next."""
        return _BESIDES_TILES + self.entries

    @property
    def nbytes(self) -> int:
        """Bytes of all lists."""
        return self.num_lists * self.stride * ITEMSIZE["float32"]

    @property
    def strides(self) -> dict[str, int]:
        """The members of a record."""
        batch = self.heads * self.tiles if self.batches > 1 else 0
        return dict(zip(LIST_STRIDES, (batch, self.tiles if self.heads > 1 else 0, self.stride), strict=True))


def list_layout(problem: AttentionProblem, side: str, tile: TileConfig) -> ListLayout:
    """The lists of a kernel whose blocks own tiles of a side, ``"queries"`` or ``"keys"``.

    Raises
    ------
    UnsupportedProblemError
        The entries of a list cannot number so many tiles or heads.
    """
    layout = _map_of(problem)
    batch, _, seqlen_q, seqlen_k = problem.score_shape
    rows, columns = -(-seqlen_q // tile.b_r), -(-seqlen_k // tile.b_c)
    if problem.heads_per_group > _MAX_GROUP or max(rows, columns) >= _MAX_TILES:
        raise UnsupportedProblemError(
            f"block_mask: kernels take up to {_MAX_GROUP} query heads for a K/V head and {_MAX_TILES - 1} tiles in a "
            f"row, got {problem.heads_per_group} and {max(rows, columns)}"
        )
    # The band and the ends of sequences are in the lists, and packed sequences differ in them.
    batches = batch if problem.is_packed else layout.shape[0]
    if side == "queries":
        return ListLayout(batches, layout.shape[1], rows, columns)
    heads = 1 if layout.shape[1] == 1 else problem.num_heads_kv
    return ListLayout(batches, heads, columns, problem.heads_per_group * rows)


def list_values(problem: AttentionProblem, lists: ListLayout) -> dict[str, int]:
    """The members of the record of the kernel that writes lists."""
    layout = _map_of(problem)
    batches, heads, rows, columns = layout.shape
    left, right = problem.band
    return {
        **lists.strides,
        "num_lists": lists.num_lists,
        "list_heads": lists.heads,
        "list_tiles": lists.tiles,
        "map_batches": batches,
        "map_heads": heads,
        "map_rows": rows,
        "map_columns": columns,
        "map_b_r": layout.tile[0],
        "map_b_c": layout.tile[1],
        "band_left": problem.seqlen_k if left is None else min(left, problem.seqlen_k),
        "band_right": problem.seqlen_q if right is None else min(right, problem.seqlen_q),
        # Without a function of its own, a map does not know which keys of its tiles `mask_mod` hides.
        "has_other_function": layout.program is None and problem.settings.mask_mod is not None,
    }


def list_workspaces(lists: dict[str, ListLayout]) -> list[Workspace]:
    """The workspaces of both sides: records have pointers to both, and a kernel reads one."""
    return [Workspace(name, lists[side].nbytes if side in lists else 0) for side, (*_, name) in LIST_OPERATIONS.items()]


def stages_of_map(plan: Plan) -> tuple[list[Stage], set[str]]:
    """The stages of a plan that write and order lists which follow from the map alone, and their workspaces.

    Lists of packed sequences, the only feature of these stages, follow from their ends, too.
    """
    operations = {operation: name for *both, name in LIST_OPERATIONS.values() for operation in both}
    stages = [one for one in plan.stages if one.spec.operation in operations and not one.spec.features]
    names = [(operations[stage.spec.operation], stage.renamed) for stage in stages]
    return stages, {renamed.get(name) or name for name, renamed in names}


def of_side(features: tuple[str, ...], problem: AttentionProblem, side: str) -> tuple[str, ...]:
    """The features of a kernel with a side of a map: without the mask function if there are intervals, or with it.

    The side is that of the rows of the kernel's scores: ``"queries"``, or ``"keys"`` where they are transposed.
    """
    of_rows, of_columns = _map_of(problem).intervals
    other = "mask_mod" if (of_rows if side == "queries" else of_columns) else "intervals"
    return tuple(name for name in features if name != other)


def interval_strides(problem: AttentionProblem, side: str) -> dict[str, int]:
    """The members of the record of a kernel that reads the intervals of a side."""
    layout = _map_of(problem)
    rows = layout.seqlen_q if side == "queries" else layout.seqlen_k
    batch, head = layout.shape[1] * rows if layout.shape[0] > 1 else 0, rows if layout.shape[1] > 1 else 0
    return dict(zip(INTERVAL_STRIDES, (batch, head, rows), strict=True))


def _map_of(problem: AttentionProblem) -> MapLayout:
    layout = problem.settings.block_mask
    assert layout is not None, "the call has a map"
    return layout
