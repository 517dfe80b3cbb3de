"""Branches, exits, calls of functions without a body, fences, and instructions that do nothing here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import CACHE_MODIFIERS, SPACES, Control, Plain, control, plain
from .errors import PtxError
from .syntax import Inst

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []


@control("bra", allow="uni")
def _branch(machine: Machine, inst: Inst) -> Control:
    target, pc = inst.target, inst.pc
    if inst.predicate is None:
        return lambda threads: machine.push(target, threads)
    predicate = machine.source(inst.predicate, "pred")

    def run(threads: np.ndarray) -> None:
        taken = predicate[machine.selection(threads)]
        count = np.count_nonzero(taken)
        if count == len(taken):
            machine.push(target, threads)
        elif not count:
            machine.push(pc + 1, threads)
        else:
            machine.push(target, threads[taken])
            machine.push(pc + 1, threads[~taken])

    return run


@control("brx.idx", allow="uni")
def _branch_indexed(machine: Machine, inst: Inst) -> Control:
    row, table = machine.source(inst.args[0], "u32"), inst.table

    def run(threads: np.ndarray) -> None:
        indices = row[threads]
        for index in np.unique(indices):
            if index >= len(table):
                k = int(np.argmax(indices == index))
                machine.fault(f"brx.idx: index {index} of {len(table)} targets", threads, k)
            machine.push(table[index], threads[indices == index])

    return run


@control("ret", "exit", allow="uni")
def _exit(machine: Machine, inst: Inst) -> Control:
    return machine.retire


@control("trap")
def _trap(machine: Machine, inst: Inst) -> Control:
    return lambda threads: machine.fault("trap executed", threads)


@control("call", allow="uni")
def _call(machine: Machine, inst: Inst) -> Control:
    name = inst.args[0].name
    if name == "vprintf":  # prints nothing
        return lambda threads: machine.push(inst.pc + 1, threads)
    if name == "__assertfail":
        return lambda threads: machine.fault("assertion failed", threads)
    raise PtxError(f"the function {name} has no body in this module")


@plain("setmaxnreg", allow="inc dec sync aligned")
@plain("griddepcontrol", allow="wait launch_dependents")
@plain("prefetch", "prefetchu", "discard", "applypriority", allow=f"{CACHE_MODIFIERS} {SPACES} tensormap")
@plain("nanosleep", "pmevent")
def _no_effect(machine: Machine, inst: Inst) -> Plain:
    return lambda ix: None


@plain("membar", allow="cta gl sys gpu")
@plain("fence", allow="sc acq_rel acquire release mbarrier_init cta cluster gpu sys sync_restrict::")
def _fence(machine: Machine, inst: Inst) -> Plain:
    """Orders accesses for the race check only, as every store is visible at once."""
    if machine.race is None:
        return lambda ix: None
    fence = machine.race.init_fence if "mbarrier_init" in inst.parts else machine.race.fence
    if "cta" in inst.parts or "mbarrier_init" in inst.parts or any(p.startswith("sync_restrict") for p in inst.parts):
        return lambda ix: fence(machine.threads[ix])

    def run(ix: Any) -> None:
        if machine.global_race is not None:
            machine.global_race.fence(machine.threads[ix])
        fence(machine.threads[ix])

    return run


@plain("fence.proxy", allow="async async:: alias tensormap:: global shared:: acquire release cta cluster gpu sys")
def _proxy_fence(machine: Machine, inst: Inst) -> Plain:
    asynchronous = any(part.startswith("async") for part in inst.parts)
    if machine.race is None or not asynchronous or "global" in inst.parts:
        return lambda ix: None

    def run(ix: Any) -> None:
        machine.race.proxy_fence(machine.threads[ix])

    return run
