"""What the references need and NumPy and CuPy do differently."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator

import numpy as np

__all__ = ["array_module", "device_context", "has_cublas", "matmul"]


def array_module(array):
    """``numpy`` or ``cupy``, whichever the array is of. CuPy is not imported for it."""
    cupy = sys.modules.get("cupy")
    return cupy.get_array_module(array) if cupy else np


@contextlib.contextmanager
def device_context(array) -> Iterator[None]:
    """New CuPy arrays go where `array` is; infinities, of masked rows or a baseline's overflow, warn nobody."""
    with contextlib.nullcontext() if isinstance(array, np.ndarray) else array.device, np.errstate(all="ignore"):
        yield


def matmul(a, b):
    """Product of two matrices of one module."""
    if isinstance(a, np.ndarray) or has_cublas():
        return a @ b
    return array_module(a).asarray(a.get() @ b.get())


@functools.lru_cache(maxsize=None)
def has_cublas() -> bool:
    """Whether CuPy can multiply matrices. Nothing else here needs cuBLAS, and the host does it without."""
    try:
        from cupy_backends.cuda.libs import cublas  # noqa: F401
    except ImportError:
        return False
    return True
