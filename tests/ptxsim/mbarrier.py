"""mbarriers: arrivals and bytes that a phase waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .decode import Control, address, control
from .errors import PtxError
from .scalars import INT64
from .shared_memory import GENERIC_SHARED
from .syntax import Addr, Inst, Sink

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Mbarrier", "Mbarriers", "by_place"]

_NBYTES = 8
_STATE_SPACES = "shared shared::cta shared::cluster"
_ORDERS = "release acquire relaxed cta cluster"
Place = tuple[int, int]  # (block of the batch, offset in its shared memory)


class Mbarrier:
    """An initialised mbarrier; `pending` arrivals and `missing_bytes` are what the current phase still waits for."""

    def __init__(self, count: int, init: tuple[int, int] | None) -> None:
        self.count = self.pending = count
        self.init = init  # the race detector's (thread, clock)
        self.known_to: set[int] = set()  # threads that come after the initialisation
        self.signalled_by: set[int] = set()  # threads whose copies come after it, through the async proxy
        self.missing_bytes = 0
        self.phase = 0
        self.waiting: list[tuple[int, np.ndarray]] = []
        self.publishing: np.ndarray | None = None
        self.published: np.ndarray | None = None


class Mbarriers:
    """All mbarriers of the batch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.reset()

    def reset(self) -> None:
        self._barriers: dict[Place, Mbarrier] = {}

    def place(self, thread: int, address_: int) -> Place:
        block, offset = self.machine.shared.locate(thread, address_)
        if offset < 0 or offset + _NBYTES > self.machine.shared.nbytes or offset % _NBYTES:
            raise PtxError(f"bad mbarrier address: {self.machine.shared.describe(offset)}", thread)
        return block, offset

    def at(self, place: Place, thread: int | None = None) -> Mbarrier:
        if place not in self._barriers:
            where = self.machine.shared.describe(place[1])
            raise PtxError(f"the mbarrier at {where} is not initialised", thread)
        return self._barriers[place]

    def use(self, place: Place, threads: np.ndarray) -> Mbarrier:
        """Returns the mbarrier for threads, which must come after its initialisation."""
        barrier = self.at(place, int(threads[0]))
        if self.machine.race is not None:
            numbers = threads.tolist()
            if not barrier.known_to.issuperset(numbers):
                self.machine.race.check_published(threads, barrier.init, self.machine.shared.describe(place[1]))
                barrier.known_to.update(numbers)
        return barrier

    def use_for_copy(self, place: Place, thread: int) -> Mbarrier:
        """Returns the mbarrier that a thread's bulk copy signals."""
        barrier = self.use(place, np.array([thread]))
        if self.machine.race is not None and thread not in barrier.signalled_by:
            self.machine.race.check_init_fenced(thread, barrier.init, self.machine.shared.describe(place[1]))
            barrier.signalled_by.add(thread)
        return barrier

    def initialise(self, place: Place, count: int, thread: int) -> None:
        race = self.machine.race
        self._barriers[place] = Mbarrier(count, None if race is None else race.init_mbarrier(thread))
        start = place[0] * self.machine.shared.stride + place[1]
        self.machine.shared.written[start : start + _NBYTES] = 1

    def invalidate(self, place: Place) -> None:
        self._barriers.pop(place, None)

    def arrive(self, place: Place, barrier: Mbarrier, count: int, thread: int | None = None) -> None:
        barrier.pending -= count
        if barrier.pending < 0:
            where = self.machine.shared.describe(place[1])
            raise PtxError(f"more arrivals at the mbarrier at {where} than its count of {barrier.count}", thread)
        self.advance(barrier)

    def complete_bytes(self, place: Place, nbytes: int, tags: Sequence[tuple[int, int]]) -> None:
        """Counts the bytes of a finished copy; its tags are the race detector's (entity, clock)."""
        barrier = self.at(place)
        barrier.missing_bytes -= nbytes
        for tag in tags:
            if barrier.publishing is None:
                barrier.publishing = np.zeros_like(self.machine.race.seen[0])
            barrier.publishing[tag[0]] = max(barrier.publishing[tag[0]], tag[1])
        self.advance(barrier)

    def advance(self, barrier: Mbarrier) -> None:
        """Ends the phase if nothing is missing."""
        if barrier.pending or barrier.missing_bytes:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.published, barrier.publishing = barrier.publishing, None
        waiting, barrier.waiting = barrier.waiting, []
        for pc, threads in waiting:
            self.machine.push(pc, threads)

    def waiting(self) -> list[tuple[str, int, np.ndarray]]:
        """Returns what threads wait for, for the report of a deadlock."""
        return [
            (
                f"for the mbarrier at {self.machine.shared.describe(offset)}: phase {b.phase}, "
                f"{b.pending} of {b.count} arrivals and {b.missing_bytes} bytes missing",
                pc,
                threads,
            )
            for (_, offset), b in self._barriers.items()
            for pc, threads in b.waiting
        ]


