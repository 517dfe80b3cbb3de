"""Windows: memory of each rank that the others write, so that messages are copies.

    window.begin(run.main, nbytes, steps, call) at the start of a call, on all ranks
    window.arrays(shape, dtype)                 an array at the same place in the windows of all ranks, by rank
    window.enter(lane)                          lets what is queued after it wait until it may write to the others
    window.signal(lane, kind, step)             tells all other ranks that the lane has come so far
    window.wait(lane, kind, step)               lets what is queued after it wait for the signals of all other ranks
    window.send(lane, copies)                   copies of parts of arrays to other ranks, which need no multiprocessor
    window.end(lane, *lanes)                    at the end: the first lane waits for the others that used the window
    window.ended(event)                         notes the event at which all of that is done

Ranks write to each other's windows and never read them: a rank whose call has ended can end itself.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...problem.array_types import Array
from ..local.copies import Copy
from ..local.lanes import Lane

__all__ = ["FAILED", "IS_READY", "MOST_STEPS", "READY", "Signal", "Window", "padded_bytes", "word_of"]

#: Most steps of a call.
MOST_STEPS = 1024
_ALIGNMENT = 1024


class Signal(enum.IntEnum):
    """What a rank tells the others."""

    #: Its window may be written: its last call has ended.
    READY = 0
    #: It has written the rows of a step.
    SENT = 1
    #: It has written the results of a step.
    RETURNED = 2
    #: What was sent in a step may be overwritten: its kernels have read it.
    USED = 3
    #: What was returned in a step may be overwritten: it has been added up.
    ADDED = 4


def word_of(kind: Signal, step: int) -> int:
    """The number of a signal's word: each rank has one for each signal of each other rank."""
    return kind * MOST_STEPS + step


#: The word of `Signal.READY`, and the number that it is given.
READY, IS_READY = word_of(Signal.READY, 0), 1
#: The word that a rank writes when it has failed: its waits end then, and what it sends has no meaning.
FAILED = len(Signal) * MOST_STEPS


def padded_bytes(shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> int:
    """The bytes of a window with arrays of these shapes and dtypes."""
    return sum(_padded(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in shapes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Window:
    """The window of a rank and those of the others: what does not depend on the kind of memory.

    Parameters
    ----------
    rank, size : int

    Attributes
    ----------
    others : tuple of int
        The other ranks, beginning with the next one, so that ranks do not all write to the same window at a time.
    nbytes : int
        Size of the window, the same on all ranks.

    Notes
    -----
    A signal is a number that stands for the call. A rank waits until it finds the number of its own call, and writes 0
    in its place. Graphs can therefore repeat a call, and ranks that make different calls wait for each other until the
    time is up. Each signal is waited for once. `Signal.READY` is needed between calls of different shapes: a rank whose
    call has ended would write inputs where another one still reads results. It does not depend on the call: each call
    sends it at its end for the next one, and it is there from the start.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.others = tuple((rank + step) % size for step in range(1, size))
        self.nbytes = 0
        self._used = self._call = 0
        self._is_captured = False
        self._last: Any = None
        self._arrays: dict[tuple, list[Array]] = {}

    def begin(self, lane: Lane, nbytes: int, steps: int, call: int, is_captured: bool = False) -> None:
        """Makes the window large enough for a call and lets the caller's lane wait for the last call.

        Parameters
        ----------
        lane : Lane
            The caller's.
        nbytes : int
        steps : int
            The number of steps: signals have steps below it.
        call : int
            The number of the call, from 1 to 2**32 - 1, on which all ranks have agreed.
        is_captured : bool
            True if a CUDA graph captures the call. Launches are ordered by the caller's streams.

        Raises
        ------
        CommunicationError
            An earlier call failed, or another rank does not answer.
        MemoryError
            A rank has no memory for it.
        RuntimeError
            A graph captures a call of a kind that has not been made before.
        """
        self._check()
        assert 0 < call < 1 << 32
        if steps > MOST_STEPS:
            raise ValueError(f"head_groups: expected at most {MOST_STEPS}, got {steps}")
        if nbytes > self.nbytes:
            if is_captured:
                raise RuntimeError("a CUDA graph captures a call of a kind that has not been made; make it once before")
            self._arrays.clear()
            self._grow(nbytes, self._last)
            self.nbytes = nbytes
        self._used, self._call = 0, call
        lane.wait_for(functools.partial(self._begin, steps, call, is_captured))

    def arrays(self, shape: tuple[int, ...], dtype: np.dtype) -> list[Array]:
        """The next array of the call, in the windows of all ranks, by rank."""
        offset = self._used
        self._used += padded_bytes([(shape, dtype)])
        assert self._used <= self.nbytes, "a call needs as much as it has asked for"
        key = (offset, shape, dtype)
        if key not in self._arrays:
            self._arrays[key] = [self._array(peer, offset, shape, dtype) for peer in range(self.size)]
        return self._arrays[key]

    def signal(self, lane: Lane, kind: Signal, step: int = 0) -> None:
        """Queues a signal to all other ranks."""
        lane.on_stream(self._write, word_of(kind, step), self._call)

    def wait(self, lane: Lane, kind: Signal, step: int = 0) -> None:
        """Lets what is queued on the lane after it wait for a signal of all other ranks."""
        lane.on_stream(self._wait, word_of(kind, step), self._call)

    def enter(self, lane: Lane) -> None:
        """Lets what is queued on the lane after it wait until the windows of all other ranks may be written."""
        lane.on_stream(self._wait, READY, IS_READY)

    def end(self, lane: Lane, *others: Lane) -> None:
        """Lets the lane tell the other ranks when what these lanes have queued with the window is done."""
        for other in others:
            lane.wait(other.record())
        lane.on_stream(self._leave)

    def send(self, lane: Lane, copies: Sequence[Copy]) -> None:
        """Queues copies to other ranks one after the other."""
        raise NotImplementedError

    # -- by kind of memory

    def can_copy(self, array: Array) -> bool:
        """True if copies of parts of this layout are fast."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raises CommunicationError if an earlier call failed."""
        raise NotImplementedError

    def _grow(self, nbytes: int, last: Any) -> None:
        """Gives all ranks larger windows, after the event `last` of this rank. All ranks call it together."""
        raise NotImplementedError

    def _array(self, peer: int, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """An array in the window of a rank."""
        raise NotImplementedError

    def _begin(self, steps: int, call: int, is_captured: bool) -> Any:
        """Notes that a call begins; returns the event that its work waits for, or None."""
        self._is_captured = is_captured
        return None if is_captured else self._last

    def ended(self, event: Any) -> None:
        """Notes that the call has queued all its work: it is done at this event, behind `end`."""
        if not self._is_captured:
            self._last = event

    def _leave(self, stream: int) -> None:
        """Writes on a stream that this rank's window may be written."""
        self._write(stream, READY, IS_READY)

    def _write(self, stream: int, word: int, number: int) -> None:
        """Writes a number to a word of each other rank, on a stream."""
        raise NotImplementedError

    def _wait(self, stream: int, word: int, number: int) -> None:
        """Waits on a stream until all other ranks have written a number, and writes 0."""
        raise NotImplementedError
