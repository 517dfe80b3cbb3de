"""NCCL and CuPy's streams on host memory: ranks are threads, and work is done when it is queued."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import sys
import threading
from types import SimpleNamespace

import numpy as np
from support.fake_cupy import FakeArray, FakeCupy, current_device, place

from fa2cupy.distributed import communicator, messages, requests
from fa2cupy.distributed import run as run_module
from fa2cupy.gpu import calls

INT8 = "NCCL_INT8"
try:
    import cupy as REAL
except ImportError:
    REAL = None


class FakeDevice:
    """``cupy.cuda.Device``."""

    def __init__(self, ordinal: int = 0):
        self._context = current_device(ordinal)

    def use(self) -> None:
        """Does nothing, because there is one device."""

    def __enter__(self):
        return self._context.__enter__()

    def __exit__(self, *error):
        return self._context.__exit__(*error)


class StreamsCupy(FakeCupy):
    """The fake CuPy with NumPy's functions, events, and streams of each thread.

    Attributes
    ----------
    allocated : list of (stream, bytes)
        Allocations of the package by `empty`.
    host_waits : list of str
        Calls by which the host has waited for the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.local, self.numbers = threading.local(), itertools.count(100)
        self.allocated: list[tuple[int, int]] = []
        self.host_waits: list[str] = []
        self.cuda.Stream, self.cuda.Event = self._stream, self._event
        self.cuda.get_current_stream = self._current
        self.cuda.Device = FakeDevice

    def __getattr__(self, name):
        # The package's compiler asks the real CuPy for its version and its libraries.
        return getattr(REAL if name.startswith("_") and REAL is not None else np, name)

    def get_array_module(self, *_):
        return self

    def empty(self, shape, dtype):
        array = super().empty(shape, dtype)
        self.allocated.append((self._current().ptr, array.nbytes))
        return array

    def asarray(self, array, dtype=None):
        return place(np.asarray(array, dtype))

    def _current(self):
        stack = self.local.__dict__.setdefault("stack", [])
        if not stack:
            stack.append(self._stream(role="caller"))
        return stack[-1]

    def _stream(self, non_blocking=False, priority=0, role=None):
        cupy = self

        class Stream(SimpleNamespace):
            def __enter__(self):
                cupy._current()
                cupy.local.stack.append(self)

            def __exit__(self, *_):
                cupy.local.stack.pop()

            def wait_event(self, event):
                assert event.is_recorded

        return Stream(ptr=next(self.numbers), non_blocking=non_blocking, priority=priority, role=role)

    def _event(self, disable_timing=False):
        cupy = self

        class Event:
            is_recorded = False

            def record(self, stream=None):
                self.is_recorded = True

            @property
            def done(self):
                cupy.host_waits.append("event")
                return True

        return Event()


class FakeNccl:
    """``cupy.cuda.nccl``; messages are exchanged when a group ends.

    Attributes
    ----------
    log : list of (rank, kind, peer, bytes, dtype, stream)
        All messages; those of a rank are in order.
    """

    NCCL_INT8 = INT8
    available = True

    def __init__(self, size: int):
        self.queues = [[queue.Queue() for _ in range(size)] for _ in range(size)]
        self.local, self.log, self.size = threading.local(), [], size
        self.aborted: list[int] = []

    def get_unique_id(self):
        return bytes(range(128))

    def NcclCommunicator(self, size, identifier, rank):
        assert (size, identifier) == (self.size, self.get_unique_id())
        return FakeCommunicator(self, rank)

    def groupStart(self):
        assert not getattr(self.local, "group", None)
        self.local.group = []

    def groupEnd(self):
        group, self.local.group = self.local.group, None
        for action in sorted(group, key=lambda action: action[0]):  # sends first, as a group starts them together
            action[1]()


class FakeCommunicator:
    """``cupy.cuda.nccl.NcclCommunicator``."""

    def __init__(self, nccl: FakeNccl, rank: int):
        self._nccl, self._rank = nccl, rank

    def rank_id(self):
        return self._rank

    def size(self):
        return self._nccl.size

    def send(self, pointer, count, dtype, peer, stream):
        self._note("send", peer, count, dtype, stream)
        data = ctypes.string_at(pointer, count)
        self._nccl.local.group.append((0, lambda: self._nccl.queues[self._rank][peer].put(data)))

    def recv(self, pointer, count, dtype, peer, stream):
        self._note("recv", peer, count, dtype, stream)

        def arrive():
            data = self._nccl.queues[peer][self._rank].get(timeout=20)
            assert len(data) == count
            ctypes.memmove(pointer, data, count)

        self._nccl.local.group.append((1, arrive))

    def abort(self):
        self._nccl.aborted.append(self._rank)

    def _note(self, kind, peer, count, dtype, stream):
        self._nccl.log.append((self._rank, kind, peer, count, dtype, stream))


@contextlib.contextmanager
def fake_streams(monkeypatch, modules):
    """Makes fa2cupy.distributed take the arrays of the fake GPU for CuPy's; yields the fake CuPy."""
    cupy = StreamsCupy()
    for module in modules:
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(FakeArray, "get", lambda self: cupy.host_waits.append("get") or np.array(self), raising=False)
    for module in (communicator, messages, requests, run_module):
        monkeypatch.setattr(module, "is_on_host", lambda array: not isinstance(array, FakeArray))
    monkeypatch.setattr(run_module, "backend_of", lambda name, array: calls)
    run_module._streams.cache_clear()
    yield cupy
    run_module._streams.cache_clear()
