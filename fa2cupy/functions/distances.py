"""Expressions of q and k that depend on their distance, q - k, alone.

Between the elements of a fragment, q - k differs by constants. Where a comparison such as ``k <= q + 1`` is written in
terms of it, the compiler compares one difference of positions with a constant for each element. Where a float such as
``slope * abs(q - k)`` is, elements add a constant to one converted difference instead of converting their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from .expressions import Node
from .linear import COMPARISONS, DISTANCE

__all__ = ["REAL_DISTANCE", "in_distance", "in_real_distance", "of_distance_alone"]

#: The name in texts of q - k in floating point: a ``RealDistance``.
REAL_DISTANCE = "real_distance"


def in_distance(node: Node) -> str | None:
    """CUDA C++ of an expression, in terms of `DISTANCE`; None if it depends on more, or on something else."""
    if node.distance is None:
        return None
    factor, constant = node.distance.factor, node.distance.constant
    if node.op in COMPARISONS:  # of the difference with 0
        left, right = (DISTANCE, -constant) if factor > 0 else (constant, DISTANCE)
        return f"{left} {COMPARISONS[node.op]} {right}"
    if factor < 0:
        return f"{constant} - {DISTANCE}"
    return f"{DISTANCE} + {constant}" if constant else DISTANCE


def of_distance_alone(roots: Iterable[Node]) -> bool:
    """True if expressions depend on q - k, b and h at most."""
    return all(node.depends.isdisjoint(("score", "q", "k")) for node in roots)


def in_real_distance(node: Node) -> str | None:
    """CUDA C++ of an int converted to float, in terms of `REAL_DISTANCE`; None if it is not q - k, k - q or |q - k|.

    Constants may be added.
    """
    if node.op != "as_float":
        return None
    (number,) = node.operands
    is_magnitude = number.op == "absolute"
    distance = number.operands[0].distance if is_magnitude else number.distance
    if distance is None or number.kind == "bool":
        return None
    if is_magnitude:
        return f"absolute({REAL_DISTANCE}.plus({distance.factor * distance.constant}))"
    return f"{REAL_DISTANCE}.{'plus' if distance.factor > 0 else 'from'}({distance.constant})"
