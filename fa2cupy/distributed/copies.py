"""Copies between arrays of one shape and dtype, at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..problem.array_types import Array
from .messages import is_on_host

__all__ = ["copy", "in_words", "word_layout"]

_WORD, _DTYPE = 8, "uint64"
#: Bytes from which on a copy takes longer than the views that make it fast.
_LARGE = 1 << 16


def copy(target: Array, source: Array) -> None:
    """Copies an array to a view of the same shape."""
    if not is_on_host(target) and target.dtype == source.dtype:
        target, source = in_words(target, source)
    target[...] = source


def in_words(*arrays: Any) -> Sequence[Any]:
    """CuPy arrays of one shape as words of 8 bytes where all rows consist of them; else, and if they are small, as is.

    CuPy's kernels take strided arrays an element at a time, which is slow for those of 16 bits.
    """
    if arrays[0].nbytes < _LARGE:
        return arrays
    import cupy

    layouts = [word_layout(array.shape, array.strides, array.itemsize, array.data.ptr) for array in arrays]
    pairs = zip(arrays, layouts, strict=True)
    words = [cupy.ndarray(layout[0], _DTYPE, array.data, layout[1]) for array, layout in pairs if layout is not None]
    return words if len(words) == len(arrays) else arrays


def word_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, address: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape and strides of an array as words; None if its rows do not consist of whole words."""
    *outer, row_stride = strides
    nbytes = shape[-1] * itemsize
    if row_stride != itemsize or itemsize >= _WORD or any(number % _WORD for number in (nbytes, address, *outer)):
        return None
    return (*shape[:-1], nbytes // _WORD), (*outer, _WORD)
