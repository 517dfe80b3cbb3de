"""A stand-in for CuPy, NVRTC, NCCL and the driver, without a GPU: it notes what a program queues, and computes nothing.

`install` puts it in the place of these modules before fa2cupy is imported. It meets the package only where that calls
them, so that the inside of the package can change between two records.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import queue
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from .launch_recorder import Address, Recorder, Word

__all__ = ["DEVICES", "captured", "communicators", "install", "named", "placed", "recorder"]

recorder = Recorder()
_numbers = itertools.count(1 << 12)

#: What the driver says of each device.
DEVICES = tuple(
    {
        "name": name, "major": major, "minor": minor, "multiProcessorCount": count, "sharedMemPerBlockOptin": block,
        "sharedMemPerMultiprocessor": shared, "regsPerMultiprocessor": 65536, "maxThreadsPerMultiProcessor": threads,
        "l2CacheSize": l2,
    }
    for name, major, minor, count, block, shared, threads, l2 in (
        (b"H100", 9, 0, 132, 232448, 233472, 2048, 50 << 20),
        (b"A100", 8, 0, 108, 166912, 167936, 2048, 40 << 20),
        (b"T4", 7, 5, 40, 65536, 65536, 1024, 4 << 20),
    )
)  # fmt: skip
#: Longest message or assignment whose bytes arrive: ranks read texts of others, and no arrays.
_MOST_BYTES = 1 << 14
_WAIT_S = 20.0
_MAP_BYTES = 128
#: Addresses from this bit on stand for arrays that prepared calls will get.
_NO_MEMORY = 56

# ------------------------------------------------------------------------------------------------------------- streams


class _Stream:
    def __init__(self, non_blocking: bool = False, priority: int = 0, role: str | None = None):
        self.ptr, self.priority, self.role = next(_numbers), priority, role
        recorder.streams[self.ptr] = self

    def __enter__(self) -> _Stream:
        _current_stream()
        recorder.stacks("streams").append(self)
        return self

    def __exit__(self, *_: object) -> None:
        recorder.stacks("streams").pop()

    def wait_event(self, event: _Event) -> None:
        if event.is_captured:
            recorder.capturing.add(self.ptr)
        recorder.note("wait", self, of=event.stream.ptr, after=event.after)

    def is_capturing(self) -> bool:
        return self.ptr in recorder.capturing

    def synchronize(self) -> None:
        """Nothing: no work is done."""


class _Event:
    done = True

    def __init__(self, disable_timing: bool = False):
        pass

    def record(self, stream: _Stream | None = None) -> None:
        self.stream = stream or _current_stream()
        self.after = recorder.queued(self.stream)
        self.is_captured = self.stream.ptr in recorder.capturing

    def synchronize(self) -> None:
        """Nothing: no work is done."""


def _current_stream() -> _Stream:
    streams = recorder.stacks("streams")
    if streams[0] is None:
        streams[0] = _Stream(role="caller")
    return streams[-1]


@contextlib.contextmanager
def captured() -> Iterator[None]:
    """A CUDA graph captures the caller's stream, and those that wait for it."""
    recorder.capturing.add(_current_stream().ptr)
    try:
        yield
    finally:
        recorder.capturing.discard(_current_stream().ptr)


class _Device:
    def __init__(self, ordinal: int | None = None):
        self.id = recorder.stacks("devices", 0)[-1] if ordinal is None else ordinal
        self.attributes = {"MultiProcessorCount": DEVICES[self.id]["multiProcessorCount"]}

    def use(self) -> None:
        recorder.stacks("devices", 0)[-1] = self.id

    def __enter__(self) -> _Device:
        recorder.stacks("devices", 0).append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        recorder.stacks("devices").pop()


# -------------------------------------------------------------------------------------------------------------- arrays


