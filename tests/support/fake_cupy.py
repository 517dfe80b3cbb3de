"""A fake CuPy on host memory, with the functions that fa2cupy.gpu calls."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Iterator

import numpy as np

#: Allocators of new arrays, "pool" or "graph"; the last one is current.
_allocators = ["pool"]
#: Devices; the last one is current.
_devices = [0]


def current_ordinal() -> int:
    """Returns the number of the device that calls go to."""
    return _devices[-1]


class FakeMemory:
    """The part of ``cupy.cuda.MemoryPointer`` that the package uses."""

    def __init__(self, address: int, owner: object, device_id: int = 0):
        self.ptr, self.device_id, self.owner = address, device_id, owner

    def __add__(self, offset: int) -> FakeMemory:
        return FakeMemory(self.ptr + offset, self.owner, self.device_id)

    def memset_async(self, value: int, nbytes: int) -> None:
        ctypes.memset(self.ptr, value, nbytes)


class FakeArray(np.ndarray):
    """The part of ``cupy.ndarray`` that the package uses."""

    device_id = 0
    allocator = "view"

    def __array_finalize__(self, source) -> None:
        if isinstance(source, FakeArray):
            self.device_id = source.device_id

    def __new__(cls, shape, dtype, memptr=None, strides=None):
        """Allocates like CuPy, or takes the memory at a pointer."""
        if memptr is None:
            return _aligned(shape, dtype)
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = (ctypes.c_char * nbytes).from_address(memptr.ptr)
        buffer.owner = memptr.owner  # the memory lives as long as the array and its views, also those of NumPy
        array = np.frombuffer(buffer, np.uint8).view(dtype).reshape(shape)
        array = np.lib.stride_tricks.as_strided(array, shape, strides).view(cls)
        array.device_id = memptr.device_id
        if isinstance(memptr.owner, _Allocation):
            array.allocator = memptr.owner.allocator
            memptr.owner.becomes_arrays()
        return array

    def copy(self, order: str = "C"):
        """Copies like CuPy, into memory of the current allocator."""
        assert order == "C"
        return place(self)

    def get(self, stream=None) -> np.ndarray:
        """Copies to the host."""
        return np.array(self)

    @property
    def data(self) -> FakeMemory:
        return FakeMemory(self.ctypes.data, self, self.device_id)


class _Allocation:
    """Memory from an allocator. It leaves the list of workspaces once arrays are made of it."""

    def __init__(self, allocator: str, nbytes: int, workspaces: list):
        self.buffer, self.allocator = _aligned((nbytes,), np.uint8), allocator
        self._entry, self._workspaces = (allocator, nbytes, _devices[-1]), workspaces
        workspaces.append(self._entry)

    def becomes_arrays(self) -> None:
        if self._workspaces is not None:
            self._workspaces.remove(self._entry)
        self._workspaces = None


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> FakeArray:
    # CuPy's allocations start on 512 bytes, NumPy's only on 16.
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(nbytes + 512, 0xFF, np.uint8)  # NaN in every dtype, so that an unwritten element shows
    start = -raw.ctypes.data % 512
    array = raw[start : start + nbytes].view(dtype).reshape(shape).view(FakeArray)
    array.allocator, array.device_id = _allocators[-1], _devices[-1]
    return array


@contextlib.contextmanager
def current_device(ordinal: int) -> Iterator[None]:
    """Stands in for ``cupy.cuda.Device`` as a context."""
    _devices.append(ordinal)
    try:
        yield
    finally:
        _devices.pop()


@contextlib.contextmanager
def _using_allocator(name: str) -> Iterator[None]:
    _allocators.append(name)
    try:
        yield
    finally:
        _allocators.pop()


class FakeStream:
    """The part of a stream of CuPy that the package uses. Events of `waited` are those that it waits for."""

    def __init__(self, ptr: int, waited: list):
        self.ptr, self.wait_event = ptr, waited.append


class FakeEvent:
    """The part of ``cupy.cuda.Event`` that the package uses. It is `done` unless a test says otherwise."""

    done = True

    def __init__(self, *, disable_timing: bool):
        assert disable_timing

    def record(self) -> None:
        """Records nothing: kernels have run when a launch returns."""


class FakeCupy(types.SimpleNamespace):
    """The functions of CuPy that fa2cupy.gpu calls.

    Attributes
    ----------
    stream : int
        Address of the current stream of device 0; that of device n is greater by n.
    capturing : set of int
        Streams whose work goes into a graph.
    workspaces : list of (allocator, bytes, device)
        Allocations other than arrays, and than memory of which arrays have been made.
    launches : list of (device, stream)
        Device and stream of each launched kernel.
    waited : list of FakeEvent
        Events that streams have been told to wait for.
    """

    def __init__(self) -> None:
        super().__init__(ndarray=FakeArray, stream=0, capturing=set(), workspaces=[], launches=[], waited=[])
        self.cuda = types.SimpleNamespace(
            Device=current_device,
            Event=FakeEvent,
            get_current_stream=lambda: FakeStream(self.stream + _devices[-1], self.waited),
            alloc=lambda nbytes: self._alloc(nbytes, _allocators[-1]),
            malloc_async=lambda nbytes: self._alloc(nbytes, "graph"),
            using_allocator=lambda allocator: _using_allocator(
                "graph" if allocator == self.cuda.malloc_async else "pool"
            ),
        )

    def is_capturing(self, stream: int) -> bool:
        assert stream not in (0, 1), "the runtime must not be asked about these"
        return stream in self.capturing

    def empty(self, shape, dtype):
        return _aligned(shape, dtype)

    def zeros(self, shape, dtype):
        array = _aligned(shape, dtype)
        array[...] = 0
        return array

    def ascontiguousarray(self, array):
        return array if array.flags.c_contiguous else place(array)

    def _alloc(self, nbytes: int, allocator: str) -> FakeMemory:
        owner = _Allocation(allocator, nbytes, self.workspaces)
        return FakeMemory(owner.buffer.ctypes.data, owner, _devices[-1])


def place(array: np.ndarray) -> FakeArray:
    """Returns a copy in memory that is aligned like CuPy's."""
    placed = _aligned(array.shape, array.dtype)
    placed[...] = array
    return placed
