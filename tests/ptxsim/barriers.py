"""Barriers of a block (bar, barrier) and of a cluster: who has arrived, who waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .decode import control
from .errors import PtxError
from .syntax import Inst
from .warp import when_converged

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Barriers"]

_NUM_BARRIERS = 16
Done = Callable[[np.ndarray, np.ndarray], None]


@dataclass
class _BlockBarrier:
    arrived: int = 0
    expected: int | None = None  # None: all threads of the block that still run
    waiting: list[tuple[int, np.ndarray, Done | None]] = field(default_factory=list)
    predicates: list[np.ndarray] = field(default_factory=list)
    published: np.ndarray | None = None


@dataclass
class _ClusterBarrier:
    arrived: int = 0
    phase: int = 0
    waiting: list[tuple[int, np.ndarray]] = field(default_factory=list)
    publishing: np.ndarray | None = None
    published: np.ndarray | None = None


class Barriers:
    """All barriers of the batch at which threads have arrived."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.reset()

    def reset(self) -> None:
        self.of_block: dict[tuple[int, int], _BlockBarrier] = {}
        self.of_cluster: dict[int, _ClusterBarrier] = {}
        self._cluster_phase = np.zeros(len(self.machine.threads), np.int64)  # phase in which each thread arrived

    def arrive(
        self,
        pc: int,
        threads: np.ndarray,
        numbers: np.ndarray,
        counts: np.ndarray | None,
        wait: bool,
        predicate: np.ndarray | None = None,
        done: Done | None = None,
    ) -> None:
        """Lets whole warps arrive; `done` gets the waiting threads and the predicates of all."""
        if wait and done is None and not self.of_block and self._all_at_once(threads, numbers, counts):
            self.machine.push(pc + 1, threads)
            return
        keys = self.machine.block_of[threads] * _NUM_BARRIERS + numbers
        for key in np.unique(keys):
            chosen = keys == key
            place = divmod(int(key), _NUM_BARRIERS)
            barrier = self.of_block.setdefault(place, _BlockBarrier())
            mine = threads[chosen]
            self._count(barrier, place[1], mine, None if counts is None else np.unique(counts[chosen]).tolist())
            if predicate is not None:
                barrier.predicates.append(predicate[chosen])
            if self.machine.race is not None:
                barrier.published = self.machine.race.release(mine, barrier.published)
            if wait:
                barrier.waiting.append((pc, mine, done))
            else:
                self.machine.push(pc + 1, mine)
            self._complete(place)

    def _all_at_once(self, threads: np.ndarray, numbers: np.ndarray, counts: np.ndarray | None) -> bool:
        """Returns True in the usual case of __syncthreads: all threads of these blocks are here, and none waits."""
        machine = self.machine
        if len(threads) % machine.padded_threads or (numbers != numbers[0]).any():
            return False
        if counts is not None and (counts != machine.padded_threads).any():
            return False
        rows = threads.reshape(-1, machine.padded_threads)
        first, last = rows[:, 0], rows[:, -1]
        if (first % machine.padded_threads).any() or (last - first != machine.padded_threads - 1).any():
            return False
        if machine.race is not None:
            machine.race.block_barrier(rows[:, ::32] >> 5)
        return True

    def _count(self, barrier: _BlockBarrier, number: int, threads: np.ndarray, counts: list[int] | None) -> None:
        first = int(threads[0])
        if barrier.arrived and (barrier.expected is None) != (counts is None):
            raise PtxError(f"barrier {number}: mixed uses with and without a count", first)
        if counts is None:
            barrier.arrived += len(threads)
            return
        count = counts[-1]
        if len(counts) > 1:
            raise PtxError(f"barrier {number}: counts {counts[0]} and {count} mixed", first)
        if count % 32 or count == 0:
            raise PtxError(f"barrier {number}: a count of {count}, which is no multiple of 32", first)
        if barrier.arrived and barrier.expected != count:
            raise PtxError(f"barrier {number}: counts {barrier.expected} and {count} mixed", first)
        barrier.expected = count
        barrier.arrived += 32 * len(np.unique(threads >> 5))
        if barrier.arrived > count:
            raise PtxError(f"barrier {number}: {barrier.arrived} threads arrived, {count} are expected", first)

    def _complete(self, place: tuple[int, int]) -> None:
        barrier, machine = self.of_block[place], self.machine
        needed = barrier.expected if barrier.expected is not None else int(machine.alive_in_block[place[0]])
        if not barrier.arrived or barrier.arrived < needed:
            return
        del self.of_block[place]
        for pc, threads, done in barrier.waiting:
            if done is not None:
                done(threads, np.concatenate(barrier.predicates))
            if machine.race is not None:
                machine.race.acquire(threads, barrier.published)
            machine.push(pc + 1, threads)

    # Clusters

    def cluster_arrive(self, pc: int, threads: np.ndarray) -> None:
        clusters = self.machine.block_of[threads] // self.machine.cluster_size
        for number in np.unique(clusters):
            mine = threads[clusters == number]
            barrier = self.of_cluster.setdefault(int(number), _ClusterBarrier())
            self._cluster_phase[mine] = barrier.phase
            barrier.arrived += len(mine)
            if self.machine.race is not None:
                barrier.publishing = self.machine.race.release(mine, barrier.publishing)
            self._complete_cluster(int(number))
        self.machine.push(pc + 1, threads)

    def cluster_wait(self, pc: int, threads: np.ndarray) -> None:
        clusters = self.machine.block_of[threads] // self.machine.cluster_size
        for number in np.unique(clusters):
            mine = threads[clusters == number]
            barrier = self.of_cluster.get(int(number))
            if barrier is None:
                raise PtxError("barrier.cluster.wait without an arrival", int(mine[0]))
            past = self._cluster_phase[mine] < barrier.phase
            if past.any():
                if self.machine.race is not None:
                    self.machine.race.acquire(mine[past], barrier.published)
                self.machine.push(pc + 1, mine[past])
            if not past.all():
                barrier.waiting.append((pc, mine[~past]))

    def _complete_cluster(self, number: int) -> None:
        barrier, size = self.of_cluster[number], self.machine.cluster_size
        needed = int(self.machine.alive_in_block[number * size : (number + 1) * size].sum())
        if barrier.arrived and barrier.arrived >= needed:
            barrier.arrived, barrier.phase = 0, barrier.phase + 1
            barrier.published, barrier.publishing = barrier.publishing, None
            waiting, barrier.waiting = barrier.waiting, []
            for pc, threads in waiting:
                self.machine.push(pc, threads)

    # Ends

    def threads_retired(self) -> None:
        """Completes barriers that wait for all running threads, after some threads have ended."""
        for place in list(self.of_block):
            self._complete(place)
        for number in list(self.of_cluster):
            self._complete_cluster(number)

    def waiting(self) -> list[tuple[str, int, np.ndarray]]:
        """Returns what threads wait for, for the report of a deadlock: (description, pc, threads)."""
        alive = self.machine.alive_in_block
        found = [
            (f"at barrier {number}: {b.arrived} of {b.expected or int(alive[block])} arrived", pc, threads)
            for (block, number), b in self.of_block.items()
            for pc, threads, _ in b.waiting
        ]
        return found + [("at the cluster's barrier", pc, a) for b in self.of_cluster.values() for pc, a in b.waiting]


