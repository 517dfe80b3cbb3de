"""Messages of CuPy arrays between GPUs, by NCCL.

The communicator is one of CuPy (``cupy.cuda.nccl``) or of nccl4py (``nccl.core``). Arrays travel as bytes, so that
every dtype does, bfloat16 included. Nothing waits for the host: a thread looks after calls that do not end.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ..system.locks import new_lock
from .messages import CommunicationError, Messages, all_texts, split_own
from .windows import Window

__all__ = ["NcclTransport", "connect", "wrap"]

INSTALL_NCCL = (
    "in the checkout of fa2cupy, pip install '.[cuda12,nccl12]' ('.[cuda13,nccl13]' with a driver for CUDA 13), or "
    "nvidia-nccl-cu12 (nvidia-nccl-cu13) alone"
)
_POLL_S = 1e-3
_log = logging.getLogger("fa2cupy")


class _Binding(Protocol):
    """What a library for NCCL is asked for."""

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Makes one message of all that are started in the context."""

    def send(self, array: Any, peer: int, stream: int) -> None:
        """Queues the bytes of a contiguous array."""

    def recv(self, array: Any, peer: int, stream: int) -> None:
        """Queues the arrival of the bytes of a contiguous array."""

    def abort(self) -> None:
        """Ends what is under way."""


class _OfCupy:
    """``cupy.cuda.nccl.NcclCommunicator``."""

    def __init__(self, communicator: Any, module: Any):
        self._communicator, self._module = communicator, module

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self._module.groupStart()
        try:
            yield
        finally:
            self._module.groupEnd()

    def send(self, array: Any, peer: int, stream: int) -> None:
        self._communicator.send(array.data.ptr, array.nbytes, self._module.NCCL_INT8, peer, stream)

    def recv(self, array: Any, peer: int, stream: int) -> None:
        self._communicator.recv(array.data.ptr, array.nbytes, self._module.NCCL_INT8, peer, stream)

    def abort(self) -> None:
        self._communicator.abort()


class _OfNccl4py:
    """``nccl.core.Communicator``, whose buffers have a dtype: an array of bytes gives it one that it knows."""

    def __init__(self, communicator: Any, module: Any):
        self._communicator, self._module = communicator, module

    def group(self) -> contextlib.AbstractContextManager[None]:
        return self._module.group()

    def send(self, array: Any, peer: int, stream: int) -> None:
        self._communicator.send(array.reshape(-1).view("int8"), peer, stream=stream)

    def recv(self, array: Any, peer: int, stream: int) -> None:
        self._communicator.recv(array.reshape(-1).view("int8"), peer, stream=stream)

    def abort(self) -> None:
        self._communicator.abort()


