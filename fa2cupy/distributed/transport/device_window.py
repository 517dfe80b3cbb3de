"""Windows of GPUs of one host: memory that processes share, copy engines, and signals that streams wait for.

Streams write signals to the other ranks' memory and wait for those in their own (`cuStreamBatchMemOp`), without a
kernel and without the host. The driver is called once for all ranks, because a call costs more than its operations.
"""

from __future__ import annotations

import functools
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...problem.array_types import Array
from ...system.recent import RecentlyUsed
from ..local.copies import Copy, matrices_with_addresses
from ..local.lanes import Lane
from ..local.matrices import Matrix, is_few
from .messages import CommunicationError
from .shared_memory import SharedMemory
from .windows import FAILED, IS_READY, READY, Signal, Window, word_of

__all__ = ["DeviceWindow", "connect"]

_WORD = 4
_COPY_DEFAULT = 4
_MOST_BATCHES = 4096
_WAIT_UNTIL_EQUAL = 1
_RELEASE_S, _PATIENCE_S = 0.02, 2.0
#: Neither the priority of the caller's streams nor that of messages: streams of one priority may share a GPU queue.
_PRIORITY_OF_ANSWERS = -2
_log = logging.getLogger("fa2cupy")


class DeviceWindow(Window):
    """The window of a GPU: see `fa2cupy.distributed.transport.windows.Window`.

    Parameters
    ----------
    rank, size : int
    texts : callable
        Returns the texts of all ranks; they call it together.
    check : callable
        Raises CommunicationError if an earlier call failed.
    """

    def __init__(self, rank: int, size: int, texts: Callable[[str], list[str]], check: Callable[[], None]):
        super().__init__(rank, size)
        import cupy
        from cuda.bindings import driver

        self._driver, self._cupy, self._runtime = driver, cupy, cupy.cuda.runtime
        self._texts, self._check_transport = texts, check
        self._data = SharedMemory(rank, texts)
        self._is_kept = False
        self._kept: list[SharedMemory] = []
        self._unfinished: list[_Queued] = []
        self._batches: RecentlyUsed[_Batch] = RecentlyUsed(_MOST_BATCHES)
        self._signals = SharedMemory(rank, texts)
        self._signals.allocate(_WORD * (FAILED + 1) * size, zeroed=True)
        self._answers = cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY_OF_ANSWERS)
        self._signals.everyones(self._try_signal, CommunicationError)

    # -- memory

    def _grow(self, nbytes: int, last: Any) -> None:
        if last is not None:
            last.synchronize()
        self._texts("")  # no rank writes to the old windows any more
        if self._is_kept:
            self._kept.append(self._data)
            self._data, self._is_kept = SharedMemory(self.rank, self._texts), False
        else:
            self._data.release()
        self._data.allocate(nbytes)

    def _array(self, peer: int, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        return self._cupy.ndarray(shape, dtype, self._data.pointers[peer] + offset)

    def _check(self) -> None:
        self._check_transport()

    # -- copies

    def send(self, lane: Lane, copies: Sequence[Copy]) -> None:
        """Queues copies to other GPUs. A copy engine makes them."""
        lane.on_stream(self._send, matrices_with_addresses(copies))

    def _send(self, stream: int, matrices: Sequence[Matrix]) -> None:
        memcpy = self._runtime.memcpy2DAsync
        for to, to_pitch, of, of_pitch, width, height in matrices:
            memcpy(to, to_pitch, of, of_pitch, width, height, _COPY_DEFAULT, stream)

    def can_copy(self, array: Array) -> bool:
        """True if a copy between this array and a contiguous one is a few copies of matrices."""
        return is_few(array.shape, array.strides, array.itemsize)

    # -- signals

    def _write(self, stream: int, word: int, number: int) -> None:
        batch = self._batches.get((word, number, False))
        if batch is None:
            batch = self._batches.put((word, number, False), _Batch(self._driver))
            self._add_writes(batch, word, number)
        batch.queue(stream)

    def _wait(self, stream: int, word: int, number: int) -> None:
        batch = self._batches.get((word, number, True))
        if batch is None:
            batch = self._batches.put((word, number, True), _Batch(self._driver))
            for peer in self.others:
                batch.wait(self._address(self.rank, word, peer), number)
                batch.write(self._address(self.rank, word, peer), 0)
        batch.queue(stream)

    def _leave(self, stream: int) -> None:
        self._leaving.queue(stream)

    @functools.cached_property
    def _leaving(self) -> _Batch:
        batch = _Batch(self._driver)
        for peer in self.others:  # results may be wrong if another rank has failed: stay until this one fails, too
            batch.wait(self._address(self.rank, FAILED, peer), 0)
        self._add_writes(batch, READY, IS_READY)
        return batch

    def _add_writes(self, batch: _Batch, word: int, number: int) -> None:
        for peer in self.others:
            batch.write(self._address(peer, word, self.rank), number)

    def _address(self, owner: int, word: int, writer: int) -> int:
        return self._signals.pointers[owner].ptr + _WORD * (word * self.size + writer)

    def _try_signal(self) -> str:
        """Lets this rank's window be written for the first time.

        Raises
        ------
        CommunicationError
            Streams cannot wait for signals.
        """
        stream, address, batch = self._answers, self._address(self.rank, 0, self.rank), _Batch(self._driver)
        for peer in self.others:
            batch.write(self._address(self.rank, READY, peer), IS_READY)
        batch.write(address, 1)
        batch.wait(address, 1)
        batch.write(address, 0)
        batch.queue(stream.ptr)
        stream.synchronize()
        return ""

    # -- failures

    def _begin(self, steps: int, call: int, is_captured: bool) -> Any:
        self._check()
        if is_captured:
            self._is_kept = True  # a graph uses the memory as long as it is there
        else:
            while self._unfinished and self._unfinished[0].is_done():
                self._unfinished.pop(0)
            self._unfinished.append(_Queued(call, steps))
        return super()._begin(steps, call, is_captured)

    def ended(self, event: Any) -> None:
        """See `Window`."""
        super().ended(event)
        if not self._is_captured:
            self._unfinished[-1].end = event

    def release(self) -> None:
        """Ends all waits of this rank after a failure, also those of later calls.

        It tells the other ranks first: from then on, this rank computes with data that have not arrived. It returns
        when the calls so far have ended, or after some time if they wait for messages, too.
        """
        device, end = self._cupy.cuda.Device(), time.monotonic() + _PATIENCE_S
        batch = _Batch(self._driver)
        self._add_writes(batch, FAILED, 1)
        batch.queue(self._answers.ptr)
        self._answers.synchronize()
        threading.Thread(target=self._answer, args=(device,), name="fa2cupy.distributed", daemon=True).start()
        while self._waiting() is not None and time.monotonic() < end:
            time.sleep(_RELEASE_S)

    def failed(self) -> list[int]:
        """The other ranks that have failed."""
        words = np.zeros(self.size, np.uint32)
        source, stream = self._address(self.rank, FAILED, 0), self._answers
        self._runtime.memcpyAsync(words.ctypes.data, source, words.nbytes, _COPY_DEFAULT, stream.ptr)
        stream.synchronize()
        return np.flatnonzero(words).tolist()

    def _answer(self, device: Any) -> None:
        """Writes the signals of all calls that are not done, one call after the other."""
        device.use()
        while True:
            if (call := self._waiting()) is not None:
                for word, number in [(FAILED, 0), *call.signals()]:
                    batch = _Batch(self._driver)
                    for peer in self.others:
                        batch.write(self._address(self.rank, word, peer), number)
                    batch.queue(self._answers.ptr)
            time.sleep(_RELEASE_S)

    def _waiting(self) -> _Queued | None:
        """The first call that is not done."""
        return next((call for call in list(self._unfinished) if not call.is_done()), None)


class _Batch:
    """Operations on words, which a stream makes one after the other."""

    def __init__(self, driver: Any):
        self._driver, kinds = driver, driver.CUstreamBatchMemOpType
        self._write, self._wait = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32, kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
        self._operations: list[Any] = []

    def write(self, address: int, number: int) -> None:
        """Adds the writing of a number."""
        one = self._driver.CUstreamBatchMemOpParams()
        self._add(one, one.writeValue, self._write, address, 0, number)

    def wait(self, address: int, number: int) -> None:
        """Adds the wait for a number."""
        one = self._driver.CUstreamBatchMemOpParams()
        self._add(one, one.waitValue, self._wait, address, _WAIT_UNTIL_EQUAL, number)

    def _add(self, one: Any, of_kind: Any, kind: Any, address: int, flags: int, number: int) -> None:
        of_kind.operation, of_kind.address, of_kind.flags, of_kind.value = kind, address, flags, number
        self._operations.append(one)

    def queue(self, stream: int) -> None:
        """Queues the operations on the stream at this address."""
        (result,) = self._driver.cuStreamBatchMemOp(stream, len(self._operations), self._operations, 0)
        if int(result):
            raise CommunicationError(f"cuStreamBatchMemOp failed: {result.name}")


@dataclass
class _Queued:
    """A call whose work may not be done.

    Attributes
    ----------
    call, steps : int
    end : cupy.cuda.Event or None
        None while it is queued.
    """

    call: int
    steps: int
    end: Any = None

    def is_done(self) -> bool:
        """True if all its work is done."""
        return self.end is not None and self.end.done

    def signals(self) -> Iterator[tuple[int, int]]:
        """Yields the words that it waits for, and their numbers."""
        for kind, step in itertools.product(Signal, range(self.steps)):
            yield word_of(kind, step), IS_READY if kind == Signal.READY else self.call


def connect(rank: int, size: int, texts: Callable[[str], list[str]], check: Callable[[], None]) -> DeviceWindow | None:
    """The window of this rank, still without memory; None on all ranks if processes cannot share memory of their GPUs.

    All ranks call it together.
    """
    try:
        from cuda.bindings import driver as _driver  # noqa: F401

        host = _host()
    except ImportError:
        host = ""
    hosts = texts(host)
    if not host or any(one != host for one in hosts):
        return None
    try:
        return DeviceWindow(rank, size, texts, check)
    except (MemoryError, CommunicationError) as error:
        _log.info("messages travel by NCCL alone: %s", error)
        return None


def _host() -> str:
    """What only processes of one host have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}"
