"""Comparisons, selections and tests of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Plain, plain
from .scalars import WIDTH, is_float
from .syntax import Inst, Pair

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []

_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_CONNECTIVES = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_MODIFIERS = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan ftz and or xor"
_TESTS = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "notanumber": np.isnan,
    "number": lambda x: ~np.isnan(x),
}


def _either_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def _comparison(name: str, ty: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Returns a comparison; ordered ones are false for NaN, unordered ones, whose name ends with u, are true."""
    if name in ("nan", "num"):
        return _either_nan if name == "nan" else lambda a, b: ~_either_nan(a, b)
    if name == "ne" and is_float(ty):
        return lambda a, b: (a != b) & ~_either_nan(a, b)
    if name in _ORDERED:
        return _ORDERED[name]
    if name in _UNSIGNED:
        return _UNSIGNED[name]
    ordered = _ORDERED[name[:2]]
    return lambda a, b: ordered(a, b) | _either_nan(a, b)


@plain("setp", allow=_MODIFIERS)
def _set_predicate(machine: Machine, inst: Inst) -> Plain:
    ty, name = inst.type, inst.parts[0]
    compare = _comparison(name, ty)
    if name in _UNSIGNED:
        ty = f"u{WIDTH[ty]}"
    connect = next((_CONNECTIVES[part] for part in inst.parts[1:] if part in _CONNECTIVES), None)
    target = machine.destination(inst.args[0], "pred")
    other = machine.destination(inst.args[0].second, "pred") if isinstance(inst.args[0], Pair) else None
    a, b = (machine.source(arg, ty) for arg in inst.args[1:3])
    c = machine.source(inst.args[3], "pred") if connect is not None else None
    packed = ty in ("f16x2", "bf16x2")

    def run(ix: Any) -> None:
        target[ix] = compare(a[ix], b[ix])

    def run_with_more(ix: Any) -> None:
        result = compare(a[ix], b[ix])
        first, second = (result[:, 0], result[:, 1]) if packed else (result, ~result)
        if connect is not None:
            also = c[ix]
            first, second = connect(first, also), connect(second, also)
        target[ix] = first
        if other is not None:
            other[ix] = second

    return run if other is None and connect is None and not packed else run_with_more


@plain("set", allow=_MODIFIERS)
def _set(machine: Machine, inst: Inst) -> Plain:
    """Sets a register to 1.0 or all ones if a comparison is true."""
    result_type, ty = inst.types[-2:]
    compare = _comparison(inst.parts[0], ty)
    connect = next((_CONNECTIVES[part] for part in inst.parts[1:] if part in _CONNECTIVES), None)
    target = machine.destination(inst.args[0], result_type)
    a, b = (machine.source(arg, ty) for arg in inst.args[1:3])
    c = machine.source(inst.args[3], "pred") if connect is not None else None

    def run(ix: Any) -> None:
        result = compare(a[ix], b[ix])
        if connect is not None:
            also = c[ix]
            result = connect(result, also[:, None] if result.ndim == 2 else also)
        if is_float(result_type):
            target[ix] = result.astype(np.float32)
        elif result.ndim == 2:
            target[ix] = result[:, 0] * np.uint32(0xFFFF) | result[:, 1] * np.uint32(0xFFFF0000)
        else:
            target[ix] = -result.astype(np.int32)

    return run


@plain("selp")
def _select(machine: Machine, inst: Inst) -> Plain:
    ty = inst.type if inst.type in ("f32", "f64") else f"b{WIDTH[inst.type]}"  # as bits, nothing is converted
    target = machine.destination(inst.args[0], ty)
    a, b = (machine.source(arg, ty) for arg in inst.args[1:3])
    predicate = machine.source(inst.args[3], "pred")

    def run(ix: Any) -> None:
        target[ix] = np.where(predicate[ix], a[ix], b[ix])

    return run


@plain("slct", allow="ftz")
def _select_by_sign(machine: Machine, inst: Inst) -> Plain:
    ty, sign_type = inst.types[:2]
    target = machine.destination(inst.args[0], ty)
    a, b = (machine.source(arg, ty) for arg in inst.args[1:3])
    sign = machine.source(inst.args[3], sign_type)

    def run(ix: Any) -> None:
        target[ix] = np.where(sign[ix] >= 0, a[ix], b[ix])

    return run


@plain("testp", allow=" ".join(_TESTS))
def _test(machine: Machine, inst: Inst) -> Plain:
    target, source = machine.destination(inst.args[0], "pred"), machine.source(inst.args[1], inst.type)
    test = _TESTS[inst.parts[0]]

    def run(ix: Any) -> None:
        target[ix] = test(source[ix])

    return run
