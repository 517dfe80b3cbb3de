"""The arithmetic between attention calls: sums of shares, in the dtype of lse and in a fixed order."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from ...numerics.arrays import is_on_host
from ...plan.ranks import LONGEST_WORD, SUMS_OF_BLOCK, sum_spec
from ...problem.array_types import Array
from ...problem.dtypes import ACCUMULATOR, DTYPES
from .kernels import launch

__all__ = ["clear", "launches_of", "subtract", "sum_into"]

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
    dtype = target.dtype.name
    if not shares:
        clear(target)
    elif (
        is_on_host(target)
        or len(shares) > _MOST_SHARES
        or dtype not in DTYPES
        or ACCUMULATOR[dtype] != wide  # a score function's float64 array
    ):
        total = shares[0].astype(wide)
        for share in shares[1:]:
            total += share.astype(wide, copy=False)
        target[...] = total
    else:
        for items, words, record in launches_of(target, shares):
            launch(sum_spec, (dtype, items), -(-words // SUMS_OF_BLOCK), record)


def launches_of(target: Any, shares: Sequence[Any]) -> Iterator[tuple[int, int, bytes]]:
    """Yields for each launch the elements of a word, the number of words and the front of the record."""
    if target.size == 0:
        return
    arrays, itemsize = (target, *shares), target.itemsize
    axes = _merged(target.shape, [array.strides for array in arrays])
    if target.size >= _MOST_WORDS or len(axes) > _AXES:
        for index in range(len(target)):
            yield from launches_of(target[index], [share[index] for share in shares])
        return
    addresses = [array.data.ptr for array in arrays]
    length, *strides = axes[-1]
    items = LONGEST_WORD // itemsize
    others = [length * itemsize, *addresses, *(stride for _, *own in axes[:-1] for stride in own)]
    if any(stride != itemsize for stride in strides) or any(number % LONGEST_WORD for number in others):
        items = 1
    axes = [(1, *[0] * len(arrays))] * (_AXES - len(axes)) + axes[:-1]
    axes.append((length // items, *[items * stride for stride in strides]))
    words = target.size // items
    values = [n for number, address in enumerate(addresses) for n in (address, *(axis[1 + number] for axis in axes))]
    lengths = [axis[0] for axis in axes]
    yield items, words, struct.pack("<6I" + "5q" * len(arrays), len(shares), words, *lengths, *values)


def _merged(shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Lengths and strides of the axes, without those of length 1; axes are merged if all arrays allow it."""
    merged: list[tuple[int, ...]] = []
    for length, *own in zip(shape, *strides, strict=True):
        if merged and all(outer == length * inner for outer, inner in zip(merged[-1][1:], own, strict=True)):
            merged[-1] = (merged[-1][0] * length, *own)
        elif length != 1:
            merged.append((length, *own))
    return merged or [(1, *[0] * len(strides))]
