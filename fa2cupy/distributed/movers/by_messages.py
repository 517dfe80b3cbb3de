"""Moves by messages: what is not contiguous is packed, sent, and unpacked, all on the lane of messages.

A part whose place is contiguous is a message of its own, which arrives there. All other parts of one dtype that go to
the same rank are one message. Both ranks know from the shapes alone which parts these are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ...problem.array_types import Array
from ..local.copies import Copy, copy_parts, part_of
from ..local.lanes import Lane
from ..transport.windows import Signal
from .move import Late, Memory, Move, Mover, Moves, Shape
from .resources import Resources

__all__ = ["ByMessages"]

#: An array, the first element of a part of it, and the shape of that.
_Part: TypeAlias = "tuple[Array, tuple[int, ...], tuple[int, ...]]"


class ByMessages(Mover):
    """Moves by messages: see `Mover`.

    Messages are in order on one lane. Their buffers therefore serve one step after the other, and whatever is queued
    after the kernels that read a step may overwrite it.
    """

    ahead = 2

    def __init__(self, own: Resources):
        super().__init__(own)
        self._arrived: dict[tuple[Signal, int], Any] = {}
        self._buffers: dict[tuple[bool, int, int], Array] = {}

    def begin(self, shapes: Sequence[Shape], results: Sequence[Array], steps: int) -> tuple[list[Memory], list[Memory]]:
        """See `Mover`."""
        arrays = [self.own.empty(one.shape, one.dtype) if one.is_read else None for one in shapes]
        plain = [Memory(one.shape, array, array) for one, array in zip(shapes, arrays, strict=True)]
        return plain, [Memory(x.shape, None, x) for x in results]

    def put(self, kind: Signal, step: int, moves: Moves, late: Late | None = None, is_idle: bool = False) -> None:
        """See `Mover`."""
        own = self.own
        each = [moves]
        if late is not None:
            each.append(late[0])
            own.comm.wait(late[1])
        sends: list[tuple[Array, int]] = []
        recvs: list[tuple[Array, int]] = []
        packed: list[Copy] = []
        unpacked: list[Copy] = []
        for distance in range(1, own.size):
            to, source = (own.rank + distance) % own.size, (own.rank - distance) % own.size
            sends += self._messages(to, [move for one in each for move in one(own.rank, to, step)], True, packed)
            recvs += self._messages(
                source, [move for one in each for move in one(source, own.rank, step)], False, unpacked
            )
        own.comm(copy_parts, packed)
        own.exchange(sends, recvs)
        own.comm(copy_parts, unpacked)
        self._arrived[kind, step] = own.comm.record()

    def _messages(self, peer: int, moves: Sequence[Move], is_sent: bool, copies: list[Copy]) -> list[tuple[Array, int]]:
        """The messages to or from a rank. The copies from or to their places are added to `copies`."""
        in_place: list[list[_Part]] = []
        together: dict[np.dtype, list[_Part]] = {}
        for memory, start, source, source_start, shape in moves:
            if 0 in shape:
                continue
            part = (source, source_start, shape) if is_sent else (memory.place, start, shape)
            if memory.place is memory.own and _is_contiguous(memory.shape, shape):
                in_place.append([part])
            else:
                together.setdefault(part[0].dtype, []).append(part)
        messages = []
        for number, parts in enumerate((*in_place, *together.values())):
            if len(parts) == 1 and (view := part_of(*parts[0])).flags.c_contiguous:
                messages.append((view, peer))
                continue
            ends = list(itertools.accumulate([math.prod(shape) for _, _, shape in parts], initial=0))
            message = self._buffer((is_sent, peer, number), ends[-1], parts[0][0].dtype)
            for (array, start, shape), begin, end in zip(parts, ends, ends[1:], strict=False):
                piece, zeros = message[begin:end].reshape(shape), (0,) * len(shape)
                copies.append((piece, zeros, array, start, shape) if is_sent else (array, start, piece, zeros, shape))
            messages.append((message, peer))
        return messages

    def _buffer(self, key: tuple[bool, int, int], count: int, dtype: np.dtype) -> Array:
        found = self._buffers.get(key)
        if found is None or len(found) < count or found.dtype != dtype:
            found = self._buffers[key] = self.own.empty((count,), dtype)
        return found if len(found) == count else found[:count]

    def arrived(self, lane: Lane, kind: Signal, step: int) -> None:
        """See `Mover`."""
        lane.wait(self._arrived.pop((kind, step)))


@functools.lru_cache(maxsize=4096)
def _is_contiguous(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """True if parts of this shape of a contiguous array are contiguous."""
    axis = next((axis for axis, length in enumerate(part) if length != 1), len(part))
    return part[axis + 1 :] == whole[axis + 1 :]
