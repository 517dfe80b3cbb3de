"""The register file, and operands as rows over all threads of the batch.

A row is indexed with a slice or an array of threads. If the register does not store the type itself (a negated
predicate, a bfloat16 number, a clock), the row is a small object that converts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .scalars import NUMPY, WIDTH, bf16_to_f32, f32_to_bf16, is_float, unsigned
from .special_registers import special_register
from .syntax import Addr, Imm, Operand, Pair, Reg, Sink, Special, Sym

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Bf16Row", "RegisterFile"]


class _NegatedRow:
    """A negated predicate."""

    def __init__(self, row: np.ndarray) -> None:
        self.row = row

    def __getitem__(self, ix: Any) -> np.ndarray:
        return ~self.row[ix]


class Bf16Row:
    """A bf16 or bf16x2 register that reads and writes as float32."""

    def __init__(self, row: np.ndarray) -> None:
        self.row = row

    def __getitem__(self, ix: Any) -> np.ndarray:
        return bf16_to_f32(self.row[ix])

    def __setitem__(self, ix: Any, values: np.ndarray) -> None:
        self.row[ix] = f32_to_bf16(values)


class RegisterFile:
    """Registers of one width are the rows of an array with one column for each thread."""

    def __init__(self, machine: Machine, counts: dict[int, int]) -> None:
        self.machine = machine
        self.threads = len(machine.threads)
        self.rows = {0: np.zeros((counts[0], self.threads), bool)}
        for width in (16, 32, 64):
            self.rows[width] = np.zeros((counts[width], self.threads), unsigned(width // 8))
        self.carry = np.zeros(self.threads, bool)
        self._constants: dict[tuple[Any, str], np.ndarray] = {}
        self._sources: dict[tuple[Operand, str], Any] = {}

    def full(self, value: Any, dtype: type) -> np.ndarray:
        """Returns a read-only row of one value."""
        key = (value.tobytes() if isinstance(value, np.generic) else value, np.dtype(dtype).char)
        if key not in self._constants:
            row = self._constants[key] = np.full(self.threads, value, dtype)
            row.setflags(write=False)
        return self._constants[key]

    @staticmethod
    @lru_cache(maxsize=None)
    def constant(operand: Imm, ty: str) -> np.generic:
        """Returns an immediate as a scalar of that type; integers in float instructions are values, not bits."""
        dtype = np.dtype(NUMPY[ty])
        value = operand.value
        if isinstance(value, tuple):
            kind, bits = value
            number = np.array(bits, "u4" if kind == "f32" else "u8").view("f4" if kind == "f32" else "f8")[()]
            if ty == "bf16":
                return f32_to_bf16(np.array([number], np.float32))[0]
            if is_float(ty) and ty != "bf16x2" and ty != "f16x2":
                return dtype.type(number)
            value = bits
        if ty == "pred":
            return np.bool_(value != 0)
        if dtype.kind == "f":
            return dtype.type(value)
        return np.array(value & ((1 << (8 * dtype.itemsize)) - 1), f"u{dtype.itemsize}").view(dtype)[()]

    def source(self, operand: Operand, ty: str) -> Any:
        """Returns the row of an operand that an instruction reads as that type."""
        key = operand, ty
        row = self._sources.get(key)
        if row is None:
            row = self._source_bits(operand, ty)
            if ty != "pred":
                row = _as_type(row, ty)
            self._sources[key] = row
        return row

    def _source_bits(self, operand: Operand, ty: str) -> Any:
        symbols = self.machine.symbol_address
        match operand:
            case Reg(width=0):
                row = self.rows[0][operand.index]
                return _NegatedRow(row) if operand.negated else row
            case Reg():
                row = self.rows[operand.width][operand.index]
                if ty == "pred" or WIDTH[ty] > operand.width:
                    raise PtxError(f"register {operand.name} is not a .{ty}")
                narrower = operand.width // WIDTH[ty]
                return row.view(NUMPY[ty])[::narrower] if narrower > 1 else row.view(NUMPY[ty])
            case Imm():
                return self.full(self.constant(operand, ty), NUMPY[ty])
            case Special():
                return special_register(self.machine, operand.name, NUMPY[ty])
            case Sym():
                return self.full(symbols(operand.name), NUMPY[ty])
            case Addr(base=Sym()):
                return self.full(symbols(operand.base.name) + operand.offset, NUMPY[ty])
        raise PtxError(f"{operand} cannot be read as .{ty}")

    def destination(self, operand: Operand, ty: str) -> Any:
        """Returns the row that an instruction writes as that type."""
        if isinstance(operand, Sink):
            return _as_type(np.zeros(self.threads, NUMPY[ty]), ty)
        if isinstance(operand, Pair):
            operand = operand.first
        if not isinstance(operand, Reg) or operand.negated:
            raise PtxError("a register is expected as the destination")
        if (ty == "pred") != (operand.width == 0):
            raise PtxError(f"register {operand.name} is not a .{ty}")
        if WIDTH[ty] > operand.width:
            raise PtxError(f"register {operand.name} is narrower than .{ty}")
        if WIDTH[ty] == operand.width:
            return self.source(operand, ty)
        if is_float(ty):
            raise PtxError(f"register {operand.name} is wider than .{ty}")
        row = self.rows[operand.width][operand.index]
        # The assignment widens, with the sign if the type has one.
        return row.view(f"i{operand.width // 8}") if ty[0] == "s" else row


def _as_type(row: np.ndarray, ty: str) -> Any:
    if ty == "f16x2":
        return row.view(np.float16).reshape(-1, 2)
    if ty == "bf16x2":
        return Bf16Row(row.view(np.uint16).reshape(-1, 2))
    return Bf16Row(row) if ty == "bf16" else row