def by_place(machine: Machine, threads: np.ndarray, addresses: np.ndarray) -> Iterator[tuple[np.ndarray, Place]]:
    """Yields threads grouped by the mbarrier that they mean."""
    first = int(addresses[0])
    if (addresses == first).all() and machine.block_of[threads[0]] == machine.block_of[threads[-1]]:
        yield threads, machine.mbarriers.place(int(threads[0]), first)
        return
    offset = np.where(addresses >= GENERIC_SHARED, addresses - GENERIC_SHARED, addresses)
    keys = machine.block_of[threads].astype(INT64) << 44 | offset
    for key in np.unique(keys):
        chosen = np.nonzero(keys == key)[0]
        mine = threads[chosen]
        yield mine, machine.mbarriers.place(int(mine[0]), int(addresses[chosen[0]]))


@control("mbarrier.init", "mbarrier.inval", allow=_STATE_SPACES)
def _initialise(machine: Machine, inst: Inst) -> Control:
    addresses = address(machine, inst.args[0])
    counts = machine.source(inst.args[1], "u32") if inst.parts[0] == "init" else None

    def run(threads: np.ndarray) -> None:
        for thread, at in zip(threads, addresses(threads), strict=True):
            place = machine.mbarriers.place(int(thread), int(at))
            if counts is None:
                machine.mbarriers.invalidate(place)
            else:
                machine.mbarriers.initialise(place, int(counts[thread]), int(thread))
        machine.push(inst.pc + 1, threads)

    return run


@control("mbarrier.try_wait", "mbarrier.test_wait", allow=f"{_STATE_SPACES} {_ORDERS} parity")
def _wait(machine: Machine, inst: Inst) -> Control:
    """Tests a phase: a try_wait suspends until it ends instead of failing now and then, a test_wait answers at once."""
    done, addresses = machine.destination(inst.args[0], "pred"), address(machine, inst.args[1])
    parity, suspends = "parity" in inst.parts, inst.parts[0] == "try_wait"
    states = machine.source(inst.args[2], "u32" if parity else "u64")

    def run(threads: np.ndarray) -> None:
        for mine, place in by_place(machine, threads, addresses(threads)):
            barrier = machine.mbarriers.use(place, mine)
            state = states[mine].astype(INT64)
            ended = (barrier.phase & 1) != (state & 1) if parity else barrier.phase != state
            past = mine[ended]
            if len(past):
                done[past] = True
                if machine.race is not None:
                    machine.race.acquire(past, barrier.published)
                machine.push(inst.pc + 1, past)
            if len(past) == len(mine):
                continue
            if suspends:
                barrier.waiting.append((inst.pc, mine[~ended]))
            else:
                done[mine[~ended]] = False
                machine.push(inst.pc + 1, mine[~ended])

    return run


@control(
    "mbarrier.arrive",
    "mbarrier.arrive_drop",
    "mbarrier.expect_tx",
    "mbarrier.complete_tx",
    allow=f"{_STATE_SPACES} {_ORDERS} expect_tx",
)
def _arrive(machine: Machine, inst: Inst) -> Control:
    kind, args = inst.parts[0], list(inst.args)
    arrives, drops, expects = kind.startswith("arrive"), kind == "arrive_drop", "expect_tx" in inst.parts
    token = None
    if arrives and not isinstance(args[0], Addr):
        token = args.pop(0)
        token = None if isinstance(token, Sink) else machine.destination(token, "b64")
    addresses = address(machine, args[0])
    values = machine.source(args[1], "u32") if len(args) > 1 else None

    def run(threads: np.ndarray) -> None:
        machine.push(inst.pc + 1, threads)
        for mine, place in by_place(machine, threads, addresses(threads)):
            if not machine.alive_in_block[place[0]]:
                raise PtxError("an arrival at an mbarrier of a block that has ended", int(mine[0]))
            barrier = machine.mbarriers.use(place, mine)
            if token is not None:
                token[mine] = barrier.phase
            total = len(mine) if values is None else int(values[mine].astype(INT64).sum())
            if expects:
                barrier.missing_bytes += total
            elif kind == "complete_tx":
                barrier.missing_bytes -= total
            if not arrives:
                machine.mbarriers.advance(barrier)
                continue
            arrivals = len(mine) if expects else total
            if machine.race is not None:
                barrier.publishing = machine.race.release(mine, barrier.publishing)
            if drops:
                barrier.count -= arrivals
            machine.mbarriers.arrive(place, barrier, arrivals, int(mine[0]))

    return run
