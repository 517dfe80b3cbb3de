"""The tile of a kernel: the compile-time parameters that do not follow from the problem."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass

from ..problem.conversions import Absent, explains_absence
from .operations import METHODS, TILED

__all__ = ["TileConfig", "has_tile_of", "requested_tile"]


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
        Tiles of the inner loop that shared memory holds at a time: with 2, one is copied while another is used.
    blocks_per_sm : int, optional
        Resident thread blocks on a multiprocessor for which the compiler limits registers.
    cluster : int, optional
        Blocks that divide the keys of a tile of ``decode`` and merge their results through shared memory.

    Examples
    --------
    >>> TileConfig(128, 64, num_warps=4, num_stages=2)
    TileConfig(b_r=128, b_c=64, num_warps=4, num_stages=2, blocks_per_sm=1, cluster=1)
    """

    b_r: int
    b_c: int
    num_warps: int
    num_stages: int = 1
    blocks_per_sm: int = 1
    cluster: int = 1

    def __post_init__(self) -> None:
        for name in ("b_r", "b_c", "num_warps", "num_stages", "blocks_per_sm", "cluster"):
            value = getattr(self, name)
            if isinstance(value, Absent):
                raise TypeError(value.text({}))
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise ValueError(f"{name}: expected a positive int, got {value!r}")
            object.__setattr__(self, name, int(value))

    @property
    def num_threads(self) -> int:
        """Threads in a block."""
        return 32 * self.num_warps

    def __str__(self) -> str:
        blocks = f", {self.blocks_per_sm} blocks/SM" if self.blocks_per_sm > 1 else ""
        cluster = f", clusters of {self.cluster}" if self.cluster > 1 else ""
        return f"{self.b_r}x{self.b_c}, {self.num_warps} warps, {self.num_stages} stages{blocks}{cluster}"


explains_absence(TileConfig.__init__)


def requested_tile(operation: str, config: object) -> TileConfig | None:
    """The caller's tile for one kernel; None if `config` has none for it.

    Raises
    ------
    TypeError, ValueError
        `config` is not None, a TileConfig, or a mapping from operations to them.
    """
    if not isinstance(config, Mapping):
        return _checked("config", config, "a TileConfig or a dict of them by operation")
    unknown = [name for name in config if name not in TILED]
    if unknown:
        raise ValueError(f"config: {unknown} are no operations; those are {list(TILED)}")
    tiles = {name: _checked(f"config[{name!r}]", tile, "a TileConfig") for name, tile in config.items()}
    return tiles.get(operation)


def has_tile_of(method: str, config: object) -> bool:
    """True if the caller's tiles by operation have one of a method."""
    return isinstance(config, Mapping) and any(operation in config for operation in METHODS[method])


def _checked(name: str, tile: object, expected: str) -> TileConfig | None:
    if not isinstance(tile, TileConfig | None):
        raise TypeError(f"{name}: expected {expected}, got {type(tile).__name__}{_tile_of(tile)}")
    return tile


def _tile_of(value: object) -> str:
    """The end of a message: the tile that a caller has written as a tuple."""
    if not isinstance(value, tuple | list):
        return ""
    return f"; write fa2cupy.TileConfig({', '.join(map(repr, value))}{'' if len(value) > 2 else ', num_warps=4'})"