@control("bar.warp", allow="sync")
def _warp_barrier(machine: Machine, inst: Inst) -> Callable:
    mask = machine.source(inst.args[0], "u32")
    tells_lanes_apart = machine.race is not None and machine.race.by_lane
    return when_converged(machine, inst, mask, machine.race.warp_barrier if tells_lanes_apart else lambda threads: None)


@control("barrier.cluster", allow="arrive wait release acquire relaxed aligned")
def _cluster_barrier(machine: Machine, inst: Inst) -> Callable:
    step = machine.barriers.cluster_arrive if "arrive" in inst.parts else machine.barriers.cluster_wait
    return when_converged(machine, inst, None, lambda threads: step(inst.pc, threads), moves_on=False)


@control("bar", "barrier", allow="cta aligned sync arrive red popc and or")
def _block_barrier(machine: Machine, inst: Inst) -> Callable:
    args, predicate, done = list(inst.args), None, None
    if "red" in inst.parts:
        ty = inst.type
        target = machine.destination(args.pop(0), ty)
        predicate = machine.source(args.pop(), "pred")
        reduce = np.sum if "popc" in inst.parts else np.all if "and" in inst.parts else np.any

        def done(threads: np.ndarray, values: np.ndarray) -> None:
            target[threads] = reduce(values)

    numbers = machine.source(args[0], "u32")
    counts = machine.source(args[1], "u32") if len(args) > 1 else None
    wait = "arrive" not in inst.parts

    def work(threads: np.ndarray) -> None:
        number = numbers[threads].astype(np.int64)
        if (number >= _NUM_BARRIERS).any():
            machine.fault(f"there is no barrier {int(number.max())}", threads, int(number.argmax()))
        machine.barriers.arrive(
            inst.pc,
            threads,
            number,
            None if counts is None else counts[threads],
            wait,
            None if predicate is None else predicate[threads],
            done,
        )

    return when_converged(machine, inst, None, work, moves_on=False)
