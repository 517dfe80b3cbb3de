"""A GPU made of NumPy: CuPy's part of gpu.py and prepared.py on host memory, and stages that do with their launch record, by the formulas,
what the kernel would. Strides, records, workspaces and the choice of copies are then tested where there is no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import types
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from fa2cupy import gpu, prepared, reference
from fa2cupy.device import DeviceInfo
from fa2cupy.plan import Plan, Stage
from fa2cupy.spec import KernelSpec


class FakeMemory:
    """What ``cupy.cuda.MemoryPointer`` is to them."""

    def __init__(self, address: int, owner: object, device_id: int = 0):
        self.ptr, self.device_id, self._owner = address, device_id, owner

    def memset_async(self, value: int, nbytes: int) -> None:
        ctypes.memset(self.ptr, value, nbytes)


class FakeArray(np.ndarray):
    """What ``cupy.ndarray`` is to them."""

    device_id = 0

    def __new__(cls, shape, dtype):
        """As CuPy allocates."""
        return _aligned(shape, dtype)

    @property
    def data(self) -> FakeMemory:
        return FakeMemory(self.ctypes.data, self, self.device_id)


def on_gpu(array: np.ndarray) -> FakeArray:
    """The same memory as an array of the fake device."""
    return array.view(FakeArray)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> FakeArray:
    # CuPy's allocations start on 512 bytes, NumPy's only on 16.
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(nbytes + 512, 0xFF, np.uint8)  # NaN in every dtype, so that an unwritten element shows
    start = -raw.ctypes.data % 512
    return raw[start : start + nbytes].view(dtype).reshape(shape).view(FakeArray)


class FakeCupy(types.SimpleNamespace):
    """The functions of CuPy that gpu.py and prepared.py call."""

    def __init__(self) -> None:
        super().__init__(ndarray=FakeArray)
        self.cuda = types.SimpleNamespace(
            Device=lambda ordinal: contextlib.nullcontext(),
            get_current_stream=lambda: types.SimpleNamespace(ptr=0),
            alloc=self._alloc,
        )

    def empty(self, shape, dtype):
        return _aligned(shape, dtype)

    def zeros(self, shape, dtype):
        array = _aligned(shape, dtype)
        array[...] = 0
        return array

    def ascontiguousarray(self, array):
        return np.ascontiguousarray(array).view(FakeArray)

    def _alloc(self, nbytes: int) -> FakeMemory:
        buffer = _aligned((nbytes,), np.uint8)
        return FakeMemory(buffer.ctypes.data, buffer)


@contextlib.contextmanager
def fake_gpu(monkeypatch, arch: str = "sm_90") -> Iterator[list[Stage]]:
    """Makes gpu.py run on the host; gives the list of the stages that were launched."""
    launched: list[Stage] = []

    def bind_plan(plan: Plan, buffers: tuple[str, ...]):
        def bound(stage: Stage):
            def launch(addresses: list[int], stream: int) -> None:
                launched.append(stage)
                _Launch(stage, dict(zip(buffers, addresses, strict=True))).run()

            return launch

        return tuple(map(bound, plan.stages))

    cupy = FakeCupy()
    for module in (gpu, prepared):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(prepared, "runtime", types.SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setattr(prepared, "bind_plan", bind_plan)
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: cls.named(arch)))
    monkeypatch.setattr(gpu, "_prepared", {})
    yield launched


class _Launch:
    """One launch: the record unpacked, tensors as views of the memory that it names."""

    def __init__(self, stage: Stage, addresses: dict[str, int]):
        self.spec = stage.spec
        layout = self.spec.params
        maps = dict(zip(layout.maps, stage.maps, strict=True))
        front = {name: bytes(128) if name in maps else addresses.get(name, 0) for name in layout.pointers}
        record = layout.pointer_packer.pack(*front.values()) + stage.constants
        assert len(record) == layout.nbytes
        self.pointers = {**front, **{name: addresses[name] for name in maps}}
        self.values = dict(_unpack(self.spec, record[layout.pointer_packer.size :]))
        for name, tensor in maps.items():
            assert self.pointers[name] % 16 == 0 and all(0 < s < 2**40 and s % 16 == 0 for s in tensor.strides), name
            row, head, batch = (stride // 2 for stride in tensor.strides)
            self.values[f"{name}_strides"] = (batch, row, head)
        per_batch = self.values["num_tiles"] * self.values.get("scheduled_heads", self.values["num_heads"])
        self.batch = self.values.get("batch", stage.blocks // per_batch)

    def run(self) -> None:
        getattr(self, f"_{self.spec.operation}")()

    def _forward(self) -> None:
        q, k, v = self._tensor("q"), self._keys("k"), self._keys("v")
        scale = self.values["scale_log2"] / np.log2(np.e)
        o, lse = reference.forward(q, k, v, causal=self.spec.causal, softmax_scale=scale)
        self._tensor("o")[...] = o
        self._rows("lse")[...] = lse

    def _delta(self) -> None:
        self._rows("delta")[...] = reference.delta(self._tensor("o"), self._tensor("dout"))

    def _backward(self) -> None:
        gradients = self._gradients()
        if "dq" in self.pointers:  # simt: dq is written, dk and dv are added to
            self._tensor("dq")[...] = gradients[0]
            self._keys("dk")[...] += gradients[1]
            self._keys("dv")[...] += gradients[2]
        else:
            self._workspace()[...] += gradients[0]
            self._keys("dk")[...], self._keys("dv")[...] = gradients[1:]

    def _backward_dq(self) -> None:
        self._tensor("dq")[...] = self._gradients()[0]

    def _backward_dkdv(self) -> None:
        self._keys("dk")[...], self._keys("dv")[...] = self._gradients()[1:]

    def _convert_dq(self) -> None:
        self._tensor("dq")[...] = self._workspace()

    def _gradients(self) -> tuple:
        """From lse and delta as they lie in memory, like the kernels."""
        q, k, v, do = self._tensor("q"), self._keys("k"), self._keys("v"), self._tensor("dout")
        lse, delta, scale = self._rows("lse"), self._rows("delta"), self.values["softmax_scale"]
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

    def _tensor(self, name: str) -> np.ndarray:
        return self._view(name, self.values["num_heads"], self.values["seqlen_q"])

    def _keys(self, name: str) -> np.ndarray:
        return self._view(name, self.values["num_heads"] // self.values["heads_per_group"], self.values["seqlen_k"])

    def _view(self, name: str, heads: int, length: int) -> np.ndarray:
        dtype = np.dtype(ml_dtypes.bfloat16 if self.spec.dtype == "bfloat16" else self.spec.dtype)
        if dtype.itemsize == 2:
            assert self.pointers[name] % 16 == 0 and all(s % 8 == 0 for s in self.values[f"{name}_strides"]), name
        batch, row, head = (stride * dtype.itemsize for stride in self.values[f"{name}_strides"])
        shape = (self.batch, length, heads, self.spec.head_dim)
        return _memory(self.pointers[name], shape, (batch, row, head, dtype.itemsize), dtype)

    def _rows(self, name: str) -> np.ndarray:
        dtype = np.dtype("float64" if self.spec.dtype == "float64" else "float32")
        shape = (self.batch, self.values["num_heads"], self.values["seqlen_q"])
        return _memory(self.pointers[name], shape, None, dtype)

    def _workspace(self) -> np.ndarray:
        """dq_accum in plain order: the kernels' order is their own affair."""
        shape = (self.batch, self.values["seqlen_q"], self.values["num_heads"], self.spec.head_dim)
        return _memory(self.pointers["dq_accum"], shape, None, np.dtype("float32"))


def _unpack(spec: KernelSpec, data: bytes) -> Iterator[tuple[str, object]]:
    real = "d" if spec.dtype == "float64" else "f"
    offset = 0
    for field in spec.params.fields[len(spec.params.pointers) :]:
        code = {"strides": "qqq", "real": real, "int": "i"}[field.kind]
        values = struct.unpack_from(f"={code}", data, offset)
        offset += struct.calcsize(f"={code}")
        yield field.name, values if field.kind == "strides" else values[0]


class _Memory:
    def __init__(self, address: int, shape: tuple, strides: tuple | None, dtype: np.dtype):
        typestr = dtype.str if dtype.kind != "V" and dtype.num < 256 else "<u2"
        self.__array_interface__ = {
            "version": 3, "data": (address, False), "shape": shape, "strides": strides, "typestr": typestr,
        }


def _memory(address: int, shape: tuple, strides: tuple | None, dtype: np.dtype) -> np.ndarray:
    array = np.asarray(_Memory(address, shape, strides, dtype))
    return array if array.dtype == dtype else array.view(dtype)
