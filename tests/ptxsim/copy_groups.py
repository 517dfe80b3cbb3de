"""Groups of cp.async and of bulk copies, which belong to single threads, and the waits of these threads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .syntax import Imm, Inst

__all__ = ["CopyGroups", "groups_kept", "kinds_of_copies"]


def kinds_of_copies(insts: Iterable[Inst]) -> set[str]:
    """Returns the kinds of copies in a kernel: "cp.async", "bulk"."""
    copies = {inst.parts[:2] for inst in insts if inst.op == "cp"}
    return {"bulk" if "bulk" in parts or parts[0] == "reduce" else "cp.async" for parts in copies}


def groups_kept(insts: Iterable[Inst]) -> int:
    """Returns how many of a thread's last groups a wait_group may tell apart."""
    waits = (inst.args[0].value for inst in insts if "wait_group" in inst.parts and isinstance(inst.args[0], Imm))
    return 1 + max((int(pending) for pending in waits), default=0)


class CopyGroups:
    """Copies of one kind, numbered by their warp's clock; every array has an element for each thread.

    Attributes
    ----------
    issued : numpy.ndarray
        The clock of a thread's last copy.
    done : numpy.ndarray
        The clock up to which a thread's own copies are complete, by its own waits.
    told : numpy.ndarray
        The same, but copies that an mbarrier was told to expect count as complete.
    """

    def __init__(self, num_threads: int, kept: int) -> None:
        self.issued, self.done, self.told = np.zeros((3, num_threads), np.int32)
        self._kept = kept
        self._count = np.zeros(num_threads, np.int64)
        self._clock = np.zeros((kept, num_threads), np.int32)  # when a thread's last groups were closed
        self.issuer: dict[tuple[int, int], int] = {}  # by warp and clock, the thread of a bulk copy

    def commit(self, threads: np.ndarray, clock: np.ndarray) -> None:
        self._clock[self._count[threads] % self._kept, threads] = clock
        self._count[threads] += 1

    def wait(self, threads: np.ndarray, pending: int) -> None:
        last = self._count[threads] - 1 - pending
        reached = np.where(last >= 0, self._clock[last % self._kept, threads], 0)
        self.done[threads] = np.maximum(self.done[threads], reached)
        self.told[threads] = np.maximum(self.told[threads], reached)

    def complete(self, warps: np.ndarray, clock: np.ndarray, told: bool = False) -> np.ndarray:
        """Returns the clock up to which all copies of these warps are complete; `clock` if none is in flight."""
        issued, reached = (x.reshape(-1, 32)[warps] for x in (self.issued, self.told if told else self.done))
        return np.where(issued > reached, reached, clock[:, None]).min(1)

    def unfinished(self, threads: np.ndarray) -> np.ndarray:
        """Returns the threads with copies that nothing waits for."""
        return threads[self.issued[threads] > self.told[threads]]
