"""Operations on bits: logic, shifts, fields, permutations, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import binary, unary
from .decode import Plain, plain
from .errors import PtxError
from .scalars import NUMPY, WIDTH
from .syntax import Imm, Inst

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []

_U64 = np.uint64
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@plain("and", "or", "xor")
def _logic(machine: Machine, inst: Inst) -> Plain:
    return binary(machine, inst, _LOGIC[inst.op])


@plain("not")
def _invert(machine: Machine, inst: Inst) -> Plain:
    return unary(machine, inst, np.invert)


@plain("cnot")
def _is_zero(machine: Machine, inst: Inst) -> Plain:
    return unary(machine, inst, lambda x: (x == 0).astype(x.dtype))


@plain("shl", "shr")
def _shift(machine: Machine, inst: Inst) -> Plain:
    """Makes a shift; amounts of the width or more shift everything out, and arithmetic shifts leave the sign."""
    ty, left = inst.type, inst.op == "shl"
    width, dtype = WIDTH[ty], NUMPY[ty]
    keeps_sign = ty[0] == "s" and not left
    shift = np.left_shift if left else np.right_shift
    target, source = machine.destination(inst.args[0], ty), machine.source(inst.args[1], ty)
    if isinstance(inst.args[2], Imm):
        constant = int(inst.args[2].value) & 0xFFFFFFFF
        amount = dtype(min(constant, width - 1))
        if constant >= width and not keeps_sign:
            return unary(machine, inst, np.zeros_like)

        def run(ix: Any) -> None:
            target[ix] = shift(source[ix], amount)

        return run
    amounts = machine.source(inst.args[2], "u32")

    def run_variable(ix: Any) -> None:
        wanted = amounts[ix]
        result = shift(source[ix], np.minimum(wanted, width - 1).astype(dtype))
        if not keeps_sign:
            result = np.where(wanted >= width, dtype(0), result)
        target[ix] = result

    return run_variable


@plain("shf", allow="l r wrap clamp")
def _funnel_shift(machine: Machine, inst: Inst) -> Plain:
    target = machine.destination(inst.args[0], "b32")
    low, high, amounts = (machine.source(arg, "u32") for arg in inst.args[1:4])
    wrap, left = "wrap" in inst.parts, "l" in inst.parts

    def run(ix: Any) -> None:
        amount = amounts[ix].astype(_U64)
        amount = amount & _U64(31) if wrap else np.minimum(amount, _U64(32))
        both = high[ix].astype(_U64) << _U64(32) | low[ix]
        target[ix] = ((both << amount) >> _U64(32) if left else both >> amount).astype(np.uint32)

    return run


@plain("lop3")
def _logic_of_three(machine: Machine, inst: Inst) -> Plain:
    if len(inst.args) != 5:
        raise PtxError("lop3 with a predicate is not implemented")
    target, table = machine.destination(inst.args[0], "b32"), int(inst.args[4].value)
    sources = [machine.source(arg, "b32") for arg in inst.args[1:4]]

    def run(ix: Any) -> None:
        a, b, c = (source[ix] for source in sources)
        result = np.zeros_like(a)
        for row in range(8):
            if table >> row & 1:
                result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        target[ix] = result

    return run


@plain("prmt")
def _permute_bytes(machine: Machine, inst: Inst) -> Plain:
    target = machine.destination(inst.args[0], "b32")
    low, high, selectors = (machine.source(arg, "u32") for arg in inst.args[1:4])

    def run(ix: Any) -> None:
        both, selector = high[ix].astype(_U64) << _U64(32) | low[ix], selectors[ix].astype(_U64)
        result = np.zeros(len(both), _U64)
        for byte in range(4):
            choice = selector >> _U64(4 * byte) & _U64(15)
            value = both >> ((choice & _U64(7)) * _U64(8)) & _U64(255)
            signs = np.where(value & _U64(128), _U64(255), _U64(0))
            result |= np.where(choice & _U64(8), signs, value) << _U64(8 * byte)
        target[ix] = result.astype(np.uint32)

    return run


def _elementwise(machine: Machine, inst: Inst, result: str, compute: Callable[..., int], fields: int = 0) -> Plain:
    """Makes an instruction that is rare enough for Python's own integers."""
    ty = inst.type
    target, bits = machine.destination(inst.args[0], result), f"u{WIDTH[ty]}"
    sources = [machine.source(arg, bits) for arg in inst.args[1 : len(inst.args) - fields]]
    sources += [machine.source(arg, "u32") for arg in inst.args[len(inst.args) - fields :] if fields]
    width = WIDTH[ty]
    mask, dtype = (1 << WIDTH[result]) - 1, NUMPY[f"u{WIDTH[result]}"]

    def run(ix: Any) -> None:
        columns = zip(*(source[ix].tolist() for source in sources), strict=True)
        values = np.array([compute(*values, width) & mask for values in columns], dtype)
        target[ix] = values.view(NUMPY[result])

    return run


@plain("bfe")
def _extract_field(machine: Machine, inst: Inst) -> Plain:
    signed = inst.type[0] == "s"

    def extract(value: int, position: int, length: int, width: int) -> int:
        position, length = position & 255, length & 255
        field = value >> position & (1 << length) - 1
        if signed and length:
            sign = min(position + length - 1, width - 1)
            inside = max(min(length, width - position), 0)
            if value >> sign & 1:
                field |= -1 << inside
        return field

    return _elementwise(machine, inst, inst.type, extract, fields=2)


@plain("bfi")
def _insert_field(machine: Machine, inst: Inst) -> Plain:
    def insert(value: int, into: int, position: int, length: int, width: int) -> int:
        mask = ((1 << (length & 255)) - 1) << (position & 255)
        return into & ~mask | value << (position & 255) & mask

    return _elementwise(machine, inst, inst.type, insert, fields=2)


@plain("popc")
def _count_ones(machine: Machine, inst: Inst) -> Plain:
    return _elementwise(machine, inst, "u32", lambda x, width: x.bit_count())


@plain("clz")
def _count_leading_zeros(machine: Machine, inst: Inst) -> Plain:
    return _elementwise(machine, inst, "u32", lambda x, width: width - x.bit_length())


@plain("brev")
def _reverse(machine: Machine, inst: Inst) -> Plain:
    return _elementwise(machine, inst, inst.type, lambda x, width: int(f"{x:0{width}b}"[::-1], 2))


@plain("bfind", allow="shiftamt")
def _find_leading(machine: Machine, inst: Inst) -> Plain:
    signed, as_shift = inst.type[0] == "s", "shiftamt" in inst.parts

    def find(x: int, width: int) -> int:
        if signed and x >> (width - 1):
            x ^= (1 << width) - 1
        if x == 0:
            return 0xFFFFFFFF
        return width - x.bit_length() if as_shift else x.bit_length() - 1

    return _elementwise(machine, inst, "u32", find)
