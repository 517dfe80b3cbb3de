"""The sm80 family for float32: products of float16 parts through ``mma.sync``, on Ampere and newer GPUs."""

from __future__ import annotations

from .device import DeviceInfo
from .family import Kernel, TileRow, register_shortage
from .float32_parts import PRODUCTS_OF_PARTS, Float32Parts, row_bytes_of_parts
from .tile import TileConfig

__all__ = ["SM80_FLOAT32", "Sm80Float32"]

#: For each kernel, the side whose rows its warps own, and the other side.
_SIDES = {"forward": ("b_r", "b_c"), "backward_dq": ("b_r", "b_c"), "backward_dkdv": ("b_c", "b_r")}
_WARP_ROWS = 16
_ROWS = (32, 64, 128)  # of a tile: strips of parts have 64 rows, and fill tiles of 128
_CHAIN = 64  # columns whose products are added in one chain


class Sm80Float32(Float32Parts):
    """Kernels of ``mma.sync``, ``ldmatrix`` and ``cp.async``, whose warps own 16 rows of queries or keys.

    None of them adds to dQ: there is no ``backward`` for ``single_pass``.
    """

    name = "sm80_float32"
    operations = tuple(_SIDES)
    min_compute_capability = 80
    largest_head_dim = 128
    default_methods = ("two_pass",)
    query_rows = key_rows = _ROWS
    warps = (2, 4, 8)
    # For each head_dim, the tile for the shared memory of the A100 first. None has been measured. Those beyond 128 are
    # for a v with fewer columns.
    tiles = {
        "forward": (
            TileRow(64, TileConfig(64, 64, 4, 1, 2)),
            TileRow(128, TileConfig(128, 64, 8)),
            TileRow(256, TileConfig(128, 32, 8)),
            TileRow(256, TileConfig(64, 32, 4)),
            TileRow(256, TileConfig(32, 32, 2)),
        ),
        "backward_dq": (
            TileRow(64, TileConfig(64, 64, 4, 2, 2)),
            TileRow(64, TileConfig(64, 32, 4, 1, 2)),
            TileRow(256, TileConfig(128, 32, 8)),
            TileRow(256, TileConfig(64, 32, 4)),
            TileRow(256, TileConfig(32, 32, 2)),
        ),
        "backward_dkdv": (
            TileRow(64, TileConfig(32, 64, 4, 2, 2)),
            TileRow(64, TileConfig(32, 64, 4, 1, 2)),
            TileRow(256, TileConfig(32, 128, 8)),
            TileRow(256, TileConfig(32, 64, 4)),
            TileRow(256, TileConfig(32, 32, 2)),
        ),
    }

    def is_default_on(self, device: DeviceInfo) -> bool:
        # Decided by the rates of the hardware: nobody has measured it yet.
        return device.float16_rate > PRODUCTS_OF_PARTS

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        is_forward = kernel.operation == "forward"
        row, row_v = row_bytes_of_parts(kernel.head_dim, kernel.head_dim_v, is_forward=is_forward)
        own, other = (getattr(tile, side) for side in _SIDES[kernel.operation])
        own_v = 0 if is_forward else own
        statistics = 2 * 2 * 4 * other if kernel.operation == "backward_dkdv" else 0
        return (own + tile.num_stages * other) * row + (own_v + other) * row_v + statistics

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        operation, _, head_dim, head_dim_v, _ = kernel
        own, other = _SIDES[operation]
        rows, others = getattr(tile, own), getattr(tile, other)
        why_not = self.why_not_columns(operation, head_dim, head_dim_v)
        if why_not:
            return why_not
        for side in (own, other):
            if getattr(tile, side) not in _ROWS:
                return f"{side}={getattr(tile, side)} is not 32, 64 or 128"
        if rows != _WARP_ROWS * tile.num_warps:
            return f"{own}={rows} does not give each of {tile.num_warps} warps {_WARP_ROWS} rows"
        most = 1 if operation == "forward" else 2
        if tile.num_stages > most:
            return f"num_stages={tile.num_stages} is more than {most}"
        if operation == "backward_dkdv" and 2 * others > tile.num_threads:
            return f"b_r={others} has less than two of {tile.num_threads} threads a row"
        sums = {"forward": head_dim_v, "backward_dq": head_dim, "backward_dkdv": head_dim + head_dim_v}[operation]
        scores = others // 2 * ((1 if operation == "forward" else 2) + (max(head_dim, head_dim_v) > _CHAIN))
        return register_shortage(sums // 2 + scores, 72, tile)


SM80_FLOAT32 = Sm80Float32()
