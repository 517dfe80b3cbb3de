"""Tiles of the Hopper backward: what they cost, and when they are legal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tiles import TileConfig

__all__ = ["backward_bytes", "why_no_backward"]

_WIDE = 128  # above it, a warp group's registers hold one of dK and dV


def backward_bytes(operation: str, head_dim: int, tile: TileConfig) -> int:
    """Dynamic shared memory of the kernels by key tiles."""
    # As kernels/sm90/backward_shape.cuh has it. Where a key tile is divided into dK and dV, P crosses.
    row, scores = -(-head_dim // 64) * 128, 2 * 2 * tile.b_r * tile.b_c
    as_step = head_dim <= (_WIDE if operation == "backward" else 64)  # statistics, with a tile of ones
    queries = 2 * tile.num_stages * tile.b_r * (row + (32 if as_step else 4)) + 64 * 32 * as_step
    exchanged = (operation == "backward") + (head_dim > _WIDE)
    return 1024 + 2 * tile.b_c * row + queries + exchanged * scores + 8 * (2 + 4 * tile.num_stages + 10)


def why_no_backward(tile: TileConfig, head_dim: int, *, with_dq: bool) -> str | None:
    """The reason why the kernels by key tiles cannot have this tile, or None if they can."""
    keys, groups = (64, "dV and one for dK") if head_dim > _WIDE else (128, "each 64 keys")
    if tile.b_c != keys or tile.num_warps != 12 or tile.blocks_per_sm != 1:
        return (
            f"b_c={tile.b_c}, num_warps={tile.num_warps} and blocks_per_sm={tile.blocks_per_sm} are not one block of {keys} keys, "
            f"a warp group of 4 warps for {groups}, and one more that loads"
        )
    if tile.b_r % 16 or tile.b_r > 128:
        return f"b_r={tile.b_r} is not a multiple of 16 up to 128"
    if with_dq and (head_dim <= 64 and tile.b_r != 128 or head_dim > _WIDE and tile.b_r != 64):
        return f"dQ of b_r={tile.b_r} rows does not divide between two warp groups"
    if with_dq and tile.b_r % 64 == 0 and 64 < head_dim <= _WIDE and tile.b_r != 64:
        return f"dQ of b_r={tile.b_r} rows by 64 columns is more than a warp group multiplies"
    if not 2 <= tile.num_stages <= 4:
        return f"num_stages={tile.num_stages} is not from 2 to 4"
    accumulators = tile.b_r + head_dim if head_dim <= _WIDE else tile.b_r + head_dim // 2
    if accumulators > 208:
        return f"its accumulators take {accumulators} of the 208 registers that a thread has for them"
    return None
