"""Types of array arguments. Only type checkers import CuPy for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import cupy

__all__ = ["Array"]

#: A NumPy or a CuPy array. All arrays of a call are of the same library.
Array: TypeAlias = "np.ndarray | cupy.ndarray"
