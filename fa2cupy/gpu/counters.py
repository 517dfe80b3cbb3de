"""Tile counters: the two ints in device memory by which the blocks of a persistent kernel share out its tiles.

A kernel finds them zero and leaves them zero, so that a launch costs no memset. Two kernels that run at a time must not
have the same. Kernels of one stream run one after the other: a counter belongs to a stream. A launch that is captured into
a graph runs whenever the graph does, beside whatever its stream is then doing: it gets a counter of its own for good.
"""

from __future__ import annotations

import functools
import threading

from ..system.locks import new_lock

__all__ = ["TileCounters", "tile_counters"]

_SLOT_BYTES = 32  # counters that are in use at a time do not share a sector
_SLOTS = 1024
_LEGACY_STREAM, _PER_THREAD_STREAM = 0, 2  # as addresses; the second is another stream in every thread


class TileCounters:
    """The counters of one device."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._memory: list[object] = []  # never freed: graphs may hold addresses as long as the process lives
        self._free: list[int] = []
        self._of_stream: dict[object, int] = {}

    def reserve(self) -> None:
        """Makes sure that a capture, which must not allocate, finds free counters; called when a kernel is loaded."""
        with self._lock:
            if len(self._free) < _SLOTS // 2:
                self._allocate()

    def address(self, stream: int) -> int:
        """The counter for a launch on a stream, 0 if a capture has used up those that were reserved.

        Kernels that get 0 take their tiles in a fixed order, which is right and a little slower.
        """
        from cupy.cuda import runtime

        if stream != _LEGACY_STREAM and runtime.streamIsCapturing(stream):
            with self._lock:
                return self._free.pop() if self._free else 0
        key = (stream, threading.get_ident()) if stream == _PER_THREAD_STREAM else stream
        return self._of_stream.get(key) or self._add(key)

    def _add(self, key: object) -> int:
        with self._lock:
            if not self._free:
                self._allocate()
            return self._of_stream.setdefault(key, self._free.pop())

    def _allocate(self) -> None:
        import cupy
        from cupy.cuda import runtime

        # Past CuPy's pool, whose memory belongs to a stream.
        memory = cupy.cuda.Memory(_SLOTS * _SLOT_BYTES)
        runtime.memset(memory.ptr, 0, memory.size)
        runtime.streamSynchronize(_LEGACY_STREAM)  # other streams need not wait for this one
        self._memory.append(memory)
        self._free += range(memory.ptr, memory.ptr + memory.size, _SLOT_BYTES)


@functools.lru_cache(maxsize=None)
def tile_counters(ordinal: int) -> TileCounters:
    """The counters of a device, which must be current when they are used."""
    return TileCounters()
