"""The dtypes of q, k and v."""

from __future__ import annotations

__all__ = ["ACCUMULATOR", "DTYPES", "ITEMSIZE"]

#: Bytes of an element, by the dtype's name.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

DTYPES = tuple(ITEMSIZE)

#: The dtype of sums and statistics (lse, delta).
ACCUMULATOR = {dtype: "float64" if dtype == "float64" else "float32" for dtype in DTYPES}
