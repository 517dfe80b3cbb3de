"""The number of blocks that share the work on a tile, where tiles are too few to fill the GPU."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ..problem.attention import AttentionProblem
from ..problem.options import MAX_SPLITS
from .device import DeviceInfo
from .family import Family
from .tile import TileConfig

__all__ = ["choose_num_splits"]


def choose_num_splits(
    operation: str, family: Family, problem: AttentionProblem, tile: TileConfig, device: DeviceInfo
) -> int:
    """The number of shares of a tile for which the launch, with the sum of the shares, is estimated to end first."""
    return 1
