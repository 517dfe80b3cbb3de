"""Tiles of the Hopper kernels by query tiles: what they cost, and when they are legal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tiles import TileConfig

__all__ = ["dq_bytes", "forward_bytes", "why_no_dq", "why_no_forward"]

_SHARED_BYTES = 227 * 1024


def forward_bytes(head_dim: int, tile: TileConfig) -> int:
    """Dynamic shared memory of the forward."""
    # As kernels/sm90/forward_shape.cuh has it: panels of 64 columns; O gets a buffer if one fits, and Q a second.
    row = -(-head_dim // 64) * 128
    queries = tile.b_r * row
    barriers = 8 * (4 + 4 * tile.num_stages + 2 * 4) + 4 * 32 + 4 * tile.num_threads
    fixed = 1024 + 2 * tile.num_stages * tile.b_c * row + barriers
    return next((n for n in (fixed + 3 * queries, fixed + 2 * queries) if n <= _SHARED_BYTES), fixed + queries)


def dq_bytes(head_dim: int, tile: TileConfig) -> int:
    """Dynamic shared memory of the dQ kernel."""
    # As kernels/sm90/backward_dq_shape.cuh has it: dQ gets a buffer if one fits, and Q and dO a second each.
    row = -(-head_dim // 64) * 128
    queries, keys = tile.b_r * row, tile.b_c * row
    fixed = 1024 + 8 * (8 + 4 * tile.num_stages + 2 * 4) + 4 * 32
    most = (_SHARED_BYTES + 1024) // tile.blocks_per_sm - 1024
    two_and_two = tile.num_stages == 2 and fixed + 4 * keys + 2 * queries <= most
    ring = fixed + (4 if two_and_two else 2 * tile.num_stages - 1) * keys
    return next((n for n in (ring + 5 * queries, ring + 3 * queries) if n <= most), ring + 2 * queries)


def why_no_forward(tile: TileConfig, head_dim: int) -> str | None:
    """The reason why the forward cannot have this tile, or None if it can."""
    return _why_not(tile, head_dim, head_dim // 2 + tile.b_c // 2 + tile.b_c // 4, 25)


def why_no_dq(tile: TileConfig, head_dim: int) -> str | None:
    """The reason why the dQ kernel cannot have this tile, or None if it can."""
    # dQ, S and dP, besides which dS has no room of its own where registers are scarce.
    return _why_not(tile, head_dim, head_dim // 2 + tile.b_c, 32)


def _why_not(tile: TileConfig, head_dim: int, accumulators: int, operands: int) -> str | None:
    groups = tile.b_r // 64
    if tile.b_r % 64 or groups > 3 or tile.num_warps != 4 * (groups + 1):
        return (
            f"b_r={tile.b_r} and num_warps={tile.num_warps} are not 64 rows for each of up to three warp groups of 4 warps, "
            "and one more that loads"
        )
    if tile.b_c % 16 or tile.b_c > 256:
        return f"b_c={tile.b_c} is not a multiple of 16 up to 256"
    if not 2 <= tile.num_stages <= 4:
        return f"num_stages={tile.num_stages} is not from 2 to 4"
    if (groups, tile.blocks_per_sm) not in ((1, 2), (2, 1), (3, 1)):
        return f"blocks_per_sm={tile.blocks_per_sm}: a multiprocessor has 2 blocks of one multiplying warp group, or 1 of more"
    at_entry, available = {1: (128, 232), 2: (168, 240), 3: (128, 160)}[groups]  # the second is what setmaxnreg leaves them
    if max(head_dim, tile.b_c) // 2 + 30 > at_entry:
        return f"one product's operands do not fit in the {at_entry} registers that a thread starts with"
    if accumulators + operands > available:
        return f"its accumulators take {accumulators} of the {available} registers that a thread can have"
    return None
