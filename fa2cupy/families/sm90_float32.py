"""The sm90 family for float32: products of float16 parts on Hopper's wgmma."""

from __future__ import annotations

from ..problem.features import features_in_registers
from .family import TileRow
from .float32_parts import Float32Parts
from .records import Record
from .tile import TileConfig

__all__ = ["SM90_FLOAT32", "Sm90Float32"]

_SHARED_BYTES = 227 * 1024  # the most that a block can have

#: For each kernel, the side whose rows its warp groups own, and the other side.
_SIDES = {
    "forward": ("b_r", "b_c"),
    "backward": ("b_c", "b_r"),
    "backward_dq": ("b_r", "b_c"),
    "backward_dkdv": ("b_c", "b_r"),
}

#: Of these kernels, persistent blocks draw query tiles from a counter.
_PERSISTENT = ("forward", "backward_dq")


class Sm90Float32(Float32Parts):
    """Kernels for sm_90a only, whose operands are pairs of float16 matrices (``kernels/float32_parts/parts.cuh``)."""

    name = "sm90"
    folder = "sm90_float32"
    min_compute_capability = max_compute_capability = 90
    arch_suffix = "a"
    largest_head_dim = 128
    default_methods = ("single_pass",)
    query_rows = (64, 128)
    key_rows = (64, 128)
    # Two consumer warp groups of 4 warps have 64 rows each, and one more loads.
    tiles = {
        "forward": (
            TileRow(64, TileConfig(128, 128, 12, 2)),
            TileRow(128, TileConfig(128, 64, 12, 2), features=features_in_registers(1)),
            TileRow(128, TileConfig(128, 128, 12, 1)),
        ),
        "backward": (TileRow(64, TileConfig(64, 128, 12, 2)), TileRow(128, TileConfig(64, 128, 12, 1))),
        "backward_dq": (TileRow(64, TileConfig(128, 128, 12, 2)), TileRow(128, TileConfig(128, 64, 12, 2))),
        "backward_dkdv": (TileRow(128, TileConfig(64, 128, 12, 2)),),
    }

    def record(self, operation: str) -> Record:
        record = super().record(operation)
        counter = " tile_counter:counter" if operation in _PERSISTENT else ""
        return record._replace(pointers=f"{record.pointers}{counter}")

    def shared_memory_bytes(self, operation: str, dtype: str, head_dim: int, tile: TileConfig) -> int:
        # The same as in kernels/sm90_float32/query_tile_shape.cuh and backward_dkdv_shape.cuh: panels of 64 columns of
        # two parts. The operand that is used second has one stage where that many of the first do not fit.
        row = 2 * -(-head_dim // 64) * 128
        if _SIDES[operation][0] == "b_c":
            own, other = 2 * tile.b_c * row, tile.b_r * row
            fixed = 8 * (2 + 4 * tile.num_stages) + tile.num_stages * 2 * 4 * tile.b_r
            if operation == "backward":  # two warp groups have dS, units of it, and barriers
                fixed += 2 * (2 * tile.b_r * 128 + 4 * 4 + 2 * 8)
        else:
            operands = {"forward": 1, "backward_dq": 2}[operation]
            own, other = operands * tile.b_r * row, tile.b_c * row
            fixed = 8 * (4 * operands + 4 * tile.num_stages + 2 * 4) + 4 * 32
        first = 1024 + own + tile.num_stages * other + fixed
        both = first + tile.num_stages * other
        return both if both <= _SHARED_BYTES else first + other

    def why_not_shape(self, operation: str, dtype: str, head_dim: int, tile: TileConfig) -> str | None:
        if head_dim > self.largest_head_dim:
            return f"head_dim={head_dim} is above the {self.largest_head_dim} whose parts fit shared memory"
        own, other = _SIDES[operation]
        rows, others = getattr(tile, own), getattr(tile, other)
        if (rows, tile.num_warps) != (128, 12):
            return (
                f"{own}={rows} and num_warps={tile.num_warps} are not 64 rows for each of two warp groups of 4 warps, "
                "and one more that loads"
            )
        if others not in ((64,) if own == "b_c" else (64, 128)):
            return f"{other}={others} is not 64{'' if own == 'b_c' else ' or 128'}"
        if tile.num_stages > 4:
            return f"num_stages={tile.num_stages} is more than 4"
        if tile.blocks_per_sm != 1:
            return f"blocks_per_sm={tile.blocks_per_sm}: a multiprocessor has one block"
        return None


SM90_FLOAT32 = Sm90Float32()
