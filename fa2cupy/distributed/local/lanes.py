"""Lanes: where the work of a call is queued.

    lane(function, *args)       queues a call
    lane.kernels(function, *args)   the same of a function of the package that has all its results in `args`
    lane.on_stream(function, *args)   the same of a function whose first argument is the address of a stream
    lane.record()               an event that is reached when all that was queued before is done
    lane.wait(event)            what is queued after it waits for the event
    lane.record_for(*uses)      the same, a new event in each call; calls ``use(event)`` for each of `uses`
    lane.wait_for(event_of)     waits for the event that ``event_of()`` returns, if it is not None
    lane.join()                 returns when the host may read what the lane has written

A call has seven lanes: the caller's, four others for computing, one for messages, and one for copies on its rank. On a
GPU they are streams. On NumPy the work is done at once, in the order in which it is queued: one of the orders that the
waits allow.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ...numerics.arrays import is_on_host
from ...problem.array_types import Array

__all__ = ["NUM_LANES", "HostLane", "Lane", "StreamLane", "device_lanes", "device_streams", "host_lanes", "is_captured"]

#: CUDA clamps a priority to the highest one of the device. Streams that compute have a lower one than messages.
_HIGHEST_PRIORITY, _PRIORITIES_OF_GROUPS = -5, (-4, -3, -2)
#: The caller's, a second one for computing, those of messages and of copies, and three more for computing.
NUM_LANES = 4 + len(_PRIORITIES_OF_GROUPS)


class Lane(Protocol):
    """See the docstring of the module."""

    def kernels(self, function: Callable[..., Any], *args: Any) -> None:
        """Queues a call of a function of the package."""
        self(function, *args)

    def record_for(self, *uses: Callable[[Any], None]) -> Any:
        """An event that is new in each call and that these functions get."""
        event = self.record()
        for use in uses:
            use(event)
        return event

    def wait_for(self, event_of: Callable[[], Any]) -> None:
        """Lets what is queued after it wait for an event, if there is one."""
        event = event_of()
        if event is not None:
            self.wait(event)

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        """Queues a call."""

    def on_stream(self, function: Callable[..., Any], *args: Any) -> None:
        """Queues a call of a function that takes the address of a stream before `args`; 0 where there is none."""

    def record(self) -> Any:
        """An event that is reached when all that was queued before is done."""

    def wait(self, event: Any) -> None:
        """Lets what is queued after it wait for the event."""

    def join(self) -> None:
        """Returns when the host may read what the lane has written."""


class HostLane(Lane):
    """A lane that does its work at once."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls the function."""
        function(*args)

    def on_stream(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls the function."""
        function(0, *args)

    def record(self) -> None:
        """Nothing: all is done."""

    def wait(self, event: None) -> None:
        """Nothing: all is done."""

    def join(self) -> None:
        """Nothing: all is done."""


class StreamLane(Lane):
    """A lane on a CUDA stream.

    Parameters
    ----------
    stream : cupy.cuda.Stream
    is_captured : bool
        True if a CUDA graph captures the work of the stream. Arrays between the steps are then memory of the graph.
    """

    def __init__(self, stream: Any, is_captured: bool):
        self._stream = stream
        self._memory: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        if is_captured:
            from ...gpu import device_memory

            self._memory = device_memory.temporaries

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls the function with the stream as CuPy's current one."""
        with self._stream, self._memory():
            function(*args)

    def on_stream(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls the function with the address of the stream, which is not made the current one."""
        function(self._stream.ptr, *args)

    def record(self) -> Any:
        """An event on the stream."""
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        """Lets the stream wait for the event; the host does not."""
        self._stream.wait_event(event)

    def join(self) -> None:
        """Nothing: results of a GPU are read on the caller's stream, which waits for the other lanes."""


def is_captured(array: Array) -> bool:
    """True if a CUDA graph captures a call on an array."""
    if is_on_host(array):
        return False
    from ...gpu import device_memory

    return device_memory.is_capturing()


def host_lanes(rank: int) -> tuple[Lane, ...]:
    """The lanes of a call on NumPy arrays."""
    return (HostLane(),) * NUM_LANES


def device_lanes(array: Any, is_captured: bool) -> tuple[list[Lane], Any]:
    """The lanes of a call on CuPy arrays, and the stream that its memory is allocated on."""
    streams, arena = device_streams(array)
    return [StreamLane(stream, is_captured) for stream in streams], arena


def device_streams(array: Any) -> tuple[list[Any], Any]:
    """The streams of these lanes, and the one that memory is allocated on."""
    import cupy

    current = cupy.cuda.get_current_stream()
    streams, arena = _streams(array.data.device_id, threading.get_ident(), current.ptr)
    return [current, *streams], arena


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
