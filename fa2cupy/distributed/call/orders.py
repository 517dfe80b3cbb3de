"""The rows of each rank: which chunks of the whole sequence a rank has, and in which order.

``"zigzag"``: of ``2 * size`` equal chunks, rank ``r`` has chunk ``r`` and chunk ``2 * size - 1 - r``. Under a causal
mask each rank then has the same number of visible pairs of queries and keys. ``"contiguous"``: of ``size`` equal
chunks, rank ``r`` has chunk ``r``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

__all__ = ["ORDERS", "Chunk", "RowOrder", "check_order", "divisor", "length"]

ORDERS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """Neighbouring rows of the whole sequence that one rank has.

    Attributes
    ----------
    local : slice
        The rows among those of the rank.
    whole : slice
        The rows in the whole sequence.
    """

    local: slice
    whole: slice


def check_order(order: object) -> str:
    """Raises ValueError unless `order` is the name of an order."""
    if order not in ORDERS:
        raise ValueError(f"order: expected {' or '.join(map(repr, ORDERS))}, got {order!r}")
    return str(order)


def divisor(order: str, size: int) -> int:
    """The number that the length of a sequence must be a multiple of."""
    return 2 * size if order == "zigzag" and size > 1 else size


class RowOrder(NamedTuple):
    """The rows of all ranks.

    Attributes
    ----------
    order : {"zigzag", "contiguous"}
    size : int
        Number of ranks.
    seqlen : int
        Rows of the whole sequence: a multiple of ``divisor(order, size)``.
    """

    order: str
    size: int
    seqlen: int

    @property
    def local(self) -> int:
        """Rows of one rank."""
        return self.seqlen // self.size

    @property
    def is_zigzag(self) -> bool:
        """True if a rank has two chunks."""
        return self.order == "zigzag" and self.size > 1

    def of_hosts(self, ranks_per_host: int) -> RowOrder:
        """The rows of all hosts: the chunks of neighbouring ranks are neighbours, so that hosts are in order, too."""
        return RowOrder(self.order, self.size // ranks_per_host, self.seqlen)

    def within_host(self, ranks_per_host: int) -> RowOrder:
        """The rows of the ranks of a host, among those of the host."""
        return RowOrder(self.order, ranks_per_host, self.seqlen * ranks_per_host // self.size)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks of a rank, in the order of its rows."""
        return _chunks(self, rank)


@functools.lru_cache(maxsize=1024)  # asked for with each message
def _chunks(order: RowOrder, rank: int) -> tuple[Chunk, ...]:
    numbers = (rank, 2 * order.size - 1 - rank) if order.is_zigzag else (rank,)
    rows = order.local // len(numbers)
    return tuple(
        Chunk(slice(i * rows, (i + 1) * rows), slice(number * rows, (number + 1) * rows))
        for i, number in enumerate(numbers)
    )


def length(rows: slice) -> int:
    """The number of rows, or of heads."""
    return rows.stop - rows.start
