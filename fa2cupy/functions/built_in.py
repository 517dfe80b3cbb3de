"""Functions that kernels compute as they compute a keyword of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from .expressions import Node, reachable, reciprocal

__all__ = ["NEIGHBORHOODS", "Band", "KnownMask", "Neighborhood", "band_of", "is_shift", "known_mask", "soft_cap_of"]


class Neighborhood(NamedTuple):
    """A mask function by which each query of a grid of tokens sees a window of keys around it.

    Attributes
    ----------
    outer : int or None
        Tokens along the first axis; None if sequences of any length are grids.
    inner : tuple of int
        Tokens along the others.
    before, sizes : tuple of int
        Along each axis, how far before a query its window begins, and how long it is.
    is_clamped : bool
        True if windows are moved inside at borders, False if they are cut off there.
    """

    outer: int | None
    inner: tuple[int, ...]
    before: tuple[int, ...]
    sizes: tuple[int, ...]
    is_clamped: bool


class Band(NamedTuple):
    """A mask function by which each query sees the keys between two diagonals, as by ``causal`` and ``window``.

    Attributes
    ----------
    first, last : int or None
        The least and the largest k - q of visible keys; None for no limit.
    """

    first: int | None
    last: int | None

    def window(self, diagonal: int) -> tuple[int | None, int | None] | None:
        """The limits of ``window`` for queries that are aligned with key ``q + diagonal``; None if one is negative."""
        left = None if self.first is None else diagonal - self.first
        right = None if self.last is None else self.last - diagonal
        return None if min(left or 0, right or 0) < 0 else (left, right)


_BOUNDS = ("less", "less_equal", "equal")

KnownMask: TypeAlias = Neighborhood | Band

#: The functions of `fa2cupy.mods` that are neighborhoods.
NEIGHBORHOODS: dict[object, Neighborhood] = {}


def known_mask(function: Callable[..., Any], result: Node) -> KnownMask | None:
    """What is known of a function with this result, or None. Some callables cannot be hashed."""
    return (NEIGHBORHOODS.get(function) if isinstance(function, FunctionType) else None) or band_of(result)


def band_of(result: Node) -> Band | None:
    """The band that a mask function is: one or more bounds of k - q, all of which hold. None for another function."""
    first: list[int] = []
    last: list[int] = []
    for node in reachable([result], operands=lambda x: x.operands if x.op == "logical_and" else ()):
        if node.op == "logical_and":
            continue
        is_hidden = node.op == "logical_not"
        bound = node.operands[0] if is_hidden else node
        if bound.distance is None or bound.op not in (("less", "less_equal") if is_hidden else _BOUNDS):
            return None
        factor, limit = bound.distance.factor, bound.distance.constant + (bound.op == "less")
        if bound.op == "equal":
            first.append(factor * limit)
            last.append(factor * limit)
        elif factor > 0:  # limit <= k - q
            (last if is_hidden else first).append(limit - is_hidden)
        else:  # k - q <= -limit
            (first if is_hidden else last).append(is_hidden - limit)
    return Band(max(first, default=None), min(last, default=None))


def is_shift(result: Node) -> bool:
    """True if a score function adds something that does not depend on the score, as ALiBi and a bias do.

    A derivative of 1 is not enough: ``score + floor(score)`` has it.
    """
    while result.op in ("add", "subtract"):
        x, y = result.operands
        if result.op == "add" and "score" in y.inputs:
            x, y = y, x
        if "score" in y.inputs:
            return False
        result = x
    return (result.op, result.value) == ("input", "score")


def soft_cap_of(result: Node) -> float | None:
    """The cap of a score function that is ``cap * tanh(score / cap)``, as ``softcap=`` is; None for another function.

    As a function, each score takes the special function unit twice for tanh; the keyword has a polynomial for scores
    far below the cap (``kernels/common/softcap.cuh``).
    """
    cap, bounded = _factor_and_rest(result)
    if cap is None or bounded.op != "tanh" or not (math.isfinite(cap) and cap > 0):
        return None
    rate, score = _factor_and_rest(bounded.operands[0])
    return cap if rate == 1 / cap and (score.op, score.value) == ("input", "score") else None


def _factor_and_rest(node: Node) -> tuple[float | None, Node]:
    """The constant that a node multiplies by, and the other operand; None and the node for another node.

    A quotient by a constant is the product with its reciprocal.
    """
    if node.op == "divide":
        return reciprocal(node.operands[1]), node.operands[0]
    if node.op == "multiply":
        for factor, rest in (node.operands, node.operands[::-1]):
            if factor.is_constant and isinstance(factor.value, float):
                return factor.value, rest
    return None, node
