"""Grids of tokens whose queries see windows of keys, and the boxes of tokens that kernels have as tiles there."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["BoxShapes", "Boxes", "Grid", "Lengths", "SequenceAxis", "sequence_axis"]

#: Tokens along x, y and z. Tokens along x follow each other in memory.
Lengths: TypeAlias = tuple[int, ...]


class Grid(NamedTuple):
    """The tokens of a sequence, and the windows of keys that they see.

    Attributes
    ----------
    lengths : tuple of int
        Tokens along x, y and z.
    before, sizes : tuple of int
        Along each axis, how far before a query its window begins, and how long it is.
    is_clamped : bool
        True if windows are moved inside at borders, False if they are cut off there.
    """

    lengths: Lengths
    before: Lengths
    sizes: Lengths
    is_clamped: bool

    def limits(self, axis: int) -> tuple[int, int]:
        """The least and the most positions at which windows begin along an axis, ahead of what is cut off."""
        if self.is_clamped:
            return 0, self.lengths[axis] - self.sizes[axis]
        return -self.before[axis], self.lengths[axis]

    def window(self, axis: int, first: int, queries: int) -> tuple[int, int]:
        """The keys along an axis that any of some queries sees: the first one, and the one behind the last."""
        length, (least, most) = self.lengths[axis], self.limits(axis)
        last = min(first + queries, length) - 1
        begin, end = (min(max(query - self.before[axis], least), most) for query in (first, last))
        return max(begin, 0), min(end + self.sizes[axis], length)

    def queries(self, axis: int, first: int, keys: int) -> tuple[int, int]:
        """The queries along an axis that see any of some keys: the first one, and the one behind the last."""
        length, before, (least, most) = self.lengths[axis], self.before[axis], self.limits(axis)
        last = min(first + keys, length) - 1
        begin = 0 if least > first - self.sizes[axis] else max(first - self.sizes[axis] + before + 1, 0)
        return begin, length if most <= last else min(last + before + 1, length)


class BoxShapes(NamedTuple):
    """Tokens along x, y and z of the boxes that are tiles of queries and of keys."""

    queries: Lengths
    keys: Lengths

    def __str__(self) -> str:
        return "by".join("x".join(map(str, box)) for box in self)


class Boxes(NamedTuple):
    """A grid, and the boxes of a kernel.

    Attributes
    ----------
    grid : Grid
    shapes : BoxShapes
    owned : str
        The boxes that blocks own, ``"queries"`` or ``"keys"``. They divide the grid.
    """

    grid: Grid
    shapes: BoxShapes
    owned: str = "queries"

    @property
    def along(self) -> Lengths:
        """The boxes along each axis that blocks own."""
        own = getattr(self.shapes, self.owned)
        return tuple(-(-length // box) for length, box in zip(self.grid.lengths, own, strict=True))

    @property
    def steps(self) -> Counter[int]:
        """How many boxes that blocks own see how many of the others."""
        own, others = self.shapes if self.owned == "queries" else self.shapes[::-1]
        seen_by = self.grid.window if self.owned == "queries" else self.grid.queries
        steps = Counter({1: 1})
        for axis, length in enumerate(self.grid.lengths):
            seen = [seen_by(axis, first, own[axis]) for first in range(0, length, own[axis])]
            along = Counter(-(-(end - begin) // others[axis]) for begin, end in seen)
            product: Counter[int] = Counter()
            for (count, tiles), (more, tiles_along) in itertools.product(steps.items(), along.items()):
                product[count * more] += tiles * tiles_along
            steps = product
        return steps

    @property
    def num_steps(self) -> int:
        """The boxes of the other side that all boxes that blocks own see."""
        return sum(count * tiles for count, tiles in self.steps.items())


class SequenceAxis(NamedTuple):
    """One axis that stands for the heads and the sequences of an array.

    Head h of sequence b has the index ``head * h + batch * b``, and `stride` elements lie between indices.
    """

    head: int
    batch: int
    stride: int

    def at(self, head: int, batch: int) -> int:
        """The index of a head of a sequence."""
        return self.head * head + self.batch * batch


def sequence_axis(sizes: Sequence[int], strides: Sequence[int]) -> SequenceAxis:
    """The axis of an array, from lengths and element strides of its batch, row and head axes."""
    batch, head = (0 if size <= 1 else stride for size, stride in zip(sizes[::2], strides[::2], strict=True))
    stride = math.gcd(batch, head)
    return SequenceAxis(head // stride, batch // stride, stride) if stride else SequenceAxis(0, 0, 8)
