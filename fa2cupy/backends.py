"""The backend of a call: ``cpu`` for NumPy arrays, ``gpu`` for CuPy arrays."""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import numpy as np

from .cpu import calls as cpu
from .problem.arguments import array_backend

__all__ = ["backend_of"]


def backend_of(name: str, array: object) -> ModuleType:
    """The module with the calls for an array; `name` is the argument's name in errors."""
    if isinstance(array, np.ndarray):
        return cpu
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        array_backend({name: array})  # raises TypeError and says how to convert the array
    return _gpu()


@functools.lru_cache(maxsize=None)
def _gpu() -> ModuleType:
    # Imported at first use, because calls on NumPy arrays must not need CuPy.
    from .gpu import calls as gpu

    return gpu
