"""The sm80 family for float64: tensor cores through ``mma.sync``, on Ampere and newer GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.strides import AnyStrides
from .device import DeviceInfo
from .estimate import BlockCost, Costs
from .family import Family, Kernel, TileRow, register_shortage
from .operations import OPERATIONS
from .records import POINTER_RECORDS, Record
from .tile import TileConfig

__all__ = ["SM80_FLOAT64", "Sm80Float64"]

_ROWS = 16  # that a warp owns, or that several share
_OPERANDS = 60  # registers of a thread for operands and addresses
_POWERS_BYTES = 512  # a table of the exponential
_BARRIERS = 15  # for some of the warps
_WIDE = 128  # with more columns of q or v, two warps hold a result of 16 rows
_NARROW = 64  # scores of so few columns are one sum in all kernels, which two warps cannot divide
_NARROW_V = 80  # of so many columns of v, one warp holds the sums of o and of its tangent
_BY_KEYS = ("backward", "backward_dkdv")
_MEASURED = "H200, 2026-11-27"
#: A multiprocessor of the H200 does 0.16 million multiply-adds in a microsecond, in either method; what else takes time
#: is computed from its rates. Two passes are estimated to be shorter only where key tiles are few.
_COSTS = Costs(
    blocks={
        operation: {head_dim: BlockCost(products / 0.16, head_dim / 12.8) for head_dim in (64, 128, 256)}
        for operation, products in (("backward", 5), ("backward_dq", 3), ("backward_dkdv", 4))
    },
    convert=4.0,
    convert_rows=7.3,
)


class Sm80Float64(Family):
    """Kernels of ``mma.sync`` and ``cp.async``, whose warps own 16 rows of queries or keys, alone or with others."""

    name = "sm80_float64"
    operations = (*Family.operations, "jvp", "output_jvp", "dq_jvp", "dkdv_jvp")
    dtypes = ("float64",)
    min_compute_capability = 80
    row_alignment = 16
    head_dim_step = 2
    column_step = 16  # rows of multiples of 128 bytes
    has_natural_scores = True
    backward_owns = "keys"
    default_methods = ("single_pass", "two_pass")
    costs = _COSTS
    query_rows = (16, 32, 64, 128)
    key_rows = (16, 32, 64, 128)
    warps = (2, 4, 8)
    # For each head_dim, the tile for the most shared memory first. In the largest tiles of kernels that own keys,
    # features spill registers.
    tiles = {
        "forward": (
            TileRow(64, TileConfig(128, 48, 8), _MEASURED),
            TileRow(64, TileConfig(128, 32, 8)),
            TileRow(128, TileConfig(128, 32, 8), _MEASURED),
            TileRow(128, TileConfig(128, 16, 8), _MEASURED),
            TileRow(128, TileConfig(32, 16, 2)),
            TileRow(256, TileConfig(64, 32, 8), _MEASURED),
            TileRow(256, TileConfig(64, 16, 8), _MEASURED),
            TileRow(256, TileConfig(32, 16, 4), _MEASURED),
            TileRow(256, TileConfig(16, 16, 2)),
        ),
        # Of tangents: where q has more than _NARROW columns, two warps share rows. Rows that no other tile serves are
        # those of a wider v beside a q of fewer.
        "jvp": (
            TileRow(64, TileConfig(128, 16, 8)),
            TileRow(64, TileConfig(64, 16, 4)),
            TileRow(128, TileConfig(64, 16, 8)),
            TileRow(128, TileConfig(32, 16, 4)),
            TileRow(64, TileConfig(32, 16, 2), head_dim_v=_NARROW_V),
        ),
        "output_jvp": (
            TileRow(64, TileConfig(128, 16, 8)),
            TileRow(64, TileConfig(64, 16, 4)),
            TileRow(128, TileConfig(64, 16, 8)),
            TileRow(128, TileConfig(32, 16, 4)),
            TileRow(64, TileConfig(32, 16, 2), head_dim_v=_NARROW_V),
        ),
        "dq_jvp": (
            TileRow(64, TileConfig(64, 16, 4)),
            TileRow(64, TileConfig(32, 16, 2)),
            TileRow(128, TileConfig(32, 16, 4)),
            TileRow(128, TileConfig(16, 16, 2)),
            TileRow(64, TileConfig(32, 16, 2), head_dim_v=_NARROW_V),
            TileRow(64, TileConfig(16, 16, 1), head_dim_v=_NARROW_V),
        ),
        "dkdv_jvp": (
            TileRow(64, TileConfig(16, 64, 4)),
            TileRow(64, TileConfig(16, 32, 2)),
            TileRow(128, TileConfig(16, 32, 4)),
            TileRow(128, TileConfig(16, 16, 2)),
            TileRow(64, TileConfig(8, 32, 2), head_dim_v=_NARROW_V),
        ),
        "backward": (
            TileRow(64, TileConfig(32, 64, 8, 2), _MEASURED, features=Family.features),
            TileRow(64, TileConfig(32, 64, 4, 1, 2), _MEASURED),
            TileRow(64, TileConfig(32, 64, 8), _MEASURED),
            TileRow(64, TileConfig(16, 32, 4)),
            TileRow(128, TileConfig(16, 64, 8), features=Family.features),
            TileRow(128, TileConfig(32, 64, 8), _MEASURED),
            TileRow(128, TileConfig(16, 48, 6)),
            TileRow(128, TileConfig(16, 16, 2)),
            TileRow(256, TileConfig(16, 32, 8)),
            TileRow(256, TileConfig(16, 16, 4)),
        ),
        "backward_dq": (
            TileRow(64, TileConfig(128, 32, 8), _MEASURED),
            TileRow(64, TileConfig(64, 16, 4), _MEASURED),
            TileRow(128, TileConfig(64, 32, 8), _MEASURED),
            TileRow(128, TileConfig(64, 16, 4), _MEASURED),
            TileRow(128, TileConfig(32, 8, 2)),
            TileRow(256, TileConfig(64, 16, 8), _MEASURED),
            TileRow(256, TileConfig(32, 32, 4), _MEASURED),
            TileRow(256, TileConfig(32, 16, 4), _MEASURED),
            TileRow(256, TileConfig(16, 16, 2)),
        ),
        "backward_dkdv": (
            TileRow(64, TileConfig(32, 64, 8, 2), _MEASURED, features=Family.features),
            TileRow(64, TileConfig(32, 64, 4, 1, 2), _MEASURED),
            TileRow(64, TileConfig(32, 64, 8, 1), _MEASURED),
            TileRow(128, TileConfig(16, 64, 8, 2), _MEASURED, features=Family.features),
            TileRow(128, TileConfig(32, 64, 8), _MEASURED),
            TileRow(128, TileConfig(16, 32, 4, 2)),
            TileRow(128, TileConfig(8, 32, 4, 2)),
            TileRow(256, TileConfig(16, 32, 8, 2), _MEASURED),
            TileRow(256, TileConfig(16, 32, 8), _MEASURED),
            TileRow(256, TileConfig(16, 16, 4)),
        ),
    }

    def is_default_on(self, device: DeviceInfo) -> bool:
        return device.float64_tensor_rate > 1

    def record(self, operation: str) -> Record:
        if operation not in self.operations:
            raise KeyError(operation)
        name = "backward_to_workspace" if operation == "backward" else operation
        return POINTER_RECORDS[name]._replace(reals=("softmax_scale",))  # there are no scores in base 2

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        if not OPERATIONS[operation].is_second_order:
            return None
        kernel = Kernel.of(operation, problem)
        if _is_wide(kernel):
            return f"kernels of tangents have up to {_WIDE} columns"
        if kernel.head_dim <= _NARROW and kernel.head_dim_v > _NARROW_V:
            return f"beside up to {_NARROW} columns of q, kernels of tangents have up to {_NARROW_V} of v"
        return None

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        sharers, columns, columns_v = _on_chip(kernel, tile)
        row, row_v, b_r, b_c = 8 * columns, 8 * columns_v, tile.b_r, tile.b_c
        scores = 8 * b_r * b_c
        slots = scores if sharers > 1 else 0
        by_keys = (b_c + tile.num_stages * b_r) * (row + row_v) + 4 * 8 * b_r + 2 * slots
        by_keys += scores if _is_in_pairs(tile, sharers) else 0
        moved = 2 * ((b_r + b_c) * row + b_c * row_v + slots)
        return {
            "forward": _POWERS_BYTES + (b_r + b_c) * row + b_c * row_v + slots,
            "jvp": _POWERS_BYTES + moved,
            "output_jvp": moved,
            "dq_jvp": moved + 2 * b_r * row_v,
            "dkdv_jvp": moved + 2 * b_r * row_v + 4 * 8 * b_r,
            "backward": by_keys + tile.num_stages * scores,
            "backward_dq": (b_r + b_c) * (row + row_v) + slots,
            "backward_dkdv": by_keys,
        }[kernel.operation]

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        if kernel.operation in _BY_KEYS:
            return _why_no_keys(kernel, tile)
        sharers, columns, columns_v = _on_chip(kernel, tile)
        names = ("b_c", "b_r") if kernel.operation == "dkdv_jvp" else ("b_r", "b_c")
        own, other = (getattr(tile, name) for name in names)
        few = 1 + _is_wide(kernel)
        most = 2 if kernel.head_dim > _NARROW else few
        if not few <= sharers <= most or sharers * own != _ROWS * tile.num_warps:
            of_whom = "each" if most == 1 else "each two" if few == 2 else "each, or each two,"
            return f"{names[0]}={own} does not give {of_whom} of {tile.num_warps} warps {_ROWS} rows"
        if sharers > 1 and own > _ROWS * _BARRIERS:
            return f"{names[0]}={own} takes more than {_BARRIERS} barriers"
        if other % (8 * sharers):
            return f"{names[1]}={other} is not a multiple of {8 * sharers}"
        if tile.num_stages > 1:
            return f"num_stages={tile.num_stages} is more than 1"
        accumulators = {
            "forward": columns_v // sharers + tile.b_c,
            "jvp": 2 * columns_v // sharers + 2 * tile.b_c,
            "output_jvp": columns_v // sharers + 2 * tile.b_c,
            "dq_jvp": columns // sharers + 4 * tile.b_c // sharers,
            "dkdv_jvp": (columns + columns_v) // sharers + 4 * tile.b_r // sharers,
            "backward_dq": columns // sharers + 2 * tile.b_c,
        }[kernel.operation]
        return register_shortage(accumulators, _OPERANDS, tile)


def _is_wide(kernel: Kernel) -> bool:
    return max(kernel.head_dim, kernel.head_dim_v) > _WIDE


def _on_chip(kernel: Kernel, tile: TileConfig) -> tuple[int, int, int]:
    """The warps that share rows, and the columns of q and of v, which these warps divide evenly."""
    owned = tile.b_c if kernel.operation == "dkdv_jvp" else tile.b_r
    by_keys = kernel.operation in _BY_KEYS
    sharers = 1 + _is_wide(kernel) if by_keys else max(1, _ROWS * tile.num_warps // owned)
    step = 16 * sharers
    return sharers, -(-kernel.head_dim // step) * step, -(-kernel.head_dim_v // step) * step


def _is_in_pairs(tile: TileConfig, sharers: int) -> bool:
    """True if two warps of a kernel that owns keys have a gradient each, where one could have both."""
    return 2 * sharers * tile.b_c == _ROWS * tile.num_warps


def _why_no_keys(kernel: Kernel, tile: TileConfig) -> str | None:
    """The reason why kernels that own keys cannot have this tile, or None if they can."""
    sharers, columns, columns_v = _on_chip(kernel, tile)
    in_pairs, with_dq = _is_in_pairs(tile, sharers), kernel.operation == "backward"
    if not in_pairs and sharers * tile.b_c != _ROWS * tile.num_warps:
        return (
            f"b_c={tile.b_c} does not give each {sharers} of {tile.num_warps} warps, or each {2 * sharers}, "
            f"{_ROWS} rows"
        )
    barriers = (tile.num_warps // 2 if in_pairs else 0) + (2 * tile.b_c // _ROWS if sharers > 1 else 0)
    if barriers > _BARRIERS:
        return f"num_warps={tile.num_warps} take {barriers} barriers, of which there are {_BARRIERS}"
    if tile.b_r % (8 * sharers):
        return f"b_r={tile.b_r} is not a multiple of {8 * sharers}"
    if 2 * tile.b_r > tile.num_threads:
        return f"b_r={tile.b_r} has less than two of {tile.num_threads} threads a row"
    if tile.num_stages > 2:
        return f"num_stages={tile.num_stages} is more than 2"
    if with_dq and (tile.b_r % _ROWS or tile.num_warps % (tile.b_r // _ROWS)):
        return f"dQ of b_r={tile.b_r} rows does not divide among {tile.num_warps} warps in bands of {_ROWS} rows"
    gradients = max(columns, columns_v) if in_pairs else columns + columns_v
    return register_shortage(gradients // sharers + 2 * tile.b_r, _OPERANDS, tile)


SM80_FLOAT64 = Sm80Float64()
