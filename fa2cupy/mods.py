"""Ready-made functions for ``score_mod=`` and ``mask_mod=``, and examples of how such functions are written.

Functions with numbers of their own are made by a call, such as ``mask_mod=mods.sliding_window(1023)``. The same numbers
give the same function object, which is traced once. `diagonal` is ``seqlen_k - seqlen_q`` where query ``i`` is aligned
with key ``i + diagonal``, as in `fa2cupy.forward`; positions count from the start of each sequence.

Where `fa2cupy.forward` has a keyword for the same (``causal``, ``window``, ``softcap``, ``alibi_slopes``), the keyword
is at least as fast, and most calls with `causal`, `sliding_window` or `softcap` run as with it; these functions are
there to be changed and combined.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np

from .functions.built_in import NEIGHBORHOODS, Neighborhood
from .problem.arguments import check_bool, check_int
from .problem.feature_checks import finite_number

__all__ = [
    "alibi",
    "causal",
    "dilated_window",
    "document",
    "neighborhood",
    "neighborhood_2d",
    "prefix_lm",
    "sliding_window",
    "softcap",
    "t5_relative",
]

#: A function for ``score_mod=`` or ``mask_mod=``. It gets symbols, and arrays that can be indexed with symbols.
Mod: TypeAlias = Callable[..., Any]
_Maker = TypeVar("_Maker", bound=Callable[..., Mod])


def _kept(**least: int) -> Callable[[_Maker], _Maker]:
    """Makes calls with equal numbers return one function: calls of attention then trace it once.

    The numbers are checked: their types, which are those of the annotations, and the least values that are given.
    """

    def with_checks(maker: _Maker) -> _Maker:
        signature, kinds = inspect.signature(maker), maker.__annotations__

        def checked(*given: Any, **named: Any) -> Mod:
            bound = signature.bind(*given, **named)
            for name, value in bound.arguments.items():
                bound.arguments[name] = _number(name, value, kinds[name], least.get(name))
            return maker(*bound.args, **bound.kwargs)

        kept = functools.lru_cache(maxsize=None)(checked)

        @functools.wraps(maker)
        def make(*given: Any, **named: Any) -> Mod:
            try:
                return kept(*given, **named)
            except TypeError as error:
                for name, value in signature.bind(*given, **named).arguments.items():
                    if type(value).__hash__ is None:
                        hint = "arrays are passed as score_args or mask_args"
                        raise TypeError(f"{name}: expected a number, got {type(value).__name__}; {hint}") from error
                raise

        return cast(_Maker, make)

    return with_checks


def _number(name: str, value: Any, kind: str, least: int | None) -> Any:
    """A number of one of the kinds int, float and bool, as one of Python, or a tuple of ints."""
    if kind == "tuple[int, ...]":
        if not isinstance(value, tuple) or not value:
            raise TypeError(f"{name}: expected a tuple of an int for each axis, got {value!r}")
        return tuple(_number(f"{name}[{axis}]", length, "int", least) for axis, length in enumerate(value))
    if kind == "bool":
        check_bool(name, value)
        return bool(value)
    number = check_int(name, value) if kind == "int" else finite_number(name, value, or_none=False)
    if least is not None and number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


@_kept()
def causal(diagonal: int = 0) -> Mod:
    """The mask of ``causal=True``: a query sees the keys up to the one that it is aligned with.

    Parameters
    ----------
    diagonal : int, optional
        Key that query 0 is aligned with: ``seqlen_k - seqlen_q``.

    Notes
    -----
    Calls on a GPU run as with the keyword where it computes the same, and do not read a map of the function: here if
    `diagonal` is ``seqlen_k - seqlen_q``. Packed sequences, calls with ``causal`` or ``window`` besides, a map given by
    its tiles, and several GPUs that share sequences keep the function.
    """

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k <= q + diagonal

    return mask


@_kept(left=0, right=0)
def sliding_window(left: int, right: int = 0, diagonal: int = 0) -> Mod:
    """The mask of ``window=(left, right)`` (Beltagy et al. 2020, Longformer).

    Parameters
    ----------
    left, right : int
        Number of visible keys on either side of the one that the query is aligned with.
    diagonal : int, optional
        As for `causal`.

    Notes
    -----
    See `causal` for calls that run as with the keyword.
    """

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q + diagonal - left <= k) & (k <= q + diagonal + right)

    return mask


@_kept(reach=0, dilation=1)
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


@_kept(width=1, radius=0)
def neighborhood_2d(width: int, radius: int) -> Mod:
    """The mask of neighbourhood attention on an image (Hassani et al. 2023), cut off at the image's borders.

    `neighborhood` has windows that stay inside.

    Parameters
    ----------
    width : int
        Number of tokens in a row of the image; the rows lie one behind the other.
    radius : int
        Visible tokens are at most as many rows and columns away.

    Notes
    -----
    See `neighborhood` for calls that need no map.
    """

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        rows, columns = q // width - k // width, q % width - k % width
        return (abs(rows) <= radius) & (abs(columns) <= radius)

    NEIGHBORHOODS[mask] = Neighborhood(None, (width,), (radius,) * 2, (2 * radius + 1,) * 2, False)
    return mask


@_kept(shape=1, kernel_size=1)
def neighborhood(shape: tuple[int, ...], kernel_size: tuple[int, ...]) -> Mod:
    """The mask of neighbourhood attention (Hassani et al. 2023), with windows that stay inside the grid of tokens.

    A query sees as many tokens as the window has, near borders, too: where a window around the query would reach out
    of the grid, it is moved inside. `neighborhood_2d` cuts windows off there.

    Parameters
    ----------
    shape : tuple of int
        Tokens along each axis of a sequence, such as (height, width) or (frames, height, width), in C order.
    kernel_size : tuple of int
        Those of a window, up to `shape`. An even number has one more before the query than behind it.

    Notes
    -----
    On Hopper, forwards in 16 bits with head_dim up to 128, and their backwards by ``single_pass``, read only boxes of
    tokens that queries see, if the function is their only feature and the grid has two or three axes. A map by
    `fa2cupy.block_mask` adds nothing to these, but it saves time in other calls.
    """
    if len(kernel_size) != len(shape):
        raise ValueError(f"kernel_size: expected {len(shape)} lengths like shape, got {len(kernel_size)}")
    for axis, (size, length) in enumerate(zip(kernel_size, shape, strict=True)):
        if size > length:
            raise ValueError(f"kernel_size[{axis}]: expected at most {length} like shape, got {size}")

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        visible: Any = True
        for axis, (size, length) in enumerate(zip(kernel_size, shape, strict=True)):
            query, key = q // math.prod(shape[axis + 1 :]), k // math.prod(shape[axis + 1 :])
            if axis > 0:
                query, key = query % length, key % length
            place = key - np.clip(query - size // 2, 0, length - size)  # in the window
            visible &= (place >= 0) & (place < size)
        return visible

    before = tuple(size // 2 for size in kernel_size)
    NEIGHBORHOODS[mask] = Neighborhood(shape[0], shape[1:], before, kernel_size, True)
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


@_kept()
def softcap(cap: float) -> Mod:
    """The scores of ``softcap=cap`` (Gemma Team 2024, Gemma 2).

    Parameters
    ----------
    cap : float
    """
    if cap == 0:
        raise ValueError(f"cap: expected a number other than 0, got {cap}")

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return cap * np.tanh(score / cap)

    return score_mod


@_kept()
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


@_kept()
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
    if exact < 1:
        raise ValueError(f"num_buckets: expected at least {4 if bidirectional else 2}, got {num_buckets}")
    if max_distance <= exact:
        wanted = f"more than {exact}, the distances that have buckets of their own"
        raise ValueError(f"max_distance: expected {wanted}, got {max_distance}")
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
