"""Copies of arrays in memory with other strides."""

from __future__ import annotations

import numpy as np
from support.fake_cupy import FakeArray, place


def shifted(x: np.ndarray, elements: int = 1) -> FakeArray:
    """Returns a copy that is some elements off the alignment."""
    wide = place(np.empty(x.size + elements, x.dtype))
    view = wide[elements:].reshape(x.shape)
    view[...] = x
    return view


def gapped(x: np.ndarray) -> FakeArray:
    """Returns a copy whose last axis is not contiguous."""
    wide = place(np.empty((*x.shape, 2), x.dtype))
    wide[..., 0] = x
    return wide[..., 0]


def reversed_columns(x: np.ndarray) -> FakeArray:
    """Returns a copy whose last axis is stored in reverse."""
    return place(x[..., ::-1])[..., ::-1]


def packed(x: np.ndarray) -> FakeArray:
    """Returns a copy in every second head of a wider array, with strides that the kernels take."""
    wide = place(np.empty((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]), x.dtype))
    wide[..., ::2, :] = x
    return wide[..., ::2, :]
