"""The sums of tensor cores, bit by bit.

The products of a block of 16 (Hopper's wgmma) or 8 (mma.sync on Ampere) are exact. They and the accumulator are aligned
to the largest exponent, cut to 23 + 2 (23 + 1) fraction bits, and added; the sum is cut to float32. The exponent of a
product is the sum of its factors' exponents. All cuts are towards zero. An H100 gave the same bits for 8 x 32768 random
sums of wgmma. The parameters are those of Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores" (arXiv
2512.07004).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["AMPERE", "HOPPER", "TensorCore", "add_products"]

_OF_ZERO = -1000  # an exponent below all others


class TensorCore(NamedTuple):
    """The number of products that are added at a time, and the fraction bits to which they are cut before."""

    products: int
    fraction_bits: int


AMPERE, HOPPER = TensorCore(8, 24), TensorCore(16, 25)


def add_products(core: TensorCore, accumulator: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns ``accumulator + left @ right.T`` of float32 arrays M x N, M x K and N x K, in stacks of any shape."""
    for first in range(0, left.shape[-1], core.products):
        block = (..., slice(first, first + core.products))
        accumulator = _add_block(core, accumulator, left[block], right[block])
    return accumulator


def _add_block(core: TensorCore, accumulator: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    exponents = _exponent(left)[..., :, None, :] + _exponent(right)[..., None, :, :]
    largest = np.maximum(exponents.max(axis=-1), _exponent(accumulator))
    unit = np.ldexp(1.0, np.maximum(largest, _OF_ZERO // 2) - core.fraction_bits)
    products = left.astype(np.float64)[..., :, None, :] * right.astype(np.float64)[..., None, :, :]
    total = np.trunc(products / unit[..., None]).sum(axis=-1) + np.trunc(accumulator / unit)
    return _cut(total * unit)


def _exponent(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, _OF_ZERO, np.frexp(x)[1] - 1)


def _cut(x: np.ndarray) -> np.ndarray:
    """Rounds float64 to float32, towards zero."""
    nearest = x.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
