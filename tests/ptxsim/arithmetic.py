"""Integer and floating-point arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Plain, plain
from .errors import PtxError
from .scalars import INT64, NUMPY, WIDTH, is_float, round_to
from .syntax import Inst

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["binary", "directed_rounding", "product_of", "unary"]

Binary = Callable[[np.ndarray, np.ndarray], np.ndarray]
_ROUNDING = "rn rz rm rp ftz"
_WIDER = {"u16": np.uint32, "s16": np.int32, "u32": np.uint64, "s32": np.int64}


def directed_rounding(inst: Inst) -> str:
    """Returns rz, rm or rp, which are implemented for float32 results only; empty for the nearest."""
    mode = next((part for part in inst.parts if part in ("rz", "rm", "rp")), "")
    if mode and inst.type != "f32":
        raise PtxError(f"directed rounding of .{inst.type} is not implemented")
    return mode


def unary(machine: Machine, inst: Inst, compute: Callable[[np.ndarray], np.ndarray]) -> Plain:
    target, source = machine.destination(inst.args[0], inst.type), machine.source(inst.args[1], inst.type)

    def run(ix: Any) -> None:
        target[ix] = compute(source[ix])

    return run


def binary(machine: Machine, inst: Inst, compute: Binary) -> Plain:
    target, a, b = _operands(machine, inst)

    def run(ix: Any) -> None:
        target[ix] = compute(a[ix], b[ix])

    return run


def _operands(machine: Machine, inst: Inst) -> tuple[Any, Any, Any]:
    ty = inst.type
    return machine.destination(inst.args[0], ty), machine.source(inst.args[1], ty), machine.source(inst.args[2], ty)


def _sum_or_product(machine: Machine, inst: Inst, compute: Binary) -> Plain:
    """Makes an operation that may round in a direction or saturate."""
    ty = inst.type
    target, a, b = _operands(machine, inst)
    mode = directed_rounding(inst) if is_float(ty) else ""
    if mode:

        def run(ix: Any) -> None:
            exact = compute(a[ix].astype(np.float64), b[ix].astype(np.float64))
            exact = np.clip(np.nan_to_num(exact), 0, 1) if "sat" in inst.parts else exact
            target[ix] = round_to(exact, NUMPY[ty], mode)

    elif "sat" not in inst.parts:
        return binary(machine, inst, compute)
    elif is_float(ty):

        def run(ix: Any) -> None:
            target[ix] = np.clip(np.nan_to_num(compute(a[ix], b[ix])), 0, 1)

    else:
        if ty != "s32":
            raise PtxError(f"saturation of .{ty} is not implemented")
        limits = np.iinfo(np.int32)

        def run(ix: Any) -> None:
            target[ix] = np.clip(compute(a[ix].astype(INT64), b[ix].astype(INT64)), limits.min, limits.max)

    return run


@plain("add", allow=_ROUNDING + " sat")
def _add(machine: Machine, inst: Inst) -> Plain:
    return _sum_or_product(machine, inst, np.add)


@plain("sub", allow=_ROUNDING + " sat")
def _subtract(machine: Machine, inst: Inst) -> Plain:
    return _sum_or_product(machine, inst, np.subtract)


@plain("min", "max", allow="ftz NaN relu")
def _minimum_maximum(machine: Machine, inst: Inst) -> Plain:
    propagating, ignoring = (np.minimum, np.fmin) if inst.op == "min" else (np.maximum, np.fmax)
    chosen = ignoring if is_float(inst.type) and "NaN" not in inst.parts else propagating
    if "relu" not in inst.parts:
        return binary(machine, inst, chosen)
    return binary(machine, inst, lambda a, b: np.maximum(chosen(a, b), 0))


@plain("abs", allow="ftz")
def _absolute(machine: Machine, inst: Inst) -> Plain:
    return unary(machine, inst, np.abs)


@plain("neg", allow="ftz")
def _negate(machine: Machine, inst: Inst) -> Plain:
    return unary(machine, inst, np.negative)


@plain("copysign")
def _copy_sign(machine: Machine, inst: Inst) -> Plain:
    return binary(machine, inst, lambda sign, magnitude: np.copysign(magnitude, sign))


# Products


def _high_of_64(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
    high = [(int(x) * int(y)) >> 64 & (1 << 64) - 1 for x, y in zip(a, b, strict=True)]
    return np.array(high, np.uint64).view(dtype)


def product_of(inst: Inst) -> tuple[Binary, str]:
    """Returns the product of mul and mad with .lo, .hi or .wide, and the type of its result."""
    ty = inst.type
    if "lo" in inst.parts:
        return np.multiply, ty
    if "hi" in inst.parts and WIDTH[ty] == 64:
        return (lambda a, b: _high_of_64(a, b, NUMPY[ty])), ty
    wide = _WIDER[ty]
    if "wide" in inst.parts:
        return (lambda a, b: np.multiply(a, b, dtype=wide)), ty[0] + str(2 * WIDTH[ty])
    shift = wide(WIDTH[ty])
    return (lambda a, b: (np.multiply(a, b, dtype=wide) >> shift).astype(NUMPY[ty])), ty


@plain("mul", allow=_ROUNDING + " sat lo hi wide")
def _multiply(machine: Machine, inst: Inst) -> Plain:
    ty = inst.type
    if is_float(ty):
        return _sum_or_product(machine, inst, np.multiply)
    compute, result = product_of(inst)
    target = machine.destination(inst.args[0], result)
    a, b = (machine.source(arg, ty) for arg in inst.args[1:3])

    def run(ix: Any) -> None:
        target[ix] = compute(a[ix], b[ix])

    return run


@plain("mad", allow="lo hi wide")
def _multiply_add(machine: Machine, inst: Inst) -> Plain:
    ty = inst.type
    if is_float(ty):
        raise PtxError("mad of floating-point numbers is not implemented")
    compute, result = product_of(inst)
    target = machine.destination(inst.args[0], result)
    a, b = (machine.source(arg, ty) for arg in inst.args[1:3])
    c = machine.source(inst.args[3], result)

    def run(ix: Any) -> None:
        target[ix] = compute(a[ix], b[ix]) + c[ix]

    return run


@plain("fma", allow=_ROUNDING + " sat relu")
def _fused_multiply_add(machine: Machine, inst: Inst) -> Plain:
    """Computes in float64 and rounds once more; the product of narrower numbers is exact there."""
    ty = inst.type
    target = machine.destination(inst.args[0], ty)
    a, b, c = (machine.source(arg, ty) for arg in inst.args[1:4])
    mode, relu, saturate = directed_rounding(inst), "relu" in inst.parts, "sat" in inst.parts
    if not (mode or relu or saturate):

        def run(ix: Any) -> None:
            value = np.multiply(a[ix], b[ix], dtype=np.float64)
            value += c[ix]
            target[ix] = value

        return run

    def run_modified(ix: Any) -> None:
        value = np.multiply(a[ix], b[ix], dtype=np.float64) + c[ix]
        if relu:
            value = np.fmax(value, 0)
        if saturate:
            value = np.clip(np.nan_to_num(value), 0, 1)
        target[ix] = round_to(value, NUMPY[ty], mode) if mode else value

    return run_modified


# Division


def _divide_integers(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the quotient, towards zero, and remainder; a quotient by zero is all ones, as on the hardware."""
    by_zero = b == 0
    divisor = np.where(by_zero, b.dtype.type(1), b)
    quotient = np.floor_divide(a, divisor)
    remainder = a - quotient * divisor
    if a.dtype.kind == "i":
        upwards = (remainder != 0) & ((a < 0) != (divisor < 0))
        quotient = quotient + upwards.astype(a.dtype)
        remainder = a - quotient * divisor
    return np.where(by_zero, ~b.dtype.type(0), quotient), np.where(by_zero, a, remainder)


@plain("div", allow=_ROUNDING + " full approx")
def _divide(machine: Machine, inst: Inst) -> Plain:
    if is_float(inst.type):
        return _sum_or_product(machine, inst, np.divide)
    return binary(machine, inst, lambda a, b: _divide_integers(a, b)[0])


@plain("rem")
def _remainder(machine: Machine, inst: Inst) -> Plain:
    return binary(machine, inst, lambda a, b: _divide_integers(a, b)[1])
