"""The types of array arguments, for type checkers: nobody needs CuPy for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import cupy

__all__ = ["Array"]

#: An array of NumPy's or CuPy's. All arrays of a call are of one of the two.
Array: TypeAlias = "np.ndarray | cupy.ndarray"
