"""Sums, differences and products of integers of several words, whose carry or borrow is a bit of each thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arithmetic import product_of
from .decode import Plain, plain
from .scalars import WIDTH, unsigned
from .syntax import Inst

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []


@plain("add.cc", "addc", "sub.cc", "subc", allow="cc")
def _add_or_subtract(machine: Machine, inst: Inst) -> Plain:
    return _with_carry(machine, inst, machine.source(inst.args[1], inst.type))


@plain("mad.lo.cc", "mad.hi.cc", "madc", allow="lo hi cc")
def _multiply_add(machine: Machine, inst: Inst) -> Plain:
    compute, _ = product_of(inst)
    a, b = (machine.source(arg, inst.type) for arg in inst.args[1:3])

    class Product:
        def __getitem__(self, ix: Any) -> np.ndarray:
            return compute(a[ix], b[ix])

    return _with_carry(machine, inst, Product())


def _with_carry(machine: Machine, inst: Inst, first: Any) -> Plain:
    """Makes the sum of the first number and the last operand, or their difference."""
    word = unsigned(WIDTH[inst.type] // 8)
    target, last = machine.destination(inst.args[0], inst.type), machine.source(inst.args[-1], inst.type)
    bits, subtracts = machine.registers.carry, inst.op.startswith("sub")
    takes, gives = inst.op.endswith("c"), "cc" in inst.parts

    def run(ix: Any) -> None:
        a, b = first[ix].view(word), last[ix].view(word)
        c = bits[ix].astype(word) if takes else word(0)
        if subtracts:
            partial = a - b
            total, carry = partial - c, (a < b) | (partial < c)
        else:
            partial = a + b
            total, carry = partial + c, (partial < a) | (partial > ~c)
        target[ix] = total.view(first[ix].dtype)
        if gives:
            bits[ix] = carry

    return run
