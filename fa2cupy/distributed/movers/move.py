"""Moves: which part of an array goes to which part of another rank's memory, and what a mover does with them.

    mover.begin(shapes, results, steps)       memory of a call that the ranks write for each other
    mover.enter(*lanes)                       lets moves wait for what the caller's lane has been given so far
    mover.put(kind, step, moves)              takes this rank's parts to the other ranks, on the lane of messages
    mover.sent()                              an event: the parts that have been put may be overwritten
    mover.keep(lane, kind, step, moves)       copies those that stay on this rank
    mover.arrived(lane, kind, step)           lets what is queued after it wait for the parts of all other ranks
    mover.collect(lane, kind, step, landed)   takes them to the caller's arrays, on the lane or on that of messages
    mover.release(lane, kind, step)           tells the others that they may overwrite what they have put
    mover.may_overwrite(kind, step)           lets what is put after it wait for that
    mover.end(*lanes)                         at the end: other ranks may write this one's memory when lanes are done

A scheme says what moves by a function ``moves(source, target, step)`` of two ranks. Both ranks call it, so that one
sends what the other one expects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...problem.array_types import Array
from ..local.copies import copy_parts
from ..local.lanes import Lane
from ..transport.windows import Signal
from .resources import Resources

__all__ = ["Landed", "Late", "Memory", "Move", "Mover", "Moves", "Shape"]


class Shape(NamedTuple):
    """Memory that all ranks ask for.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    is_read : bool
        False if no part arrives on this rank.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    is_read: bool = True


class Memory(NamedTuple):
    """An array at the same place on all ranks, whose parts other ranks fill.

    Attributes
    ----------
    shape : tuple of int
    own : ndarray or None
        This rank's, if a part arrives there.
    place : ndarray
        Where this rank's parts end up. For a result, other ranks cannot write there: it is the caller's array, or a
        contiguous one in its place.
    by_rank : sequence of ndarray
        All of them, if ranks write each other's memory.
    """

    shape: tuple[int, ...]
    own: Any
    place: Any
    by_rank: Sequence[Array] = ()


#: A part of an array that goes to a part of another rank's memory: (memory, the first element of its part, source, the
#: first element of its part, shape of both parts). The rank that receives it needs no source.
Move: TypeAlias = "tuple[Memory, tuple[int, ...], Any, tuple[int, ...], tuple[int, ...]]"
#: What moves from a source to a target, two ranks, in a step.
Moves: TypeAlias = "Callable[[int, int, int], Sequence[Move]]"
#: A part of a result that other ranks have put: its memory, its first element and its shape.
Landed: TypeAlias = "tuple[Memory, tuple[int, ...], tuple[int, ...]]"
#: Further moves of a step, and the event that their arrays wait for.
Late: TypeAlias = "tuple[Moves, Any]"


class Mover:
    """See the docstring of the module.

    Parameters
    ----------
    own : Resources
        This rank's lanes, memory and messages.

    Attributes
    ----------
    ahead : int
        How many steps are put before the kernels of the first one are queued.
    """

    ahead: int

    def __init__(self, own: Resources):
        self.own = own

    def begin(self, shapes: Sequence[Shape], results: Sequence[Array], steps: int) -> tuple[list[Memory], list[Memory]]:
        """Memory of these shapes, and for the caller's arrays `results`. All ranks ask for the same."""
        raise NotImplementedError

    def enter(self, *lanes: Lane, cleared: bool = False) -> None:
        """Lets moves and lanes wait for the caller's lane. If it clears memory, moves wait for that of all ranks."""
        begun = self.own.main.record()
        for lane in (self.own.comm, *lanes):
            lane.wait(begun)

    def source(self, array: Array, lane: Lane | None = None) -> Array:
        """An array whose parts move fast: itself, or a copy, which the lane makes (the caller's by default)."""
        return array

    def put(self, kind: Signal, step: int, moves: Moves, late: Late | None = None, is_idle: bool = False) -> None:
        """Queues the moves to other ranks. `is_idle` says that nothing is computed meanwhile."""
        raise NotImplementedError

    def sent(self) -> Any:
        """An event: what this rank has put has been read. None if lanes that wait for arrivals wait for this, too."""
        return None

    def keep(self, lane: Lane, kind: Signal, step: int, moves: Moves) -> None:
        """Queues the moves that stay on this rank, behind those of `put`."""
        rank = self.own.rank
        lane(copy_parts, [(memory.place, *part) for memory, *part in moves(rank, rank, step)])

    def arrived(self, lane: Lane, kind: Signal, step: int) -> None:
        """Lets the lane wait for all that other ranks put in a step. It is called once for each step."""
        raise NotImplementedError

    def collect(self, lane: Lane, kind: Signal, step: int, landed: Sequence[Landed]) -> None:
        """Takes what other ranks put in a step to the caller's arrays, on the lane or on that of messages."""

    def release(self, lane: Lane, kind: Signal, step: int) -> None:
        """Tells the other ranks, when the lane has come so far, that they may put a step."""

    def may_overwrite(self, kind: Signal, step: int) -> None:
        """Lets what is put from now on wait until all other ranks have released a step."""

    def end(self, *lanes: Lane) -> None:
        """Ends the use of the memory: these lanes and that of messages have been given all their work with it."""