class NcclTransport:
    """Messages by NCCL: see `fa2cupy.distributed.messages.Transport`.

    Parameters
    ----------
    binding : _Binding
    rank, size : int
    timeout : float
        Seconds after which a call whose messages have not arrived is ended.
    """

    waits_for_host = False

    def __init__(self, binding: _Binding, rank: int, size: int, timeout: float):
        self.rank, self.size = rank, size
        self._binding = binding
        self._timeout = timeout
        self._watched: list[tuple[Any, float]] = []
        self._lock = new_lock()
        self._watcher: threading.Thread | None = None
        self._failure: str | None = None
        self._is_connected = False
        self._window: Any = None

    def check(self) -> None:
        """Raises CommunicationError if an earlier call failed."""
        if self._failure is not None:
            raise CommunicationError(self._failure)

    def window(self, is_captured: bool) -> Window | None:
        """The memory that the other GPUs of the host write; None if one of them cannot."""
        if not self._is_connected and not is_captured:
            from .device_window import connect

            self._window = connect(self.rank, self.size, functools.partial(all_texts, self), self.check)
            self._is_connected = True
        return self._window

    @property
    def window_bytes(self) -> int:
        """Size of the window so far."""
        return 0 if self._window is None else self._window.nbytes

    def exchange(self, sends: Messages, recvs: Messages) -> None:
        """Queues a group of messages on CuPy's current stream. All arrays must be contiguous."""
        import cupy

        self.check()
        copies, sends, recvs = split_own(self.rank, sends, recvs)
        for target, source in copies:
            target[...] = source
        if not (sends or recvs):
            return
        stream = cupy.cuda.get_current_stream().ptr
        with self._binding.group():
            for array, peer in sends:
                self._binding.send(array, peer, stream)
            for array, peer in recvs:
                self._binding.recv(array, peer, stream)

    def watch(self) -> None:
        """Ends the call if what is queued on the current stream so far is not done in time."""
        event = _event()
        with self._lock:
            self._watched.append((event, time.monotonic() + self._timeout))
            if self._watcher is None:
                name, device = "fa2cupy.distributed", _current_device()
                self._watcher = threading.Thread(target=self._look_after, args=(device,), name=name, daemon=True)
                self._watcher.start()

    def _look_after(self, device: Any) -> None:
        device.use()  # a new thread would make a context on the first GPU
        while True:
            time.sleep(min(1.0, self._timeout / 4))
            with self._lock:
                self._watched = [(event, end) for event, end in self._watched if not event.done]
                is_late = any(time.monotonic() > end for _, end in self._watched)
                if not self._watched and not is_late:
                    self._watcher = None
                    return
            if is_late:
                self._end()
                return

    def _end(self) -> None:
        self._failure = (
            f"rank {self.rank} has waited {self._timeout:g} s for messages of other ranks, one of which has ended, is "
            "late or makes another call; results of the last calls are not there"
        )
        _log.error(self._failure)
        print(f"fa2cupy.distributed: {self._failure}", file=sys.stderr, flush=True)
        if self._window is not None:
            self._window.release()  # first: NCCL frees memory, and CUDA waits for all streams then
        self._binding.abort()

    def empty_bytes(self, nbytes: int) -> Any:
        """An array of bytes on the device."""
        import cupy

        return cupy.empty(nbytes, "uint8")

    def to_buffer(self, data: np.ndarray) -> Any:
        """A copy on the device."""
        import cupy

        return cupy.asarray(data)

    def to_host(self, buffer: Any) -> np.ndarray:
        """A copy on the host, which waits for the messages so far."""
        event, end = _event(), time.monotonic() + self._timeout
        while not event.done:
            if time.monotonic() > end:
                self._end()
                raise CommunicationError(self._failure)
            time.sleep(_POLL_S)
        return buffer.get()


def _current_device() -> Any:
    import cupy

    return cupy.cuda.Device()


def _event() -> Any:
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    return event


def connect(rank: int, size: int, broadcast: Callable[[Any], Any], timeout: float) -> NcclTransport:
    """Makes a communicator on the current device; all ranks call it together.

    Parameters
    ----------
    rank, size : int
    broadcast : callable
        Returns the argument of rank 0 on all ranks.
    timeout : float

    Raises
    ------
    ImportError
        CuPy finds no NCCL; the text says what to install.
    """
    module = _module()
    identifier = broadcast(module.get_unique_id() if rank == 0 else None)
    return NcclTransport(_OfCupy(module.NcclCommunicator(size, bytes(identifier), rank), module), rank, size, timeout)


def wrap(communicator: Any, rank: int | None, size: int | None, timeout: float) -> NcclTransport:
    """The messages of a communicator that the caller has made.

    Raises
    ------
    TypeError
        It is of another kind, or does not tell its rank or size.
    """
    if type(communicator).__module__.startswith("nccl."):
        import nccl.core

        found = communicator.rank, communicator.nranks
        return NcclTransport(_OfNccl4py(communicator, nccl.core), *_told(rank, size, *found), timeout)
    given = getattr(communicator, "_comm", communicator)  # that of cupyx.distributed.NCCLBackend
    if not all(hasattr(given, name) for name in ("send", "recv", "rank_id", "size")):
        kind = f"{type(communicator).__module__}.{type(communicator).__qualname__}"
        raise TypeError(
            "communicator: expected a cupy.cuda.nccl.NcclCommunicator, a cupyx.distributed.NCCLBackend or a "
            f"nccl.core.Communicator, got {kind}"
        )
    found = given.rank_id(), given.size()
    return NcclTransport(_OfCupy(given, _module()), *_told(rank, size, *found), timeout)


def _told(rank: int | None, size: int | None, own_rank: int, own_size: int) -> tuple[int, int]:
    """The communicator's rank and size, which those of the caller must be."""
    for name, given, own in (("rank", rank, own_rank), ("size", size, own_size)):
        if given is not None and given != own:
            raise ValueError(f"{name}: expected {own}, that of the communicator, got {given}")
    return own_rank, own_size


def _module() -> Any:
    """``cupy.cuda.nccl`` with its library."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where the library is missing; the error below says so, too
            from cupy.cuda import nccl
    except ImportError as error:
        raise ImportError(f"NCCL needs CuPy: {error}; {INSTALL_NCCL}") from error
    if not getattr(nccl, "available", False):
        raise ImportError(f"CuPy finds no NCCL; {INSTALL_NCCL}")
    return nccl
