"""Messages of CuPy arrays between GPUs, by NCCL.

The communicator is one of CuPy (``cupy.cuda.nccl``) or of nccl4py (``nccl.core``). Arrays travel as bytes, so that
those of any dtype can, bfloat16 included. The host does not wait for messages: a thread watches for calls that do not
end.
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
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...system.locks import new_lock
from .messages import CommunicationError, Messages, all_texts, check_heads, split_own
from .windows import Window

__all__ = ["NcclTransport", "connect", "wrap"]

INSTALL_NCCL = (
    "in the checkout of fa2cupy, pip install '.[cuda12,nccl12]' ('.[cuda13,nccl13]' with a driver for CUDA 13), or "
    "nvidia-nccl-cu12 (nvidia-nccl-cu13) alone"
)
_POLL_S = 1e-3
_log = logging.getLogger("fa2cupy")


class _Binding(Protocol):
    """What the transport needs of a library for NCCL."""

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
    """``nccl.core.Communicator``. It needs a dtype that it knows: arrays are passed as int8."""

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


class _Watched(NamedTuple):
    """A call that may not be done: its end, when its time is up, and its head with those of the other ranks."""

    event: Any
    end: float
    heads: tuple[np.ndarray, Any] | None


class NcclTransport:
    """Messages by NCCL: see `fa2cupy.distributed.transport.messages.Transport`.

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
        self._watched: list[_Watched] = []
        self._heads: tuple[np.ndarray, Any] | None = None
        self._lock = new_lock()
        self._watcher: threading.Thread | None = None
        self._failure: str | None = None
        self._reader: Any = None
        self._is_connected = False
        self._window: Any = None

    def check(self) -> None:
        """Raises CommunicationError if an earlier call failed."""
        if self._failure is not None:
            raise CommunicationError(self._failure)

    def end(self, reason: str) -> None:
        """Ends what is under way. Ranks that write this one's memory hear of it; the time of others runs out."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        if self._window is not None:
            self._window.release()  # first: NCCL frees memory, and CUDA waits for all streams then
        self._binding.abort()

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
        try:
            with self._binding.group():
                for array, peer in sends:
                    self._binding.send(array, peer, stream)
                for array, peer in recvs:
                    self._binding.recv(array, peer, stream)
        except Exception as error:
            raise CommunicationError(f"rank {self.rank}: NCCL has failed: {type(error).__name__}: {error}") from error

    def announce(self, head: np.ndarray, own: Any, landing: Any) -> None:
        """Queues the heads of the ranks' calls. They are compared when the call is done, without a wait of the host.

        A rank that compares texts meets them before any other message, and stops.
        """
        import cupy

        if self._reader is None:  # it waits for no other stream
            self._reader = cupy.cuda.Stream(non_blocking=True)
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange([(own, peer) for peer in peers], [(landing[peer], peer) for peer in peers])
        self._heads = head, landing

    def watch(self, event: Any = None) -> None:
        """Ends the call if the event, by default that of all work on the current stream so far, is late."""
        heads, self._heads = self._heads, None
        with self._lock:
            self._watched.append(_Watched(event or _event(), time.monotonic() + self._timeout, heads))
            if self._watcher is None:
                name, device = "fa2cupy.distributed", _current_device()
                self._watcher = threading.Thread(target=self._look_after, args=(device,), name=name, daemon=True)
                self._watcher.start()

    def _look_after(self, device: Any) -> None:
        device.use()  # a new thread would make a context on the first GPU
        while self._failure is None:
            time.sleep(min(1.0, self._timeout / 4))
            with self._lock:
                if not self._watched:
                    self._watcher = None
                    return
                done: list[_Watched] = []
                left: list[_Watched] = []
                for call in self._watched:
                    (done if call.event.done else left).append(call)
                self._watched = left
            try:
                self._check_calls(done)
            except CommunicationError as error:
                self._end(f"{error}; results of the last calls are not there")

    def _check_calls(self, done: list[_Watched]) -> None:
        """Raises CommunicationError if a call is late, a rank has failed, or ranks have made different calls."""
        if any(time.monotonic() > call.end for call in self._watched):
            raise self._late()
        if self._window is not None and (failed := self._window.failed()):
            raise CommunicationError(f"rank {self.rank} cannot go on: ranks {failed} have failed")
        for own, landing in (call.heads for call in done if call.heads is not None):
            heads = landing.get(stream=self._reader)
            self._reader.synchronize()
            heads[self.rank] = own
            check_heads(self.rank, own, heads)

    def _late(self) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank} has waited {self._timeout:g} s for messages of other ranks, one of which has ended, is "
            "late or makes another call"
        )

    def _end(self, reason: str) -> None:
        """Ends what is under way, and prints the reason, which no call is there to raise."""
        _log.error(reason)
        print(f"fa2cupy.distributed: {reason}", file=sys.stderr, flush=True)
        self.end(reason)

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
                late = self._late()
                self.end(str(late))
                raise late
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
    """The communicator's rank and size. Raises ValueError if the caller's are others."""
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
