"""Where the arrays of a call lie: their device, and rows that kernels can take as they are."""

from __future__ import annotations

from collections.abc import Mapping

import cupy

from ..families.device import DeviceInfo
from .arguments import Arguments

__all__ = ["device_of", "takes_rows"]


def device_of(arguments: Arguments, named: Mapping[str, cupy.ndarray | None]) -> tuple[int, DeviceInfo]:
    """The device of all arrays. Raises ValueError if there are several."""
    ordinals = {name: array.data.device_id for name, array in named.items() if array is not None}
    first_name = arguments.inputs[0]
    first = ordinals[first_name]
    for name, ordinal in ordinals.items():
        if ordinal != first:
            like = f"device {first} like {first_name}"
            raise ValueError(f"{arguments.label(name)}: expected an array on {like}, got device {ordinal}")
    with cupy.cuda.Device(first):
        return first, DeviceInfo.current()


def takes_rows(step: int, array: cupy.ndarray) -> bool:
    """True if the last axis of the array is contiguous and its rows start on multiples of `step` bytes."""
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return False
    starts = (s for s, length in zip(array.strides[:-1], array.shape[:-1], strict=True) if length > 1)
    return array.data.ptr % step == 0 and all(s % step == 0 for s in starts)
