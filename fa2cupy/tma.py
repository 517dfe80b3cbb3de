"""Tensor maps: what TMA must know of an array in memory to copy boxes of it."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import INSTALL_CUDA, KernelLaunchError

__all__ = [
    "TensorLayout", "TensorMaps", "encode", "encode_arguments", "is_available", "packed_layout", "tensor_layout", "tensor_maps",
    "why_not_mappable",
]  # fmt: skip

_PANEL_COLUMNS = 64  # of 16 bits: the 128 bytes that a swizzle spans
_MAX_STRIDE = 2**40
_FAR_ROW, _WRAP = 2**30, 2**34  # their product is 2**64; kernels/sm90/tma_rows.cuh has the first, too
_MAX_MAPS = 256


@dataclass(frozen=True)
class TensorLayout:
    """An array of 16-bit elements as TMA sees it, but for its address: the innermost axis first.

    Attributes
    ----------
    dtype : str
    sizes : tuple of int
        Of column, row, head and batch; for packed sequences of column, row, head, end and wrap.
    strides : tuple of int
        Bytes from element to element of all these axes but the first.
    box_rows : int
        Rows of the boxes that are copied. They have 64 columns, and one element along the other axes.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box_rows: int


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
    dtype: str, sizes: Sequence[int], strides: Sequence[int], head_dim: int, itemsize: int, box_rows: int
) -> TensorLayout:
    """The layout of packed sequences, of any lengths: kernels/sm90/tma_rows.cuh says how kernels address their rows.

    Row i of the sequence of n rows that ends before row `end` of the array is element (2**30 - n + i, end, 2**30) of the
    axes row, end and wrap, whose strides leave of the 2**30 a multiple of 2**64. What is past a sequence is then past the
    row axis, for all sequences with one map, which begins where the array does: a load of a box without an element of the
    tensor touches the map's address, which must be mapped.
    """
    plain = tensor_layout(dtype, sizes, strides, head_dim, itemsize, box_rows)
    row_stride, head_stride, _ = plain.strides
    _, rows, heads, _ = plain.sizes
    wrap_stride = _WRAP - row_stride % _WRAP
    sizes = (head_dim, _FAR_ROW, heads, rows + 1, _FAR_ROW + 1)
    return TensorLayout(dtype, sizes, (row_stride, head_stride, row_stride, wrap_stride), box_rows)


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
        The driver refuses.
    """
    from cuda.bindings import driver

    result, encoded = driver.cuTensorMapEncodeTiled(*encode_arguments(layout, address))
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
        [driver.cuuint32_t(n) for n in (_PANEL_COLUMNS, layout.box_rows, *[1] * (len(layout.sizes) - 2))],
        [driver.cuuint32_t(1)] * len(layout.sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    return (dtype, len(layout.sizes)), behind


def encode_arguments(layout: TensorLayout, address: int) -> tuple:
    """The arguments of ``cuTensorMapEncodeTiled``."""
    before, behind = _fixed_arguments(layout)
    return (*before, address, *behind)


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
