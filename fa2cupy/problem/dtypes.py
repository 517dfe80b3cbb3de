"""The dtypes of q, k and v."""

from __future__ import annotations

__all__ = ["DTYPES", "accumulator_dtype", "itemsize"]

#: Bytes of an element, by the dtype's name.
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

DTYPES = tuple(_ITEMSIZE)


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return _ITEMSIZE[dtype]


def accumulator_dtype(dtype: str) -> str:
    """The dtype of sums and statistics (lse, delta)."""
    return "float64" if dtype == "float64" else "float32"
