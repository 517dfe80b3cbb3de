"""The arithmetic between attention calls: sums of shares, in the dtype of lse and in a fixed order."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ...problem.array_types import Array
from ..movers.copies import in_words
from ..transport.messages import is_on_host

__all__ = ["add", "clear", "store", "subtract", "sum_into"]


#: Most shares of one kernel, whose arguments have 4 KiB.
_MOST_SHARES = 32


def clear(target: Array) -> None:
    """Writes zeros."""
    target[...] = 0


def store(target: Array, total: Array) -> None:
    """Rounds a sum to the dtype of the target."""
    target[...] = total


def add(total: Array, share: Array) -> None:
    """Adds a share to a sum."""
    if is_on_host(total):
        total += share.astype(total.dtype, copy=False)
    else:
        _kernel("T share", "W total", "total += static_cast<W>(share)", "fa2cupy_add")(share, total)


def subtract(target: Array, first: Array, second: Array) -> None:
    """Writes a difference."""
    target[...] = first - second


def sum_into(target: Array, shares: Sequence[Array], wide: str) -> None:
    """Writes the sum of shares of the target's dtype, which is added up in the dtype `wide` and rounded once.

    Without shares it is zero.
    """
    if not shares:
        clear(target)
    elif is_on_host(target) or len(shares) > _MOST_SHARES:
        total = shares[0].astype(wide)
        for share in shares[1:]:
            add(total, share)
        store(target, total)
    else:
        _sum_kernel(len(shares), wide)(target, *in_words(*shares, target))


@functools.lru_cache(maxsize=None)
def _kernel(reads: str, writes: str, body: str, name: str) -> Any:
    """A kernel of CuPy that reads and writes each element once. Operators would make an array of each step."""
    import cupy

    return cupy.ElementwiseKernel(reads, writes, body, name)


def _sum_kernel(count: int, wide: str) -> Any:
    """The kernel that adds up shares in words ``W`` of some elements ``T``."""
    total = {"float32": "float", "float64": "double"}[wide]
    names = [f"share{n}" for n in range(count)]
    words = "".join(f"const W word_of_{name} = {name}; " for name in names)
    sums = "".join(f"total += static_cast<{total}>(reinterpret_cast<const T*>(&word_of_{name})[j]); " for name in names)
    body = f"""
        W word;
        {words}
        for (int j = 0; j < sizeof(W) / sizeof(T); ++j) {{
            {total} total = 0;
            {sums}
            reinterpret_cast<T*>(&word)[j] = static_cast<T>(total);
        }}
        target = word;
    """
    shares = ", ".join(f"W {name}" for name in names)
    return _kernel(f"raw T like, {shares}", "W target", body, f"fa2cupy_sum_of_{count}")
