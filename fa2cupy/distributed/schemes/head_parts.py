"""The arrays that travel by groups of heads: their parts with the rows of one rank and the heads of another one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ...problem.array_types import Array
from ..call.orders import RowOrder
from ..movers.move import Shape

__all__ = ["GroupPart", "GroupedShape", "Route", "landed_of_group", "parts_of_group"]


class GroupedShape(NamedTuple):
    """The shape of an array that travels by groups of heads.

    Attributes
    ----------
    order : RowOrder
    sizes : tuple of int
        The shape of the array of this rank's rows and all heads.
    axes : tuple of int
        The axis of rows and the axis of heads.
    heads : tuple of (int, int)
        Where the heads of each group begin and end, among those of a rank; (0, 1) if the array has one head for all.
    """

    order: RowOrder
    sizes: tuple[int, ...]
    axes: tuple[int, int]
    heads: tuple[tuple[int, int], ...]

    def with_sizes(self, rows: int, heads: int, of: Sequence[int]) -> tuple[int, ...]:
        """The numbers `of` for each axis, but `rows` and `heads` for those of rows and heads."""
        numbers = list(of)
        numbers[self.axes[0]], numbers[self.axes[1]] = rows, heads
        return tuple(numbers)

    def whole(self, group: int) -> tuple[int, ...]:
        """The shape of all rows of the heads of a group."""
        return self.with_sizes(self.order.seqlen, self.width(group), self.sizes)

    def width(self, group: int) -> int:
        """The number of heads of a group."""
        start, stop = self.heads[group]
        return stop - start

    def first_head(self, rank: int, group: int) -> int:
        """The first head of a group of a rank."""
        return 0 if self.is_shared else rank * self.heads[-1][1] + self.heads[group][0]

    @property
    def is_shared(self) -> bool:
        """True if the array has one head, which is that of all."""
        return self.sizes[self.axes[1]] == 1

    def is_again(self, group: int) -> bool:
        """True if a group has the heads of the group before."""
        return group > 0 and self.heads[group] == self.heads[group - 1]


class GroupPart(NamedTuple):
    """Where a part begins in an array of a group's heads, where it begins in an array of a rank's rows, its shape."""

    whole: tuple[int, ...]
    own: tuple[int, ...]
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def parts_of_group(shape: GroupedShape, rows_of: int, heads_of: int, group: int) -> tuple[GroupPart, ...]:
    """The parts with the rows of one rank and the heads of another rank's group."""
    zeros = (0,) * len(shape.sizes)
    head = shape.first_head(heads_of, group)
    return tuple(
        GroupPart(
            shape.with_sizes(chunk.whole.start, 0, zeros),
            shape.with_sizes(chunk.local.start, head, zeros),
            shape.with_sizes(chunk.local.stop - chunk.local.start, shape.width(group), shape.sizes),
        )
        for chunk in shape.order.chunks(rows_of)
    )


@functools.lru_cache(maxsize=4096)
def landed_of_group(shape: GroupedShape, heads_of: int, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the heads of a rank's group begin in an array of this rank's rows, and the shape of that part."""
    start = shape.with_sizes(0, shape.first_head(heads_of, group), (0,) * len(shape.sizes))
    return start, shape.with_sizes(shape.order.local, shape.width(group), shape.sizes)


class Route(NamedTuple):
    """An array of a rank's rows that travels by groups of heads."""

    array: Array
    shape: GroupedShape

    def whole(self, group: int) -> Shape:
        """Shape and dtype of all rows of the heads of a group."""
        return Shape(self.shape.whole(group), self.array.dtype)
