"""Checks of the caller's arrays, made before anything is allocated, launched or written.

Messages name the argument, what was expected and what was passed.
"""

from __future__ import annotations

import functools
import numbers
import sys
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from .array_types import Array
from .conversions import NO_ROWS, Absent, ArrayRow, as_dtype, moved, refusal, scalar_of

__all__ = [
    "OverlapCheck",
    "array_backend",
    "check_array",
    "check_bool",
    "check_int",
    "check_outputs",
    "check_overlap",
    "check_writable",
    "dtype_name",
    "output_name",
    "takes_rows",
    "unpack_out",
]

#: Shape, strides in bytes and itemsize: the positions of an array's elements relative to its first one.
Layout = tuple[tuple[int, ...], tuple[int, ...], int]

_MASKED = (
    "expected an array without a mask of its own, got a numpy.ma.MaskedArray; pass numpy.ma.getdata of it, and hide "
    "keys with mask= or key_padding_mask="
)


def output_name(name: str) -> str:
    """The name of an element of `out` in messages."""
    return f"out ({name})"


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype, which NumPy takes 3 us to put together: a call asks for seven."""
    return dtype.name


def array_backend(
    required: Mapping[str, object],
    optional: Mapping[str, object] | None = None,
    rows: Mapping[str, ArrayRow] = NO_ROWS,
) -> str:
    """The library of all these arrays: ``"numpy"`` or ``"cupy"``. Only those in `optional` may be None.

    `rows` says what messages suggest for arrays of features.

    Raises
    ------
    TypeError
        An argument is no array of either, or the two are mixed.
    """
    cupy = sys.modules.get("cupy")
    found: dict[str, str] = {}
    arrays = {**required, **{name: array for name, array in (optional or {}).items() if array is not None}}
    for name, array in arrays.items():
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name}: {_MASKED}")
        if isinstance(array, np.ndarray):
            found[name] = "numpy"
        elif cupy is not None and isinstance(array, cupy.ndarray):
            found[name] = "cupy"
        else:
            raise TypeError(refusal(name, array, arrays, rows))
    first, backend = next(iter(found.items()))
    for name, other in found.items():
        if other != backend:
            hint = moved(name, backend)
            raise TypeError(f"{name}: expected a {backend} array like {first}, got a {other} array{hint}")
    return backend


def check_bool(name: str, value: object) -> None:
    """Checks that an argument is a bool of Python or NumPy."""
    if not isinstance(value, bool | np.bool_):
        hint = f"; write {name}={bool(value)}" if isinstance(value, int) else scalar_of(name, value, "bool")
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}{hint}")


def check_int(name: str, value: object, wanted: str = "an int") -> int:
    """The value as an int of Python. Raises TypeError unless it is one of Python or NumPy; `wanted` is in its text."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        if isinstance(value, Absent):
            raise TypeError(value.text({}))
        raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__}{scalar_of(name, value, 'int')}")
    return int(value)


def check_array(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype | str, like: str) -> None:
    """Checks that an array has the shape and dtype that follow from the arguments `like`."""
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape} to match {like}, got {array.shape}")
    wanted = str(getattr(dtype, "name", dtype))
    if dtype_name(array.dtype) != wanted:
        hint = as_dtype(name, array.dtype, wanted)
        raise TypeError(f"{name}: expected dtype {dtype} to match {like}, got {array.dtype}{hint}")


def takes_rows(step: int, array: Array, address: int = 0) -> bool:
    """True if the last axis of an array at this address is contiguous and rows start on multiples of `step` bytes."""
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return False
    starts = (s for s, length in zip(array.strides[:-1], array.shape[:-1], strict=True) if length > 1)
    return address % step == 0 and all(s % step == 0 for s in starts)


