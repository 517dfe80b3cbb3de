"""Operations on arrays of either library, where NumPy and CuPy differ."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np

from ..problem.arguments import array_backend, check_array
from ..problem.array_types import Array

__all__ = ["array_module", "device_context", "has_cublas", "is_on_host", "matmul", "stacked"]


def is_on_host(array: object) -> bool:
    """True for a NumPy array."""
    return isinstance(array, np.ndarray)


def array_module(array: Array) -> ModuleType:
    """``numpy`` or ``cupy``, whichever the array belongs to. CuPy is not imported for it.

    CuPy imports modules to answer, which threads with NumPy arrays must not do at the same time.
    """
    cupy = None if is_on_host(array) else sys.modules.get("cupy")
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


def stacked(name: str, parts: Array | Sequence[Array]) -> Array:
    """An array as it is, or those of a list or tuple as one array with an axis in front.

    Raises
    ------
    TypeError, ValueError
        The sequence is empty, or its elements are no arrays of one library, shape and dtype.
    """
    if not isinstance(parts, list | tuple):
        return parts
    if not parts:
        raise ValueError(f"{name}: expected at least one part, got an empty {type(parts).__name__}")
    labels = [f"{name}[{index}]" for index in range(len(parts))]
    array_backend(dict(zip(labels, parts, strict=True)))
    first = parts[0]
    for label, part in zip(labels, parts, strict=True):
        check_array(label, part, first.shape, first.dtype, labels[0])
    with device_context(first):
        whole = array_module(first).empty((len(parts), *first.shape), first.dtype)
        for index, part in enumerate(parts):
            whole[index] = part
    return whole
