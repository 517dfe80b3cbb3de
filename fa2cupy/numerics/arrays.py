"""Operations of the references that differ between NumPy and CuPy."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np

from ..problem.array_types import Array

__all__ = ["array_module", "device_context", "has_cublas", "matmul"]


def array_module(array: Array) -> ModuleType:
    """``numpy`` or ``cupy``, whichever the array belongs to. CuPy is not imported for it."""
    cupy = sys.modules.get("cupy")
    return cupy.get_array_module(array) if cupy else np


@contextlib.contextmanager
def device_context(array: Array) -> Iterator[None]:
    """Makes the array's device current, and silences NumPy's floating-point warnings.

    The warnings come from infinities, which masked rows and overflows of a baseline have.
    """
    with contextlib.nullcontext() if isinstance(array, np.ndarray) else array.device, np.errstate(all="ignore"):
        yield


def matmul(a: Array, b: Array) -> Array:
    """Product of two matrices of one module."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or has_cublas():
        return a @ b
    return array_module(a).asarray(a.get() @ b.get())


@functools.lru_cache(maxsize=None)
def has_cublas() -> bool:
    """True if CuPy can multiply matrices. Nothing else here needs cuBLAS; without it, the host multiplies."""
    try:
        from cupy_backends.cuda.libs import cublas  # noqa: F401  # the import is the test
    except ImportError:
        return False
    return True
