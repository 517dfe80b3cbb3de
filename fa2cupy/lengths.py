"""Offsets of packed sequences, computed from their lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np

from .numerics.arrays import array_module, device_context
from .problem.array_types import CupyArray
from .problem.conversions import Absent, as_dtype, explains_absence

__all__ = ["cu_seqlens"]

_LARGEST = 2**31 - 1


@overload
def cu_seqlens(lengths: Sequence[int] | np.ndarray) -> tuple[np.ndarray, int]: ...
@overload
def cu_seqlens(lengths: CupyArray) -> tuple[CupyArray, int]: ...
@explains_absence
def cu_seqlens(lengths: Any) -> tuple[Any, int]:
    """The offsets of packed sequences and the longest length, for `forward` and `backward`.

    Parameters
    ----------
    lengths : sequence of int, or ndarray of an integer dtype, shape (batch,)
        Numbers of rows of the sequences, in their order in the packed arrays.

    Returns
    -------
    cu_seqlens : ndarray of int32, shape (batch + 1,)
        A NumPy array, or a CuPy array on the device of `lengths` if that is a CuPy array.
    max_seqlen : int
        The largest length; 0 if there are none.

    Raises
    ------
    TypeError
        `lengths` are no integers.
    ValueError
        `lengths` do not have one axis, one of them is negative, or their sum is 2**31 or more.

    Notes
    -----
    Lengths on a GPU are copied to the host, which synchronises with the GPU.

    Examples
    --------
    >>> offsets, longest = cu_seqlens([3, 0, 5])
    >>> offsets, longest
    (array([0, 3, 3, 8], dtype=int32), 5)
    """
    if isinstance(lengths, np.ma.MaskedArray):
        raise TypeError("lengths: expected an array without a mask of its own, got a numpy.ma.MaskedArray")
    xp = array_module(lengths)
    if xp is np:
        _check_sequence(lengths)
    host = np.asarray(lengths if xp is np else lengths.get())
    if host.ndim != 1:
        hint = "; of a mask, write mask.sum(axis=1)" if host.ndim == 2 and host.dtype.kind == "b" else ""
        raise ValueError(f"lengths: expected shape (batch,), got {host.shape}{hint}")
    if host.size == 0:
        host = host.astype("int64")  # NumPy makes an empty list float64
    if host.dtype.kind not in "iu":
        hint = as_dtype("lengths", host.dtype, "int32")
        if not hasattr(lengths, "astype"):
            hint = '; write numpy.asarray(lengths, "int32")'
        raise TypeError(f"lengths: expected integers, got dtype {host.dtype}{hint}")
    shortest, longest = int(host.min(initial=0)), int(host.max(initial=0))
    if shortest < 0:
        raise ValueError(f"lengths: expected at least 0, got {shortest}")
    total = sum(map(int, host)) if longest > _LARGEST else int(host.sum(dtype="int64"))
    if total > _LARGEST:
        raise ValueError(f"lengths: expected a sum below 2**31, which offsets of int32 can hold, got {total}")
    offsets = np.zeros(len(host) + 1, "int32")
    np.cumsum(host.astype("int32"), out=offsets[1:])
    if xp is np:
        return offsets, longest
    with device_context(lengths):
        return xp.asarray(offsets), longest


def _check_sequence(lengths: object) -> None:
    """Raises TypeError or ValueError for what NumPy would make an array of no axis of, or none at all."""
    if isinstance(lengths, Absent):
        raise TypeError(lengths.text({}))
    if isinstance(lengths, str) or not (isinstance(lengths, Sequence) or hasattr(lengths, "dtype")):
        hint = f"; write [{lengths}]" if isinstance(lengths, int) else ""
        if isinstance(lengths, Iterable) and not isinstance(lengths, str):
            hint = "; write list(lengths)"
        raise TypeError(f"lengths: expected a sequence of ints or an ndarray, got {type(lengths).__name__}{hint}")
    lists = lengths if type(lengths) is list else []
    if len({len(one) if isinstance(one, list | tuple) else None for one in lists}) > 1:
        raise ValueError("lengths: expected shape (batch,), got sequences of several lengths")
