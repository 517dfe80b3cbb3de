"""Tensor maps: the driver's encoding of an array's layout and address, for TMA."""

from __future__ import annotations

import ctypes
import functools

from ..errors import KernelLaunchError
from ..plan.tensor_maps import TensorLayout

__all__ = ["TensorMaps", "encode", "encode_arguments", "tensor_maps"]

_MAX_MAPS = 256


def encode(layout: TensorLayout, address: int) -> bytes:
    """The tensor map of an array at an address, which must be a multiple of 16.

    Raises
    ------
    KernelLaunchError
        The driver refused the layout or the address.
    """
    from cuda.bindings import driver

    result, encoded = driver.cuTensorMapEncodeTiled(*encode_arguments(layout, address))
    if result != driver.CUresult.CUDA_SUCCESS:
        raise KernelLaunchError(f"the driver does not make a tensor map of {layout} at {address:#x}: {result.name}")
    return ctypes.string_at(int(encoded.getPtr()), 128)


@functools.lru_cache(maxsize=64)
def _fixed_arguments(layout: TensorLayout) -> tuple[tuple, tuple]:
    # The arguments before and after the address. Making these objects takes longer than the driver's call.
    from cuda.bindings import driver

    names = {"float16": "FLOAT16", "bfloat16": "BFLOAT16"}
    dtype = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{names[layout.dtype]}")
    behind = (
        [driver.cuuint64_t(size) for size in layout.sizes],
        [driver.cuuint64_t(stride) for stride in layout.strides],
        [driver.cuuint32_t(n) for n in layout.box],
        [driver.cuuint32_t(1)] * len(layout.sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{2 * layout.box[0]}B"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )
    return (dtype, len(layout.sizes)), behind


def encode_arguments(layout: TensorLayout, address: int) -> tuple:
    """The arguments of ``cuTensorMapEncodeTiled`` for an array at an address."""
    before, behind = _fixed_arguments(layout)
    return (*before, address, *behind)


class TensorMaps(dict[int, bytes]):
    """The tensor maps of arrays of one layout by address: a dict that encodes missing ones and keeps at most 256."""

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
    """The tensor maps of a layout, which all kernels share."""
    return TensorMaps(layout)
