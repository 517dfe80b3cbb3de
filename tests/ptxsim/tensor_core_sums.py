"""How Hopper's tensor cores add, bit by bit.

The 16 products of a k-step are exact. They and the accumulator are aligned to the largest exponent, which of a product
is the sum of its factors' exponents, cut to 23 + 2 fraction bits, and added; the sum is cut to float32. All cuts are
towards zero. An H100 gave the same bits for 8 x 32768 random sums. The parameters are those of Khattak and Mikaitis,
"Accurate models of NVIDIA tensor cores" (arXiv 2512.07004).
"""

from __future__ import annotations

import numpy as np

__all__ = ["add_products"]

_FRACTION_BITS = 25
_OF_ZERO = -1000  # an exponent below all others


def add_products(accumulator: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``accumulator + left @ right.T`` for one k-step: float32 arrays of M x N, M x 16 and N x 16."""
    exponents = _exponent(left)[:, None, :] + _exponent(right)[None, :, :]
    largest = np.maximum(exponents.max(axis=2), _exponent(accumulator))
    unit = np.ldexp(1.0, np.maximum(largest, _OF_ZERO // 2) - _FRACTION_BITS)
    products = left.astype(np.float64)[:, None, :] * right.astype(np.float64)[None, :, :]
    total = np.trunc(products / unit[:, :, None]).sum(axis=2) + np.trunc(accumulator / unit)
    return _cut(total * unit)


def _exponent(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, _OF_ZERO, np.frexp(x)[1] - 1)


def _cut(x: np.ndarray) -> np.ndarray:
    """float64 to float32, towards zero."""
    nearest = x.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