class _Pointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, memory: Any, offset: int = 0):
        self.mem, self.ptr, self.device_id = memory, memory.ptr + offset, _Device().id
        self.array: _Array | None = None

    def __add__(self, offset: int) -> _Pointer:
        return _Pointer(self, offset)

    def memset_async(self, value: int, nbytes: int) -> None:
        recorder.note("clear", _current_stream(), place=Address(self.ptr), bytes=nbytes, value=value)


def _memory(nbytes: int, is_divided: bool = False) -> Any:
    """``cupy.cuda.Memory``."""
    block = recorder.allocate(nbytes, is_divided)
    return SimpleNamespace(ptr=block.start, size=nbytes, block=block)


def _alloc(nbytes: int) -> _Pointer:
    return _Pointer(_memory(nbytes))


def _malloc_async(nbytes: int) -> _Pointer:
    with _using_allocator(_malloc_async):
        return _alloc(nbytes)


@contextlib.contextmanager
def _using_allocator(allocator: Callable[[int], _Pointer]) -> Iterator[None]:
    kinds = recorder.stacks("kinds", "memory")
    kinds.append("memory of a graph" if allocator is _malloc_async else "memory")
    try:
        yield
    finally:
        kinds.pop()


class _Array:
    """``cupy.ndarray``. An array of the host keeps its layout."""

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None):
        shape, dtype = (shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if memptr is None:
            data = recorder.allocate(nbytes).bytes
        else:
            if memptr.array is None:
                recorder.divide(memptr.ptr)
            data = np.frombuffer((ctypes.c_char * max(nbytes, 1)).from_address(memptr.ptr), np.uint8)[:nbytes]
        host = data.view(dtype).reshape(shape)
        self.host = host if strides is None else np.lib.stride_tricks.as_strided(host, shape, strides)
        self.device_id = _Device().id

    @property
    def data(self) -> _Pointer:
        pointer = _Pointer(SimpleNamespace(ptr=self.host.ctypes.data))
        pointer.device_id, pointer.array = self.device_id, self
        return pointer

    @property
    def device(self) -> _Device:
        return _Device(self.device_id)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["host"], name)
        return functools.partial(_call, name, found) if callable(found) else _view(found)

    def __getitem__(self, index: Any) -> Any:
        return _view(self.host[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        target, value = self.host[index], _plain(value)
        recorder.note("compute", _current_stream(), what="assign", arrays=[_where(target), _where(value)])
        if target.nbytes <= _MOST_BYTES:
            self.host[index] = value

    def __len__(self) -> int:
        return len(self.host)

    def fill(self, value: Any) -> None:
        self[...] = value

    def copy(self, order: str = "C") -> _Array:
        return _new("copy", self.host, self.host)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> _Array:
        return self if self.host.dtype == dtype and not copy else _new("astype", self.host.astype(dtype), self.host)

    def set(self, source: np.ndarray) -> None:
        values = source.tolist() if source.dtype == np.int32 else None
        recorder.note("upload", _current_stream(), place=_where(self.host), values=values)
        self.host[...] = source

    def get(self, stream: Any = None) -> np.ndarray:
        return np.array(self.host)


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: _call(name, getattr(self.host, name), *others)


def _in_place(name: str) -> Callable[..., Any]:
    def apply(self: _Array, other: Any) -> _Array:
        recorder.note("compute", _current_stream(), what=name, arrays=[_where(self.host), _where(_plain(other))])
        return self

    return apply


for _name in ("add", "sub", "mul", "truediv", "radd", "rsub", "rmul", "rtruediv", "neg", "eq", "ne", "lt", "gt", "ge"):
    setattr(_Array, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("iadd", "isub", "imul"):
    setattr(_Array, f"__{_name}__", _in_place(f"__{_name}__"))


def _plain(value: Any) -> Any:
    """The host's array in the place of one of these, also in lists."""
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.host if isinstance(value, _Array) else value


def _view(host: Any) -> Any:
    """An array of the same memory; what is no array stays."""
    if not isinstance(host, np.ndarray):
        return host
    array = _Array.__new__(_Array)
    array.__dict__.update(host=host, device_id=_Device().id)
    return array


def _new(what: str, host: np.ndarray, *operands: Any) -> _Array:
    """An array in memory of its own, which a kernel of CuPy writes."""
    array = _Array(host.shape, host.dtype)
    if host.nbytes <= _MOST_BYTES:
        array.host[...] = host
    recorder.note("compute", _current_stream(), what=what, arrays=[_where(array.host), *map(_where, operands)])
    return array


def _where(value: Any) -> Any:
    """What an entry has of an operand."""
    if isinstance(value, np.ndarray):
        return [Address(value.ctypes.data), str(value.dtype), list(value.shape), list(value.strides)]
    return value if isinstance(value, bool | int | float | str | None) else str(type(value))


def _call(name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Calls a function of NumPy: views stay views, and results are new arrays."""
    operands = [_plain(one) for one in arguments]
    with np.errstate(all="ignore"):
        found = function(*operands, **{key: _plain(one) for key, one in keywords.items()})
    if isinstance(found, np.ndarray) and (recorder.block_at(found.ctypes.data) or found.ctypes.data >> _NO_MEMORY):
        return _view(found)
    return _new(name, np.asarray(found), *operands) if isinstance(found, np.ndarray | np.generic) else found


def named(results: Any, *names: str) -> Any:
    """Lets names stand for the memory of arrays that a call has returned."""
    for name, array in zip(names, results, strict=False):
        recorder.name(name, array.data.ptr)
    return results


def placed(name: str, host: np.ndarray) -> _Array:
    """A named copy of an array of the host on the current device; zeros for an array without strides."""
    (array,) = named([_Array(host.shape, host.dtype)], name)
    if host.strides != (0,) * host.ndim:
        array.host[...] = host
    return array


# ------------------------------------------------------------------------------------------------------------- kernels

#: Members of a record: their C types, and letters of struct.
_MEMBERS = {"Strides": "3q", "ScoreStrides": "4q", "int64": "q", "uint64": "Q", "int32": "i", "uint32": "I"}
_MEMBERS["SummedArrays"] = "sum"
_MEMBER = re.compile(r"\s*(?:const )?(?P<type>[^*<;]+)(?:<(?P<rank>\d+)>)?(?P<star>\*?) (?P<name>\w+);$")
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/|^#line[^\n]*$", re.DOTALL | re.MULTILINE)
_MATRICES = "copy_matrices"  # the kernel whose record is a list of copies
_WORD = re.compile(r"_d?(\d+)(?:_r|$)")  # in the kernel's name: the bytes of a word
_functions: dict[int, _Function] = {}


class _Function:
    """A kernel. Its machine code is its source."""

    def __init__(self, source: str, symbol: str):
        self.ptr, self.kernel = next(_numbers), self
        self.symbol, self._source = symbol, source
        _functions[self.ptr] = self

    @functools.cached_property
    def key(self) -> str:
        """The name by which `Recorder.kernels` has the digest of the source, without comments and names."""
        code = " ".join(_COMMENTS.sub("", self._source).replace(self.symbol, "kernel").split())
        digest = hashlib.sha256(code.encode()).hexdigest()
        keys = (f"{self.symbol}{f', source {number}' * (number > 1)}" for number in itertools.count(1))
        return next(key for key in keys if recorder.kernels.setdefault(key, digest) == digest)

    @functools.cached_property
    def _members(self) -> list[tuple[str, str]]:
        """Names of the record's members, each with its letters of struct, ``map`` or ``address``."""
        text = self._source[self._source.index("struct Params {") :].partition("__device__")[0].partition("};")[0]
        real = "d" if "using Element = double;" in self._source else "f"
        found = []
        for member in filter(None, map(_MEMBER.match, text.splitlines())):
            kind = member["type"]
            letters = "address" if member["star"] else {"TensorMap": "map", "Accum": real}.get(kind)
            letters = letters or (f"{2 * int(member['rank'])}q" if member["rank"] else _MEMBERS[kind])
            found.append((member["name"], letters))
        return found

    def record(self, address: int) -> dict[str, Any]:
        """The members of the record at an address."""
        found: dict[str, Any] = {}
        for name, letters in self._members:
            if letters == "map":
                number, place = struct.unpack("<2q", ctypes.string_at(address, 16))
                found[name] = {"place": Address(place), **recorder.maps[number]}
                address += _MAP_BYTES
                continue
            if letters == "sum":
                return {name: _summed(address)}
            own = "<Q" if letters == "address" else f"<{letters}"
            values = struct.unpack(own, ctypes.string_at(address, struct.calcsize(own)))
            address += struct.calcsize(own)
            found[name] = Address(values[0]) if letters == "address" else values if values[1:] else values[0]
        return found


def _summed(address: int) -> dict[str, Any]:
    """The arrays of a launch that sums them: the target and its terms, with their strides in bytes."""
    count, words, *lengths = struct.unpack("<6I", ctypes.string_at(address, 24))
    arrays = struct.iter_unpack("<5q", ctypes.string_at(address + 24, 40 * (1 + count)))
    return {"words": words, "lengths": lengths, "arrays": [[Address(place), *strides] for place, *strides in arrays]}


class _Module:
    """``cupy.cuda.function.Module``, and ``cupy.RawModule``."""

    def __init__(self, code: str = "", options: tuple[str, ...] = ()):
        self._source = code

    def load(self, cubin: bytes) -> None:
        self._source = cubin.rstrip(b"\0").decode()

    def get_function(self, symbol: str) -> _Function:
        return _Function(self._source, symbol)


def _elementwise(reads: str, writes: str, body: str, name: str) -> Callable[..., None]:
    return lambda *arrays: recorder.note(
        "compute", _current_stream(), what=name, arrays=[_where(_plain(one)) for one in arrays]
    )


def _launch(function: int, *shape_and_more: int) -> None:
    """``cuLaunchKernel``: function, three numbers of blocks and of threads, shared memory, stream, record."""
    blocks, *others, shared, stream, pointers, _ = shape_and_more
    _, _, threads, _, _ = others
    kernel, queued_on = _functions[function], recorder.streams[stream]
    (address,) = struct.unpack("<Q", ctypes.string_at(pointers, 8))
    if _MATRICES in kernel.symbol:
        (count,) = struct.unpack("<q", ctypes.string_at(address, 8))
        word = int(_WORD.findall(kernel.symbol)[0])
        for to, to_pitch, of, of_pitch, _, words_of_row, words in struct.iter_unpack(
            "<5q2I", ctypes.string_at(address + 8, 48 * count)
        ):
            shape = (words_of_row * word, words // words_of_row)
            _copy(to, to_pitch, of, of_pitch, *shape, f"kernel of {blocks} blocks", queued_on)
        return
    how = {"kernel": kernel.key, "blocks": blocks, "threads": threads, "shared": shared}
    recorder.note("launch", queued_on, **how, record=kernel.record(address))


def _copy(*place_and_more: Any) -> None:
    to, to_pitch, of, of_pitch, width, height, by, stream = place_and_more
    fields = {"to": Address(to), "of": Address(of), "width": width, "height": height}
    recorder.note("copy", stream, by=by, **fields, pitches=[to_pitch, of_pitch] if height > 1 else [])


# ------------------------------------------------------------------------------------------------- NVRTC, driver, NCCL


def _nvrtc() -> dict[str, Any]:
    return {
        "NVRTCError": type("NVRTCError", (Exception,), {}),
        "getVersion": lambda: (12, 9),
        "getSupportedArchs": lambda: tuple(10 * one["major"] + one["minor"] for one in DEVICES),
        "createProgram": lambda text, *_: text,
        "compileProgram": lambda *_: None,
        "destroyProgram": lambda *_: None,
        "getPTX": lambda program: b"recorded\n.version 8.0\n",
        "getProgramLog": lambda program: "",
        "getCUBIN": str.encode,
    }


def _driver() -> dict[str, Any]:
    return {
        "launchKernel": _launch,
        "funcSetAttribute": lambda *_: None,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 0,
        "CUDADriverError": type("CUDADriverError", (Exception,), {}),
    }


def _runtime() -> dict[str, Any]:
    def handle(address: int) -> bytes:
        if not recorder.shares_memory:
            raise RuntimeError("messages of this call travel by NCCL")
        return address.to_bytes(8, "little")

    without_effect = ("free", "memset", "streamSynchronize", "deviceSynchronize", "ipcCloseMemHandle", "memcpyAsync")
    return dict.fromkeys(without_effect, lambda *_: None) | {
        "getDevice": lambda: _Device().id,
        "getDeviceCount": lambda: len(DEVICES),
        "getDeviceProperties": lambda ordinal: DEVICES[ordinal],
        "streamIsCapturing": lambda stream: stream in recorder.capturing,
        "ipcGetMemHandle": handle,
        "ipcOpenMemHandle": lambda handle, flags: int.from_bytes(handle, "little"),
        "memsetAsync": lambda address, value, nbytes, stream: recorder.note(
            "clear", recorder.streams[stream], place=Address(address), bytes=nbytes, value=value
        ),
        "memcpy2DAsync": lambda *copy: _copy(*copy[:6], "engine", recorder.streams[copy[-1]]),
    }


class _Enumeration:
    """An enumeration whose members are the ends of their names."""

    CUDA_SUCCESS = 0

    def __getattr__(self, name: str) -> str:
        return name.rpartition("_")[2]


class _Operation(SimpleNamespace):
    """An operation on a word: the members of all kinds share their memory."""

    def __init__(self) -> None:
        self.writeValue = self.waitValue = self


def _bindings() -> dict[str, Any]:
    """``cuda.bindings.driver``."""

    def encode(dtype: str, rank: int, address: int, sizes: Any, strides: Any, box: Any, *_: Any) -> tuple[int, Any]:
        recorder.maps.append({"dtype": dtype, "sizes": sizes, "strides": strides, "box": box})
        encoded = ctypes.create_string_buffer(struct.pack("<2q", len(recorder.maps) - 1, address), _MAP_BYTES)
        return 0, SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded))

    def operate(stream: int, count: int, operations: Any, flags: int) -> tuple[int]:
        for one in operations:
            recorder.note(one.operation, recorder.streams[stream], word=Word(one.address), is_zero=one.value == 0)
        return (0,)

    kinds = ("DataType", "Interleave", "Swizzle", "L2promotion", "FloatOOBfill")
    return {f"CUtensorMap{kind}": _Enumeration() for kind in kinds} | {
        "CUresult": _Enumeration(),
        "cuuint32_t": int,
        "cuuint64_t": int,
        "cuTensorMapEncodeTiled": encode,
        "CUstreamBatchMemOpType": SimpleNamespace(
            CU_STREAM_MEM_OP_WRITE_VALUE_32="signal", CU_STREAM_MEM_OP_WAIT_VALUE_32="await"
        ),
        "CUstreamBatchMemOpParams": _Operation,
        "cuStreamBatchMemOp": operate,
    }


class _Communicator:
    """``cupy.cuda.nccl.NcclCommunicator`` between threads: texts arrive, arrays do not."""

    def __init__(self, queues: dict[tuple[int, int], queue.Queue], rank: int, size: int):
        self._queues, self._rank, self._size = queues, rank, size
        self._receives: list[Callable[[], None]] = []

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, address: int, nbytes: int, dtype: str, peer: int, stream: int) -> None:
        recorder.note("send", recorder.streams[stream], of=Address(address), to_rank=peer, bytes=nbytes)
        data = ctypes.string_at(address, nbytes) if nbytes <= _MOST_BYTES else b""
        self._queues[self._rank, peer].put((nbytes, data))

    def recv(self, address: int, nbytes: int, dtype: str, peer: int, stream: int) -> None:
        recorder.note("recv", recorder.streams[stream], to=Address(address), of_rank=peer, bytes=nbytes)
        _group.__dict__.setdefault("receives", []).append(functools.partial(self._arrive, address, nbytes, peer))

    def _arrive(self, address: int, nbytes: int, peer: int) -> None:
        sent, data = self._queues[peer, self._rank].get(timeout=_WAIT_S)
        assert sent == nbytes, f"rank {self._rank} waits for {nbytes} bytes of rank {peer}, which sends {sent}"
        ctypes.memmove(address, data, len(data))

    def abort(self) -> None:
        """Nothing: nothing is under way."""


_group = threading.local()


def _end_group() -> None:
    receives, _group.receives = _group.__dict__.get("receives", []), []
    for receive in receives:
        receive()


def communicators(size: int) -> list[_Communicator]:
    """Communicators of ranks that belong together."""
    queues: dict[tuple[int, int], queue.Queue] = collections.defaultdict(queue.Queue)
    for pair in itertools.product(range(size), repeat=2):
        queues[pair] = queue.Queue()
    return [_Communicator(queues, rank, size) for rank in range(size)]


# ---------------------------------------------------------------------------------------------------------------- CuPy


class _Cupy(ModuleType):
    """``cupy``, with NumPy's functions."""

    __version__ = "14.0.0"
    ndarray, RawModule, ElementwiseKernel = _Array, _Module, staticmethod(_elementwise)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        return functools.partial(_call, name, found) if callable(found) and not isinstance(found, type) else found

    def get_array_module(self, array: Any) -> ModuleType:
        return self if isinstance(array, _Array) else np

    def empty(self, shape: Any, dtype: Any = float) -> _Array:
        return _Array(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = float) -> _Array:
        array = _Array(shape, dtype)
        array.data.memset_async(0, array.nbytes)
        return array

    def asarray(self, array: Any, dtype: Any = None) -> _Array:
        host = np.asarray(_plain(array), dtype)
        made = _Array(host.shape, host.dtype)
        made.set(host)
        return made

    def ascontiguousarray(self, array: _Array) -> _Array:
        return array if array.host.flags.c_contiguous else array.copy()


def install() -> None:
    """Puts the stand-ins in the place of the modules. It belongs before the first import of fa2cupy."""
    cuda = {
        "Device": _Device, "Stream": _Stream, "Event": _Event, "MemoryPointer": _Pointer, "alloc": _alloc,
        "malloc_async": _malloc_async, "using_allocator": _using_allocator, "get_current_stream": _current_stream,
        "Memory": functools.partial(_memory, is_divided=True),
        "UnownedMemory": lambda address, nbytes, owner, device: SimpleNamespace(ptr=address),
    }  # fmt: skip
    nccl = {"NCCL_INT8": "int8", "available": True, "groupStart": lambda: None, "groupEnd": _end_group}
    contents = {
        "cupy.cuda": cuda, "cupy.cuda.driver": _driver(), "cupy.cuda.function": {"Module": _Module},
        "cupy.cuda.memory": {"OutOfMemoryError": MemoryError}, "cupy.cuda.runtime": _runtime(),
        "cupy.cuda.nvrtc": _nvrtc(), "cupy.cuda.nccl": nccl,
        "cuda": {}, "cuda.bindings": {}, "cuda.bindings.driver": _bindings(),
    }  # fmt: skip
    modules = {"cupy": _Cupy("cupy"), **{name: ModuleType(name) for name in contents}}
    for name, module in modules.items():
        module.__dict__.update(contents.get(name, {}), __path__=[])
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    sys.modules.update(modules)
