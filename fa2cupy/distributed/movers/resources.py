"""What a call has on one rank: lanes, memory and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...numerics.arrays import array_module, is_on_host
from ...problem.array_types import Array
from ..communicator import Communicator
from ..local.lanes import Lane, device_lanes, host_lanes, is_captured
from ..local.prepared import PreparedCall
from ..transport.messages import Messages, head_of, without_text
from ..transport.windows import Window

__all__ = ["Resources"]


class Resources:
    """The lanes, memory and messages of a call on one rank.

    Parameters
    ----------
    comm : Communicator
    array : ndarray
        An array of the call.
    call : int
        Stands for all that the ranks have agreed on, from 1 to 2**32 - 1.
    prepared : PreparedCall, optional
        What records the call, which is not queued yet.

    Attributes
    ----------
    rank, size, call : int
    xp : module
        ``numpy`` or ``cupy``.
    main, side, comm, back : Lane
        The caller's stream, a second one for computing, the one of messages, and the one of copies on this rank.
    of_groups : tuple of Lane
        Four for computing, of falling priority: kernels of an earlier lane go first. A group's results travel after the
        small kernels that follow its large one. Without priorities, these would wait until the large kernel of the next
        group ends.
    is_captured : bool
        True if a CUDA graph captures the call.
    at_end : list of callable
        Functions that get the event at which the lane of messages is done.
    """

    def __init__(self, comm: Communicator, array: Array, call: int, prepared: PreparedCall | None = None):
        self.rank, self.size, self.call = comm.rank, comm.size, call
        self.xp = array_module(array)
        self._transport = comm.transport_of(array)
        self._peers: Sequence[int] = range(comm.size)
        self._held: list[Array] = []
        self.at_end: list[Callable[[Any], None]] = []
        self._arena: Any = None
        self._prepared = prepared
        self.is_captured = is_captured(array)
        if prepared is not None:
            lanes: Sequence[Lane] = prepared.lanes
        elif is_on_host(array):
            lanes = host_lanes(comm.rank)
        else:
            lanes, self._arena = device_lanes(array, self.is_captured)
        self.main, self.side, self.comm, self.back, *first = lanes
        self.of_groups = (*first, self.side)
        if self.is_captured:
            comm.captured.append(self._held)
            # `finish` waits for this lane even if it is idle, so it must belong to the capture.
            self.side.wait(self.main.record())

    def window(self) -> Window | None:
        """The memory that the other ranks write, if they can. All ranks call it together."""
        return self._transport.window(self.is_captured)

    def announce(self, number: int) -> None:
        """Sends the number and kind of a call ahead of its messages, where the ranks do not compare each call."""
        if not (self._transport.waits_for_host or self.is_captured):
            head = head_of(number, without_text(self.call))
            own, landing = (self.empty(shape, head.dtype) for shape in (head.shape, (self.size, *head.shape)))
            self.main(_write, own, head)
            self._held.append(head)
            self.comm.wait(self.main.record())
            self.comm(self._transport.announce, head, own, landing)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | str) -> Array:
        """Memory that any lane may use until the end of the call.

        It does not come from the caller's stream. A call of the package frees its workspaces there when it returns,
        while its kernels still use them, and CuPy's pool would hand them out to a lane that does not wait for these
        kernels. The pool keeps memory by stream, and nothing else allocates on the arena's stream.
        """
        if self._prepared is not None:
            return self._prepared.empty(shape, dtype)
        if self._arena is None:
            array = host_memory(shape, dtype)
        else:
            with self._arena:
                array = self.xp.empty(shape, dtype)
        self._held.append(array)
        return array

    def place(self, values: Sequence[int]) -> Array:
        """A small array of int32 on the arrays' device, written on the caller's lane."""
        array = self.empty((len(values),), np.dtype("int32"))
        host = np.array(values, "int32")
        self.main(_write, array, host)
        self._held.append(host)
        return array

    def exchange(self, sends: Messages, recvs: Messages) -> None:
        """Queues a group of messages."""
        peers = self._peers
        sends, recvs = [(x, peers[rank]) for x, rank in sends], [(x, peers[rank]) for x, rank in recvs]
        self.comm(self._transport.exchange, sends, recvs)

    def finish(self) -> None:
        """Lets the caller's lane wait for the others."""
        if not self.is_captured:
            self.at_end.append(self._transport.watch)
        self.main.wait(self.comm.record_for(*self.at_end))
        self.main.wait(self.side.record())
        for lane in (self.comm, *self.of_groups, self.back, self.main):
            lane.join()

    def abandon(self) -> None:
        """Lets the caller's lane wait for the others after an error: they may still use the memory of the call."""
        for lane in (self.comm, self.back, *self.of_groups):
            self.main.wait(lane.record())


def host_memory(shape: tuple[int, ...], dtype: np.dtype | str) -> np.ndarray:
    """Memory of a call on NumPy arrays."""
    return np.empty(shape, dtype)


def _write(target: Any, source: np.ndarray) -> None:
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.set(source)
