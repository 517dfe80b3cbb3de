"""The sm90 family of latent attention: ``decode`` where v is the first columns of k, through wgmma."""

from __future__ import annotations

from .family import Family, Kernel, TileRow
from .records import POINTER_RECORDS, Record
from .tile import TileConfig

__all__ = ["SM90_LATENT", "Sm90Latent"]

_H200 = "NVIDIA H200, 2026-11-28"
_COLUMNS = 576, 512  # of k, and those of v among them
_KEYS, _MULTIPLIERS, _PRODUCERS = 64, 8, 4  # of a tile; warps that multiply, and those beside them, if there are any


class Sm90Latent(Family):
    """One kernel of wgmma and ``cp.async``, whose blocks share the keys that they have copied."""

    name = "sm90_latent"
    operations = ("decode",)
    dtypes = ("float16", "bfloat16")
    min_compute_capability = 90
    max_compute_capability = 90
    row_alignment = 16
    head_dim_step = 8
    column_step = 64  # of a panel in shared memory
    most_columns, only_columns = _COLUMNS[0], _COLUMNS
    arch_suffix = "a"
    divides_rows = False
    backward_owns = "queries"
    default_methods = ()
    # Their b_r is the most rows of a tile. Clusters merge the parts of few jobs; with more, they leave multiprocessors
    # idle. Up to 32 rows the memory is the limit, and producers keep more copies under way. The registers of 64 rows
    # leave none to producers.
    tiles = {
        "decode": (
            TileRow(576, TileConfig(32, 64, 8, 2, cluster=8), _H200, most_jobs=1 / 32, most_rows=32, head_dim_v=512),
            TileRow(576, TileConfig(32, 64, 12, 2), _H200, most_rows=32, head_dim_v=512),
            TileRow(576, TileConfig(64, 64, 8, 2, cluster=8), _H200, most_jobs=1 / 16, head_dim_v=512),
            TileRow(576, TileConfig(64, 64, 8, 2), _H200, head_dim_v=512),
        )
    }

    def record(self, operation: str) -> Record:
        return POINTER_RECORDS[operation]

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        _check_operation(kernel)
        columns = _COLUMNS[0]
        slots = tile.num_stages * 2 * tile.b_c * columns
        scratch = tile.b_r * (2 * tile.b_c + 4 * 4 + 4)  # P, four maxima of each row, and a factor
        halves = 256 * tile.b_r if tile.b_r <= 32 else 0  # of scores, which the groups exchange
        signals = 2 * tile.num_stages * 8
        arrived = 16 if tile.cluster > 1 else 0  # shares of O are in the slots
        return 2 * tile.b_r * columns + slots + scratch + halves + signals + 8 * tile.b_r + arrived

    def blocks_of_tile(self, kernel: Kernel, tile: TileConfig) -> int:
        return tile.cluster

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        _check_operation(kernel)
        reason = self.why_not_columns(kernel.operation, kernel.head_dim, kernel.head_dim_v)
        if reason:
            return reason
        if tile.b_c != _KEYS:
            return f"b_c={tile.b_c} is not {_KEYS}"
        if tile.num_warps - _MULTIPLIERS not in (0, _PRODUCERS):
            return f"num_warps={tile.num_warps} is not {_MULTIPLIERS} or {_MULTIPLIERS + _PRODUCERS}"
        if tile.b_r not in (16, 32, 64) or (tile.b_r == 64 and tile.num_warps > _MULTIPLIERS):
            return f"b_r={tile.b_r} is not 16, 32 or, without producers, 64"
        if tile.cluster not in (1, 2, 4, 8):
            return f"cluster={tile.cluster} is not 1, 2, 4 or 8"
        return None if tile.num_stages == 2 else f"num_stages={tile.num_stages} is not 2"


def _check_operation(kernel: Kernel) -> None:
    if kernel.operation != "decode":
        raise KeyError(kernel.operation)


SM90_LATENT = Sm90Latent()
