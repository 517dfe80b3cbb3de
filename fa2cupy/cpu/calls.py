"""The calls of the package on NumPy arrays."""

from __future__ import annotations

from .attention import backward, default_tile, delta, forward
from .decode import decode
from .merge import merge
from .second_order import backward_jvp, double_backward, jvp, output_jvp
from .tile_states import copied, tile_states

__all__ = [
    "backward",
    "backward_jvp",
    "copied",
    "decode",
    "default_tile",
    "delta",
    "double_backward",
    "forward",
    "jvp",
    "merge",
    "output_jvp",
    "tile_states",
]
