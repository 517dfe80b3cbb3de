"""Functions that kernels compute faster as a keyword of their own."""

from __future__ import annotations

import math

from .expressions import Node

__all__ = ["soft_cap_of"]


def soft_cap_of(result: Node) -> float | None:
    """The cap of a score function that is ``cap * tanh(score / cap)``, as ``softcap=`` is; None for another function.

    As a function, each score takes the special function unit twice for tanh; the keyword has a polynomial for scores
    far below the cap (``kernels/common/softcap.cuh``).
    """
    cap, bounded = _factor_and_rest(result)
    if cap is None or bounded.op != "tanh" or not (math.isfinite(cap) and cap > 0):
        return None
    # The graph divides by a constant by multiplying by its reciprocal.
    rate, score = _factor_and_rest(bounded.operands[0])
    return cap if rate == 1 / cap and (score.op, score.value) == ("input", "score") else None


def _factor_and_rest(node: Node) -> tuple[float | None, Node]:
    """The constant that a node multiplies by, and the other operand; None and the node for another node."""
    if node.op == "multiply":
        for factor, rest in (node.operands, node.operands[::-1]):
            if factor.is_constant and isinstance(factor.value, float):
                return factor.value, rest
    return None, node
