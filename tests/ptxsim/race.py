"""Races through shared memory, found with vector clocks.

Entities are the warps of a cluster and their background work: the reads of a warp's wgmmas, the reads of its bulk
copies, the writes of its cp.async copies, and for each mbarrier the TMA writes that signal it. Every entity has a
clock. A release (arrival at a barrier) publishes what a warp has seen, and an acquire (a wait that succeeds) merges it.
Every granule of shared memory remembers its last writer and the last read by every reader. An access that does not come
after a conflicting one is an error.

Threads of one warp share a clock, and are not checked against each other's ordinary accesses. For copies and proxies
they are told apart: a group of copies belongs to the thread that issued it, and a proxy fence covers what its thread
has written or has seen by synchronisation. The fence may be anywhere between a write and the copy that reads it, as in
PTX's proxy-preserved causality. A lane has seen what others of its warp did before they last met at a barrier.

Strong accesses (atomics, volatile, relaxed, acquire, release) do not conflict with each other. A granule that one of
them has written has the writer `self.strong`, whose clock is never seen, so that plain accesses there are checked
further.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from .copy_groups import CopyGroups, groups_kept, kinds_of_copies
from .errors import PtxError
from .scalars import WIDTH
from .syntax import Imm, Inst, Vec

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["RaceDetector", "granule_bytes", "warps_of"]

_MAX_MBARRIERS = 96  # mbarriers of one cluster with TMA writes
_AGENTS = {"wgmma": 1, "bulk": 2, "cp.async": 3}
_AGENT_NAMES = ("warp {}", "the wgmma reads of warp {}", "the bulk copy of warp {}", "the cp.async of warp {}")
_COPY_NAMES = {"bulk": "a bulk copy from shared memory", "cp.async": "a cp.async"}

Order = frozenset[str]  # of a strong access: acquire, release, rmw; cta if that is its scope


def granule_bytes(insts: Iterable[Inst]) -> int:
    """Returns the bytes of a kernel's narrowest access to shared memory: the race check needs nothing finer."""
    narrowest = 16
    for inst in insts:
        if inst.op == "cp" and inst.parts[0] == "async" and len(inst.args) > 2 and isinstance(inst.args[2], Imm):
            narrowest = min(narrowest, int(inst.args[2].value))
        elif inst.op in ("ld", "st", "atom", "red") and not {"global", "local", "const", "param"} & set(inst.parts):
            vector = next((len(arg.items) for arg in inst.args if isinstance(arg, Vec)), 1)
            narrowest = min(narrowest, vector * WIDTH[inst.type] // 8)
    return narrowest


def warps_of(threads: np.ndarray) -> np.ndarray:
    """Returns the warps of ascending threads, each once."""
    warps = threads >> 5
    first = np.empty(len(warps), bool)
    first[0] = True
    np.not_equal(warps[1:], warps[:-1], out=first[1:])
    return warps[first]


class RaceDetector:
    """Warps are numbered over the batch, entities over the cluster: its warps, then their agents, then mbarriers."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        insts = machine.kernel.insts
        self.granule = granule_bytes(insts)
        self.num_warps = machine.num_warps
        self.warps = machine.padded_threads // 32 * machine.cluster_size  # of a cluster
        self.readers = 3 * self.warps
        self.strong = 4 * self.warps + _MAX_MBARRIERS
        self.entities = self.strong + 1
        self.granules = len(machine.shared.data) // self.granule
        self.local = np.arange(self.num_warps) % self.warps
        self.cluster = np.arange(self.num_warps) // self.warps
        self._kinds, self._kept = sorted(kinds_of_copies(insts)), groups_kept(insts)
        proxies = any(inst.op in ("wgmma", "mbarrier") or "proxy" in inst.parts for inst in insts)
        self.by_lane = bool(self._kinds) or proxies  # True if threads of a warp have to be told apart
        self._generic = np.arange(self.entities) < 4 * self.warps  # entities that write through the generic proxy
        self._generic[self.strong] = True
        self.reset()

    @staticmethod
    def bytes_per_block(machine_warps: int, cluster_size: int, shared_bytes: int) -> int:
        """Returns an upper estimate of the detector's memory, without strong accesses."""
        return shared_bytes // 2 * (3 * machine_warps * cluster_size + 2) * 4

    def reset(self) -> None:
        # The clocks of all entities that a warp has seen, then those that it knows to be behind a proxy fence.
        self.seen = np.zeros((self.num_warps, 2 * self.entities), np.int32)
        self.seen[np.arange(self.num_warps), self.local] = 1
        self.agent_clock = np.zeros((self.num_warps // self.warps, self.entities), np.int32)
        self.writer = np.zeros(self.granules, np.int32)
        self.write_clock = np.zeros(self.granules, np.int32)
        self.read_clock = np.zeros((self.granules, self.readers), np.int32)
        # Four neighbouring readers, the warps of a warp group, as one item: NumPy scatters these several times as fast.
        self._reads_by_four = self.read_clock.view("V16") if self.readers % 4 == 0 else None
        self._mbarriers: dict[tuple[int, int], int] = {}
        # For each lane: the writer of a granule, the clock up to which the lane has seen its warp's writes, and copies.
        self.write_lane = np.zeros(self.granules if self.by_lane else 0, np.int8)
        self.met = np.zeros(32 * self.num_warps, np.int32)
        self.copies = {kind: CopyGroups(32 * self.num_warps, self._kept) for kind in self._kinds}
        self._waited = np.zeros(self.num_warps, bool)  # since the warp's copies were last taken in
        # Fences that lanes have executed without the rest of their warp: the warp's clock at that time, and the lanes.
        self._proxy_fences: dict[int, list[tuple[int, int]]] = {}
        self._init_fences: dict[int, list[tuple[int, int]]] = {}
        # Strong accesses by granule and warp, the plain write before them, and the clocks that releases left there.
        self._strong_writes: np.ndarray | None = None
        self._strong_reads: np.ndarray | None = None
        self._flags: dict[int, np.ndarray] = {}
        self._before_fence: dict[int, np.ndarray] = {}
        self._behind_fence: dict[int, np.ndarray] = {}

    # Synchronisation. Threads and warps are ascending arrays of distinct numbers.

    def clock(self, warps: np.ndarray) -> np.ndarray:
        return self.seen[warps, self.local[warps]]

    def _tick(self, warps: np.ndarray) -> None:
        self.seen[warps, self.local[warps]] += 1

    def release(self, threads: np.ndarray, published: np.ndarray | None) -> np.ndarray:
        """Returns what the warps of these threads have seen, merged into what others published at the same barrier."""
        warps = warps_of(threads)
        self._take_in_copies(warps)
        seen = self.seen[warps].max(0)
        self._tick(warps)
        return seen if published is None else np.maximum(published, seen)

    def acquire(self, threads: np.ndarray, published: np.ndarray | None) -> None:
        if published is None:
            return
        warps = warps_of(threads)
        self.seen[warps] = np.maximum(self.seen[warps], published)
        if self.by_lane:
            self.met[threads] = np.maximum(self.met[threads], published[self.local[threads >> 5]])

    def block_barrier(self, warps: np.ndarray) -> None:
        """Lets all warps release and acquire, given as (blocks, warps of a block), each block by itself."""
        self._take_in_copies(warps.ravel())
        if self.by_lane:
            self.met.reshape(-1, 32)[warps] = self.clock(warps)[..., None]
        self.seen[warps] = self.seen[warps].max(1, keepdims=True)
        self._tick(warps)

    def warp_barrier(self, threads: np.ndarray) -> None:
        """Handles bar.warp.sync; the threads that take part count as the whole warp."""
        warps = warps_of(threads)
        self._take_in_copies(warps)
        self.met[threads] = self.clock(threads >> 5)
        self._tick(warps)

    def fence(self, threads: np.ndarray) -> None:
        """Turns later strong writes into releases and earlier strong reads into acquires."""
        warps = warps_of(threads)
        self._take_in_copies(warps)
        for warp in warps.tolist():
            behind = self._behind_fence.pop(warp, None)
            if behind is not None:
                self.acquire(threads[threads >> 5 == warp], behind)
            self._before_fence[warp] = self.seen[warp].copy()
        self._tick(warps)

    def proxy_fence(self, threads: np.ndarray) -> None:
        warps, clock = warps_of(threads), self.clock(warps_of(threads))
        whole = np.ones(len(warps), bool)
        if len(threads) != 32 * len(warps):
            lanes = self._lanes(threads)
            whole = lanes == self.machine.alive_lanes[warps]
            met = np.maximum.reduceat(self.met[threads], np.flatnonzero(np.diff(threads >> 5, prepend=-1)))
            for warp, mask in zip(warps[~whole].tolist(), lanes[~whole].tolist(), strict=True):
                self._proxy_fences.setdefault(warp, []).append((int(self.seen[warp, self.local[warp]]), mask))
            clock = np.where(whole, clock, np.maximum(met, self.seen[warps, self.entities + self.local[warps]]))
        self.seen[warps, self.entities :] = self.seen[warps, : self.entities]
        self.seen[warps, self.entities + self.local[warps]] = clock
        if "cp.async" in self.copies:
            agents = self.agent("cp.async", warps)
            done = self.copies["cp.async"].complete(warps, self.agent_clock[self.cluster[warps], agents])
            self.seen[warps, self.entities + agents] = np.where(whole, done, self.seen[warps, agents])
        self._tick(warps)

    def init_fence(self, threads: np.ndarray) -> None:
        """Records fence.mbarrier_init."""
        warps = warps_of(threads)
        for warp, mask in zip(warps.tolist(), self._lanes(threads).tolist(), strict=True):
            self._init_fences.setdefault(warp, []).append((int(self.seen[warp, self.local[warp]]), mask))
        self._tick(warps)

    @staticmethod
    def _lanes(threads: np.ndarray) -> np.ndarray:
        """Returns for each warp of these threads the bits of their lanes."""
        starts = np.flatnonzero(np.diff(threads >> 5, prepend=-1))
        return np.bitwise_or.reduceat(np.left_shift(1, threads & 31), starts)

    # Copies in the background

    def agent(self, kind: str, warps: np.ndarray) -> np.ndarray:
        return _AGENTS[kind] * self.warps + self.local[warps]

    def commit(self, kind: str, threads: np.ndarray) -> None:
        """Closes a group of background work; every thread has its own groups of copies."""
        warps = warps_of(threads)
        self.agent_clock[self.cluster[warps], self.agent(kind, warps)] += 1
        if kind in self.copies:
            every = threads >> 5
            self.copies[kind].commit(threads, self.agent_clock[self.cluster[every], self.agent(kind, every)])

    def wait(self, kind: str, threads: np.ndarray, pending: int) -> None:
        """Waits for all groups but the last `pending`."""
        warps = warps_of(threads)
        if kind in self.copies:  # a lane's wait counts for itself alone until the lanes meet
            self.copies[kind].wait(threads, pending)
            self._waited[warps] = True
            return
        agents = self.agent(kind, warps)
        done = self.agent_clock[self.cluster[warps], agents] - pending
        self.seen[warps, agents] = np.maximum(self.seen[warps, agents], done)

    def _take_in_copies(self, warps: np.ndarray) -> None:
        """Lets warps see the end of copies that their threads have waited for."""
        if not np.count_nonzero(self._waited[warps]):
            return
        for kind, copies in self.copies.items():
            agents = self.agent(kind, warps)
            done = copies.complete(warps, self.agent_clock[self.cluster[warps], agents])
            self.seen[warps, agents] = np.maximum(self.seen[warps, agents], done)
        self._waited[warps] = False

    def publish_copies(self, threads: np.ndarray, published: np.ndarray | None) -> np.ndarray:
        """Returns `published` with the end of these threads' cp.async copies so far."""
        warps, copies = warps_of(threads), self.copies.get("cp.async")
        published = np.zeros_like(self.seen[0]) if published is None else published
        if copies is not None:
            agents = self.agent("cp.async", warps)
            self.agent_clock[self.cluster[warps], agents] += 1
            copies.told[threads] = copies.issued[threads]
            done = copies.complete(warps, self.agent_clock[self.cluster[warps], agents], told=True)
            published[agents] = np.maximum(published[agents], done)
        return published

    def check_end(self, threads: np.ndarray) -> None:
        """Checks that ending threads have no copies in flight, which can no longer be waited for."""
        for kind, copies in self.copies.items():
            late = copies.unfinished(threads)
            if len(late):
                raise PtxError(
                    f"the thread ends with {_COPY_NAMES[kind]} in flight: it has not waited for it", int(late[0])
                )

    def check_block_end(self, block: int, thread: int) -> None:
        """Checks that no TMA load to an mbarrier of a block is in flight when the block ends."""
        size, per_block = self.machine.cluster_size, self.warps // self.machine.cluster_size
        warps = slice(block * per_block, (block + 1) * per_block)
        for (owner, offset), agent in self._mbarriers.items():
            if owner == block and self.agent_clock[block // size, agent] > self.seen[warps, agent].max():
                where = self.machine.shared.describe(offset)
                raise PtxError(
                    f"the block ends with a TMA load in flight: nobody has waited for it at the mbarrier at {where}",
                    thread,
                )

    # Accesses. Offsets are bytes in the shared memory of the batch.

    def read(self, threads: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        warps = threads >> 5
        places = self._places(offset, nbytes)
        self._after_writes("read", threads, warps, places)
        flat = places * self.readers + self.local[warps][:, None]
        self.read_clock.reshape(-1)[flat] = self.seen[warps, self.local[warps]][:, None]

    def write(self, threads: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        warps = threads >> 5
        places, mine = self._places(offset, nbytes), self.local[warps][:, None]
        self._after_writes("write", threads, warps, places)
        self._after_reads("write", threads, warps, places)
        self.writer[places] = mine
        self.write_clock[places] = self.seen[warps, self.local[warps]][:, None]
        if self.by_lane:
            self.write_lane[places] = (threads & 31)[:, None]
        lost = self.writer[places] != mine
        if np.count_nonzero(lost):
            row, k = np.argwhere(lost)[0]
            other = int(self.writer[places[row, k]])
            self._raise("write", other, int(warps[row]), int(places[row, k]), "write in the same instruction")

    def strong_read(self, threads: np.ndarray, offset: np.ndarray, nbytes: int, order: Order) -> None:
        warps, places = threads >> 5, self._places(offset, nbytes)
        self._after_writes("strong read", threads, warps, places, strong=True)
        if self._strong_reads is None:
            self._strong_reads = np.zeros((self.granules, self.warps), np.int32)
        self._strong_reads[places, self.local[warps][:, None]] = self.clock(warps)[:, None]
        if self._flags:
            for k, place in enumerate(places[:, 0].tolist()):
                if place in self._flags:
                    self._observe(threads[k : k + 1], self._flags[place], "acquire" in order)

    def strong_write(self, threads: np.ndarray, offset: np.ndarray, nbytes: int, order: Order) -> None:
        warps, places = threads >> 5, self._places(offset, nbytes)
        what = "atomic" if "rmw" in order else "strong write"
        self._after_writes(what, threads, warps, places, strong=True)
        self._after_reads(what, threads, warps, places, strong=True)
        if self._strong_writes is None:
            self._strong_writes = np.zeros((self.granules, self.warps), np.int32)
            self._plain_writer, self._plain_clock = np.zeros((2, self.granules), np.int32)
        plain = places[self.writer[places] != self.strong]
        self._plain_writer[plain], self._plain_clock[plain] = self.writer[plain], self.write_clock[plain]
        self.writer[places], self.write_clock[places] = self.strong, 1
        if self.by_lane:
            self.write_lane[places] = (threads & 31)[:, None]
        self._strong_writes[places, self.local[warps][:, None]] = self.clock(warps)[:, None]
        if order & {"acquire", "release"} or self._flags or self._before_fence:
            for k, place in enumerate(places[:, 0].tolist()):
                self._leave(threads[k : k + 1], place, order)

    def _observe(self, thread: np.ndarray, published: np.ndarray, acquires: bool) -> None:
        """Handles a strong read that has found what a release left."""
        if acquires:
            self.acquire(thread, published)
            return
        warp = int(thread[0]) >> 5
        pending = self._behind_fence.get(warp)
        self._behind_fence[warp] = published if pending is None else np.maximum(pending, published)

    def _leave(self, thread: np.ndarray, place: int, order: Order) -> None:
        """Handles a strong write: atomics continue the release that they find, stores begin anew."""
        found = self._flags.pop(place, None)
        if "rmw" not in order:
            found = None
        elif found is not None:
            self._observe(thread, found, "acquire" in order)
        if "release" in order:
            found = self.release(thread, found)
        elif int(thread[0]) >> 5 in self._before_fence:
            before = self._before_fence[int(thread[0]) >> 5]
            found = before if found is None else np.maximum(found, before)
        if found is not None:
            self._flags[place] = found

    def copy_write(self, threads: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        """Records a cp.async; a thread's copies do not conflict with each other."""
        warps = threads >> 5
        agents = self.agent("cp.async", warps)
        places = self._places(offset, nbytes)
        self._after_writes("asynchronous write", threads, warps, places, copies=True)
        self._after_reads("asynchronous write", threads, warps, places)
        clock = self.agent_clock[self.cluster[warps], agents] + 1
        self.writer[places] = agents[:, None]
        self.write_clock[places] = clock[:, None]
        self.write_lane[places] = (threads & 31)[:, None]
        self.copies["cp.async"].issued[threads] = clock

    def tma_write(self, thread: int, offset: np.ndarray, nbytes: int, block: int, mbarrier: int) -> tuple[int, int]:
        """Records a bulk write issued by a thread; returns what its mbarrier publishes: an entity and its clock."""
        warp = thread >> 5
        cluster = int(self.cluster[warp])
        if (block, mbarrier) not in self._mbarriers:
            known = sum(b // self.machine.cluster_size == cluster for b, _ in self._mbarriers)
            if known >= _MAX_MBARRIERS:
                raise PtxError(f"the race check has room for {_MAX_MBARRIERS} mbarriers in a cluster")
            self._mbarriers[block, mbarrier] = 4 * self.warps + known
        agent = self._mbarriers[block, mbarrier]
        self.agent_clock[cluster, agent] += 1
        places, threads = self._places(offset, nbytes), np.full(len(offset), thread)
        warps = np.full(len(offset), warp)
        self._after_writes("asynchronous write", threads, warps, places)
        self._after_reads("asynchronous write", threads, warps, places)
        self._behind_fences("written", np.array([warp]), places.ravel()[None, :], thread)
        self.writer[places] = agent
        self.write_clock[places] = self.agent_clock[cluster, agent]
        return agent, int(self.agent_clock[cluster, agent])

    def wgmma_read(self, warps: np.ndarray, places: np.ndarray) -> None:
        """Records that each warp of a warp group reads the granules of an operand in shared memory."""
        # The clocks that all of them have seen; the generic proxy's writes must be behind a proxy fence. If this does
        # not settle it, each warp is checked by itself.
        known = self.seen[warps[0] : warps[-1] + 1].min(0)
        seen, fenced = known[: self.entities], known[self.entities :]
        np.minimum(seen, fenced, out=seen, where=self._generic)
        late = self.write_clock.take(places) > seen.take(self.writer.take(places))
        if np.count_nonzero(late):
            self._after_writes("asynchronous read", 32 * warps, warps, places[None, :])
            self._behind_fences("read", warps, places[None, :])
        agents = self.agent("wgmma", warps)
        clocks = self.agent_clock[self.cluster[warps], agents] + 1
        if self._reads_by_four is not None and len(agents) == 4 and agents[0] % 4 == 0:
            self._reads_by_four[:, agents[0] // 4][places] = clocks.astype(np.int32).view("V16")[0]
        else:
            self.read_clock[places, agents[0] : agents[-1] + 1] = clocks

    def bulk_read(self, thread: int, offset: np.ndarray, nbytes: int, in_group: bool = True) -> tuple[int, int]:
        """Records the reads of a thread's bulk copy; returns what an mbarrier publishes unless a group tells of it."""
        places, warps = self._places(offset, nbytes).ravel()[None, :], np.array([thread >> 5])
        self._after_writes("asynchronous read", np.array([thread]), warps, places)
        self._behind_fences("read", warps, places, thread)
        agent = int(self.agent("bulk", warps)[0])
        self.agent_clock[self.cluster[warps], agent] += 1
        clock = int(self.agent_clock[self.cluster[thread >> 5], agent])
        self.read_clock[places[0], agent] = clock
        if in_group:
            copies = self.copies["bulk"]
            copies.issued[thread], copies.issuer[thread >> 5, clock] = clock, thread
        return agent, clock

    # mbarriers

    def init_mbarrier(self, thread: int) -> tuple[int, int]:
        """Returns the thread that initialises an mbarrier and its clock, as `check_published` takes them."""
        return thread, int(self.seen[thread >> 5, self.local[thread >> 5]])

    def check_published(self, threads: np.ndarray, init: tuple[int, int], where: str) -> None:
        """Checks that the initialisation of an mbarrier comes before its use by these threads."""
        warp, clock = init[0] >> 5, init[1]
        seen = np.where(threads >> 5 == warp, self.met[threads], self.seen[threads >> 5, self.local[warp]])
        bad = threads[(seen < clock) & (threads != init[0])]
        if len(bad):
            raise PtxError(
                f"the mbarrier at {where} is used by warp {int(self.local[bad[0] >> 5])} before its initialisation "
                f"by warp {int(self.local[warp])} is published: no barrier is between them",
                int(bad[0]),
            )

    def check_init_fenced(self, thread: int, init: tuple[int, int], where: str) -> None:
        """Checks that the asynchronous proxy, which signals an mbarrier, knows its initialisation."""
        warp, clock = init[0] >> 5, init[1]
        if not self._is_fenced(thread >> 5, warp, init[0] & 31, clock, self._init_fences):
            raise PtxError(
                f"the mbarrier at {where} is signalled by the async proxy, and warp {int(self.local[warp])} "
                "initialised it without fence.mbarrier_init or fence.proxy.async",
                thread,
            )

    # Checks

    def _places(self, offset: np.ndarray, nbytes: int) -> np.ndarray:
        """Returns the granules of accesses: (accesses, granules of each)."""
        first = (offset // self.granule)[:, None]
        return first if nbytes <= self.granule else first + np.arange(nbytes // self.granule)

    def _after_writes(
        self,
        what: str,
        threads: np.ndarray,
        warps: np.ndarray,
        places: np.ndarray,
        strong: bool = False,
        copies: bool = False,
    ) -> None:
        """Checks accesses against writes; each row of places belongs to a thread, or a single row to all threads."""
        writer = self.writer.take(places)
        bad = self.write_clock.take(places) > self.seen.take(warps[:, None] * (2 * self.entities) + writer)
        if np.count_nonzero(bad):
            self._look_at_writes(what, threads, bad, np.broadcast_to(places, bad.shape), strong, copies)

    def _look_at_writes(
        self, what: str, threads: np.ndarray, bad: np.ndarray, places: np.ndarray, strong: bool, copies: bool
    ) -> None:
        """Checks writes that these threads' warps have not seen; some of them are in order nevertheless."""
        row, place = np.nonzero(bad)[0], places[bad]
        thread, warp = threads[row], threads[row] >> 5
        writer, clock = self.writer[place], self.write_clock[place]
        if self._strong_writes is not None:
            marked = writer == self.strong
            if not strong and marked.any():
                unseen = self._strong_writes[place] > self.seen[warp, : self.warps]
                unseen[~marked] = False
                if unseen.any():
                    k, other = np.argwhere(unseen)[0]
                    self._raise(what, int(other), int(warp[k]), int(place[k]), "strong write or atomic")
            writer = np.where(marked, self._plain_writer[place], writer)
            clock = np.where(marked, self._plain_clock[place], clock)
            late = clock > self.seen[warp, writer]
        else:
            late = np.ones(len(place), bool)
        if "cp.async" in self.copies:  # a thread's own copies
            own = (writer == self.agent("cp.async", warp)) & (self.write_lane[place] == thread & 31)
            late &= ~(own & (copies | (clock <= self.copies["cp.async"].done[thread])))
        if late.any():
            k = int(np.argmax(late))
            self._raise(what, int(writer[k]), int(warp[k]), int(place[k]), "write")

    def _after_reads(
        self, what: str, threads: np.ndarray, warps: np.ndarray, places: np.ndarray, strong: bool = False
    ) -> None:
        bad = self.read_clock.take(places, axis=0) > self.seen[warps, None, : self.readers]
        if np.count_nonzero(bad):
            for row, k, reader in np.argwhere(bad).tolist():
                if not self._is_own_copy(int(threads[row]), reader, int(self.read_clock[places[row, k], reader])):
                    self._raise(what, reader, int(warps[row]), int(places[row, k]), "read")
        if self._strong_reads is not None and not strong:
            bad = self._strong_reads.take(places, axis=0) > self.seen[warps, None, : self.warps]
            if bad.any():
                row, k, reader = np.argwhere(bad)[0]
                self._raise(what, int(reader), int(warps[row]), int(places[row, k]), "strong read")

    def _is_own_copy(self, thread: int, reader: int, clock: int) -> bool:
        """Returns True if the read is that of a thread's own bulk copy that it has waited for."""
        warp, copies = thread >> 5, self.copies.get("bulk")
        if copies is None or reader != 2 * self.warps + self.local[warp]:
            return False
        return copies.issuer.get((warp, clock)) == thread and bool(copies.done[thread] >= clock)

    def _behind_fences(self, done: str, warps: np.ndarray, places: np.ndarray, thread: int | None = None) -> None:
        """Checks that a proxy fence is between the generic proxy's writes at these places and the async proxy's use.

        A thread that issues a copy must also have met the lanes of its warp that wrote there.
        """
        writer, clock = self.writer[places], self.write_clock[places]
        generic = self._generic[writer] & (clock > 0)
        column = warps[:, None]
        unfenced = generic & (clock > self.seen.take(column * (2 * self.entities) + self.entities + writer))
        if unfenced.any():
            row, k = np.nonzero(unfenced)
            # Places that one lane has written at one clock have the same fences; each strong write has its own clocks.
            wrote = np.where(writer[0, k] == self.strong, -1 - k, clock[0, k] << 5 | self.write_lane[places[0, k]])
            written_alike = np.stack((row, writer[0, k], wrote))
            for which in np.sort(np.unique(written_alike, axis=1, return_index=True)[1]).tolist():
                self._check_fenced(done, int(warps[row[which]]), int(places[0, k[which]]))
        if thread is None:
            return
        apart = (writer == self.local[warps[0]]) & (clock > self.met[thread])
        apart &= self.write_lane[places] != thread & 31
        if apart.any():
            place = int(places[apart][0])
            raise PtxError(
                f"{self._where(place)} was written by lane {int(self.write_lane[place])} of warp "
                f"{int(self.local[warps[0]])} and is {done} through the async proxy by lane {thread & 31}, without "
                "__syncwarp or another barrier between them",
                thread,
            )

    def _check_fenced(self, done: str, warp: int, place: int) -> None:
        writer, clock, lane = (int(x[place]) for x in (self.writer, self.write_clock, self.write_lane))
        first = int(self.cluster[warp]) * self.warps
        writers = [(writer, clock)]
        if writer == self.strong:
            writers = [(k, int(c)) for k, c in enumerate(self._strong_writes[place]) if c]
        for other, when in writers:
            is_warp = other < self.warps
            if self.seen[warp, self.entities + other] >= when or not when:
                continue
            if not is_warp or not self._is_fenced(warp, first + other, lane, when, self._proxy_fences):
                name = _AGENT_NAMES[other // self.warps].format(other % self.warps)
                raise PtxError(
                    f"{self._where(place)} was written by {name} and is {done} through the async proxy "
                    f"(for warp {int(self.local[warp])}) without fence.proxy.async",
                    warp * 32,
                )

    def _is_fenced(
        self, warp: int, writer: int, lane: int, clock: int, fences: dict[int, list[tuple[int, int]]]
    ) -> bool:
        """Returns True if a fence that a warp has seen covers what a lane of the writing warp did at that clock."""
        seen = int(self.seen[warp, self.local[writer]])
        if self.seen[warp, self.entities + self.local[writer]] >= clock:
            return True
        done = (*fences.get(writer, ()), *self._proxy_fences.get(writer, ()))
        return any(clock <= when < seen and lanes >> lane & 1 for when, lanes in done)

    def _where(self, place: int) -> str:
        shared = self.machine.shared
        return shared.describe(place * self.granule % shared.stride)

    def _raise(self, what: str, other: int, warp: int, place: int, how: str) -> None:
        kind, number = divmod(other, self.warps)
        name = _AGENT_NAMES[kind].format(number) if kind < 4 else "a TMA load"
        raise PtxError(
            f"shared memory race: the {what} of {self._where(place)} by warp {int(self.local[warp])} "
            f"is not ordered after the {how} by {name}",
            warp * 32,
        )
