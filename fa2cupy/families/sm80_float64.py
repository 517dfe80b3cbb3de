"""The sm80 family for float64: tensor cores through ``mma.sync``, on Ampere and newer GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.strides import AnyStrides
from .device import DeviceInfo
from .estimate import BlockCost, Costs
from .family import Family, Kernel, TileRow, register_shortage
from .records import POINTER_RECORDS, Record
from .tile import TileConfig

__all__ = ["SM80_FLOAT64", "Sm80Float64"]

_ROWS = 16  # of a warp, or of a pair
_POWERS_BYTES = 512  # a table of the exponential
_MOST_PAIRS = 15  # each has a barrier of its own
#: Computed, and to be fitted to measurements: a multiprocessor of the H100 does 0.22 million multiply-adds in a
#: microsecond, and reads and writes its share of 3.3 TB/s. Only the method follows from them: two passes where key tiles
#: are too few for the multiprocessors.
_COSTS = Costs(
    blocks={
        operation: {head_dim: BlockCost(products / 0.22, head_dim / 12.8) for head_dim in (64, 128, 256)}
        for operation, products in (("backward", 5), ("backward_dq", 3), ("backward_dkdv", 4))
    },
    convert=4.0,
    convert_rows=7.3,
)


class Sm80Float64(Family):
    """Kernels of ``mma.sync`` and ``cp.async``, whose warps, or pairs of warps, own 16 rows of queries or keys.

    None of them adds to dQ: there is no ``backward`` for ``single_pass``.

    Attributes
    ----------
    largest_head_dim : int
        The largest head_dim of q and of v for which a thread holds the accumulators of 16 rows.
    """

    name = "sm80_float64"
    operations = ("forward", "backward_dq", "backward_dkdv")
    dtypes = ("float64",)
    min_compute_capability = 80
    largest_head_dim = 128
    row_alignment = 16
    head_dim_step = 2
    column_step = 16  # rows of multiples of 128 bytes
    has_natural_scores = True
    backward_owns = "keys"
    default_methods = ("single_pass", "two_pass")
    costs = _COSTS
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
        "backward_dq": (
            TileRow(64, TileConfig(128, 32, 8)),
            TileRow(64, TileConfig(64, 16, 4)),
            TileRow(128, TileConfig(64, 16, 4)),
            TileRow(128, TileConfig(32, 8, 2)),
        ),
        "backward_dkdv": (
            TileRow(64, TileConfig(32, 64, 8, 2)),
            TileRow(128, TileConfig(16, 64, 8, 2)),
            TileRow(128, TileConfig(16, 32, 4, 2)),
            TileRow(128, TileConfig(8, 32, 4, 2)),
        ),
    }

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        return self.why_not_columns(problem.head_dim, problem.columns_of("v"))

    def why_not_columns(self, head_dim: int, head_dim_v: int) -> str | None:
        for name, columns in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            if columns > self.largest_head_dim:
                return f"{name}={columns} is above {self.largest_head_dim}"
        return None

    def is_default_on(self, device: DeviceInfo) -> bool:
        return device.float64_tensor_rate > 1

    def record(self, operation: str) -> Record:
        if operation not in self.operations:
            raise KeyError(operation)
        return POINTER_RECORDS[operation]._replace(reals=("softmax_scale",))  # there are no scores in base 2

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        row, row_v = (8 * self.padded_head_dim(columns) for columns in (kernel.head_dim, kernel.head_dim_v))
        b_r, b_c = tile.b_r, tile.b_c
        return {
            "forward": _POWERS_BYTES + (b_r + b_c) * row + b_c * row_v,
            "backward_dq": (b_r + b_c) * (row + row_v),
            "backward_dkdv": (b_c + tile.num_stages * b_r) * (row + row_v) + 8 * b_r * b_c + 4 * 8 * b_r,
        }[kernel.operation]

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        operation, _, head_dim, head_dim_v = kernel
        accumulators = {
            "forward": head_dim_v + tile.b_c,
            "backward_dq": head_dim + 2 * tile.b_c,
            "backward_dkdv": max(head_dim, head_dim_v) + 2 * tile.b_r,
        }[operation]
        why_not = self.why_not_columns(head_dim, head_dim_v)
        if why_not:
            return why_not
        by_keys = operation == "backward_dkdv"
        own, other = ("b_c", "b_r") if by_keys else ("b_r", "b_c")
        owners = tile.num_warps // 2 if by_keys else tile.num_warps
        if by_keys and (tile.num_warps % 2 or owners > _MOST_PAIRS):
            return f"num_warps={tile.num_warps} is not an even number up to {2 * _MOST_PAIRS}"
        if getattr(tile, own) != _ROWS * owners:
            of_whom = f"each pair of {tile.num_warps} warps" if by_keys else f"each of {tile.num_warps} warps"
            return f"{own}={getattr(tile, own)} does not give {of_whom} {_ROWS} rows"
        if getattr(tile, other) % 8:
            return f"{other}={getattr(tile, other)} is not a multiple of 8"
        if by_keys and 2 * tile.b_r > tile.num_threads:
            return f"b_r={tile.b_r} has less than two of {tile.num_threads} threads a row"
        most = 2 if by_keys else 1
        if tile.num_stages > most:
            return f"num_stages={tile.num_stages} is more than {most}"
        return register_shortage(accumulators, 60, tile)


SM80_FLOAT64 = Sm80Float64()
