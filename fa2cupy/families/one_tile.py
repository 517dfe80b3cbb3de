"""The kernels of ``one_tile``, whose blocks have all keys of a sequence: tiles, costs, and what they take."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.features import FEATURES
from ..problem.strides import AnyStrides, atomics_of
from .estimate import BlockCost
from .family import Family, TileRow
from .operations import OPERATIONS
from .tile import TileConfig

__all__ = ["ONE_TILE_COSTS", "ONE_TILE_ROWS", "ONE_TILE_ROWS_OF_HOPPER", "why_not_one_tile"]

_H200 = "NVIDIA H200, 2026-11-28"
#: Fitted to thousands of sequences of 64 and 128 rows on an H200, 2026-11-28, with head_dim 32 and 64, and with dbias
#: 2026-11-29. The others are predicted.
ONE_TILE_COSTS = {
    "backward_one_tile": {32: BlockCost(8.6, 0.6), 64: BlockCost(7.4, 0.6), 256: BlockCost(6.0, 5.0)},
    "backward_one_tile_dbias": {
        32: BlockCost(13.2, 0.6),
        64: BlockCost(9.3, 0.6),
        128: BlockCost(4.8, 5.0),
        256: BlockCost(7.5, 5.0),
    },
}

ONE_TILE_ROWS = {
    "backward_one_tile": (
        TileRow(32, TileConfig(64, 64, 4, 1, 4), _H200),
        TileRow(64, TileConfig(64, 64, 4, 1, 3), _H200),
        TileRow(128, TileConfig(64, 64, 8, 1, 2)),
        TileRow(256, TileConfig(64, 64, 8)),
        TileRow(32, TileConfig(64, 128, 8, 1, 2), _H200),
        TileRow(64, TileConfig(32, 128, 8, 1, 2), _H200),
        TileRow(128, TileConfig(64, 128, 8)),
        TileRow(256, TileConfig(32, 64, 8)),
        TileRow(256, TileConfig(16, 32, 4)),
    ),
    "backward_one_tile_dbias": (
        TileRow(32, TileConfig(64, 64, 4, 1, 4), _H200),
        TileRow(64, TileConfig(64, 64, 4, 1, 3)),
        TileRow(64, TileConfig(64, 64, 4, 1, 2)),
        TileRow(256, TileConfig(64, 64, 8)),
        TileRow(256, TileConfig(32, 64, 8)),
        TileRow(256, TileConfig(16, 32, 4)),
    ),
}
#: Those that are for GPUs with less shared memory.
_OF_LESS_MEMORY = (TileConfig(64, 64, 4, 1, 2), TileConfig(32, 64, 8), TileConfig(16, 32, 4))
ONE_TILE_ROWS_OF_HOPPER = {
    operation: tuple(row for row in rows if row.tile not in _OF_LESS_MEMORY)
    for operation, rows in ONE_TILE_ROWS.items()
}


def why_not_one_tile(
    family: Family, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]
) -> str | None:
    """The reason why no tile of a kernel has all keys of a sequence, if it must; None if one has."""
    row = OPERATIONS[operation]
    if not row.holds_keys:
        return None
    others = [name for name in OPERATIONS["forward"].features if name in problem.features and FEATURES[name].acts_on]
    lacking = [name for name in others if name not in row.features]
    if lacking:
        return f"a block does not have all keys with {', '.join(lacking)}"
    tiles = [one.tile for one in family.tiles[operation]]
    most = max(tile.b_c for tile in tiles)
    if problem.seqlen_k > most:
        return f"its {problem.seqlen_k} keys are more than the {most} of a tile"
    if row.owns == "keys":
        return None
    if "dbias" not in strides or not atomics_of(strides["dbias"], problem.score_shape):
        return "the bias does not have an element for each query and key"
    if problem.heads_per_group > 1:
        return "several query heads share keys"
    most = max(tile.b_r for tile in tiles)
    return f"its {problem.seqlen_q} queries are more than the {most} of a tile" if problem.seqlen_q > most else None
