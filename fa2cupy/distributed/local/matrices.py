"""Parts of strided arrays as matrices of bytes, which copy engines take: rows of one length at a pitch."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple, TypeAlias

__all__ = ["Matrix", "is_few", "matrices_of"]

#: An array of more matrices is copied to a contiguous one first: each matrix takes the host about 3 us.
_MOST_MATRICES = 64
#: Length, stride in the target, stride in the source.
_Axis: TypeAlias = "tuple[int, int, int]"


class Matrix(NamedTuple):
    """A matrix of bytes to copy: where it begins in both arrays, its pitches and its size."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


@functools.lru_cache(maxsize=4096)
def matrices_of(
    shape: tuple[int, ...],
    target: tuple[int, ...],
    source: tuple[int, ...],
    itemsize: int,
    target_start: tuple[int, ...] | None = None,
    source_start: tuple[int, ...] | None = None,
) -> tuple[Matrix, ...]:
    """The matrices that a part of this shape consists of, in arrays with these strides."""
    width, rows, others = _layout(shape, target, source, itemsize)
    height, target_pitch, source_pitch = rows
    to, of = (
        sum(n * stride for n, stride in zip(start or (), strides, strict=False))
        for start, strides in ((target_start, target), (source_start, source))
    )
    found = []
    for places in itertools.product(*(range(length) for length, *_ in others)):
        pairs = list(zip(places, others, strict=True))
        first = to + sum(n * stride for n, (_, stride, _) in pairs), of + sum(n * stride for n, (_, _, stride) in pairs)
        found.append(Matrix(first[0], target_pitch, first[1], source_pitch, width, height))
    return tuple(found)


def _layout(
    shape: tuple[int, ...], target: tuple[int, ...], source: tuple[int, ...], itemsize: int
) -> tuple[int, _Axis, list[_Axis]]:
    """The bytes of a row of a matrix, the axis of its rows, and the axes along which there are further matrices."""
    axes = [one for one in zip(shape, target, source, strict=True) if one[0] != 1]
    width = itemsize
    while axes and axes[-1][1] == axes[-1][2] == width:
        width *= axes.pop()[0]
    merged: list[_Axis] = []
    for length, to, of in axes:
        if merged and merged[-1][1:] == (length * to, length * of):
            length *= merged.pop()[0]
        merged.append((length, to, of))
    pitched = [axis for axis in merged if min(axis[1:]) >= width]  # rows of a matrix do not overlap
    rows = max(pitched, default=(1, width, width))
    return width, rows, [axis for axis in merged if axis is not rows]


@functools.lru_cache(maxsize=4096)
def is_few(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, others: tuple[int, ...] | None = None
) -> bool:
    """True if arrays with these strides, or such an array and a contiguous one, have few matrices in common."""
    if others is None:
        others = tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    *_, axes = _layout(shape, strides, others, itemsize)
    return math.prod(length for length, *_ in axes) <= _MOST_MATRICES
