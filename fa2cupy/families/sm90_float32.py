"""The sm90 family for float32: products of float16 parts on Hopper's wgmma."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.features import features_in_registers
from ..problem.strides import AnyStrides
from .family import Kernel, TileRow
from .float32_parts import Float32Parts, row_bytes_of_parts
from .records import Record
from .sm90_tiles import SHARED_BYTES
from .tile import TileConfig

__all__ = ["SM90_FLOAT32", "Sm90Float32"]

_WIDE = 128  # for more columns of q or v, operands pass through shared memory in pieces of 64 columns

#: For each kernel, the side whose rows its warp groups own, and the other side.
_SIDES = {
    "forward": ("b_r", "b_c"),
    "backward": ("b_c", "b_r"),
    "backward_dq": ("b_r", "b_c"),
    "backward_dkdv": ("b_c", "b_r"),
}

#: The kernels whose persistent blocks draw query tiles from a counter.
_PERSISTENT = ("forward", "backward_dq")


class Sm90Float32(Float32Parts):
    """Kernels for sm_90a only, whose operands are pairs of float16 matrices (``kernels/float32_parts/parts.cuh``)."""

    name = "sm90_float32"
    min_compute_capability = max_compute_capability = 90
    arch_suffix = "a"
    largest_head_dim = 256
    default_methods = ("single_pass", "two_pass")
    query_rows = (64, 128)
    key_rows = (64, 128)
    # Two consumer warp groups of 4 warps have 64 rows each, and one more loads. Beyond head_dim 128 a stage is a piece,
    # and the two groups of a backward have the same 64 rows. Rows with more stages than shared memory holds at their
    # head_dim are for pairs, of which one is less.
    tiles = {
        "forward": (
            TileRow(64, TileConfig(128, 128, 12, 2)),
            TileRow(128, TileConfig(128, 64, 12, 2), features=features_in_registers(1)),
            TileRow(128, TileConfig(128, 128, 12, 2)),
            TileRow(128, TileConfig(128, 128, 12, 1)),
            TileRow(256, TileConfig(128, 64, 12, 4)),
            TileRow(256, TileConfig(128, 64, 12, 3)),
        ),
        "backward": (TileRow(128, TileConfig(64, 128, 12, 2)), TileRow(128, TileConfig(64, 128, 12, 1))),
        "backward_dq": (
            TileRow(64, TileConfig(128, 64, 12, 2), features=("score_mod", "mask_mod")),
            TileRow(64, TileConfig(128, 128, 12, 2)),
            TileRow(128, TileConfig(128, 64, 12, 2)),
            TileRow(256, TileConfig(64, 64, 12, 4)),
            TileRow(256, TileConfig(64, 64, 12, 3)),
        ),
        "backward_dkdv": (
            TileRow(128, TileConfig(64, 128, 12, 2)),
            TileRow(256, TileConfig(64, 64, 12, 4)),
            TileRow(256, TileConfig(64, 64, 12, 3)),
        ),
    }

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        if operation == "backward":
            for name, columns in (("head_dim", problem.head_dim), ("head_dim_v", problem.columns_of("v"))):
                if columns > _WIDE:
                    return f"{name}={columns} is above the {_WIDE} of 'single_pass'; use 'two_pass' or None"
        return super().why_not(operation, problem, strides)

    def record(self, operation: str) -> Record:
        record = super().record(operation)
        counter = " tile_counter:counter" if operation in _PERSISTENT else ""
        return record._replace(pointers=f"{record.pointers}{counter}")

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        # The same as in kernels/sm90_float32/query_tile_shape.cuh and backward_dkdv_shape.cuh: panels of 64 columns of
        # two parts. A stage holds one panel if operands come in pieces. If not, the operand that is used second has one
        # stage where that many of the first do not fit.
        operation, _, *columns, _ = kernel
        is_wide = max(columns) > _WIDE
        row, row_v = row_bytes_of_parts(*columns, is_forward=operation == "forward")
        of_stage, of_stage_v = (2 * 128, 2 * 128) if is_wide else (row, row_v)
        if _SIDES[operation][0] == "b_c":
            own, others = tile.b_c * (row + row_v), tile.b_r
            barriers = 2 + 4 * tile.num_stages + (2 * 2 if is_wide else 0)
            fixed = 8 * barriers + (2 if is_wide else tile.num_stages) * 2 * 4 * tile.b_r
            if operation == "backward":  # two warp groups have dS, units of it, and barriers
                fixed += 2 * (2 * tile.b_r * 128 + 4 * 4 + 2 * 8)
        else:
            operands = {"forward": 1, "backward_dq": 2}[operation]
            own, others = tile.b_r * (row + (operands - 1) * row_v), tile.b_c
            fixed = 8 * (4 * operands + 4 * tile.num_stages + 2 * 4) + 4 * 32
        first = 1024 + own + tile.num_stages * others * of_stage + fixed
        both = first + tile.num_stages * others * of_stage_v
        return both if both <= SHARED_BYTES or is_wide else first + others * of_stage_v

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        operation, _, *columns, _ = kernel
        own, other = _SIDES[operation]
        rows, others = getattr(tile, own), getattr(tile, other)
        widest = max(columns)
        is_wide = widest > _WIDE
        if is_wide and operation == "backward":
            return f"head_dim={widest} is above the {_WIDE} of which two warp groups hold dK and dV of 128 keys"
        # Beyond, where shared memory holds two operands of 64 rows besides pieces, two warp groups share these rows.
        expected = 64 if is_wide and operation != "forward" else 128
        if (rows, tile.num_warps) != (expected, 12):
            owned = "64 rows for both" if expected == 64 else "64 rows for each"
            return (
                f"{own}={rows} and num_warps={tile.num_warps} are not {owned} of two warp groups of 4 warps, "
                "and one more that loads"
            )
        allowed = (64,) if own == "b_c" or is_wide else (64, 128)
        if others not in allowed:
            return f"{other}={others} is not {' or '.join(map(str, allowed))}"
        if tile.num_stages > 4:
            return f"num_stages={tile.num_stages} is more than 4"
        if tile.blocks_per_sm != 1:
            return f"blocks_per_sm={tile.blocks_per_sm}: a multiprocessor has one block"
        return None


SM90_FLOAT32 = Sm90Float32()
