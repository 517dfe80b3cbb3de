"""Ints that are linear functions of the positions q and k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["COMPARISONS", "DISTANCE", "Linear", "linear_of"]

#: The name in texts of q - k.
DISTANCE = "distance"
COMPARISONS = {"less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!="}
#: For operations that are linear in their operands: the operands' factors.
_FACTORS = {"add": (1, 1), "subtract": (1, -1), "negative": (-1,)} | dict.fromkeys(COMPARISONS, (1, -1))
#: The sum of a position and a number up to this one fits in 32 bits. If ints wrapped around, comparing their difference
#: with 0 would not be the same as comparing them.
_LARGEST = 2**30


class Linear(NamedTuple):
    """of_q q + of_k k + constant."""

    of_q: int
    of_k: int
    constant: int

    @property
    def factor(self) -> int:
        """The factor of q - k; 0 if this is no function of it."""
        return self.of_q if self.of_q == -self.of_k and abs(self.of_q) == 1 else 0


_INPUTS = {"q": Linear(1, 0, 0), "k": Linear(0, 1, 0)}


def linear_of(op: str, kind: str, operands: Sequence[Linear | None], value: object) -> Linear | None:
    """The linear function that an int is, or the difference of two ints that are compared; None for other nodes."""
    of_q = of_k = constant = 0
    if op in _FACTORS:
        for factor, x in zip(_FACTORS[op], operands, strict=True):
            if x is None:
                return None
            of_q, of_k, constant = of_q + factor * x.of_q, of_k + factor * x.of_k, constant + factor * x.constant
    elif op == "constant" and kind == "int":
        assert isinstance(value, int)
        constant = value
    elif op == "input":
        return _INPUTS.get(str(value))
    else:
        return None
    is_small = abs(of_q) <= _LARGEST and abs(of_k) <= _LARGEST and abs(constant) <= _LARGEST
    return Linear(of_q, of_k, constant) if is_small else None
