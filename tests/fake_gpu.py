"""A GPU made of NumPy: CuPy's part of gpu.py and prepared.py on host memory, and stages that run from their record.

Here they do by the formulas what the kernel would, in simulator.py they execute the kernel. Strides, records,
workspaces and the choice of copies are then tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import types
from collections.abc import Callable, Iterator, Mapping

import ml_dtypes
import numpy as np
from ptxsim.tensor_map import TensorMap, driver_tensor_map

from fa2cupy import device_memory, gpu, prepared, reference, signatures
from fa2cupy.device import DeviceInfo
from fa2cupy.features import ARRAY_FEATURES, OFFSETS
from fa2cupy.plan import Plan, Stage
from fa2cupy.spec import KernelSpec
from fa2cupy.tma import TensorLayout, encode_arguments


TILE_COUNTER = "tile_counter"  # a pointer of the record that is no array of the call


class FakeMemory:
    """What ``cupy.cuda.MemoryPointer`` is to them."""

    def __init__(self, address: int, owner: object, device_id: int = 0):
        self.ptr, self.device_id, self._owner = address, device_id, owner

    def memset_async(self, value: int, nbytes: int) -> None:
        ctypes.memset(self.ptr, value, nbytes)


class FakeArray(np.ndarray):
    """What ``cupy.ndarray`` is to them."""

    device_id = 0
    allocator = "view"

    def __array_finalize__(self, source) -> None:
        if isinstance(source, FakeArray):
            self.device_id = source.device_id

    def __new__(cls, shape, dtype):
        """As CuPy allocates."""
        return _aligned(shape, dtype)

    def copy(self, order: str = "C"):
        """As CuPy copies: into memory of the current allocator."""
        assert order == "C"
        return place(self)

    @property
    def data(self) -> FakeMemory:
        return FakeMemory(self.ctypes.data, self, self.device_id)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> FakeArray:
    # CuPy's allocations start on 512 bytes, NumPy's only on 16.
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(nbytes + 512, 0xFF, np.uint8)  # NaN in every dtype, so that an unwritten element shows
    start = -raw.ctypes.data % 512
    array = raw[start : start + nbytes].view(dtype).reshape(shape).view(FakeArray)
    array.allocator, array.device_id = _allocators[-1], _devices[-1]
    return array


#: Whose memory new arrays get: the pool's, or in a context the graph's.
_allocators = ["pool"]
#: The current device.
_devices = [0]


@contextlib.contextmanager
def current_device(ordinal: int) -> Iterator[None]:
    """What ``cupy.cuda.Device`` is to them, as a context."""
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


class FakeCupy(types.SimpleNamespace):
    """The functions of CuPy that gpu.py, prepared.py and device_memory.py call.

    Attributes
    ----------
    stream : int
        Address of the current stream of device 0; one more for each device behind it.
    capturing : set of int
        Streams whose work goes into a graph.
    workspaces : list of (allocator, bytes, device)
        What has been allocated besides arrays.
    launches : list of (device, stream)
        Where kernels were launched.
    """

    def __init__(self) -> None:
        super().__init__(ndarray=FakeArray, stream=0, capturing=set(), workspaces=[], launches=[])
        self.cuda = types.SimpleNamespace(
            Device=current_device,
            get_current_stream=lambda: types.SimpleNamespace(ptr=self.stream + _devices[-1]),
            alloc=lambda nbytes: self._alloc(nbytes, _allocators[-1]),
            malloc_async=lambda nbytes: self._alloc(nbytes, "graph"),
            using_allocator=lambda allocator: _using_allocator("graph" if allocator == self.cuda.malloc_async else "pool"),
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
        self.workspaces.append((allocator, nbytes, _devices[-1]))
        buffer = _aligned((nbytes,), np.uint8)
        return FakeMemory(buffer.ctypes.data, buffer, _devices[-1])


def place(array: np.ndarray) -> FakeArray:
    """A copy where CuPy's allocator would put it."""
    placed = _aligned(array.shape, array.dtype)
    placed[...] = array
    return placed


def shifted(x: np.ndarray) -> FakeArray:
    """The same numbers two or four bytes off the alignment."""
    wide = place(np.empty(x.size + 1, x.dtype))
    view = wide[1:].reshape(x.shape)
    view[...] = x
    return view


def gapped(x: np.ndarray) -> FakeArray:
    """A last axis that is not contiguous."""
    wide = place(np.empty((*x.shape, 2), x.dtype))
    wide[..., 0] = x
    return wide[..., 0]


