"""The simt family: IEEE arithmetic in float32 and float64, with one warp lane for each column.

Its kernels are the simplest, and the best ones to read first.
"""

from __future__ import annotations

from ..problem.dtypes import itemsize
from .family import Family, TileRow, register_shortage
from .records import POINTER_RECORDS, Record
from .tile import TileConfig

__all__ = ["SIMT", "Simt"]

_H100 = "NVIDIA H100 80GB HBM3, 2026-11-21"
_FLOAT, _DOUBLE = ("float32",), ("float64",)

#: For each kernel: the side whose rows a warp holds in registers, the other side, and the number of such matrices.
_ROWS_OF_WARPS = {
    "forward": ("b_r", "b_c", 2),
    "backward": ("b_r", "b_c", 3),
    "backward_dq": ("b_r", "b_c", 3),
    "backward_dkdv": ("b_c", "b_r", 4),
}


class Simt(Family):
    """Kernels without tensor cores, whose blocks own query tiles in ``backward`` and add to dK and dV atomically."""

    name = "simt"
    dtypes = ("float32", "float64")
    min_compute_capability = 60
    row_alignment = 1
    head_dim_step = 1
    backward_owns = "queries"
    default_methods = ("two_pass",)
    # The backward has tiles of 32 x 32 and four warps with eight rows each as long as registers suffice.
    tiles = {
        "forward": (
            TileRow(128, TileConfig(64, 32, 8, 1, 2), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 32, 8), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 16, 4, 1, 3), _H100, dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 16, 4, 1, 2), _H100, dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_DOUBLE),
        ),
        "backward": (
            TileRow(64, TileConfig(32, 32, 4, 1, 4), _H100, dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 32, 4, 1, 3), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 16, 4, 1, 2), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4, 1, 3), _H100, dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 16, 4, 1, 2), _H100, dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_DOUBLE),
        ),
        "backward_dq": (
            TileRow(64, TileConfig(32, 32, 4, 1, 4), _H100, dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 32, 4, 1, 3), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 16, 4, 1, 2), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4, 1, 3), _H100, dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 16, 4, 1, 2), _H100, dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 16, 4, 1, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_DOUBLE),
        ),
        "backward_dkdv": (
            TileRow(64, TileConfig(32, 32, 4, 1, 4), _H100, dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 32, 4, 1, 3), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 32, 8), _H100, dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4, 1, 2), _H100, dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 16, 4, 1, 2), _H100, dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 16, 4), dtypes=_DOUBLE),
        ),
    }

    def record(self, operation: str) -> Record:
        return POINTER_RECORDS[operation]

    def padded_head_dim(self, head_dim: int) -> int:
        return -(-head_dim // 32) * 32  # one lane for each column, in whole warps

    def shared_memory_bytes(self, operation: str, dtype: str, head_dim: int, tile: TileConfig) -> int:
        element = itemsize(dtype)
        row = self.padded_head_dim(head_dim) * element
        tiles = {
            "forward": 2 * tile.b_c * row,
            "backward": 4 * tile.b_c * row,
            "backward_dq": 2 * tile.b_c * row,
            "backward_dkdv": 2 * tile.b_r * row + 2 * tile.b_r * element,
        }
        return tiles[operation] + tile.b_r * tile.b_c * element

    def why_not_shape(self, operation: str, dtype: str, head_dim: int, tile: TileConfig) -> str | None:
        own_name, other_name, matrices = _ROWS_OF_WARPS[operation]
        own, other = getattr(tile, own_name), getattr(tile, other_name)
        rows_per_warp = own // tile.num_warps
        if own % tile.num_warps or rows_per_warp not in (1, 2, 4, 8):
            return f"{own_name}={own} does not give each of {tile.num_warps} warps 1, 2, 4 or 8 rows"
        if other % (32 // rows_per_warp):
            return f"{other_name}={other} is not a multiple of {32 // rows_per_warp}"
        if tile.num_stages != 1:
            return f"num_stages={tile.num_stages}: the simt family has one stage"
        return register_shortage((matrices * rows_per_warp * head_dim // 32 + 16) * itemsize(dtype) // 4, 16, tile)


SIMT = Simt()
