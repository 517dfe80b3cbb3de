"""The primitive operations of expressions: one row for each, with its kinds, its NumPy function and its CUDA C++."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["PRIMITIVES", "Primitive", "truncated"]


class Primitive(NamedTuple):
    """One primitive operation.

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


def _real(name: str) -> Primitive:
    return Primitive("real", name, f"{name}({{0}})")


#: All operations but constants, inputs, elements of arguments and sums, which have no operands of their own kind.
PRIMITIVES = {
    "add": Primitive("number", "add", "{0} + {1}", commutes=True, wrapping="wrapped_sum({0}, {1})"),
    "subtract": Primitive("number", "subtract", "{0} - {1}", wrapping="wrapped_difference({0}, {1})"),
    "multiply": Primitive("number", "multiply", "{0} * {1}", commutes=True, wrapping="wrapped_product({0}, {1})"),
    "negative": Primitive("number", "negative", "-{0}", wrapping="wrapped_difference(0, {0})"),
    "absolute": Primitive("number", "absolute", "absolute({0})"),
    "minimum": Primitive("number", "minimum", "least({0}, {1})"),
    "maximum": Primitive("number", "maximum", "greatest({0}, {1})"),
    "divide": Primitive("real", "true_divide", "{0} / {1}"),
    "power": Primitive("real", "power", "pow({0}, {1})"),
    "floor_divide": Primitive("whole", "floor_divide", "floor_divide({0}, {1})"),
    "remainder": Primitive("whole", "remainder", "floor_modulo({0}, {1})"),
    **{name: _real(name) for name in ("log", "log1p", "sqrt", "sin", "cos", "floor")},
    **{name: Primitive("real", name, f"{name}_of<Arguments>({{0}})") for name in ("exp", "exp2", "tanh")},
    "less": Primitive("compare", "less", "{0} < {1}"),
    "less_equal": Primitive("compare", "less_equal", "{0} <= {1}"),
    "equal": Primitive("compare", "equal", "{0} == {1}", commutes=True),
    "not_equal": Primitive("compare", "not_equal", "{0} != {1}", commutes=True),
    "logical_and": Primitive("truth", "logical_and", "{0} && {1}", commutes=True),
    "logical_or": Primitive("truth", "logical_or", "{0} || {1}", commutes=True),
    "logical_xor": Primitive("truth", "logical_xor", "{0} != {1}", commutes=True),
    "logical_not": Primitive("truth", "logical_not", "!{0}"),
    "bitwise_and": Primitive("bits", "bitwise_and", "{0} & {1}", commutes=True),
    "bitwise_or": Primitive("bits", "bitwise_or", "{0} | {1}", commutes=True),
    "bitwise_xor": Primitive("bits", "bitwise_xor", "{0} ^ {1}", commutes=True),
    "invert": Primitive("bits", "invert", "~{0}"),
    "where": Primitive("where", "where", "{0} ? {1} : {2}"),
}


def truncated(x: Any, xp: ModuleType) -> Any:
    """Floats as int32: cut off towards 0, the nearest int32 for one out of range, and 0 for NaN.

    NumPy leaves the last two to the processor; kernels compute the same (``truncated`` of ``traced.cuh``).
    """
    limits = np.iinfo("int32")
    return xp.clip(xp.nan_to_num(x.astype("float64")), limits.min, limits.max).astype("int32")
