"""Copies between arrays of one shape and dtype, at the speed of memory."""

from __future__ import annotations

from typing import Any

from ..problem.array_types import Array
from .messages import is_on_host

__all__ = ["copy", "word_layout"]

_WORD, _DTYPE = 8, "uint64"
#: Bytes from which on a copy takes longer than the views that make it fast.
_LARGE = 1 << 16


def copy(target: Array, source: Array) -> None:
    """Copies an array to a view of the same shape.

    CuPy copies strided arrays an element at a time, which is slow for those of 16 bits. Large arrays are therefore
    copied as words of 8 bytes where all rows consist of them.
    """
    if target.nbytes >= _LARGE and not is_on_host(target) and target.dtype == source.dtype:
        words = _in_words(target), _in_words(source)
        if words[0] is not None and words[1] is not None:
            target, source = words
    target[...] = source


def _in_words(array: Any) -> Any:
    import cupy

    layout = word_layout(array.shape, array.strides, array.itemsize, array.data.ptr)
    return None if layout is None else cupy.ndarray(layout[0], _DTYPE, array.data, layout[1])


def word_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape and strides of an array as words; None if its rows do not consist of whole words."""
    *outer, row_stride = strides
    nbytes = shape[-1] * itemsize
    if row_stride != itemsize or itemsize >= _WORD or any(number % _WORD for number in (nbytes, address, *outer)):
        return None
    return (*shape[:-1], nbytes // _WORD), (*outer, _WORD)
