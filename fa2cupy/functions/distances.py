"""Expressions of q and k that depend on their distance, q - k, alone.

Between the elements of a fragment, q - k differs by constants. Where a comparison such as ``k <= q + 1`` is written in
terms of it, the compiler compares one difference of positions with a constant for each element. Where a float such as
``slope * abs(q - k)`` is, elements add a constant to one converted difference instead of converting their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .expressions import INT, Node, reachable

__all__ = ["DISTANCE", "REAL_DISTANCE", "in_distance", "in_real_distance", "of_distance_alone"]

#: The names in texts of q - k, and of the same in floating point: a ``RealDistance``.
DISTANCE, REAL_DISTANCE = "distance", "real_distance"
_COMPARISONS = {"less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!="}
#: The factors of the operands of what is linear in them.
_FACTORS = {"add": (1, 1), "subtract": (1, -1), "negative": (-1,)}


class _Linear(NamedTuple):
    """of_q q + of_k k + constant."""

    of_q: int
    of_k: int
    constant: int

    def plus(self, factor: int, other: _Linear) -> _Linear:
        return _Linear(*(x + factor * y for x, y in zip(self, other, strict=True)))

    @property
    def factor(self) -> int:
        """The factor of q - k; 0 if this is no function of it."""
        return self.of_q if self.of_q == -self.of_k and abs(self.of_q) == 1 else 0


def in_distance(node: Node) -> str | None:
    """CUDA C++ of an expression, in terms of `DISTANCE`; None if it depends on more, or on something else."""
    if node.op in _COMPARISONS and all(x.kind == INT for x in node.operands):
        difference = _linear_sum((1, -1), node.operands)
        if difference is None or difference.factor == 0:
            return None
        return _compared(_COMPARISONS[node.op], difference)
    linear = _linear(node) if node.op in _FACTORS else None
    if linear is None or linear.factor == 0:
        return None
    if linear.factor < 0:
        return f"{linear.constant} - {DISTANCE}"
    return f"{DISTANCE} + {linear.constant}" if linear.constant else DISTANCE


def of_distance_alone(roots: Sequence[Node]) -> bool:
    """True if expressions depend on q - k, b and h at most."""
    nodes = reachable(roots, operands=lambda node: node.operands if in_distance(node) is None else ())
    return not any(node.op == "input" and node.value in ("score", "q", "k") for node in nodes)


def in_real_distance(node: Node) -> str | None:
    """CUDA C++ of an int converted to float, in terms of `REAL_DISTANCE`; None if it is not q - k, k - q or |q - k|.

    Constants may be added.
    """
    if node.op != "as_float":
        return None
    (number,) = node.operands
    is_magnitude = number.op == "absolute"
    linear = _linear(number.operands[0] if is_magnitude else number)
    if linear is None or linear.factor == 0:
        return None
    if is_magnitude:
        return f"absolute({REAL_DISTANCE}.plus({linear.factor * linear.constant}))"
    return f"{REAL_DISTANCE}.{'plus' if linear.factor > 0 else 'from'}({linear.constant})"


def _compared(comparison: str, difference: _Linear) -> str:
    """The text of ``difference < 0``, or another comparison."""
    if difference.factor < 0:
        return f"{difference.constant} {comparison} {DISTANCE}"
    return f"{DISTANCE} {comparison} {-difference.constant}"


def _linear(node: Node) -> _Linear | None:
    if node.kind != INT or node.bounds.wraps:
        return None
    if node.is_constant:
        assert isinstance(node.value, int)
        return _Linear(0, 0, node.value)
    if node.op == "input":
        return {"q": _Linear(1, 0, 0), "k": _Linear(0, 1, 0)}.get(str(node.value))
    return _linear_sum(_FACTORS[node.op], node.operands) if node.op in _FACTORS else None


def _linear_sum(factors: tuple[int, ...], operands: tuple[Node, ...]) -> _Linear | None:
    total = _Linear(0, 0, 0)
    for factor, operand in zip(factors, operands, strict=True):
        term = _linear(operand)
        if term is None:
            return None
        total = total.plus(factor, term)
    return total
