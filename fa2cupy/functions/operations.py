"""The operations of expressions: one row for each, with its kinds, its NumPy function and its CUDA C++."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["OPERATIONS", "Operation", "truncated"]


class Operation(NamedTuple):
    """One operation.

    Attributes
    ----------
    rule : str
        How kinds are found. ``"number"``: operands and result have the widest kind of the operands, at least int;
        ``"real"``: all are float; ``"whole"``: all are int, and a float is refused; ``"compare"``: operands as for
        ``"number"``, the result is bool; ``"truth"``: all are bool; ``"bits"``: all are bool, or all are int;
        ``"where"``: the first operand is bool, the others as for ``"number"``.
    function : str
        Name of the function in NumPy and CuPy, which is also a name that callers can write.
    text : str
        CUDA C++ of the result, of the texts of the operands. Its functions are in ``kernels/common/traced.cuh``.
    commutes : bool
        True if the order of the operands changes no bit of the result.
    wrapping : str
        CUDA C++ of the result of ints that may exceed 32 bits, where it differs.
    """

    rule: str
    function: str
    text: str
    commutes: bool = False
    wrapping: str = ""


def _real(name: str) -> Operation:
    return Operation("real", name, f"{name}({{0}})")


#: All operations but constants, inputs, elements of arguments and sums, which have no operands of their own kind.
OPERATIONS = {
    "add": Operation("number", "add", "{0} + {1}", commutes=True, wrapping="wrapped_sum({0}, {1})"),
    "subtract": Operation("number", "subtract", "{0} - {1}", wrapping="wrapped_difference({0}, {1})"),
    "multiply": Operation("number", "multiply", "{0} * {1}", commutes=True, wrapping="wrapped_product({0}, {1})"),
    "negative": Operation("number", "negative", "-{0}", wrapping="wrapped_difference(0, {0})"),
    "absolute": Operation("number", "absolute", "absolute({0})"),
    "minimum": Operation("number", "minimum", "least({0}, {1})"),
    "maximum": Operation("number", "maximum", "greatest({0}, {1})"),
    "divide": Operation("real", "true_divide", "{0} / {1}"),
    "power": Operation("real", "power", "pow({0}, {1})"),
    "floor_divide": Operation("whole", "floor_divide", "floor_divide({0}, {1})"),
    "remainder": Operation("whole", "remainder", "floor_modulo({0}, {1})"),
    **{name: _real(name) for name in ("log", "log1p", "sqrt", "sin", "cos", "floor")},
    **{name: Operation("real", name, f"{name}_of<Arguments>({{0}})") for name in ("exp", "exp2", "tanh")},
    "less": Operation("compare", "less", "{0} < {1}"),
    "less_equal": Operation("compare", "less_equal", "{0} <= {1}"),
    "equal": Operation("compare", "equal", "{0} == {1}", commutes=True),
    "not_equal": Operation("compare", "not_equal", "{0} != {1}", commutes=True),
    "logical_and": Operation("truth", "logical_and", "{0} && {1}", commutes=True),
    "logical_or": Operation("truth", "logical_or", "{0} || {1}", commutes=True),
    "logical_xor": Operation("truth", "logical_xor", "{0} != {1}", commutes=True),
    "logical_not": Operation("truth", "logical_not", "!{0}"),
    "bitwise_and": Operation("bits", "bitwise_and", "{0} & {1}", commutes=True),
    "bitwise_or": Operation("bits", "bitwise_or", "{0} | {1}", commutes=True),
    "bitwise_xor": Operation("bits", "bitwise_xor", "{0} ^ {1}", commutes=True),
    "invert": Operation("bits", "invert", "~{0}"),
    "where": Operation("where", "where", "{0} ? {1} : {2}"),
}


def truncated(x: Any, xp: ModuleType) -> Any:
    """Floats as int32: cut off towards 0, the nearest int32 for one out of range, and 0 for NaN.

    NumPy leaves the last two to the processor; kernels compute the same (``truncated`` of ``traced.cuh``).
    """
    limits = np.iinfo("int32")
    return xp.clip(xp.nan_to_num(x.astype("float64")), limits.min, limits.max).astype("int32")
