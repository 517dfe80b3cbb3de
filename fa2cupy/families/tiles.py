"""Tile shapes: what a kernel is specialised by besides the problem, what it costs, and when it is legal."""

from __future__ import annotations

from dataclasses import dataclass

from .device import DeviceInfo
from .sm90_query_tiles import dq_bytes, forward_bytes, why_no_dq, why_no_forward
from .sm90_tiles import backward_bytes, why_no_backward

__all__ = ["OPERATIONS", "TileConfig", "fits_blocks", "padded_head_dim", "shared_memory_bytes", "why_illegal"]

#: Kernels whose tile is a choice. ``backward`` is the one kernel of ``single_pass``, the next two those of ``two_pass``.
OPERATIONS = ("forward", "backward", "backward_dq", "backward_dkdv")

_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MAX_REGISTERS = 255
_WIDE = 128  # above it, two warps share the rows of the sm80 forward


@dataclass(frozen=True)
class TileConfig:
    """The tile of one kernel: the template parameters that a sweep varies.

    Parameters
    ----------
    b_r : int
        Rows of a query tile (B_r of the FlashAttention-2 paper).
    b_c : int
        Rows of a key tile (B_c).
    num_warps : int
        Warps in a thread block.
    num_stages : int, optional
        Tiles of the inner loop that are in shared memory at a time: with 2, one is copied while another is used.
    blocks_per_sm : int, optional
        Thread blocks that the compiler leaves registers for on one multiprocessor.

    Examples
    --------
    >>> TileConfig(128, 64, num_warps=4, num_stages=2)
    TileConfig(b_r=128, b_c=64, num_warps=4, num_stages=2, blocks_per_sm=1)
    """

    b_r: int
    b_c: int
    num_warps: int
    num_stages: int = 1
    blocks_per_sm: int = 1

    def __post_init__(self) -> None:
        for name in ("b_r", "b_c", "num_warps", "num_stages", "blocks_per_sm"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a positive int, got {value!r}")

    @property
    def num_threads(self) -> int:
        """Threads in a block."""
        return 32 * self.num_warps

    def __str__(self) -> str:
        blocks = f", {self.blocks_per_sm} blocks/SM" if self.blocks_per_sm > 1 else ""
        return f"{self.b_r}x{self.b_c}, {self.num_warps} warps, {self.num_stages} stages{blocks}"


def padded_head_dim(family: str, head_dim: int) -> int:
    """Columns that a row occupies on chip."""
    # simt: whole warps of lanes. sm80: whole k-steps, and pairs of them where two warps share a row's columns. sm90: whole
    # k-steps (the panels in shared memory are wider).
    step = 32 if family == "simt" or (family == "sm80" and head_dim > _WIDE) else 16
    return -(-head_dim // step) * step


def shared_memory_bytes(operation: str, family: str, dtype: str, head_dim: int, tile: TileConfig) -> int:
    """Dynamic shared memory of a block; the kernels assert the same number."""
    if family == "sm90":
        by_queries = {"forward": forward_bytes, "backward_dq": dq_bytes}.get(operation)
        return by_queries(head_dim, tile) if by_queries else backward_bytes(operation, head_dim, tile)
    row = padded_head_dim(family, head_dim) * _ITEMSIZE[dtype]
    b_r, b_c = tile.b_r, tile.b_c
    if family == "simt":
        tiles = {
            "forward": 2 * b_c * row,
            "backward": 4 * b_c * row,
            "backward_dq": 2 * b_c * row,
            "backward_dkdv": 2 * b_r * row + 2 * b_r * _ITEMSIZE[dtype],
        }
        return tiles[operation] + b_r * b_c * _ITEMSIZE[dtype]
    if operation == "forward":
        exchange = 2 * b_r * b_c + 8 * b_r if head_dim > _WIDE else 0
        return b_r * row + tile.num_stages * 2 * b_c * row + exchange
    if operation == "backward_dq":
        return 2 * b_r * row + tile.num_stages * 2 * b_c * row
    ds_bytes = 2 * b_r * b_c * 2 if operation == "backward" else 0
    return 2 * b_c * row + tile.num_stages * 2 * b_r * row + ds_bytes + 2 * b_r * b_c + 4 * b_r * 4


def why_illegal(
    operation: str, family: str, dtype: str, head_dim: int, tile: TileConfig, device: DeviceInfo
) -> str | None:
    """The reason why a kernel cannot have this tile on this device, or None if it can."""
    rule = _SHAPE_RULES[family, operation](tile, padded_head_dim(family, head_dim), _ITEMSIZE[dtype])
    if rule:
        return rule
    if tile.num_threads > 1024:
        return f"num_warps={tile.num_warps} is more than the 32 of a block"
    needed = shared_memory_bytes(operation, family, dtype, head_dim, tile)
    if needed > device.shared_memory_per_block:
        return f"it needs {needed} bytes of shared memory, {device.name} has {device.shared_memory_per_block} for a block"
    return None


def fits_blocks(operation: str, family: str, dtype: str, head_dim: int, tile: TileConfig, device: DeviceInfo) -> bool:
    """Whether the device's shared memory holds as many blocks as the tile counts on."""
    needed = shared_memory_bytes(operation, family, dtype, head_dim, tile) + device.reserved_shared_memory
    return needed * tile.blocks_per_sm <= device.shared_memory_per_multiprocessor


def _register_rule(accumulators: int, operands: int, tile: TileConfig) -> str | None:
    # What the tile itself occupies, with room for operands and addresses: beyond it the compiler spills.
    available = min(_MAX_REGISTERS, 65536 // (tile.num_threads * tile.blocks_per_sm))
    if accumulators + operands > available:
        return f"its accumulators take {accumulators} of the {available} registers that a thread can have"
    return None


def _sm80_forward_rule(tile: TileConfig, head_dim: int) -> str | None:
    if head_dim <= _WIDE:
        return _sm80_query_rule(tile, head_dim, 1)
    pairs = tile.num_warps // 2
    if tile.b_c % 32:
        return f"b_c={tile.b_c} is not a multiple of 32"
    if tile.num_warps % 2 or pairs > 15 or tile.b_r % (16 * pairs) or tile.b_r // pairs not in (16, 32):
        return f"b_r={tile.b_r} does not give each pair of {tile.num_warps} warps 16 or 32 rows"
    if tile.num_stages > 4:
        return f"num_stages={tile.num_stages} is more than 4"
    return _register_rule(tile.b_r // pairs // 16 * (head_dim + tile.b_c) // 4, 40, tile)


def _sm80_query_rule(tile: TileConfig, head_dim: int, score_fragments: int) -> str | None:
    if tile.b_c % 16:
        return f"b_c={tile.b_c} is not a multiple of 16"
    if tile.b_r % (16 * tile.num_warps) or tile.b_r // tile.num_warps not in (16, 32, 64):
        return f"b_r={tile.b_r} does not give each of {tile.num_warps} warps 16, 32 or 64 rows"
    if tile.num_stages > 4:
        return f"num_stages={tile.num_stages} is more than 4"
    fragments = tile.b_r // tile.num_warps // 16
    return _register_rule(fragments * (head_dim + score_fragments * tile.b_c) // 2, 32, tile)


def _sm80_key_rule(tile: TileConfig, head_dim: int, with_dq: bool) -> str | None:
    pairs = tile.num_warps // 2
    if tile.num_warps % 2 or pairs > 15:
        return f"num_warps={tile.num_warps} is not an even number up to 30"
    if tile.b_c % (16 * pairs) or tile.b_c // pairs not in (16, 32, 64):
        return f"b_c={tile.b_c} does not give each of {pairs} pairs of warps 16, 32 or 64 keys"
    if tile.b_r % 16 or 2 * tile.b_r > tile.num_threads:
        return f"b_r={tile.b_r} is not a multiple of 16 with two threads a row"
    if tile.num_stages > 2:
        return f"num_stages={tile.num_stages} is more than 2"
    if with_dq and not any(_dq_split(tile, head_dim)):
        return f"dQ of {tile.b_r} x {head_dim} does not divide among {tile.num_warps} warps"
    fragments = tile.b_c // pairs // 16
    return _register_rule(fragments * (head_dim + tile.b_r) // 2, 32, tile)


def _dq_split(tile: TileConfig, head_dim: int) -> tuple[bool, bool]:
    # Whether dQ can be split 32 rows a warp (then columns must divide evenly), or 16.
    wide = tile.b_r % 32 == 0 and tile.num_warps % (tile.b_r // 32) == 0
    return (
        wide and (head_dim // 16) % (tile.num_warps // (tile.b_r // 32)) == 0,
        tile.num_warps % (tile.b_r // 16) == 0,
    )


def _simt_rule(row_name: str, column_name: str, matrices: int) -> object:
    def rule(tile: TileConfig, head_dim: int, itemsize: int) -> str | None:
        own, other = getattr(tile, row_name), getattr(tile, column_name)
        rows_per_warp = own // tile.num_warps
        if own % tile.num_warps or rows_per_warp not in (1, 2, 4, 8):
            return f"{row_name}={own} does not give each of {tile.num_warps} warps 1, 2, 4 or 8 rows"
        if other % (32 // rows_per_warp):
            return f"{column_name}={other} is not a multiple of {32 // rows_per_warp}"
        if tile.num_stages != 1:
            return f"num_stages={tile.num_stages}: the simt family has one stage"
        return _register_rule((matrices * rows_per_warp * head_dim // 32 + 16) * itemsize // 4, 16, tile)

    return rule


_SHAPE_RULES = {
    ("sm90", "forward"): lambda tile, d, _: why_no_forward(tile, d),
    ("sm90", "backward_dq"): lambda tile, d, _: why_no_dq(tile, d),
    ("sm90", "backward"): lambda tile, d, _: why_no_backward(tile, d, with_dq=True),
    ("sm90", "backward_dkdv"): lambda tile, d, _: why_no_backward(tile, d, with_dq=False),
    ("sm80", "forward"): lambda tile, d, _: _sm80_forward_rule(tile, d),
    ("sm80", "backward_dq"): lambda tile, d, _: _sm80_query_rule(tile, d, 2),
    ("sm80", "backward"): lambda tile, d, _: _sm80_key_rule(tile, d, True),
    ("sm80", "backward_dkdv"): lambda tile, d, _: _sm80_key_rule(tile, d, False),
    ("simt", "forward"): _simt_rule("b_r", "b_c", 2),
    ("simt", "backward"): _simt_rule("b_r", "b_c", 3),
    ("simt", "backward_dq"): _simt_rule("b_r", "b_c", 3),
    ("simt", "backward_dkdv"): _simt_rule("b_c", "b_r", 4),
}
