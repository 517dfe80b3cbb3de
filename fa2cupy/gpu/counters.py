"""Counters in device memory: persistent blocks draw tiles from some, and blocks count their arrivals at others.

A kernel finds its counters zero and leaves them zero, so that a launch costs no memset. Two kernels that run at the
same time must not share counters. Kernels of one stream run one after the other, so each stream has its own. A launch
that is captured into a graph may run at the same time as other work of its stream; it keeps separate counters for the
life of the process.
"""

from __future__ import annotations

import functools
import threading
from types import ModuleType

from ..system.locks import new_lock

__all__ = ["Counters", "counters"]

_SECTOR_BYTES = 32  # counters have sectors of their own, so that concurrent kernels do not share one
_ALLOCATED_BYTES, _LEAST_SLOTS = 32 << 10, 128
_LEGACY_STREAM, _PER_THREAD_STREAM = 0, 2  # addresses; the second means a different stream in every thread


class Counters:
    """Hands out the counters of one device, a number of ints at a time."""

    def __init__(self, ints: int) -> None:
        self._slot_bytes = -(-4 * ints // _SECTOR_BYTES) * _SECTOR_BYTES
        self._slots = max(_ALLOCATED_BYTES // self._slot_bytes, _LEAST_SLOTS)
        self._lock = new_lock()
        self._memory: list[object] = []  # never freed: graphs may hold its addresses until the process ends
        self._free: list[int] = []
        self._of_stream: dict[object, int] = {}

    def reserve(self) -> None:
        """Allocates counters ahead, when a kernel is loaded: a capture must not allocate them."""
        with self._lock:
            if len(self._free) < self._slots // 2:
                self._allocate()

    def address(self, stream: int) -> int:
        """The address of the counter for a launch on a stream; 0 if captures have used up the reserved ones.

        A kernel that gets 0 divides its work in a fixed way, which is correct and slower.
        """
        if stream != _LEGACY_STREAM and self._runtime.streamIsCapturing(stream):
            with self._lock:
                return self._free.pop() if self._free else 0
        key = (stream, threading.get_ident()) if stream == _PER_THREAD_STREAM else stream
        return self._of_stream.get(key) or self._add(key)

    @functools.cached_property
    def _runtime(self) -> ModuleType:
        # An import statement takes longer than all else that a warm launch does here.
        from cupy.cuda import runtime

        return runtime

    def _add(self, key: object) -> int:
        with self._lock:
            if not self._free:
                self._allocate()
            return self._of_stream.setdefault(key, self._free.pop())

    def _allocate(self) -> None:
        import cupy

        # Not from CuPy's pool, whose memory belongs to a stream.
        memory = cupy.cuda.Memory(self._slots * self._slot_bytes)
        self._runtime.memset(memory.ptr, 0, memory.size)
        self._runtime.streamSynchronize(_LEGACY_STREAM)  # other streams do not wait for the memset by themselves
        self._memory.append(memory)
        self._free += range(memory.ptr, memory.ptr + memory.size, self._slot_bytes)


@functools.lru_cache(maxsize=None)
def counters(ordinal: int, ints: int) -> Counters:
    """The counters of a device, of `ints` numbers each. The device must be current when they are used."""
    return Counters(ints)