def unpack_out(out: object, names: tuple[str, ...]) -> tuple[Array | None, ...]:
    """The elements of `out`, an array or None for each result."""
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, tuple | list) or len(out) != len(names):
        got = f"{len(out)} elements" if isinstance(out, tuple | list) else type(out).__name__
        raise TypeError(f"out: expected a tuple ({', '.join(names)}) of arrays or None, got {got}")
    return tuple(out)


def check_outputs(outputs: Sequence[tuple[str, tuple[int, ...], np.dtype]], arrays: tuple[Array | None, ...]) -> None:
    """Checks that the caller's arrays can hold the results (name, shape, dtype); None is skipped."""
    for (name, shape, dtype), array in zip(outputs, arrays, strict=True):
        if array is None:
            continue
        name = output_name(name)
        check_array(name, array, shape, dtype, "the result")
        check_writable(name, array, "a result")


def check_writable(name: str, array: Array, what: str) -> None:
    """Checks that an array, which is to hold `what`, is not read-only, and that its elements do not share memory."""
    if getattr(array.flags, "writeable", True) is False:
        raise ValueError(f"{name}: the array is read-only, and cannot hold {what}")
    if _overlaps_itself((array.shape, array.strides, array.itemsize)):
        raise ValueError(
            f"{name}: elements share memory (strides {array.strides}), so that they cannot hold {what} each"
        )


def _overlaps_itself(layout: Layout) -> bool:
    # The strides of a view of an ordinary array are nested: each is at least the extent of all axes with shorter ones.
    shape, strides, itemsize = layout
    if 0 in shape:
        return False
    reach = itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def check_overlap(outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> None:
    """Checks that no output shares memory with an input or another output."""
    arrays = {**inputs, **outputs}
    layouts = [(name, array.shape, array.strides, array.itemsize) for name, array in arrays.items()]
    check = OverlapCheck(layouts, range(len(inputs), len(arrays)))
    check([array.ctypes.data for array in arrays.values()])


class OverlapCheck:
    """A check that no output of a call shares memory with an input or another output.

    Layouts are known beforehand, so that each call passes addresses only.

    Parameters
    ----------
    arrays : sequence of (name, shape, strides, itemsize), or None
        Inputs and outputs; None where the call has no array.
    written : collection of int
        Positions of the outputs.
    """

    def __init__(
        self, arrays: Sequence[tuple[str, tuple[int, ...], tuple[int, ...], int] | None], written: Collection[int]
    ):
        present: list[tuple[int, str, Layout]] = [
            (position, array[0], array[1:])
            for position, array in enumerate(arrays)
            if array is not None and 0 not in array[1]
        ]
        self._pairs = []
        for position, name, layout in present:
            low, high = _extent(layout)
            for other, other_name, other_layout in present:
                if position in written and (other < position or other not in written):
                    other_low, other_high = _extent(other_layout)
                    names, layouts = (name, other_name), (layout, other_layout)
                    self._pairs.append((position, other, low - other_high, high - other_low, names, layouts))

    def __call__(self, addresses: Sequence[int]) -> None:
        """Raises ValueError if arrays at these addresses overlap; absent arrays may have any address."""
        for position, other, low, high, names, layouts in self._pairs:
            offset = addresses[other] - addresses[position]
            if low < offset < high and _shares_memory(*layouts, offset):
                raise ValueError(f"{names[0]}: overlaps {names[1]} in memory")


@functools.lru_cache(maxsize=4096)
def _shares_memory(first: Layout, second: Layout, offset: int) -> bool:
    # NumPy's exact test compares addresses and reads no memory, so that made-up addresses serve for device arrays, too.
    base = 1 << 60
    return np.shares_memory(np.asarray(_Shadow(first, base)), np.asarray(_Shadow(second, base + offset)))


def _extent(layout: Layout) -> tuple[int, int]:
    shape, strides, itemsize = layout
    ends = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends) + itemsize


class _Shadow:
    def __init__(self, layout: Layout, address: int):
        shape, strides, itemsize = layout
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "data": (address, False),
        }
