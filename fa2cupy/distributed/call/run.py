"""What a call works with on one rank: lanes, messages, memory, and the attention calls of its parts."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from copy import copy as shallow_copy
from typing import Any

import numpy as np

from ...backends import backend_of
from ...problem.array_types import Array
from ..communicator import Communicator
from ..movers.copies import copy
from ..movers.windows import Window
from ..transport.messages import Messages, Transport, head_of, is_on_host, library_of, without_text
from .lanes import HostLane, Lane, StreamLane
from .requests import Request

__all__ = ["Run", "is_captured", "messages_of"]

#: CUDA clamps a priority to the highest one of the device. Streams that compute have a lower one than messages.
_HIGHEST_PRIORITY, _PRIORITIES_OF_GROUPS = -5, (-4, -3, -2)


class Run:
    """One call on one rank.

    Attributes
    ----------
    rank, size, ranks_per_host : int
    request : Request
    backend : module
        The calls of the package for the arrays' library.
    xp : module
        ``numpy`` or ``cupy``.
    main, side, comm, back : Lane
        The caller's stream, a second one for computing, the one of messages, and the one of copies on this rank.
    of_groups : tuple of Lane
        Four for computing, of falling priority: kernels of an earlier lane go first. A group's results travel after the
        small kernels that follow its large one. Without priorities, these would wait until the large kernel of the next
        group ends.
    options : CallOptions
        Those of the attention calls of parts.
    is_captured : bool
        True if a CUDA graph captures the call.

    Notes
    -----
    Schemes queue messages before the kernels that need not wait for them: a persistent kernel holds all
    multiprocessors, and NCCL's blocks wait until it ends.
    """

    def __init__(self, comm: Communicator, request: Request, array: Array):
        self.rank, self.size, self.ranks_per_host = comm.rank, comm.size, comm.ranks_per_host
        self.request = request
        self.options = request.options._replace(layout="bshd")
        self.backend = backend_of("q", array)
        self.xp = library_of(array)
        self._transport = comm.transport_of(array)
        self._peers: Sequence[int] = range(comm.size)
        self._held: list[Array] = []
        self._arena: Any = None
        self.is_captured = is_captured(array)
        if is_on_host(array):
            lanes: Sequence[Lane] = host_lanes(comm.rank)
        else:
            lanes, self._arena = _device_lanes(array, self.is_captured)
        self.main, self.side, self.comm, self.back, *first = lanes
        self.of_groups = (*first, self.side)
        if self.is_captured:
            comm.captured.append(self._held)
            # `finish` waits for this lane even if it is idle, so it must belong to the capture.
            self.side.wait(self.main.record())

    def among(self, ranks: Sequence[int], request: Request) -> Run:
        """A run with the same lanes and memory, for the part of the call that these ranks make, in this order."""
        run = shallow_copy(self)
        run.rank, run.size = ranks.index(self.rank), len(ranks)
        run.request, run._peers = request, ranks
        return run

    def window(self) -> Window | None:
        """The memory that the other ranks write, if they can. All ranks call it together."""
        return self._transport.window(self.is_captured)

    def announce(self, number: int) -> None:
        """Sends the number and kind of a call ahead of its messages, where the ranks do not compare each call."""
        if not (self._transport.waits_for_host or self.is_captured):
            head = head_of(number, without_text(self.request.number))
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
        sends, recvs = ([(array, self._peers[rank]) for array, rank in messages] for messages in (sends, recvs))
        self.comm(self._transport.exchange, sends, recvs)

    def finish(self) -> None:
        """Lets the caller's lane wait for the others."""
        if not self.is_captured:
            self.comm(self._transport.watch)
        self.main.wait(self.comm.record())
        self.main.wait(self.side.record())
        for lane in (self.comm, *self.of_groups, self.back, self.main):
            lane.join()

    def abandon(self) -> None:
        """Lets the caller's lane wait for the others after an error: they may still use the memory of the call."""
        for lane in (self.comm, self.back, *self.of_groups):
            self.main.wait(lane.record())

    def packed(self, lane: Lane, view: Array) -> Array:
        """A view as a contiguous array: itself, or a copy that the lane makes."""
        if view.flags.c_contiguous:
            return view
        array = self.empty(view.shape, view.dtype)
        lane(copy, array, view)
        return array

    def forward(self, lane: Lane, inputs: Sequence[Array], out: Sequence[Array], keywords: dict[str, Any]) -> None:
        """Queues a forward of q, k and v with the axes (batch, row, head, column)."""
        inputs, out = self._axes(inputs), self._axes(out)
        lane(self.backend.forward, *inputs, tuple(out), self.options, keywords)

    def backward(
        self, lane: Lane, inputs: Sequence[Array], delta: Array, out: Sequence[Array], keywords: dict[str, Any]
    ) -> None:
        """Queues a backward of q, k, v, o, lse and do, with the delta from which dlse is subtracted."""
        own, extra = self._axes(out[:3]), out[3:]
        arrays, (delta,) = self._axes(inputs), self._axes([delta])
        lane(self.backend.backward, *arrays, delta, None, (*own, *extra), self.options, keywords)

    def _axes(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays without the axis of sequences, which packed ones do not have."""
        return [array[0] for array in arrays] if self.request.problem.is_packed else list(arrays)


def host_lanes(rank: int) -> tuple[Lane, ...]:
    """The lanes of a call on NumPy arrays."""
    return (HostLane(),) * (4 + len(_PRIORITIES_OF_GROUPS))


def host_memory(shape: tuple[int, ...], dtype: np.dtype | str) -> np.ndarray:
    """Memory of a call on NumPy arrays."""
    return np.empty(shape, dtype)


def _write(target: Any, source: np.ndarray) -> None:
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.set(source)


def is_captured(array: Array) -> bool:
    """True if a CUDA graph captures a call on an array."""
    if is_on_host(array):
        return False
    from ...gpu import device_memory

    return device_memory.is_capturing()


@contextlib.contextmanager
def messages_of(comm: Communicator, array: Array, description: int) -> Iterator[Transport]:
    """The messages of a call that uses the caller's stream alone; `agree` has returned the number `description`."""
    transport = comm.transport_of(array)
    is_queued = not (transport.waits_for_host or is_captured(array))
    if is_queued:
        head = head_of(comm.number, without_text(description))
        landing = transport.empty_bytes(comm.size * len(head)).reshape(comm.size, len(head))
        transport.announce(head, transport.to_buffer(head), landing)
    yield transport
    if is_queued:
        transport.watch()


def _device_lanes(array: Any, is_captured: bool) -> tuple[list[Lane], Any]:
    """The lanes of a call on CuPy arrays, and the stream that its memory is allocated on."""
    import cupy

    current = cupy.cuda.get_current_stream()
    streams, arena = _streams(array.data.device_id, threading.get_ident(), current.ptr)
    return [StreamLane(stream, is_captured) for stream in (current, *streams)], arena


@functools.lru_cache(maxsize=None)
def _streams(device: int, thread: int, current: int) -> tuple[list[Any], Any]:
    """The streams that belong to one stream of the caller: the lanes after the caller's, and the one to allocate on.

    Blocks of the stream with a higher priority go first where several wait for a multiprocessor.
    """
    import cupy

    priorities = (0, _HIGHEST_PRIORITY, _HIGHEST_PRIORITY, *_PRIORITIES_OF_GROUPS)
    with cupy.cuda.Device(device):
        streams = [cupy.cuda.Stream(non_blocking=True, priority=priority) for priority in priorities]
        return streams, cupy.cuda.Stream(non_blocking=True)
