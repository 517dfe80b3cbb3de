"""Conversions between types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Plain, plain
from .errors import PtxError
from .registers import Bf16Row
from .scalars import NUMPY, WIDTH, f32_to_bf16, is_float, round_to
from .syntax import Inst

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []

_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_MODES = ("rn", "rz", "rm", "rp", "rna", *_TO_INTEGER)


@plain("cvt", allow=" ".join((*_MODES, "ftz", "sat", "relu")))
def _convert(machine: Machine, inst: Inst) -> Plain:
    if len(inst.types) != 2:
        raise PtxError("a conversion from or to this type is not implemented")
    to, of = inst.types
    mode = next((part for part in inst.parts if part in _MODES), "")
    if to in ("f16x2", "bf16x2"):
        return _pack_two(machine, inst, mode)
    if to == "tf32":
        return _round_to_tf32(machine, inst, mode)
    if not is_float(of) and not is_float(to):
        return _integer_to_integer(machine, inst)
    if not is_float(to):
        return _float_to_integer(machine, inst, mode)
    if not is_float(of):
        return _integer_to_float(machine, inst, mode)
    return _float_to_float(machine, inst, mode)


def _to_bf16(x: np.ndarray, mode: str) -> np.ndarray:
    """Returns the bits of bfloat16 numbers."""
    if mode == "rz":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if mode not in ("", "rn"):
        raise PtxError(f".{mode} to bf16 is not implemented")
    return f32_to_bf16(x)


def _to_f16(x: np.ndarray, mode: str) -> np.ndarray:
    rounded = x.astype(np.float16) if mode in ("", "rn") else round_to(x.astype(np.float64), np.float16, mode)
    return rounded.view(np.uint16)


def _pack_two(machine: Machine, inst: Inst, mode: str) -> Plain:
    """Packs two float32 into one register, the first operand into its upper half."""
    to, of = inst.types
    if of != "f32" or "sat" in inst.parts or mode not in ("rn", "rz"):
        raise PtxError("this packing conversion is not implemented")
    narrow = _to_f16 if to == "f16x2" else _to_bf16
    target = machine.destination(inst.args[0], "b32")
    high, low = (machine.source(arg, "f32") for arg in inst.args[1:3])
    relu = "relu" in inst.parts

    def run(ix: Any) -> None:
        upper, lower = high[ix], low[ix]
        if relu:
            upper, lower = np.fmax(upper, 0), np.fmax(lower, 0)
        target[ix] = narrow(upper, mode).astype(np.uint32) << 16 | narrow(lower, mode)

    return run


def _round_to_tf32(machine: Machine, inst: Inst, mode: str) -> Plain:
    if mode not in ("rn", "rna") or "relu" in inst.parts or "sat" in inst.parts:
        raise PtxError("this conversion to tf32 is not implemented")
    target, source = machine.destination(inst.args[0], "b32"), machine.source(inst.args[1], "b32")

    def run(ix: Any) -> None:
        bits = source[ix]
        half = np.uint32(0x1000) if mode == "rna" else np.uint32(0xFFF) + (bits >> 13 & 1)
        finite = (bits & 0x7F800000) != 0x7F800000
        target[ix] = np.where(finite, (bits + half) & np.uint32(0xFFFFE000), bits)

    return run


def _rows(machine: Machine, inst: Inst) -> tuple[Any, Any]:
    to, of = inst.types
    return machine.destination(inst.args[0], to), machine.source(inst.args[1], of)


def _integer_to_integer(machine: Machine, inst: Inst) -> Plain:
    target, source = _rows(machine, inst)
    to, of = inst.types
    dtype = NUMPY[to]
    if "sat" not in inst.parts:

        def run(ix: Any) -> None:
            target[ix] = source[ix].astype(dtype)

        return run
    # Limits of the result that the source can reach, in the source's own type.
    low = max(np.iinfo(dtype).min, np.iinfo(NUMPY[of]).min)
    high = min(np.iinfo(dtype).max, np.iinfo(NUMPY[of]).max)

    def run_saturated(ix: Any) -> None:
        target[ix] = np.clip(source[ix], low, high).astype(dtype)

    return run_saturated


def _float_to_integer(machine: Machine, inst: Inst, mode: str) -> Plain:
    """Converts floats to integers; a number out of range becomes the nearest limit.

    NaN becomes 0, but if one of both types has 64 bits only the highest bit is set.
    """
    target, source = _rows(machine, inst)
    if mode not in _TO_INTEGER:
        raise PtxError("a conversion to an integer needs .rni, .rzi, .rmi or .rpi")
    dtype, to_integer = NUMPY[inst.types[0]], _TO_INTEGER[mode]
    limits = np.iinfo(dtype)
    of_nan = (limits.min or limits.max // 2 + 1) if 64 in map(WIDTH.get, inst.types) else 0

    def run(ix: Any) -> None:
        x = to_integer(source[ix].astype(np.float64))
        over, under = x >= float(limits.max), x <= float(limits.min)
        is_nan = np.isnan(x)
        value = np.where(over | under | is_nan, 0, x).astype(dtype)
        value[over], value[under], value[is_nan] = limits.max, limits.min, of_nan
        target[ix] = value

    return run


def _integer_to_float(machine: Machine, inst: Inst, mode: str) -> Plain:
    target, source = _rows(machine, inst)
    to, of = inst.types
    if mode not in ("", "rn") and (to == "bf16" or of[1:] == "64"):
        raise PtxError("directed rounding of this conversion is not implemented")
    dtype = np.float32 if to == "bf16" else NUMPY[to]

    def run(ix: Any) -> None:
        x = source[ix]
        if to == "f16":  # NumPy goes through float32, which would round 64-bit integers
            x = x.astype(np.float64)
        target[ix] = x.astype(dtype) if mode in ("", "rn") else round_to(x.astype(np.float64), dtype, mode)

    return run


def _float_to_float(machine: Machine, inst: Inst, mode: str) -> Plain:
    target, source = _rows(machine, inst)
    to = inst.types[0]
    steps: list[Callable[[np.ndarray], np.ndarray]] = []
    if mode in _TO_INTEGER:
        steps.append(_TO_INTEGER[mode])
    if "relu" in inst.parts:
        steps.append(lambda x: np.fmax(x, 0))
    if "sat" in inst.parts:
        steps.append(lambda x: np.clip(np.nan_to_num(x, nan=0.0), 0, 1))
    if mode in ("rz", "rm", "rp"):
        if isinstance(target, Bf16Row):
            target = target.row
            steps.append(lambda x: _to_bf16(x, mode))
        else:
            steps.append(lambda x: round_to(x.astype(np.float64), NUMPY[to], mode))

    def run(ix: Any) -> None:
        x = source[ix]
        for step in steps:
            x = step(x)
        target[ix] = x

    return run
