"""Kernels of the sm90 family beyond 256 columns, whose two consumer warp groups have the same rows.

Each has half of the columns of O or of a gradient. Calls import this module only for kernels that have it.
"""

from __future__ import annotations

from .family import Kernel
from .sm90_tiles import SHARED_BYTES
from .tile import TileConfig

__all__ = ["shared_bytes", "why_not_shape"]


def shared_bytes(kernel: Kernel, tile: TileConfig) -> int:
    """Dynamic shared memory of a kernel."""
    operation, _, head_dim, head_dim_v, _ = kernel
    if operation != "forward":
        return _gradient_bytes(kernel, tile)
    # The same as in kernels/sm90/shared_rows_shape.cuh.
    row, row_v = -(-head_dim // 64) * 128, -(-head_dim_v // 128) * 256
    exchanged = 2 * 64 * tile.b_c + 8 * 128 + 4 * 64
    barriers = 8 * (2 + 2 * tile.num_stages + 4 * 2 + 2 * 4 + 4) + 4 * 32
    needed = 1024 + 64 * max(row, row_v) + tile.num_stages * tile.b_c * row + exchanged + barriers
    return needed + max(1, min(2, (SHARED_BYTES - needed) // (tile.b_c * row_v))) * tile.b_c * row_v


def _gradient_bytes(kernel: Kernel, tile: TileConfig) -> int:
    """Dynamic shared memory of a kernel of gradients."""
    # The same as in kernels/sm90/shared_gradient_shape.cuh. Blocks that own keys compute dV, and then dK.
    by_keys = kernel.operation == "backward_dkdv"
    rows = tile.b_r if by_keys else tile.b_c  # of a tile of the other side
    panels, panels_v = -(-kernel.head_dim // 64), -(-kernel.head_dim_v // 64)
    control = [8 * (8 + 5 * tile.num_stages + 4 * n) for n in ((panels_v, panels) if by_keys else (panels_v,))]
    fixed = 1024 + sum(control) + (0 if by_keys else 8 * 2 * 4 + 4 * 32)
    statistics = 2 * tile.num_stages * 4 * rows if by_keys else 0

    def data(own: int, kept: int, passing: int, least: int) -> int:
        """Bytes with so many panels: of the block's rows, and of the kept and of the passing operand of a tile."""
        needed = own * 64 * 128 + tile.num_stages * kept * rows * 128 + statistics
        most = (SHARED_BYTES - fixed - needed) // (rows * 128)
        return needed + max(least, min(2 * passing, most)) * rows * 128

    even, even_v = panels + panels % 2, panels_v + panels_v % 2  # each group has half of the panels of a gradient
    needed = data(even + panels_v, even, panels_v, panels_v)
    if by_keys:
        needed = max(needed, data(max(panels, even_v), even_v, panels, 2 * panels))
    return fixed + needed


def why_not_shape(kernel: Kernel, tile: TileConfig) -> str | None:
    """The reason why a kernel cannot have this tile, or None if it can."""
    if kernel.operation != "forward":
        return _why_no_gradient(kernel, tile)
    if tile.b_r not in (64, 128) or (tile.num_warps, tile.blocks_per_sm) != (12, 1):
        return (
            f"b_r={tile.b_r}, num_warps={tile.num_warps} and blocks_per_sm={tile.blocks_per_sm} are not one or two "
            "blocks of 64 rows, for which two warp groups of 4 warps multiply, and one more that loads"
        )
    if tile.b_c % 16:
        return f"b_c={tile.b_c} is not a multiple of 16"
    if not 2 <= tile.num_stages <= 4:
        return f"num_stages={tile.num_stages} is not from 2 to 4"
    if kernel.kept_keys:
        return "there is no room to keep the bias"
    columns = -(-kernel.head_dim_v // 128) * 64
    accumulators = columns // 2 + tile.b_c // 2 + 2 * (tile.b_c // 4)  # O, S and P of both groups
    if accumulators + 32 > 232:
        return f"its accumulators take {accumulators} of the 232 registers that a thread can have"
    return None


def _why_no_gradient(kernel: Kernel, tile: TileConfig) -> str | None:
    """The reason why a kernel of gradients cannot have this tile, or None if it can."""
    names = ("b_c", "b_r") if kernel.operation == "backward_dkdv" else ("b_r", "b_c")
    own, other = (getattr(tile, name) for name in names)
    if (own, tile.num_warps, tile.blocks_per_sm) != (64, 12, 1):
        return (
            f"{names[0]}={own}, num_warps={tile.num_warps} and blocks_per_sm={tile.blocks_per_sm} are not one block of "
            "64 rows, for which two warp groups of 4 warps multiply, and one more that loads"
        )
    if other % 16:
        return f"{names[1]}={other} is not a multiple of 16"
    if not 2 <= tile.num_stages <= 4:
        return f"num_stages={tile.num_stages} is not from 2 to 4"
    columns = -(-max(kernel.head_dim, kernel.head_dim_v) // 128) * 64
    accumulators = columns // 2 + other + 2 * (other // 4)  # the gradient, S, dP, and dS of both groups
    if accumulators + 32 > 232:
        return f"its accumulators take {accumulators} of the 232 registers that a thread can have"
    return None
