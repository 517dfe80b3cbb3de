"""Tensor maps of the interpreter, like those of cuTensorMapEncodeTiled but with their own encoding."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod

import numpy as np

from .errors import PtxError

__all__ = ["TensorMap", "driver_tensor_map", "swizzled", "tensor_map"]

_MAGIC = 0x50545853494D3031
_FORMAT = "<QqBBBx5Q4Q5H"
_NBYTES = 128
_MAX_RANK = 5
_MAX_SIZE, _MAX_STRIDE, _MAX_BOX = 1 << 32, 1 << 40, 256
_TYPES = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "i32": np.int32,
    "u64": np.uint64,
    "i64": np.int64,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
}
_NAMES = list(_TYPES)

# By swizzle span in bytes: the bits of the 128-byte line's number that are XORed with the 16-byte chunk's number.
_SWIZZLE_BITS = {0: 0, 32: 1, 64: 3, 128: 7}


def swizzled(address: np.ndarray, span: int) -> np.ndarray:
    """Returns the place of the byte at a linear shared address under the swizzle, which moves 16-byte chunks."""
    return address ^ ((address >> 7 & _SWIZZLE_BITS[span]) << 4)


def tensor_map(
    address: int,
    dtype: str,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 0,
) -> np.void:
    """Makes a tensor map as a kernel argument of 128 bytes, if the driver would make it.

    Parameters
    ----------
    address : int
        Address of the first element, as Memory returns it. Copies by a map with an address in no buffer are refused.
    dtype : str
        "f16", "bf16", "f32", ...
    dims : sequence of int
        Elements of each dimension, innermost first.
    strides : sequence of int
        Bytes between elements of dimensions 1, 2, ...: one fewer than dims.
    box : sequence of int
        Elements of a tile in each dimension.
    swizzle : int
        0, 32, 64 or 128 bytes.
    """
    size = np.dtype(_TYPES[dtype]).itemsize
    rank = len(dims)
    if len(strides) != rank - 1 or len(box) != rank or not 1 <= rank <= _MAX_RANK:
        raise PtxError(f"tensor_map: {rank} dims, {len(strides)} strides and {len(box)} box sizes do not fit together")
    if address % 16 or any(stride % 16 or not 0 < stride < _MAX_STRIDE for stride in strides):
        raise PtxError(
            "tensor_map: the address and all strides must be multiples of 16 bytes, strides above 0 and below 2**40"
        )
    if any(not 1 <= extent <= _MAX_SIZE for extent in dims):
        raise PtxError("tensor_map: dims must be 1 to 2**32")
    if any(not 1 <= extent <= _MAX_BOX for extent in box) or box[0] * size % 16:
        raise PtxError("tensor_map: box sizes must be 1 to 256, and the inner one a multiple of 16 bytes")
    if swizzle not in _SWIZZLE_BITS or (swizzle and box[0] * size > swizzle):
        raise PtxError(f"tensor_map: an inner box of {box[0] * size} bytes in a swizzle span of {swizzle}")

    def padded(values: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(int(value) for value in values) + (0,) * (count - len(values))

    fields = (*padded(dims, _MAX_RANK), *padded(strides, _MAX_RANK - 1), *padded(box, _MAX_RANK))
    data = struct.pack(_FORMAT, _MAGIC, int(address), _NAMES.index(dtype), rank, swizzle, *fields)
    return np.frombuffer(data.ljust(_NBYTES, b"\0"), f"V{_NBYTES}")[0]


def driver_tensor_map(dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill) -> np.void:
    """Makes a `tensor_map` from the arguments of ``cuTensorMapEncodeTiled``, as cuda.bindings takes them."""
    kind = {"FLOAT16": "f16", "BFLOAT16": "bf16", "FLOAT32": "f32"}.get(_suffix(dtype, "DATA_TYPE"))
    span = {"NONE": 0, "32B": 32, "64B": 64, "128B": 128}.get(_suffix(swizzle, "SWIZZLE"))
    modes = (_suffix(interleave, "INTERLEAVE"), _suffix(fill, "FLOAT_OOB_FILL"))
    if kind is None or span is None or modes != ("NONE", "NONE") or any(int(step) != 1 for step in steps):
        raise PtxError(
            f"tensor_map: {dtype}, {swizzle}, {interleave}, {fill} or element strides {steps} are not implemented"
        )
    _suffix(promotion, "L2_PROMOTION")  # does not change the data
    lists = [[int(x) for x in numbers] for numbers in (dims, strides, box)]
    if rank != len(dims):
        raise PtxError(f"tensor_map: a rank of {rank} with {len(dims)} dims")
    return tensor_map(int(address), kind, *lists, span)


def _suffix(value, kind: str) -> str:
    """Returns the name of a member of an enumeration without its prefix, which must be that of `kind`."""
    prefix = f"CU_TENSOR_MAP_{kind}_"
    if not value.name.startswith(prefix):
        raise PtxError(f"tensor_map: {value} where a {prefix}... belongs")
    return value.name.removeprefix(prefix)


class TensorMap:
    """A decoded map; strides are in bytes and include the innermost one."""

    def __init__(self, data: bytes) -> None:
        magic, self.address, code, self.rank, self.swizzle, *fields = struct.unpack_from(_FORMAT, data)
        if magic != _MAGIC:
            raise PtxError("these bytes are no tensor map of ptxsim.tensor_map")
        self.name = _NAMES[code]
        self.dtype = np.dtype(_TYPES[self.name])
        self.size = self.dtype.itemsize
        self.dims = tuple(fields[: self.rank])
        self.strides = (self.size, *fields[_MAX_RANK : _MAX_RANK + self.rank - 1])
        self.box = tuple(fields[2 * _MAX_RANK - 1 : 2 * _MAX_RANK - 1 + self.rank])
        self.nbytes = prod(self.box) * self.size

    def tile(self, coordinates: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns byte offsets of a tile's elements from the tensor's start, and which are inside of the tensor.

        Addresses have 64 bits: offsets are modulo 2**64.
        """
        offset, inside = np.zeros(self.box[::-1], np.int64), np.ones(self.box[::-1], bool)
        for dimension, (start, extent) in enumerate(zip(coordinates, self.box, strict=True)):
            along = start + np.arange(extent)
            shape = [1] * self.rank
            shape[self.rank - 1 - dimension] = extent
            offset += (along * self.strides[dimension]).reshape(shape)
            inside &= ((along >= 0) & (along < self.dims[dimension])).reshape(shape)
        return offset.ravel(), inside.ravel()

    def chunks(self, start: int) -> np.ndarray:
        """Returns shared offsets of the 16-byte chunks of a tile at `start`, in the order of its elements."""
        if start % 128:
            raise PtxError(f"TMA: the shared address 0x{start:x} is misaligned, no multiple of 128")
        if self.swizzle and self.box[0] * self.size != self.swizzle:
            raise PtxError("TMA: swizzled tiles narrower than the swizzle span are not implemented")
        return swizzled(start + np.arange(0, self.nbytes, 16), self.swizzle)
