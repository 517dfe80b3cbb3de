"""The calls of the package on NumPy arrays."""

from __future__ import annotations

from .attention import backward, default_tile, delta, forward
from .decode import decode
from .merge import merge
from .tile_states import tile_states

__all__ = ["backward", "decode", "default_tile", "delta", "forward", "merge", "tile_states"]
