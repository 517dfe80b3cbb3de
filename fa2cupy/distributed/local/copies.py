"""Copies between arrays of one shape and dtype, and between parts of them, at the speed of memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from ...numerics.arrays import is_on_host
from ...problem.array_types import Array
from .copy_kernel import copy_matrices, works_of
from .kernels import Work
from .matrices import Matrix, is_few, matrices_of

__all__ = [
    "Copy",
    "copy",
    "copy_parts",
    "divided",
    "matrices_with_addresses",
    "part_of",
    "word_layout",
    "works_of_copy",
]

#: A copy of a part of an array to a part of another one, of one dtype and number of axes: (target, the first element
#: of its part, source, the first element of its part, shape of both parts).
Copy: TypeAlias = "tuple[Any, tuple[int, ...], Any, tuple[int, ...], tuple[int, ...]]"

_WORD, _DTYPE = 8, "uint64"
#: A copy of fewer bytes takes less time than making the views that would speed it up.
_LARGE = 1 << 16


def copy(target: Array, source: Array) -> None:
    """Copies an array to a view of the same shape."""
    if not is_on_host(target) and target.dtype == source.dtype:
        target, source = _in_words(target, source)
    target[...] = source


def works_of_copy(target: Array, source: Array) -> Iterator[Work] | None:
    """The launches of a kernel that make a copy; None if it has another dtype, or is of many matrices."""
    if target.dtype != source.dtype:
        return None
    start = (0,) * target.ndim
    matrices, others = divided([(target, start, source, start, target.shape)])
    return None if others else works_of(matrices)


def copy_parts(copies: Sequence[Copy]) -> None:
    """Makes copies between arrays of one library. On a GPU, one kernel makes all those that are a few matrices each."""
    matrices, others = divided(copies)
    for target, source in others:
        copy(target, source)
    if matrices:
        copy_matrices(matrices)


def divided(copies: Sequence[Copy]) -> tuple[list[Matrix], list[tuple[Array, Array]]]:
    """The matrices of those copies that one kernel makes, and targets and sources of the others."""
    on_host = bool(copies) and is_on_host(copies[0][0])
    together: list[Copy] = []
    others: list[tuple[Array, Array]] = []
    for one in copies:
        target, target_start, source, source_start, shape = one
        if not on_host and is_few(shape, target.strides, target.itemsize, source.strides):
            together.append(one)
        elif 0 not in shape:
            others.append((part_of(target, target_start, shape), part_of(source, source_start, shape)))
    return matrices_with_addresses(together), others


def part_of(array: Array, start: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """A view of a part."""
    return array[tuple(map(slice, start, map(operator.add, start, shape)))]


def matrices_with_addresses(copies: Sequence[Copy]) -> list[Matrix]:
    """The matrices of copies between arrays on GPUs."""
    found = []
    for target, target_start, source, source_start, shape in copies:
        if 0 in shape:
            continue
        to, of = target.data.ptr, source.data.ptr
        parts = matrices_of(shape, target.strides, source.strides, target.itemsize, target_start, source_start)
        for a, a_pitch, b, b_pitch, width, height in parts:
            found.append(Matrix(to + a, a_pitch, of + b, b_pitch, width, height))
    return found


def _in_words(*arrays: Any) -> Sequence[Any]:
    """CuPy arrays of one shape as words of 8 bytes; as they are if they are small, or have rows of other lengths.

    CuPy's kernels copy strided arrays element by element, which is slow for elements of 16 bits.
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
