"""cp.async: copies of 4 to 16 bytes by each thread, and their groups. A copy takes effect at once; waits order it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Control, Plain, address, control, plain
from .errors import PtxError
from .load_store import load_words
from .mbarrier import by_place
from .scalars import INT64
from .syntax import Imm, Inst, Reg

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["commit_group", "wait_group"]


def commit_group(machine: Machine, kind: str) -> Plain:
    """Closes a group of copies; only the race check needs to know."""
    if machine.race is None:
        return lambda ix: None
    return lambda ix: machine.race.commit(kind, machine.threads[ix])


def wait_group(machine: Machine, inst: Inst, kind: str) -> Plain:
    """Waits until at most as many groups are pending as the instruction allows."""
    pending = int(inst.args[0].value) if inst.args else 0
    if machine.race is None:
        return lambda ix: None
    return lambda ix: machine.race.wait(kind, machine.threads[ix], pending)


@plain("cp.async.commit_group")
def _commit(machine: Machine, inst: Inst) -> Plain:
    return commit_group(machine, "cp.async")


@plain("cp.async.wait_group")
def _wait(machine: Machine, inst: Inst) -> Plain:
    return wait_group(machine, inst, "cp.async")


@plain("cp.async.wait_all")
def _wait_all(machine: Machine, inst: Inst) -> Plain:
    commit, wait = commit_group(machine, "cp.async"), wait_group(machine, inst, "cp.async")

    def run(ix: Any) -> None:
        commit(ix)
        wait(ix)

    return run


@plain("cp.async", allow="ca cg shared shared::cta global L2::")
def _copy(machine: Machine, inst: Inst) -> Plain:
    to, of, size = inst.args[:3]
    rest = inst.args[3 : len(inst.args) - ("L2::cache_hint" in inst.parts)]
    if not isinstance(size, Imm) or size.value not in (4, 8, 16) or len(rest) > 1:
        raise PtxError(f"{inst.opcode} with these operands is not implemented")
    nbytes = int(size.value)
    target, source = address(machine, to), address(machine, of)
    skipped = source_size = None
    if rest and isinstance(rest[0], Reg) and rest[0].width == 0:
        skipped = machine.source(rest[0], "pred")
    elif rest:
        source_size = machine.source(rest[0], "u32")

    def run(ix: Any) -> None:
        threads = machine.threads[ix]
        offset = machine.shared.resolve(ix, target(ix), nbytes)
        sizes = np.full(len(threads), nbytes) if source_size is None else source_size[ix].astype(INT64)
        if (sizes > nbytes).any():
            machine.fault(f"cp.async of {nbytes} bytes with a larger source size", ix, int(np.argmax(sizes > nbytes)))
        if skipped is not None:
            sizes = np.where(skipped[ix], 0, sizes)
        words = _source_words(machine, threads, source(ix), sizes, nbytes)
        if machine.race is not None:
            machine.race.copy_write(threads, offset, nbytes)
        machine.shared.scatter(offset, nbytes, words)

    return run


def _source_words(
    machine: Machine, threads: np.ndarray, addresses: np.ndarray, sizes: np.ndarray, nbytes: int
) -> np.ndarray:
    """Returns the words that the copies write; bytes from `sizes` on are zeros, and are not read."""
    whole = sizes == nbytes
    if whole.all():
        return load_words(machine, threads, "global", addresses, nbytes)
    words = np.zeros((len(threads), nbytes), np.uint8)
    if whole.any():
        loaded = load_words(machine, threads[whole], "global", addresses[whole], nbytes)
        words[whole] = loaded.view(np.uint8).reshape(-1, nbytes)
    for k in np.nonzero((sizes > 0) & ~whole)[0]:
        size = int(sizes[k])
        try:
            words[k, :size] = machine.memory.read_bytes(int(addresses[k]), size, machine.check_uninit)
        except PtxError as error:
            machine.fault(error.problem, threads, int(k))
        if machine.global_race is not None:
            buffer = machine.memory.find(int(addresses[k]))
            offset = int(addresses[k]) - buffer.address + np.arange(size)
            machine.global_race.copy("read", "read", int(threads[k]), buffer, offset, 1)
    if nbytes == 16:
        return words.view(np.uint64)
    return words.view(f"u{nbytes}")[:, 0]


@control("cp.async.mbarrier.arrive", allow="noinc shared shared::cta")
def _arrive(machine: Machine, inst: Inst) -> Control:
    """Arrives at once, because the earlier copies are complete already."""
    addresses, counted = address(machine, inst.args[0]), "noinc" in inst.parts

    def run(threads: np.ndarray) -> None:
        machine.push(inst.pc + 1, threads)
        for mine, place in by_place(machine, threads, addresses(threads)):
            barrier = machine.mbarriers.use(place, mine)
            if machine.race is not None:
                barrier.publishing = machine.race.publish_copies(mine, barrier.publishing)
            if counted:
                machine.mbarriers.arrive(place, barrier, len(mine), int(mine[0]))

    return run
