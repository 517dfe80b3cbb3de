"""NCCL and CuPy's streams on host memory: ranks are threads, and work is done when it is queued."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import queue
import struct
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import numpy as np
from support.fake_cupy import FakeArray, FakeCupy, FakeMemory, current_device, place

import fa2cupy.distributed as dist
from fa2cupy.distributed import communicator
from fa2cupy.distributed.call import requests
from fa2cupy.distributed.call import run as run_module
from fa2cupy.distributed.local import copies as copies_of_ranks
from fa2cupy.distributed.local import kernels, lanes
from fa2cupy.distributed.local import prepared as prepared_of_ranks
from fa2cupy.distributed.local import sums as sums_of_ranks
from fa2cupy.distributed.local.kernels import Work
from fa2cupy.distributed.local.matrices import Matrix
from fa2cupy.distributed.movers import resources
from fa2cupy.distributed.transport import device_window
from fa2cupy.distributed.transport.nccl import NcclTransport
from fa2cupy.gpu import calls, copies, device_memory, prepare, prepared
from fa2cupy.numerics import arrays
from fa2cupy.plan.ranks import copy_spec, sum_spec
from fa2cupy.problem.dtypes import ACCUMULATOR

INT8 = "NCCL_INT8"
#: Ranks of the tests.
SIZE = 4
MODULES = (calls, copies, device_memory, prepare, prepared)
WINDOW = NcclTransport.window
try:
    import cupy as REAL
except ImportError:
    REAL = None


class FakeDevice:
    """``cupy.cuda.Device``."""

    def __init__(self, ordinal: int = 0):
        self.id, self._context = ordinal, current_device(ordinal)

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

            def synchronize(self):
                """All work is done when it is queued."""

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

            def synchronize(self):
                cupy.host_waits.append("synchronize")

        return Event()


def driver() -> ModuleType | None:
    """Returns the real ``cuda.bindings.driver``, if it is installed."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def copy_matrices(matrices) -> None:
    """Does what the kernel does."""
    for one in matrices:
        for row in range(one.height):
            to, of = one.target + row * one.target_pitch, one.source + row * one.source_pitch
            ctypes.memmove(to, of, one.width)


