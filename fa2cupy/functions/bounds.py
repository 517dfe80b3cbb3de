"""Bounds of the ints that expressions compute, without knowing positions or arrays.

NumPy's int32 wraps around. In C++ an overflow is undefined, and as a distance, q - k, an expression would have another
value: where the bounds do not exclude it, texts compute with unsigned numbers, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["ANY_INT", "LARGEST_INT", "MAX_POSITION", "Bounds", "bounds_of"]

LARGEST_INT = 2**31 - 1
#: Positions, sequences and heads of functions are below this number, so that sums and differences of two do not wrap.
MAX_POSITION = 2**30


class Bounds(NamedTuple):
    """The smallest and the largest value that an int may have; `wraps` if its operation may exceed 32 bits."""

    low: int
    high: int
    wraps: bool = False


ANY_INT = Bounds(-LARGEST_INT - 1, LARGEST_INT)
_FLAG = Bounds(0, 1)


def bounds_of(op: str, value: object, operands: Sequence[Bounds]) -> Bounds:
    """The bounds of an int by those of its operands; a bool has 0 and 1, and a float any."""
    if op == "constant":
        assert isinstance(value, int)
        return Bounds(value, value)
    if op in ("input", "position"):
        return Bounds(0, MAX_POSITION - 1)
    if op == "as_int":
        return operands[0]
    if op not in _RULES:
        return ANY_INT
    low, high = _RULES[op](*operands)
    return Bounds(low, high) if low >= ANY_INT.low and high <= ANY_INT.high else ANY_INT._replace(wraps=True)


def _product(x: Bounds, y: Bounds) -> tuple[int, int]:
    corners = [a * b for a in x[:2] for b in y[:2]]
    return min(corners), max(corners)


def _magnitude(x: Bounds) -> tuple[int, int]:
    return (0 if x.low < 0 < x.high else min(abs(x.low), abs(x.high))), max(abs(x.low), abs(x.high))


def _quotient(x: Bounds, y: Bounds) -> tuple[int, int]:
    if y.low > 0:
        return min(x.low // y.low, x.low // y.high), max(x.high // y.low, x.high // y.high)
    largest = _magnitude(x)[1]
    return -largest, largest


def _remainder(x: Bounds, y: Bounds) -> tuple[int, int]:
    if y.low > 0:
        return 0, y.high - 1 if x.low < 0 else min(x.high, y.high - 1)
    largest = min(_magnitude(y)[1], LARGEST_INT)
    return -largest, largest


def _conjunction(x: Bounds, y: Bounds) -> tuple[int, int]:
    highest = [one.high for one in (x, y) if one.low >= 0]
    return (0, min(highest)) if highest else ANY_INT[:2]


_RULES: Mapping[str, Callable[..., tuple[int, int]]] = {
    "add": lambda x, y: (x.low + y.low, x.high + y.high),
    "subtract": lambda x, y: (x.low - y.high, x.high - y.low),
    "multiply": _product,
    "negative": lambda x: (-x.high, -x.low),
    "absolute": _magnitude,
    "minimum": lambda x, y: (min(x.low, y.low), min(x.high, y.high)),
    "maximum": lambda x, y: (max(x.low, y.low), max(x.high, y.high)),
    "floor_divide": _quotient,
    "remainder": _remainder,
    "bitwise_and": _conjunction,
    "invert": lambda x: (~x.high, ~x.low),
    "where": lambda _, x, y: (min(x.low, y.low), max(x.high, y.high)),
}
