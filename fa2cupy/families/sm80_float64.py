"""The sm80 family for float64: tensor cores through ``mma.sync``, on Ampere and newer GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.strides import AnyStrides
from .device import DeviceInfo
from .family import Family, TileRow, register_shortage
from .records import POINTER_RECORDS, Record
from .tile import TileConfig

__all__ = ["SM80_FLOAT64", "Sm80Float64"]

_WARP_ROWS = 16


class Sm80Float64(Family):
    """Kernels of ``mma.sync`` and ``cp.async``, whose warps own 16 query rows. There is no backward yet.

    Attributes
    ----------
    largest_head_dim : int
        The largest head_dim of q and of v for which a thread holds the accumulators of 16 rows.
    """

    name = "sm80_float64"
    operations = ("forward",)
    dtypes = ("float64",)
    min_compute_capability = 80
    largest_head_dim = 128
    row_alignment = 16
    head_dim_step = 2
    has_natural_scores = True
    backward_owns = "keys"
    default_methods = ("two_pass",)
    query_rows = (32, 64, 128)
    key_rows = (16, 32, 64)
    warps = (2, 4, 8)
    # For each head_dim, the tile for the most shared memory first. None has been measured. At 128, features leave
    # registers for 16 keys.
    tiles = {
        "forward": (
            TileRow(64, TileConfig(128, 32, 8)),
            TileRow(128, TileConfig(128, 16, 8), features=Family.features),
            TileRow(128, TileConfig(128, 32, 8)),
            TileRow(128, TileConfig(128, 16, 8)),
            TileRow(128, TileConfig(32, 16, 2)),
        ),
    }

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        return self.why_not_columns(problem.head_dim, problem.head_dim_v)

    def why_not_columns(self, head_dim: int, head_dim_v: int | None) -> str | None:
        for name, columns in (("head_dim", head_dim), ("head_dim_v", head_dim_v or head_dim)):
            if columns > self.largest_head_dim:
                return f"{name}={columns} is above {self.largest_head_dim}"
        return None

    def is_default_on(self, device: DeviceInfo) -> bool:
        return False  # nobody has measured it yet

    def record(self, operation: str) -> Record:
        if operation not in self.operations:
            raise KeyError(operation)
        return POINTER_RECORDS[operation]._replace(reals=("softmax_scale",))  # there are no scores in base 2

    def padded_head_dim(self, head_dim: int) -> int:
        return -(-head_dim // 16) * 16  # rows of multiples of 128 bytes

    def shared_memory_bytes(
        self, operation: str, dtype: str, head_dim: int, tile: TileConfig, head_dim_v: int | None = None
    ) -> int:
        row, row_v = (8 * self.padded_head_dim(columns) for columns in (head_dim, head_dim_v or head_dim))
        return {"forward": (tile.b_r + tile.b_c) * row + tile.b_c * row_v}[operation]

    def why_not_shape(
        self, operation: str, dtype: str, head_dim: int, tile: TileConfig, head_dim_v: int | None = None
    ) -> str | None:
        accumulators = {"forward": (head_dim_v or head_dim) + tile.b_c}[operation]
        why_not = self.why_not_columns(head_dim, head_dim_v)
        if why_not:
            return why_not
        if tile.b_r != _WARP_ROWS * tile.num_warps:
            return f"b_r={tile.b_r} does not give each of {tile.num_warps} warps {_WARP_ROWS} rows"
        if tile.b_c % 8:
            return f"b_c={tile.b_c} is not a multiple of 8"
        if tile.num_stages != 1:
            return f"num_stages={tile.num_stages}: this kernel has one stage"
        return register_shortage(accumulators, 60, tile)


SM80_FLOAT64 = Sm80Float64()