class FakeLaunch:
    """A launch of a kernel of the ranks, to be repeated with other addresses in its record."""

    def __init__(self, sharing: FakeSharing, work: Work):
        self._record, self._sharing, self._work = np.frombuffer(bytearray(work.front), np.int64), sharing, work

    def move(self, addresses: np.ndarray) -> None:
        self._record[[*self._work.places]] = addresses

    def __call__(self, stream: int) -> None:
        if self._work.spec_of is copy_spec:
            self._copy(*self._work.kind, stream)
        else:
            assert self._work.spec_of is sum_spec
            self._sum(*self._work.kind, stream)

    def _copy(self, word: int, stream: int) -> None:
        places = struct.iter_unpack("<5q2I", self._record[1:].tobytes())
        matrices = [
            Matrix(to, to_pitch, of, of_pitch, words_of_row * word, words // words_of_row)
            for to, to_pitch, of, of_pitch, _, words_of_row, words in places
        ]
        self._sharing.copy_matrices(matrices, stream)

    def _sum(self, dtype: str, items: int, stream: int) -> None:
        count, _, *lengths = struct.unpack("<6I", self._record[:3].tobytes())
        target, *shares = (
            memory_at(address, (*lengths, items), (*strides, np.dtype(dtype).itemsize), dtype)
            for address, *strides in self._record[3:].reshape(1 + count, 5).tolist()
        )
        total = shares[0].astype(ACCUMULATOR[dtype])
        for share in shares[1:]:
            total += share.astype(total.dtype)
        target[...] = total
        self._sharing.log.append(("sum by kernel", stream))


def memory_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array in memory that others own."""
    behind = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    nbytes = behind + np.dtype(dtype).itemsize
    whole = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
    return np.ndarray(shape, np.dtype(dtype), whole, strides=strides)


class FakeSharing:
    """CUDA IPC, pitched copies and signals of streams, between ranks that are threads of one process.

    Attributes
    ----------
    log : list of (kind, stream)
        Copies of matrices and signals, in the order in which they were queued.
    mapped : set of int
        Addresses that a rank has opened and not closed.
    refusal : str or None
        The error of every rank that opens memory.
    timeout : float
        Seconds that streams wait for a signal.
    never : list of int
        Streams that have waited for a signal that did not come.
    waiting : int
        Number of streams that wait.
    """

    SUCCESS = 0

    def __init__(self, cupy: StreamsCupy):
        self.log: list[tuple[str, int]] = []
        self.mapped: set[int] = set()
        self.refusal: str | None = None
        self.timeout, self.never, self.waiting = 20.0, [], 0
        self.changed = threading.Condition()
        self._driver, self.current = driver(), cupy.cuda.get_current_stream
        cupy.cuda.runtime = self
        cupy.cuda.Memory = self._memory
        cupy.cuda.MemoryPointer = lambda memory, offset: FakeMemory(memory.ptr + offset, memory)
        cupy.cuda.UnownedMemory = lambda address, nbytes, owner, device: SimpleNamespace(ptr=address)
        cupy.cuda.memory = SimpleNamespace(OutOfMemoryError=MemoryError)

    def __getattr__(self, name):
        return getattr(self._driver, name)  # tensor maps are encoded by the real driver

    @staticmethod
    def _memory(nbytes):
        array = FakeArray((nbytes,), np.uint8)
        return SimpleNamespace(ptr=array.ctypes.data, array=array)

    def memset(self, address, value, nbytes):
        ctypes.memset(address, value, nbytes)

    def deviceSynchronize(self):
        """All work is done when it is queued."""

    def ipcGetMemHandle(self, address):
        return address.to_bytes(8, "little")

    def ipcOpenMemHandle(self, handle, flags):
        if self.refusal:
            raise RuntimeError(self.refusal)
        address = int.from_bytes(handle, "little")
        self.mapped.add(address)
        return address

    def ipcCloseMemHandle(self, address):
        self.mapped.discard(address)

    def memcpy2DAsync(self, target, target_pitch, source, source_pitch, width, height, kind, stream):
        assert min(target_pitch, source_pitch) >= width
        self.log.append(("copy", stream))
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)

    def memcpyAsync(self, target, source, nbytes, kind, stream):
        ctypes.memmove(target, source, nbytes)

    def copy_matrices(self, matrices, stream=None):
        self.log += [("copy by kernel", stream or self.current().ptr)] * len(matrices)
        copy_matrices(matrices)

    def cuStreamBatchMemOp(self, stream, count, operations, flags):
        assert (count, flags) == (len(operations), 0)
        kinds = self._driver.CUstreamBatchMemOpType
        for one in operations:
            if one.operation == kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32:
                self._write(stream, int(one.writeValue.address), int(one.writeValue.value))
            else:
                assert one.operation == kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
                assert one.waitValue.flags == 1  # until equal
                self._wait(stream, int(one.waitValue.address), int(one.waitValue.value))
        return (self.SUCCESS,)

    def _write(self, stream, address, value):
        self.log.append(("write", stream))
        with self.changed:
            ctypes.c_uint32.from_address(address).value = value
            self.changed.notify_all()

    def _wait(self, stream, address, value):
        self.log.append(("wait", stream))
        word = ctypes.c_uint32.from_address(address)
        with self.changed:
            self.waiting += 1
            if not self.changed.wait_for(lambda: word.value == value, self.timeout):
                self.never.append(stream)
            self.waiting -= 1
            self.changed.notify_all()

    def is_idle(self, timeout):
        """Waits until no stream waits, like CUDA where memory is freed; returns False if that takes too long."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.waiting, timeout)


@contextlib.contextmanager
def fake_sharing(monkeypatch, cupy: StreamsCupy):
    """Makes fake GPUs write each other's memory; yields what they share."""
    sharing = FakeSharing(cupy)
    bindings = ModuleType("cuda.bindings")
    bindings.driver = sharing
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings", bindings)
        patch.setattr(NcclTransport, "window", WINDOW)
        patch.setattr(copies_of_ranks, "copy_matrices", sharing.copy_matrices)
        for module in (kernels, prepared_of_ranks):
            patch.setattr(module, "Launch", functools.partial(FakeLaunch, sharing))
        patch.setattr(sums_of_ranks, "is_on_host", lambda array: not isinstance(array, FakeArray))
        yield sharing


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
        self.timeout = 20.0

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
            data = self._nccl.queues[peer][self._rank].get(timeout=self._nccl.timeout)
            assert len(data) == count
            ctypes.memmove(pointer, data, count)

        self._nccl.local.group.append((1, arrive))

    def abort(self):
        self._nccl.aborted.append(self._rank)

    def _note(self, kind, peer, count, dtype, stream):
        self._nccl.log.append((self._rank, kind, peer, count, dtype, stream))


@contextlib.contextmanager
def fake_streams(monkeypatch):
    """Makes fa2cupy.distributed take the arrays of the fake GPU for CuPy's; yields the fake CuPy."""
    cupy = StreamsCupy()
    cupy.launches = calls.cupy.launches  # the fake GPU notes them
    for module in MODULES:
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    def get(array, stream=None):
        if stream is None:  # else a thread that looks after calls reads it
            cupy.host_waits.append("get")
        return np.array(array)

    monkeypatch.setattr(FakeArray, "get", get)
    monkeypatch.setattr(copies_of_ranks, "copy_matrices", copy_matrices)
    for module in (arrays, communicator, copies_of_ranks, lanes, requests, resources):
        monkeypatch.setattr(module, "is_on_host", lambda array: not isinstance(array, FakeArray))
    monkeypatch.setattr(run_module, "backend_of", lambda name, array: calls)
    monkeypatch.setattr(NcclTransport, "window", lambda transport, is_captured: None)  # but in `fake_sharing`
    over = threading.Event()

    def sleep(seconds):
        if over.wait(seconds):
            threading.Event().wait()  # a rank that has failed answers others for as long as its process lives

    monkeypatch.setattr(device_window, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    lanes._streams.cache_clear()
    yield cupy
    over.set()
    lanes._streams.cache_clear()


def shards(comm, arrays, order="zigzag"):
    """Returns the rows of a rank, on its fake GPU."""
    rows = dist.positions(comm, arrays[0].shape[1], order=order)
    return [place(x[:, rows]) for x in arrays]


def run_all(nccl: FakeNccl, work) -> list:
    """Runs ``work(comm)`` on each rank of two hosts, with communicators of NCCL."""

    def of_rank(comm):
        one = FakeCommunicator(nccl, comm.rank)
        return work(dist.Communicator.from_nccl(one, ranks_per_host=SIZE // 2, timeout=20))

    return dist.simulate(SIZE, of_rank)


def together(parts, comm_size: int, axis: int = 1) -> np.ndarray:
    """Returns the whole array, joined from the rows of all ranks in zigzag order."""
    halves = [np.split(np.asarray(part), 2, axis=axis) for part in parts]
    return np.concatenate([low for low, _ in halves] + [high for _, high in reversed(halves)], axis=axis)
