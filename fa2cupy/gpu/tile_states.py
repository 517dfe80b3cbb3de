"""The states of the tiles of a mask function on CuPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import numpy as np

from ..families.device import DeviceInfo
from ..functions.tracing import BoundFunction
from ..plan.tile_states import plan_tile_states
from ..problem.checks import Result
from ..problem.strides import array_layout
from .arguments import Arguments
from .prepared import KernelCall

__all__ = ["tile_states"]


def tile_states(
    function: BoundFunction,
    arrays: Sequence[cupy.ndarray],
    like: cupy.ndarray | None,
    shape: tuple[int, int, int, int],
    lengths: tuple[int, int],
    tile: tuple[int, int],
) -> cupy.ndarray:
    """`fa2cupy.block_mask` on CuPy arrays: one kernel evaluates the function, on their device and the current stream.

    Parameters and the result are those of `fa2cupy.cpu.tile_states.tile_states`.

    Raises
    ------
    ValueError
        An array is empty, or on another device than the first.
    """
    names = tuple(f"mask_args[{number}]" for number in range(len(arrays)))
    ordinal = _device(dict(zip(names, arrays, strict=True)) | ({} if like is None else {"like": like}))
    with cupy.cuda.Device(ordinal):
        strides = tuple(map(array_layout, arrays))
        plan = plan_tile_states(DeviceInfo.current(), function, strides, shape, lengths, tile)
        result = Result("states", shape, np.dtype("uint8"))
        call = KernelCall(plan, ordinal, Arguments("tile_states", names, (), ("states",)), (result,))
        (states,) = call((*arrays, None), [*(array.data.ptr for array in arrays), 0])
    return states


def _device(named: dict[str, cupy.ndarray]) -> int:
    """The number of the device of all arrays."""
    first_name, first = next(iter(named.items()))
    ordinal = int(first.data.device_id)
    for name, array in named.items():
        if array.size == 0 and name != "like":
            raise ValueError(f"{name}: expected at least one element, got shape {array.shape}")
        if array.data.device_id != ordinal:
            like = f"device {ordinal} like {first_name}"
            raise ValueError(f"{name}: expected an array on {like}, got device {array.data.device_id}")
    return ordinal
