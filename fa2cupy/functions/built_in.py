"""Functions that kernels compute as they compute a keyword of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from .expressions import Node, reciprocal

__all__ = ["KNOWN_MASKS", "Band", "KnownMask", "Neighborhood", "is_shift", "known_mask", "soft_cap_of"]


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
    """A mask function by which each query sees keys around one, as by ``causal`` and ``window``.

    Attributes
    ----------
    left : int or None
        Number of visible keys before that one; None for all, with none behind it: ``causal``.
    right : int
        Number of those behind it.
    diagonal : int
        Its distance from the query.
    """

    left: int | None
    right: int
    diagonal: int


KnownMask: TypeAlias = Neighborhood | Band

#: What is known of functions: of those of `fa2cupy.mods`.
KNOWN_MASKS: dict[object, KnownMask] = {}


def known_mask(function: Callable[..., Any]) -> KnownMask | None:
    """What is known of a function, or None. Some callables cannot be hashed."""
    return KNOWN_MASKS.get(function) if isinstance(function, FunctionType) else None


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
