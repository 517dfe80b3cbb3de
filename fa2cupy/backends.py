"""Which backend a call runs on: NumPy's for NumPy arrays, kernels for CuPy's."""

from __future__ import annotations

import functools
import sys

import numpy as np

from .cpu import calls as cpu
from .problem.arguments import array_backend

__all__ = ["backend_of"]


def backend_of(name: str, array):
    """The module with `forward`, `delta` and `backward` for an array; errors call the array by its name."""
    if isinstance(array, np.ndarray):
        return cpu
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        array_backend({name: array})  # says how to convert it
    return _gpu()


@functools.lru_cache(maxsize=None)
def _gpu():
    # Imported at first use: NumPy users need no CuPy, and CuPy is there once someone has an array of it.
    from .gpu import calls as gpu

    return gpu
