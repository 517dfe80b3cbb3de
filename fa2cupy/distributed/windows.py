"""Windows: memory of each rank that the others write, so that messages are copies.

    window.begin(run.main, nbytes, steps)       at the start of a call, on all ranks
    window.arrays(shape, dtype)                 an array at the same place in the windows of all ranks, by rank
    window.signal(lane, kind, step)             tells all other ranks that the lane has come so far
    window.wait(lane, kind, step, peers)        lets what is queued after it wait for the signals of other ranks
    lane(window.copy, copies)                   copies of parts of arrays; those to other ranks need no multiprocessor
    window.end(lane)                            at the end: the lane has waited for all that was done with the window

Ranks write to each other's windows and never read them: a rank whose call has ended can end itself.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..problem.array_types import Array
from .lanes import Lane

__all__ = ["Copy", "Signal", "Window", "padded_bytes"]

_ALIGNMENT = 1024


class Copy(NamedTuple):
    """A copy of a part of an array to a part of another one.

    Attributes
    ----------
    target, source : ndarray
        Of one dtype and number of axes.
    target_start, source_start : tuple of int
        The first element of each part.
    shape : tuple of int
        That of both parts.
    """

    target: Array
    target_start: tuple[int, ...]
    source: Array
    source_start: tuple[int, ...]
    shape: tuple[int, ...]


class Signal(enum.IntEnum):
    """What a rank tells the others."""

    #: Its window may be written: what earlier calls have read there is not needed any more.
    READY = 0
    #: It has written the rows of a step.
    SENT = 1
    #: It has written the results of a step.
    RETURNED = 2


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
    Signals are numbers that only grow: ``base + step + 1``, where a call raises the base by its number of steps. A rank
    waits until it finds the number or a greater one. `Signal.READY` is needed between calls of several shapes: a rank
    whose call has ended would write inputs where another one still reads results.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.others = tuple((rank + step) % size for step in range(1, size))
        self.nbytes = 0
        self._used = self._base = self._steps = 0
        self._last: Any = None
        self._arrays: dict[tuple, list[Array]] = {}

    def begin(self, lane: Lane, nbytes: int, steps: int) -> None:
        """Makes the window large enough for a call and lets the caller's lane wait for the last call.

        Raises
        ------
        CommunicationError
            An earlier call failed, or another rank does not answer.
        MemoryError
            A rank has no memory for it.
        """
        self._check()
        if nbytes > self.nbytes:
            self._arrays.clear()
            self._grow(nbytes, self._last)
            self.nbytes = nbytes
        if self._last is not None:
            lane.wait(self._last)
        self._used, self._steps = 0, steps

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
        lane(self._write, kind, self._base + step + 1)

    def wait(self, lane: Lane, kind: Signal, step: int = 0, peers: Sequence[int] | None = None) -> None:
        """Lets what is queued on the lane after it wait for a signal of other ranks, by default of all."""
        lane(self._wait, kind, self.others if peers is None else peers, self._base + step + 1)

    def end(self, lane: Lane) -> None:
        """Notes that the call has queued all its work, which the lane waits for."""
        self._last = lane.record()
        self._base += self._steps

    # -- by kind of memory

    def copy(self, copies: Sequence[Copy]) -> None:
        """Makes copies one after the other, on the current lane."""
        raise NotImplementedError

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

    def _write(self, kind: Signal, value: int) -> None:
        """Writes a number of each other rank's, on the current lane."""
        raise NotImplementedError

    def _wait(self, kind: Signal, peers: Sequence[int], value: int) -> None:
        """Waits on the current lane until these ranks have written a number, or a greater one."""
        raise NotImplementedError
