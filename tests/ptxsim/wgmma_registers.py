"""Checks of registers of wgmmas: early accesses while a wgmma runs, and missing fences before the next one.

A wgmma reads and writes registers asynchronously. Until wgmma.wait_group, no instruction may touch its accumulators or
write its A. At least one wgmma.fence must come before a wgmma, after every other access to these registers. Only
accumulators may pass without a fence from one wgmma to the next of the same shape. A compiler leaves copies of
registers in PTX that the assembler removes; such a copy has the state of its source.

Instructions up to and including the next control instruction are checked together, because the registers that they
touch are known before they run. An instruction touches its registers whatever its predicate is, as for the assembler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .race import warps_of
from .syntax import Addr, Inst, Operand, Pair, Reg, Vec

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["WgmmaRegisters", "rows_of", "selection_of"]

Rows = slice | np.ndarray

_TOUCHED = -1  # by other instructions since the last wgmma.fence; 0: untouched, else the columns of the last wgmma


def rows_of(operand: Operand | None) -> list[int]:
    """Returns the rows of the 32-bit registers in an operand."""
    kind = type(operand)
    if kind is Reg:
        return [operand.index] if operand.width == 32 else []
    if kind is Vec:
        return [row for item in operand.items for row in rows_of(item)]
    if kind is Pair:
        return rows_of(operand.first) + rows_of(operand.second)
    return rows_of(operand.base) if kind is Addr else []


def selection_of(rows: list[int]) -> Rows:
    """Returns a slice if the rows are consecutive, which NumPy handles faster."""
    start = rows[0] if rows else 0
    consecutive = rows == list(range(start, start + len(rows)))
    return slice(start, start + len(rows)) if consecutive else np.array(rows)


def _used(inst: Inst) -> list[int]:
    return [row for arg in inst.args for row in rows_of(arg)]


def _written(inst: Inst) -> list[int]:
    writes = inst.args and inst.op not in ("st", "red") and not isinstance(inst.args[0], Addr)
    return rows_of(inst.args[0]) if writes else []


def _copy(inst: Inst) -> tuple[int, int] | None:
    """Returns (to, from) of a copy of a 32-bit register; None for other instructions."""
    if inst.op != "mov" or inst.predicate is not None:
        return None
    match inst.args:
        case (Reg(width=32) as to, Reg(width=32) as of):
            return to.index, of.index
    return None


@dataclass(frozen=True)
class _Effect:
    """The joint effect on registers of instructions that run one after another."""

    used: np.ndarray
    written: np.ndarray
    touched: np.ndarray  # only registers that wgmmas use
    copied_to: np.ndarray
    copied_from: np.ndarray


class WgmmaRegisters:
    """The registers of the warps of a batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        insts = machine.kernel.insts
        self._of_wgmmas = {
            row
            for inst in insts
            if inst.op == "wgmma" and inst.parts[0] == "mma_async"
            for arg in inst.args[:2]
            for row in rows_of(arg)
        }
        copies = [copy for copy in map(_copy, insts) if copy is not None]
        while sources := {of for to, of in copies if to in self._of_wgmmas and of not in self._of_wgmmas}:
            self._of_wgmmas |= sources
        self._effects: dict[tuple[int, int], _Effect | None] = {}
        self.reset()

    def reset(self) -> None:
        shape = (max(self.machine.kernel.registers[32], 1), self.machine.num_warps)
        self._accumulator, self._operand = np.zeros(shape, np.int16), np.zeros(shape, np.int16)
        self._state = np.full(shape, _TOUCHED, np.int16)
        self._busy = 0
        self._open: dict[int, list[tuple[Rows, Rows]]] = {}
        self._groups: dict[int, list[list[tuple[Rows, Rows]]]] = {}

    # wgmmas

    def issue(self, threads: np.ndarray, accumulators: Rows, operands: Rows, columns: int) -> None:
        """Records and checks a wgmma of a warp group."""
        first, last = int(threads[0]) >> 5, int(threads[-1]) >> 5
        warps = slice(first, last + 1)
        self._check_fenced(threads, warps, accumulators, operands, columns)
        self._accumulator[accumulators, warps] += 1
        self._operand[operands, warps] += 1
        used = accumulators, operands  # one object for all warps: `wait` looks at them together
        for warp in range(first, last + 1):
            self._open.setdefault(warp, []).append(used)
            self._busy += 1

    def _check_fenced(
        self, threads: np.ndarray, warps: slice, accumulators: Rows, operands: Rows, columns: int
    ) -> None:
        state = self._state[accumulators, warps]
        if np.count_nonzero((state != 0) & (state != columns)):
            self.machine.fault("a wgmma's accumulators were accessed before it without wgmma.fence", threads)
        self._state[accumulators, warps] = columns
        if np.count_nonzero(self._state[operands, warps]):
            self.machine.fault("the registers of a wgmma's A were accessed before it without wgmma.fence", threads)

    def fence(self, warps: np.ndarray) -> None:
        self._state[:, warps] = 0

    def commit(self, warps: np.ndarray) -> None:
        for warp in warps.tolist():
            self._groups.setdefault(warp, []).append(self._open.pop(warp, []))

    def wait(self, warps: np.ndarray, pending: int) -> None:
        done: dict[int, tuple[tuple[Rows, Rows], list[int]]] = {}  # by wgmma, its registers and its warps
        for warp in warps.tolist():
            groups = self._groups.get(warp, [])
            while len(groups) > pending:
                for used in groups.pop(0):
                    done.setdefault(id(used), (used, []))[1].append(warp)
        for (accumulators, operands), of in done.values():
            consecutive = of[-1] - of[0] + 1 == len(of)
            for some in (slice(of[0], of[-1] + 1),) if consecutive else of:
                self._accumulator[accumulators, some] -= 1
                self._operand[operands, some] -= 1
            self._busy -= len(of)

    def check_end(self, threads: np.ndarray) -> None:
        for warp in warps_of(threads).tolist() if self._busy else ():
            if self._open.get(warp) or any(self._groups.get(warp, ())):
                raise PtxError("the warp ends with a wgmma in flight: it has not waited for it", 32 * warp)

    # Other instructions

    def effect(self, first: int, end: int) -> _Effect | None:
        """Returns the effect of instructions from first to end, which run one after another; None if there is none."""
        key = first, end
        if key not in self._effects:
            self._effects[key] = self._effect_of(self.machine.kernel.insts[first:end])
        return self._effects[key]

    def _effect_of(self, insts: Iterable[Inst]) -> _Effect | None:
        used, written = set(), set()
        now: dict[int, int] = {}  # by register that wgmmas use, the row whose state it has
        for inst in insts:
            if inst.op == "wgmma":
                continue
            rows, copy = _used(inst), _copy(inst)
            used.update(rows)
            written.update(_written(inst))
            if copy is not None and copy[1] in self._of_wgmmas:
                now[copy[0]] = now.get(copy[1], copy[1])
            else:
                now.update(dict.fromkeys(self._of_wgmmas.intersection(rows), _TOUCHED))
        if not used:
            return None
        copies = [(to, of) for to, of in now.items() if of != _TOUCHED and to in self._of_wgmmas]
        touched = [row for row, state in now.items() if state == _TOUCHED]
        to, of = ([pair[k] for pair in copies] for k in (0, 1))
        return _Effect(
            *(np.array(sorted(x) if isinstance(x, set) else x, int) for x in (used, written, touched, to, of))
        )

    def conflicts(self, effect: _Effect) -> bool:
        """Returns True if an unfinished wgmma of any warp uses the same registers."""
        return bool(self._busy) and bool(self._accumulator[effect.used].any() or self._operand[effect.written].any())

    def check(self, pc: int, ix: Any) -> None:
        """Checks one of the instructions, for the warps that execute it."""
        inst, warps = self.machine.kernel.insts[pc], warps_of(self.machine.threads[ix])
        if inst.op == "wgmma":
            return
        if self._accumulator[np.ix_(_used(inst), warps)].any():
            self.machine.fault("accumulator of an unfinished wgmma is accessed before wgmma.wait_group", ix)
        if self._operand[np.ix_(_written(inst), warps)].any():
            self.machine.fault("A register of an unfinished wgmma is overwritten before wgmma.wait_group", ix)

    def touch(self, effect: _Effect, threads: np.ndarray) -> None:
        """Records that the instructions of an effect have run."""
        if not len(effect.touched) and not len(effect.copied_to):
            return
        warps = warps_of(threads)
        copied = self._state[np.ix_(effect.copied_from, warps)]
        self._state[np.ix_(effect.touched, warps)] = _TOUCHED
        self._state[np.ix_(effect.copied_to, warps)] = copied
