"""The arithmetic between attention calls: sums of shares, in the dtype of lse and in a fixed order."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...numerics.arrays import is_on_host
from ...plan.ranks import LONGEST_WORD, SUMS_OF_BLOCK, sum_spec
from ...problem.array_types import Array
from ...problem.dtypes import ACCUMULATOR, DTYPES
from .kernels import Work, launch

__all__ = ["clear", "launches_of", "subtract", "sum_into", "works_of"]

#: A launch takes at most so many shares (a record has at most 4 KiB), fewer words than this, and so many axes.
_MOST_SHARES, _MOST_WORDS, _AXES = 64, 1 << 31, 4


def clear(target: Array) -> None:
    """Writes zeros."""
    target[...] = 0


def subtract(target: Array, first: Array, second: Array) -> None:
    """Writes a difference."""
    target[...] = first - second


def sum_into(target: Array, shares: Sequence[Array], wide: str) -> None:
    """Writes the sum of shares: they have the target's dtype, are added up in the dtype `wide`, and rounded once.

    Without shares the sum is zero.
    """
    works = works_of(target, shares, wide)
    if not shares:
        clear(target)
    elif works is None:
        total = shares[0].astype(wide)
        for share in shares[1:]:
            total += share.astype(wide, copy=False)
        target[...] = total
    else:
        for work in works:
            launch(work)


def works_of(target: Array, shares: Sequence[Array], wide: str) -> list[Work] | None:
    """The launches that sum shares; None if no kernel does."""
    dtype = _of_kernel(target.dtype, wide)
    if is_on_host(target) or not 0 < len(shares) <= _MOST_SHARES or dtype is None:
        return None
    places = tuple(range(3, 3 + 5 * (1 + len(shares)), 5))
    return [
        Work(sum_spec, (dtype, items), -(-words // SUMS_OF_BLOCK), record, places)
        for items, words, record in launches_of(target, shares)
    ]


@functools.lru_cache(maxsize=None)
def _of_kernel(dtype: np.dtype, wide: str) -> str | None:
    """The dtype's name if the kernel adds it up in `wide`, which it does not for a score function's float64 array."""
    return dtype.name if dtype.name in DTYPES and ACCUMULATOR[dtype.name] == wide else None


def launches_of(target: Any, shares: Sequence[Any]) -> Iterator[tuple[int, int, bytes]]:
    """Yields for each launch the elements of a word, the number of words and the front of the record."""
    arrays = (target, *shares)
    addresses = [array.data.ptr for array in arrays]
    is_aligned = functools.reduce(operator.or_, addresses) % LONGEST_WORD == 0
    layout = _layout(target.shape, tuple([array.strides for array in arrays]), target.itemsize, is_aligned)
    if layout is None:
        for index in range(len(target)):
            yield from launches_of(target[index], [share[index] for share in shares])
        return
    items, words, lengths, strides = layout
    if not words:
        return
    values = [n for address, own in zip(addresses, strides, strict=True) for n in (address, *own)]
    yield items, words, struct.pack(f"<6I{len(values)}q", len(shares), words, *lengths, *values)


@functools.lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], itemsize: int, is_aligned: bool
) -> tuple[int, int, list[int], list[list[int]]] | None:
    """The elements of a word, the number of words, the lengths of the axes, and the strides of each array.

    None if a launch does not take so many words or axes. `is_aligned` says that all arrays begin where words may.
    """
    axes, size = _merged(shape, strides), math.prod(shape)
    if size >= _MOST_WORDS or len(axes) > _AXES:
        return None
    length, *steps = axes[-1]
    items = LONGEST_WORD // itemsize
    others = [length * itemsize, *(stride for _, *own in axes[:-1] for stride in own)]
    if not is_aligned or any(step != itemsize for step in steps) or any(number % LONGEST_WORD for number in others):
        items = 1
    axes = [(1, *[0] * len(strides))] * (_AXES - len(axes)) + axes[:-1]
    axes.append((length // items, *[items * step for step in steps]))
    lengths, *own = map(list, zip(*axes, strict=True))
    return items, size // items, lengths, own


def _merged(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Lengths and strides of the axes, without those of length 1; axes are merged if all arrays allow it."""
    merged: list[tuple[int, ...]] = []
    for length, *own in zip(shape, *strides, strict=True):
        if merged and all(outer == length * inner for outer, inner in zip(merged[-1][1:], own, strict=True)):
            merged[-1] = (merged[-1][0] * length, *own)
        elif length != 1:
            merged.append((length, *own))
    return merged or [(1, *[0] * len(strides))]
