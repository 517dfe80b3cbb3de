"""Tensor maps: what TMA must know of an array in memory to copy boxes of it."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import INSTALL_CUDA, KernelLaunchError

__all__ = [
    "TensorLayout", "TensorMaps", "encode", "is_available", "packed_layout", "tensor_layout", "tensor_maps", "why_not_mappable",
]  # fmt: skip

_PANEL_COLUMNS = 64  # of 16 bits: the 128 bytes that a swizzle spans
_MAX_STRIDE = 2**40
_MAX_MAPS = 256


@dataclass(frozen=True)
class TensorLayout:
    """A (batch, row, head, column) array of 16-bit elements but for its address, innermost axis first.

    Attributes
    ----------
    dtype : str
    sizes : tuple of int
        Of column, row, head and batch.
    strides : tuple of int
        Bytes between rows, heads and batches.
    box_rows : int
        Rows of the boxes that are copied; their columns are always 64.
    rows_before : int
        How many rows before the array the map begins. They are never copied.
    """

    dtype: str
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box_rows: int
    rows_before: int = 0


def why_not_mappable(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> str | None:
    """The reason why TMA cannot take an array, or None if it can: sizes and element strides of batch, row and head."""
    if 0 in sizes:
        return "it is empty"
    for size, stride in zip(sizes, strides, strict=True):
        nbytes = stride * itemsize
        if size > 1 and (nbytes <= 0 or nbytes % 16 or nbytes >= _MAX_STRIDE):
            return f"a stride of {nbytes} bytes is not a positive multiple of 16 below 2**40"
    return None


def tensor_layout(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], head_dim: int, itemsize: int, box_rows: int
) -> TensorLayout:
    """The layout of an array that is mappable, from sizes and element strides of batch, row and head."""
    # The stride of an axis of length 1 means nothing, but the driver wants a legal one.
    in_bytes = [16 if size <= 1 else stride * itemsize for size, stride in zip(sizes, strides, strict=True)]
    batch, row, head = sizes
    return TensorLayout(dtype, (head_dim, row, head, batch), (in_bytes[1], in_bytes[2], in_bytes[0]), box_rows)


def packed_layout(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], head_dim: int, itemsize: int, box_rows: int, longest: int
) -> TensorLayout:
    """The layout of packed sequences, of which none has more than `longest` rows (kernels/sm90/map_place.cuh).

    Both the row and the last axis count rows: element (longest - length + i, end) is row i of the sequence of that length
    that ends before row `end`. What is past a sequence is then past an axis, for all of them with one map.
    """
    plain = tensor_layout(dtype, sizes, strides, head_dim, itemsize, box_rows)
    row_stride, head_stride, _ = plain.strides
    _, rows, heads, _ = plain.sizes
    sizes = (head_dim, longest, heads, rows + 1)
    return TensorLayout(dtype, sizes, (row_stride, head_stride, row_stride), box_rows, longest)


@functools.lru_cache(maxsize=None)
def is_available() -> bool:
    """Whether maps can be encoded here. Warns once, with what to install, if not."""
    try:
        from cuda.bindings import driver

        driver.cuTensorMapEncodeTiled  # noqa: B018  (absent before CUDA 12)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"cuda-bindings cannot be used ({error}), so that calls run on the kernels for older GPUs, at about half "
            f"the speed: {INSTALL_CUDA}",
            stacklevel=2,
        )
        return False
    return True


def encode(layout: TensorLayout, address: int) -> bytes:
    """The map of an array at an address, which must be a multiple of 16.

    Raises
    ------
    KernelLaunchError
        The driver refuses, or the map would begin before address 0.
    """
    if address < layout.rows_before * layout.strides[0]:
        raise KernelLaunchError(
            f"sequences of up to {layout.rows_before} packed rows of {layout.strides[0]} bytes are too long for TMA at the "
            f"address {address:#x}: pass their longest lengths as max_seqlen_q and max_seqlen_k, or family='sm80'"
        )
    from cuda.bindings import driver

    result, encoded = driver.cuTensorMapEncodeTiled(*_arguments(layout, address))
    if result != driver.CUresult.CUDA_SUCCESS:
        raise KernelLaunchError(f"the driver does not make a tensor map of {layout} at {address:#x}: {result.name}")
    return ctypes.string_at(int(encoded.getPtr()), 128)


@functools.lru_cache(maxsize=64)
def _fixed_arguments(layout: TensorLayout) -> tuple[tuple, tuple]:
    # What stands before and behind the address. Making these objects takes longer than the call.
    from cuda.bindings import driver

    names = {"float16": "FLOAT16", "bfloat16": "BFLOAT16"}
    dtype = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{names[layout.dtype]}")
    behind = (
        [driver.cuuint64_t(size) for size in layout.sizes],
        [driver.cuuint64_t(stride) for stride in layout.strides],
        [driver.cuuint32_t(n) for n in (_PANEL_COLUMNS, layout.box_rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    return (dtype, len(layout.sizes)), behind


def _arguments(layout: TensorLayout, address: int) -> tuple:
    before, behind = _fixed_arguments(layout)
    return (*before, address - layout.rows_before * layout.strides[0], *behind)


class TensorMaps(dict):
    """The maps of arrays of one layout by their address: found as in a dict, encoded when new. At most 256 are kept."""

    def __init__(self, layout: TensorLayout):
        super().__init__()
        self._layout = layout

    def __missing__(self, address: int) -> bytes:
        if len(self) >= _MAX_MAPS:
            self.clear()
        encoded = self[address] = encode(self._layout, address)
        return encoded


@functools.lru_cache(maxsize=1024)
def tensor_maps(layout: TensorLayout) -> TensorMaps:
    """The maps of a layout, which all kernels share."""
    return TensorMaps(layout)
