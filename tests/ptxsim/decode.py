"""The table of instructions, and helpers that their makers share.

A maker turns one instruction into a closure over rows of registers. A plain closure gets a selection of threads (a
slice or an array of numbers); a control closure gets the sorted array of thread numbers and sends them to their next
instruction. A modifier that no maker claims is refused before the kernel starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .scalars import INT64, WIDTH
from .syntax import Addr, Imm, Inst, Operand, Reg, Special, Sym

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["CACHE_MODIFIERS", "SPACES", "Control", "Plain", "address", "build", "control", "plain", "space_of"]

Plain = Callable[[Any], None]
Control = Callable[[np.ndarray], None]
Maker = Callable[["Machine", Inst], Any]

SPACES = "param param::entry param::func global shared shared::cta shared::cluster local const"
CACHE_MODIFIERS = (
    "volatile relaxed acquire release acq_rel weak mmio cta cluster gpu sys nc ca cg cs lu cv wb wt L1:: L2:: "
    "evict_normal evict_last evict_first no_allocate"
)


_SPACE_NAMES = frozenset(SPACES.split())


@dataclass(frozen=True)
class _Entry:
    make: Maker
    is_control: bool
    modifiers: frozenset[str]

    def claims(self, part: str) -> bool:
        return part in WIDTH or part in self.modifiers or f"{part.partition('::')[0]}::" in self.modifiers


_TABLE: dict[str, _Entry] = {}
_LONGEST_KEY = 4


def _register(names: tuple[str, ...], allow: str, is_control: bool) -> Callable[[Maker], Maker]:
    def register(make: Maker) -> Maker:
        for name in names:
            _TABLE[name] = _Entry(make, is_control, frozenset(allow.split()))
        return make

    return register


def plain(*names: str, allow: str = "") -> Callable[[Maker], Maker]:
    """Registers the maker of instructions that leave the flow of control alone; `allow` lists their modifiers."""
    return _register(names, allow, False)


def control(*names: str, allow: str = "") -> Callable[[Maker], Maker]:
    """Registers the maker of instructions that branch, wait, or need whole warps."""
    return _register(names, allow, True)


@lru_cache(maxsize=None)
def _entry(op: str, parts: tuple[str, ...]) -> _Entry:
    """Returns the entry with the longest name that fits an instruction, if it claims all other modifiers."""
    opcode = ".".join((op, *parts))
    for length in range(min(len(parts), _LONGEST_KEY), -1, -1):
        entry = _TABLE.get(".".join((op, *parts[:length])))
        if entry is not None:
            break
    else:
        raise PtxError(f"the instruction {opcode} is not implemented")
    for part in parts[length:]:
        if not entry.claims(part):
            raise PtxError(f".{part} of the instruction {opcode} is not implemented")
    return entry


def build(machine: Machine, inst: Inst) -> tuple[Plain | Control, bool]:
    """Returns the closure of an instruction, and whether it is a control closure."""
    entry = _entry(inst.op, inst.parts)
    step = entry.make(machine, inst)
    if inst.predicate is not None and inst.op != "bra":  # branches look at their predicate themselves
        step = (_predicated_control if entry.is_control else _predicated)(machine, inst, step)
    return step, entry.is_control


def _predicated(machine: Machine, inst: Inst, step: Plain) -> Plain:
    predicate, threads = machine.source(inst.predicate, "pred"), machine.threads

    def run(ix: Any) -> None:
        taken = predicate[ix]
        count = np.count_nonzero(taken)  # on short arrays several times as fast as any() and all()
        if count == len(taken):
            step(ix)
        elif count:
            step(threads[ix][taken])

    return run


def _predicated_control(machine: Machine, inst: Inst, step: Control) -> Control:
    predicate = machine.source(inst.predicate, "pred")

    def run(threads: np.ndarray) -> None:
        taken = predicate[threads]
        if taken.all():
            step(threads)
        else:
            machine.push(inst.pc + 1, threads[~taken])
            if taken.any():
                step(threads[taken])

    return run


def space_of(inst: Inst) -> str:
    """Returns the state space that an instruction names, "generic" if none."""
    for part in inst.parts:
        if part in _SPACE_NAMES:
            return part if part == "shared::cluster" else part.partition("::")[0]
    return "generic"


def address(machine: Machine, operand: Operand) -> Callable[[Any], np.ndarray]:
    """Returns a closure from threads to their addresses, as int64."""
    base, offset = (operand.base, operand.offset) if isinstance(operand, Addr) else (operand, 0)
    match base:
        case None:
            row = machine.full(0, INT64)
        case Sym():
            row = machine.full(machine.symbol_address(base.name), INT64)
        case Imm():
            row = machine.full(int(base.value), INT64)
        case Reg(width=32):
            row = machine.source(base, "u32")
        case Reg() | Special():
            row = machine.source(base, "s64")
        case _:
            raise PtxError(f"{base} is no address")
    if offset:
        return lambda ix: row[ix].astype(INT64) + offset
    return lambda ix: row[ix].astype(INT64)