def reversed_columns(x: np.ndarray) -> FakeArray:
    """A last axis that lies last to first."""
    return place(x[..., ::-1])[..., ::-1]


def packed(x: np.ndarray) -> FakeArray:
    """Every second head of a wider array: strides that the kernels take."""
    wide = place(np.empty((*x.shape[:2], 2 * x.shape[2], x.shape[3]), x.dtype))
    wide[:, :, ::2] = x
    return wide[:, :, ::2]


def forward(q, k, v, *, causal=False, scale=None, layout="bshd", out=None, config=None, family=None, **features):
    """`gpu.forward` by keyword."""
    return gpu.forward(q, k, v, causal, scale, layout, out, config, family, features)


def backward(
    q, k, v, o, lse, do, *, causal=False, scale=None, delta=None, method=None, deterministic=False, layout="bshd",
    out=None, config=None, family=None, dlse=None, return_dbias=False, return_dsink=False, **features,
):
    """`gpu.backward` by keyword."""
    return gpu.backward(
        q, k, v, o, lse, do, causal, scale, delta, method, deterministic, layout, out, config, family, dlse,
        return_dbias, return_dsink, features,
    )  # fmt: skip


class Launch:
    """One launch: the record unpacked, and the arrays that it names as views of their memory.

    Attributes
    ----------
    stage : Stage
    pointers : dict
        Addresses by the record's names, of what its tensor maps describe, too.
    maps : dict
        Layouts of the tensor maps by name.
    values : dict
        The record's other members, and the strides of what the maps describe.
    cleared : tuple of str
        What the plan has set to zero before its first stage.
    """

    def __init__(self, plan: Plan, stage: Stage, addresses: dict[str, int]):
        self.stage, self.spec, self.cleared = stage, stage.spec, plan.cleared
        layout = self.spec.params
        self._kinds = kinds = {field.name: field.kind for field in layout.fields}
        self.pointers = {
            name: addresses[name] for name in layout.pointers if kinds[name] not in ("counter", "per_call")
        }
        self._per_call = {name: addresses[name] for name in layout.pointers if kinds[name] == "per_call"}
        self.maps = dict(zip(layout.maps, stage.maps, strict=True))
        self.values = stage_values(stage)
        for name, tensor in self.maps.items():
            row, head, batch = (stride // 2 for stride in tensor.strides[:3])
            self.values[f"{name}_strides"] = (batch, row, head)
        per_batch = self.values.get("num_tiles", 1) * self.values.get("scheduled_heads", self.values["num_heads"])
        self.packed = "cu_seqlens" in self.spec.features
        self.batch = 1 if self.packed else self.values.get("batch", stage.blocks // per_batch)
        assert len(self.record(addresses)) == layout.nbytes
        self._wide = np.dtype("float64" if self.spec.dtype == "float64" else "float32")
        self._workspaces = {workspace.name: workspace.nbytes for workspace in plan.workspaces}
        for name, tensor in self.maps.items():
            check_map(tensor, self.array(name))

    def record(
        self, addresses: Mapping[str, int], encode: Callable[[TensorLayout, int], bytes] = lambda layout, address: bytes(128)
    ) -> bytes:
        """The bytes that the kernel takes, with other addresses and an encoder of tensor maps; 0 is no tile counter."""
        front = {name: (self._per_call | addresses).get(name, 0) for name in self.spec.params.pointers}
        front.update({name: encode(layout, front[name]) for name, layout in self.maps.items()})
        return self.spec.params.pointer_packer.pack(*front.values()) + self.stage.constants

    def _rows(self, side: str) -> int:
        return self.values[f"total_{side}" if self.packed else f"seqlen_{side}"]

    def array(self, name: str) -> np.ndarray:
        """What a pointer of the record stands for: (batch, row, head, column), (batch, head, row) for lse and delta."""
        if name == "dq_accum":
            return memory_at(self.pointers[name], (self._workspaces[name] // 4,), None, np.dtype("float32"))
        heads, rows = self.values["num_heads"], self._rows("q")
        if name in OFFSETS:
            return memory_at(self.pointers[name], (self.values["num_sequences"] + 1,), None, np.dtype("int32"))
        if name == "dsink":
            return memory_at(self.pointers[name], (heads,), None, self._wide)
        if name in ("lse", "delta", "dlse"):
            return memory_at(self.pointers[name], (self.batch, heads, rows), None, self._wide)
        if name in ("k", "v", "dk", "dv"):
            heads, rows = heads // self.values["heads_per_group"], self._rows("k")
        dtype = np.dtype(ml_dtypes.bfloat16 if self.spec.dtype == "bfloat16" else self.spec.dtype)
        if name in (*ARRAY_FEATURES, "dbias_accum"):
            dtype = {"input": dtype, "input_bool": np.dtype(bool)}.get(self._kinds[name], self._wide)
            strides = tuple(stride * dtype.itemsize for stride in self.values[f"{name}_strides"])
            sizes = (self.batch, heads, rows, self.values.get("seqlen_k"))
            if self.packed:
                sizes = tuple(self.values[n] for n in ("num_sequences", "num_heads", "max_seqlen_q", "max_seqlen_k"))
            shape = tuple(size if stride else 1 for size, stride in zip(sizes, strides, strict=True))
            return memory_at(self.pointers[name], shape, strides, dtype)
        if dtype.itemsize == 2:
            assert self.pointers[name] % 16 == 0 and all(s % 8 == 0 for s in self.values[f"{name}_strides"]), name
        batch, row, head = (stride * dtype.itemsize for stride in self.values[f"{name}_strides"])
        shape = (self.batch, rows, heads, self.spec.head_dim)
        return memory_at(self.pointers[name], shape, (batch, row, head, dtype.itemsize), dtype)


def check_map(layout: TensorLayout, array: np.ndarray) -> None:
    """Holds a tensor map of a (batch, row, head, column) array against what driver and hardware require of it.

    The driver takes it; it begins at the array's first element, because a load of a box without an element of the tensor
    touches the map's address; and what is inside of its axes, as far as kernels ask for it, is the array and nothing else.
    """
    address = array.ctypes.data
    tensor = TensorMap(bytes(driver_tensor_map(*encode_arguments(layout, address))))
    assert tensor.address == address and tensor.box == (64, layout.box_rows, *[1] * (tensor.rank - 2))
    batch, rows, heads, columns = array.shape
    if tensor.rank == 4:
        assert tensor.dims == (columns, rows, heads, batch)
        places = [((0, r, h, b), (b, r, h)) for b in (0, batch - 1) for r in (0, rows - 1) for h in (0, heads - 1)]
    else:
        # A sequence of n rows that ends before row `end` ends with the row axis; see kernels/sm90/tma_rows.cuh.
        far = 2**30
        assert tensor.dims == (columns, far, heads, rows + 1, far + 1)
        sequences = [(n, end) for end in (1, (rows + 1) // 2, rows) for n in (1, end)]
        places = [
            ((0, far - n + i, h, end, far), (0, end - n + i, h))
            for n, end in sequences for i in (0, n - 1) for h in (0, heads - 1)
        ]  # fmt: skip
    for coordinates, index in places:
        offset = sum(c * s for c, s in zip(coordinates, tensor.strides, strict=True)) % 2**64
        assert offset == (array[index].ctypes.data - address) % 2**64, (layout, coordinates)


def run_formulas(launch: Launch) -> None:
    """Does what the kernel would, by the formulas."""
    _Formulas(launch).run()


@contextlib.contextmanager
def fake_gpu(
    monkeypatch, device: DeviceInfo | str | tuple = "sm_90", run: Callable[[Launch], None] = run_formulas
) -> Iterator[list[Stage]]:
    """Makes gpu.py run on the host, with one device or those of a tuple; gives the list of the stages that were launched."""
    launched: list[Stage] = []
    devices = device if isinstance(device, tuple) else (device,)
    infos = [x if isinstance(x, DeviceInfo) else DeviceInfo.named(x) for x in devices]

    def bind_plan(plan: Plan, buffers: tuple[str, ...]):
        loaded_on = _devices[-1]

        def bound(stage: Stage):
            def launch(addresses: list[int], stream: int) -> None:
                assert _devices[-1] == loaded_on, f"a kernel of device {loaded_on} is launched on {_devices[-1]}"
                cupy.launches.append((loaded_on, stream))
                launched.append(stage)
                run(Launch(plan, stage, dict(zip(buffers, addresses, strict=True))))

            return launch

        return tuple(map(bound, plan.stages))

    cupy = FakeCupy()
    for module in (gpu, prepared, device_memory):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(device_memory, "runtime", types.SimpleNamespace(streamIsCapturing=cupy.is_capturing))
    monkeypatch.setattr(prepared, "runtime", types.SimpleNamespace(getDevice=lambda: _devices[-1], free=lambda pointer: None))
    monkeypatch.setattr(prepared, "bind_plan", bind_plan)
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: infos[_devices[-1]]))
    monkeypatch.setattr(signatures, "_prepared", {})
    yield launched


class _Formulas:
    """Kernels by their formulas."""

    def __init__(self, launch: Launch):
        self.launch, self.spec, self.values = launch, launch.spec, launch.values

    def run(self) -> None:
        getattr(self, f"_{self.spec.operation}")()

    def _forward(self) -> None:
        q, k, v = self.launch.array("q"), self.launch.array("k"), self.launch.array("v")
        scale = self.values["scale_log2"] / np.log2(np.e)
        o, lse = reference.forward(q, k, v, causal=self.spec.causal, softmax_scale=scale)
        self.launch.array("o")[...] = o
        self.launch.array("lse")[...] = lse

    def _delta(self) -> None:
        self.launch.array("delta")[...] = reference.delta(self.launch.array("o"), self.launch.array("dout"))

    def _backward(self) -> None:
        gradients = self._gradients()
        if "dq" in self.launch.pointers:  # simt: dq is written, dk and dv are added to
            self.launch.array("dq")[...] = gradients[0]
            self.launch.array("dk")[...] += gradients[1]
            self.launch.array("dv")[...] += gradients[2]
        else:
            self._workspace()[...] += gradients[0]
            self.launch.array("dk")[...], self.launch.array("dv")[...] = gradients[1:]

    def _backward_dq(self) -> None:
        self.launch.array("dq")[...] = self._gradients()[0]

    def _backward_dkdv(self) -> None:
        self.launch.array("dk")[...], self.launch.array("dv")[...] = self._gradients()[1:]

    def _convert_dq(self) -> None:
        self.launch.array("dq")[...] = self._workspace()

    def _gradients(self) -> tuple:
        """From lse and delta as they lie in memory, like the kernels."""
        q, k, v, do = self.launch.array("q"), self.launch.array("k"), self.launch.array("v"), self.launch.array("dout")
        lse, delta, scale = self.launch.array("lse"), self.launch.array("delta"), self.values["softmax_scale"]
        group = self.values["heads_per_group"]
        q, k, v, do = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (q, k, v, do))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        scores = scale * q @ k.swapaxes(2, 3)
        if self.spec.causal:
            rows, columns = scores.shape[2:]
            scores[..., np.arange(columns) > np.arange(rows)[:, None] + columns - rows] = -np.inf
        p = np.exp(scores - np.where(np.isinf(lse), np.inf, lse)[..., None])
        ds = p * (do @ v.swapaxes(2, 3) - delta[..., None])
        dk, dv = scale * ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
        dk, dv = (x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:]).sum(2) for x in (dk, dv))
        return tuple(x.transpose(0, 2, 1, 3) for x in (scale * ds @ k, dk, dv))

    def _workspace(self) -> np.ndarray:
        """dq_accum in plain order: the kernels' order is their own affair."""
        shape = (self.launch.batch, self.values["seqlen_q"], self.values["num_heads"], self.spec.head_dim)
        return self.launch.array("dq_accum")[: np.prod(shape)].reshape(shape)


def stage_values(stage: Stage) -> dict[str, object]:
    """The members of a stage's record that are no pointers."""
    return dict(_unpack(stage.spec, stage.constants))


def _unpack(spec: KernelSpec, data: bytes) -> Iterator[tuple[str, object]]:
    real = "d" if spec.dtype == "float64" else "f"
    offset = 0
    for field in spec.params.fields[len(spec.params.pointers) :]:
        code = {"strides": "qqq", "score_strides": "qqqq", "real": real, "int": "i", "word": "I"}[field.kind]
        values = struct.unpack_from(f"={code}", data, offset)
        offset += struct.calcsize(f"={code}")
        yield field.name, values if field.kind.endswith("strides") else values[0]


class _Memory:
    def __init__(self, address: int, shape: tuple, strides: tuple | None, dtype: np.dtype):
        typestr = dtype.str if dtype.kind != "V" and dtype.num < 256 else "<u2"
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": shape, "strides": strides, "typestr": typestr,
        }


def memory_at(address: int, shape: tuple, strides: tuple | None, dtype: np.dtype) -> np.ndarray:
    """An array of what lies at an address; nothing keeps it there."""
    array = np.asarray(_Memory(address, shape, strides, dtype))
    return array if array.dtype == dtype else array.view(dtype)
