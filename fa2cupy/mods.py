"""Ready-made functions for ``score_mod=`` and ``mask_mod=``, and examples of how such functions are written.

Functions with numbers of their own are made by a call, such as ``mask_mod=mods.sliding_window(1023)``. The same numbers
give the same function object, which is traced once. `diagonal` is ``seqlen_k - seqlen_q`` where query ``i`` is aligned
with key ``i + diagonal``, as in `fa2cupy.forward`; positions count from the start of each sequence.

Where `fa2cupy.forward` has a keyword for the same (``causal``, ``window``, ``softcap``, ``alibi_slopes``), the keyword
is at least as fast; these functions are there to be changed and combined.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

__all__ = [
    "alibi",
    "causal",
    "dilated_window",
    "document",
    "neighborhood_2d",
    "prefix_lm",
    "sliding_window",
    "softcap",
    "t5_relative",
]

#: A function for ``score_mod=`` or ``mask_mod=``. It gets symbols, and arrays that can be indexed with symbols.
Mod: TypeAlias = Callable[..., Any]
_Maker = TypeVar("_Maker", bound=Callable[..., Mod])


def _kept(maker: _Maker) -> _Maker:
    """Makes calls with equal arguments return one function: calls of attention then trace it once."""
    return cast(_Maker, functools.lru_cache(maxsize=None)(maker))


@_kept
def causal(diagonal: int = 0) -> Mod:
    """The mask of ``causal=True``: a query sees the keys up to the one that it is aligned with.

    Parameters
    ----------
    diagonal : int, optional
        Key that query 0 is aligned with: ``seqlen_k - seqlen_q``.
    """

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q + diagonal

    return mask


@_kept
def sliding_window(left: int, right: int = 0, diagonal: int = 0) -> Mod:
    """The mask of ``window=(left, right)`` (Beltagy et al. 2020, Longformer).

    Parameters
    ----------
    left, right : int
        Number of visible keys on either side of the one that the query is aligned with.
    diagonal : int, optional
        As for `causal`.
    """

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + diagonal - left <= k) & (k <= q + diagonal + right)

    return mask


@_kept
def dilated_window(reach: int, dilation: int) -> Mod:
    """The mask of a causal window with gaps (Beltagy et al. 2020): every `dilation`-th of the last keys.

    Parameters
    ----------
    reach : int
        Distance of the farthest visible key.
    dilation : int
        Visible keys are multiples of it away from the query.
    """

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k <= reach) & ((q - k) % dilation == 0)

    return mask


@_kept
def neighborhood_2d(width: int, radius: int) -> Mod:
    """The mask of neighbourhood attention on an image (Hassani et al. 2023), cut off at the image's borders.

    Parameters
    ----------
    width : int
        Number of tokens in a row of the image; the rows lie one behind the other.
    radius : int
        Visible tokens are at most as many rows and columns away.
    """

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        rows, columns = q // width - k // width, q % width - k % width
        return (abs(rows) <= radius) & (abs(columns) <= radius)

    return mask


def prefix_lm(b: Any, h: Any, q: Any, k: Any, prefix: Any) -> Any:
    """The mask of a prefix language model (Raffel et al. 2020): all see the prefix, and what follows is causal.

    Parameters
    ----------
    b, h, q, k : symbol
        The positions that a mask function gets.
    prefix : ndarray of ints, shape (batch,)
        Length of each sequence's prefix: ``mask_args=(prefix,)``.
    """
    return (k <= q) | (k < prefix[b])


def document(b: Any, h: Any, q: Any, k: Any, ids: Any) -> Any:
    """The mask of sequences of several documents: a query sees its own document.

    Parameters
    ----------
    b, h, q, k : symbol
        The positions that a mask function gets.
    ids : ndarray of ints, shape (batch, seqlen)
        Number of the document of each token: ``mask_args=(ids,)``.
    """
    return ids[b, q] == ids[b, k]


@_kept
def softcap(cap: float) -> Mod:
    """The scores of ``softcap=cap`` (Gemma Team 2024, Gemma 2).

    Parameters
    ----------
    cap : float
    """

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * np.tanh(score / cap)

    return score_mod


@_kept
def alibi(diagonal: int = 0) -> Mod:
    """The scores of ``alibi_slopes=slopes`` (Press et al. 2022), here with a gradient for the slopes.

    Parameters
    ----------
    diagonal : int, optional
        As for `causal`.

    Notes
    -----
    The function takes an array of shape (num_heads,): ``score_args=(slopes,)``.
    """

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
        return score - slopes[h] * abs(q + diagonal - k)

    return score_mod


@_kept
def t5_relative(num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Mod:
    """The learned relative positions of T5 (Raffel et al. 2020).

    Parameters
    ----------
    num_buckets : int, optional
        Number of buckets of distances. Half of them have one distance each; those of the others grow geometrically.
    max_distance : int, optional
        Distance from which on all are in the last bucket.
    bidirectional : bool, optional
        True for an encoder: half of the buckets are then for keys behind the query.

    Notes
    -----
    The function takes an array of shape (num_buckets, num_heads): ``score_args=(table,)``. The first distance of each
    bucket is found with exact integers, so that rounding moves no distance into another bucket.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    exact = side // 2
    steps = side - exact
    # Bucket exact + i begins at the smallest distance d with log(d / exact) / log(max_distance / exact) >= i / steps.
    distances = range(exact, max_distance + 1)
    first = [
        distances[bisect.bisect_left(distances, exact ** (steps - i) * max_distance**i, key=lambda d: d**steps)]
        for i in range(1, steps)
    ]

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
        distance = abs(q - k) if bidirectional else np.maximum(q - k, 0)
        bucket = np.minimum(distance, exact)
        for start in first:
            bucket += distance >= start
        if bidirectional:
            bucket += np.where(k > q, side, 0)
        return score + table[bucket, h]

    return score_mod
