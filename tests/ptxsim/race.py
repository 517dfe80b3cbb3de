"""Races through shared memory, found with vector clocks.

Entities are the warps of a cluster and what works for them in the background: the reads of a warp's wgmmas, the reads
of its bulk copies, the writes of its cp.async copies, and for each mbarrier the TMA writes that signal it. Every entity
has a clock. A release (arrival at a barrier) publishes what a warp has seen, an acquire (a wait that succeeds) merges
it. Every granule of shared memory remembers its last writer and the last read by every reader; an access that does not
come after the conflicting one is an error. Threads of one warp are not checked against each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from .errors import PtxError
from .scalars import WIDTH
from .syntax import Imm, Inst, Vec

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["RaceDetector", "granule_bytes"]

_MAX_MBARRIERS = 96  # with TMA writes, of one cluster
_AGENTS = {"wgmma": 1, "bulk": 2, "cp.async": 3}
_AGENT_NAMES = ("warp {}", "the wgmma reads of warp {}", "the bulk copy of warp {}", "the cp.async of warp {}")


def granule_bytes(insts: Iterable[Inst]) -> int:
    """The narrowest access of a kernel to shared memory: nothing finer has to be remembered."""
    narrowest = 16
    for inst in insts:
        if inst.op == "cp" and inst.parts[0] == "async" and len(inst.args) > 2 and isinstance(inst.args[2], Imm):
            narrowest = min(narrowest, int(inst.args[2].value))
        elif inst.op in ("ld", "st", "atom", "red") and not {"global", "local", "const", "param"} & set(inst.parts):
            vector = next((len(arg.items) for arg in inst.args if isinstance(arg, Vec)), 1)
            narrowest = min(narrowest, vector * WIDTH[inst.type] // 8)
    return narrowest


class RaceDetector:
    """Warps are numbered over the batch, entities over the cluster: its warps, then their agents, then mbarriers."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.granule = granule_bytes(machine.kernel.insts)
        self.num_warps = machine.num_warps
        self.warps = machine.padded_threads // 32 * machine.cluster_size  # of a cluster
        self.readers = 3 * self.warps
        self.entities = 4 * self.warps + _MAX_MBARRIERS
        self.granules = len(machine.shared.data) // self.granule
        self.local = np.arange(self.num_warps) % self.warps
        self.cluster = np.arange(self.num_warps) // self.warps
        self.reset()

    @staticmethod
    def bytes_per_block(machine_warps: int, cluster_size: int, shared_bytes: int) -> int:
        """An upper estimate of the memory it takes."""
        return shared_bytes // 2 * (3 * machine_warps * cluster_size + 2) * 4

    def reset(self) -> None:
        # What a warp has seen of everyone's clock, and beside it, what of that it knows to be behind a proxy fence.
        self.seen = np.zeros((self.num_warps, 2 * self.entities), np.int32)
        self.seen[np.arange(self.num_warps), self.local] = 1
        self.agent_clock = np.zeros((self.num_warps // self.warps, self.entities), np.int32)
        self.writer = np.zeros(self.granules, np.int32)
        self.write_clock = np.zeros(self.granules, np.int32)
        self.read_clock = np.zeros((self.granules, self.readers), np.int32)
        self._mbarriers: dict[tuple[int, int], int] = {}

    # Synchronisation. Warps are arrays of distinct numbers.

    def release(self, warps: np.ndarray, published: np.ndarray | None) -> np.ndarray:
        """What these warps have seen, merged into what others published at the same barrier."""
        seen = self.seen[warps].max(0)
        self.seen[warps, self.local[warps]] += 1
        return seen if published is None else np.maximum(published, seen)

    def acquire(self, warps: np.ndarray, published: np.ndarray | None) -> None:
        if published is not None:
            self.seen[warps] = np.maximum(self.seen[warps], published)

    def block_barrier(self, warps: np.ndarray) -> None:
        """Release and acquire of all warps, given as (blocks, warps of a block), each block by itself."""
        self.seen[warps] = self.seen[warps].max(1, keepdims=True)
        self.seen[warps, self.local[warps]] += 1

    def proxy_fence(self, warps: np.ndarray) -> None:
        self.seen[warps, self.entities :] = self.seen[warps, : self.entities]
        self.seen[warps, self.local[warps]] += 1

    def agent(self, kind: str, warps: np.ndarray) -> np.ndarray:
        return _AGENTS[kind] * self.warps + self.local[warps]

    def commit(self, kind: str, warps: np.ndarray) -> None:
        """Closes a group of a warp's background work: one tick of the agent's clock."""
        self.agent_clock[self.cluster[warps], self.agent(kind, warps)] += 1

    def wait(self, kind: str, warps: np.ndarray, pending: int) -> None:
        """All groups but the last `pending` are done."""
        agents = self.agent(kind, warps)
        done = self.agent_clock[self.cluster[warps], agents] - pending
        self.seen[warps, agents] = np.maximum(self.seen[warps, agents], done)

    def publish_copies(self, warps: np.ndarray, published: np.ndarray | None) -> np.ndarray:
        """A barrier is to be told when the cp.async copies of these warps so far are done."""
        self.commit("cp.async", warps)
        published = np.zeros_like(self.seen[0]) if published is None else published
        agents = self.agent("cp.async", warps)
        published[agents] = np.maximum(published[agents], self.agent_clock[self.cluster[warps], agents])
        return published

    # Accesses. Offsets are bytes in the shared memory of the batch.

    def read(self, threads: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        warps = threads >> 5
        places = self._places(offset, nbytes)
        self._after_writes("read", warps[:, None], places)
        flat = places * self.readers + self.local[warps][:, None]
        self.read_clock.reshape(-1)[flat] = self.seen[warps, self.local[warps]][:, None]

    def write(self, threads: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        warps = threads >> 5
        places, mine = self._places(offset, nbytes), self.local[warps][:, None]
        self._after_writes("write", warps[:, None], places)
        self._after_reads("write", warps, places)
        self.writer[places] = mine
        self.write_clock[places] = self.seen[warps, self.local[warps]][:, None]
        lost = self.writer[places] != mine
        if lost.any():
            self._report("write", lost, warps[:, None], places, self.writer[places], "write in the same instruction")

    def copy_write(self, threads: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        """cp.async: a warp's copies do not conflict with each other."""
        warps = threads >> 5
        agents = self.agent("cp.async", warps)
        places = self._places(offset, nbytes)
        self._after_writes("asynchronous write", warps[:, None], places, own=agents[:, None])
        self._after_reads("asynchronous write", warps, places)
        self.writer[places] = agents[:, None]
        self.write_clock[places] = self.agent_clock[self.cluster[warps], agents][:, None] + 1

    def tma_write(self, warp: int, offset: np.ndarray, nbytes: int, block: int, mbarrier: int) -> tuple[int, int]:
        """A bulk write issued by a warp; returns what its mbarrier publishes: an entity and its clock."""
        cluster = int(self.cluster[warp])
        if (block, mbarrier) not in self._mbarriers:
            known = sum(b // self.machine.cluster_size == cluster for b, _ in self._mbarriers)
            if known >= _MAX_MBARRIERS:
                raise PtxError(f"the race check has room for {_MAX_MBARRIERS} mbarriers in a cluster")
            self._mbarriers[block, mbarrier] = 4 * self.warps + known
        agent = self._mbarriers[block, mbarrier]
        self.agent_clock[cluster, agent] += 1
        places, warps = self._places(offset, nbytes), np.full(len(offset), warp)
        self._after_writes("asynchronous write", warps[:, None], places)
        self._after_reads("asynchronous write", warps, places)
        self.writer[places] = agent
        self.write_clock[places] = self.agent_clock[cluster, agent]
        return agent, int(self.agent_clock[cluster, agent])

    def async_read(self, kind: str, warps: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        """Reads by the asynchronous proxy for each of these warps of one cluster."""
        places = self._places(offset, nbytes).ravel()[None, :]
        column = warps[:, None]
        self._after_writes("asynchronous read", column, places)
        writer, clock = self.writer[places], self.write_clock[places]
        by_warp = (writer < self.warps) & (clock > 0)
        unfenced = by_warp & (clock > self.seen[column, self.entities + writer])
        if unfenced.any():
            row, k = np.argwhere(unfenced)[0]
            where = self._where(int(places[0, k]))
            raise PtxError(
                f"{where} was written by warp {int(writer[0, k])} and is read through the async proxy "
                f"(for warp {int(self.local[warps[row]])}) without fence.proxy.async",
                int(warps[row]) * 32,
            )
        agents = self.agent(kind, warps)
        for warp, agent in zip(warps, agents, strict=True):
            self.read_clock[places[0], agent] = self.agent_clock[self.cluster[warp], agent] + 1

    # Checks

    def _places(self, offset: np.ndarray, nbytes: int) -> np.ndarray:
        """(accesses, granules of each)"""
        first = (offset // self.granule)[:, None]
        return first if nbytes <= self.granule else first + np.arange(nbytes // self.granule)

    def _after_writes(self, what: str, warps: np.ndarray, places: np.ndarray, own: np.ndarray | None = None) -> None:
        writer = self.writer.take(places)
        bad = self.write_clock.take(places) > self.seen.take(warps * (2 * self.entities) + writer)
        if own is not None:
            bad &= writer != own
        if bad.any():
            self._report(what, bad, warps, places, writer, "write")

    def _after_reads(self, what: str, warps: np.ndarray, places: np.ndarray) -> None:
        bad = self.read_clock.take(places, axis=0) > self.seen[warps, None, : self.readers]
        if bad.any():
            row, k, reader = np.argwhere(bad)[0]
            self._raise(what, int(reader), int(warps[row]), int(places[row, k]), "read")

    def _report(
        self, what: str, bad: np.ndarray, warps: np.ndarray, places: np.ndarray, other: np.ndarray, how: str
    ) -> None:
        index = tuple(np.argwhere(bad)[0])
        pick = [int(np.broadcast_to(x, bad.shape)[index]) for x in (other, warps, places)]
        self._raise(what, *pick, how)

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
