"""Races between the blocks of a launch, through global memory.

The detector remembers the last plain write to each place of a buffer, and for every block its last accesses of the
other kinds there. Places are as wide as the accesses that were made, so that bytes are told apart. An access conflicts
with earlier accesses of other blocks to its bytes. Reads conflict with writes alone. Strong accesses (atomics,
volatile, relaxed, acquire, release) do not conflict with each other; those of scope .cta count as plain ones.

Conflicting accesses must be ordered by the barriers of a cluster or by synchronisation through memory: a release (or a
strong write after a fence) is observed by an acquire (or a strong read before a fence), possibly through atomics in
between. Clocks are those of the warps in race.py. A view gives a clock for each warp of the launch: the work of that
warp up to this clock comes before the owner of the view. A release leaves the view of its warp at its place. An acquire
adds this view to the knowledge of its warp; barriers and waits pass it on to the warps of the cluster that they order
after it. A strong write also comes before the next accesses of its observer, without any fence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import PtxError
from .race import warps_of

if TYPE_CHECKING:
    from .machine import Machine
    from .memory import Buffer, Part
    from .race import Order, RaceDetector

__all__ = ["GlobalRaceDetector"]

View = np.ndarray  # clocks by warp of the launch; never changed once it is shared
_Found = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # rows of places, places, blocks, stamps

_CONFLICTS = {
    "read": ("write", "strong write", "atomic"),
    "write": ("write", "strong write", "atomic", "read", "strong read"),
    "strong read": ("write",),
    "strong write": ("write", "read"),
    "atomic": ("write", "read"),
}


class _LastWrites:
    """The last plain write to every place of one width: its block (number + 1; 0: none) and its stamp."""

    def __init__(self, num_blocks: int, nbytes: int, width: int) -> None:
        self.writer, self.stamp = np.zeros((2, nbytes // width), np.int32)

    def of_others(self, places: np.ndarray, blocks: np.ndarray) -> _Found | None:
        """Returns the entries of other blocks at these places, which have a row for each of the blocks."""
        writer = self.writer.take(places)
        foreign = (writer != blocks[:, None] + 1) & (writer != 0)
        if not np.count_nonzero(foreign):
            return None
        place = places[foreign]
        return np.nonzero(foreign)[0], place, writer[foreign] - 1, self.stamp[place]

    def enter(self, places: np.ndarray, blocks: np.ndarray, stamps: np.ndarray, time: int) -> None:
        self.writer[places] = blocks[:, None] + 1
        self.stamp[places] = stamps[:, None]


class _LastOfBlocks:
    """The stamp of every block's last access of one kind to every place of one width; 0: none.

    Strong accesses also have times, in the order in which they were executed.
    """

    def __init__(self, num_blocks: int, nbytes: int, width: int) -> None:
        # Zeros take no memory until they are touched.
        self.stamps, self.times = np.zeros((2, num_blocks, nbytes // width), np.int32)

    def of_others(self, places: np.ndarray, blocks: np.ndarray) -> _Found | None:
        stamps = self.stamps.take(places, axis=1)
        stamps[blocks, np.arange(len(blocks))] = 0
        if not np.count_nonzero(stamps):
            return None
        block, row, column = np.nonzero(stamps)
        return row, places[row, column], block, stamps[block, row, column]

    def enter(self, places: np.ndarray, blocks: np.ndarray, stamps: np.ndarray, time: int) -> None:
        flat = places + (blocks * self.stamps.shape[1])[:, None]
        self.stamps.reshape(-1)[flat] = stamps[:, None]
        if time:
            self.times.reshape(-1)[flat] = time


class _Shadow:
    """The accesses to a buffer by kind and width, and the views that releases have left at offsets of it."""

    def __init__(self) -> None:
        self.accesses: dict[tuple[str, int], _LastWrites | _LastOfBlocks] = {}
        self.views: dict[int, View] = {}

    def times(self, kind: str, width: int, place: int) -> np.ndarray:
        """Returns for each block the time of its last strong access."""
        accesses = self.accesses.get((kind, width))
        return np.zeros(0, np.int32) if accesses is None else accesses.times[:, place]


class GlobalRaceDetector:
    """The races of one launch; blocks and the warps of a view are numbered over the launch."""

    def __init__(self, machine: Machine, race: RaceDetector, num_blocks: int) -> None:
        self.machine, self.race, self.num_blocks = machine, race, num_blocks
        self.block_warps = machine.padded_threads // 32
        self._shadows: dict[Buffer, _Shadow] = {}
        self._time = 0  # of the last strong access

    def begin(self, first_block: int) -> None:
        """Begins a batch of blocks, whose warps have new clocks."""
        self._block_of = self.machine.block_of + first_block
        self._first_warp = first_block * self.block_warps
        # Acquires by cluster of the batch: the warp and its clock at that time, as in race.py, and the view.
        self._acquired: dict[int, list[tuple[int, int, View]]] = {}
        self._before_fence: dict[int, View] = {}
        self._behind_fence: dict[int, View] = {}
        self._has_fenced = np.zeros(self.machine.num_warps, bool)

    # Accesses

    def read(self, threads: np.ndarray, parts: list[Part], nbytes: int, order: Order | None) -> None:
        if order is not None and "rmw" in order:  # the store of an atomic operation checks both
            return
        kind = "read" if order is None or "cta" in order else "strong read"
        for buffer, chosen, offset in parts:
            mine = threads if chosen is None else threads[chosen]
            shadow = self._access(kind, kind, mine, buffer, offset, nbytes)
            if kind == "strong read" and shadow.views:
                for k, place in enumerate(offset.tolist()):
                    if place in shadow.views:
                        self._observe(mine[k : k + 1], shadow.views[place], "acquire" in order)

    def write(self, threads: np.ndarray, parts: list[Part], nbytes: int, order: Order | None) -> None:
        atomic = order is not None and "rmw" in order
        what = kind = "atomic" if atomic else "write" if order is None else "strong write"
        if order is not None and "cta" in order:
            what, kind = f"{what} of scope .cta", "write"
        for buffer, chosen, offset in parts:
            mine = threads if chosen is None else threads[chosen]
            shadow = self._access(kind, what, mine, buffer, offset, nbytes)
            if kind == "write":
                for place in offset.tolist() if shadow.views else ():
                    shadow.views.pop(place, None)
            elif order & {"acquire", "release"} or shadow.views:
                self._leave(mine, offset, shadow, order)
            elif self._before_fence:
                fenced = self._has_fenced[mine >> 5]
                self._leave(mine[fenced], offset[fenced], shadow, order)

    def copy(self, kind: str, what: str, thread: int, buffer: Buffer, offset: np.ndarray, size: int) -> None:
        """Records a thread's copy of elements; each element of a bulk reduction is a relaxed atomic."""
        per_chunk = max(16 // size, 1)
        if kind != "atomic" and size < 16 and len(offset) % per_chunk == 0:  # whole chunks, if there is nothing else
            chunks = offset[::per_chunk]
            whole = chunks[:, None] + np.arange(0, 16, size) == offset.reshape(-1, per_chunk)
            if whole.all() and not np.count_nonzero(chunks & 15):
                offset, size = chunks, 16
        self._access(kind, what, np.array([thread]), buffer, offset, size)

    def _access(
        self, kind: str, what: str, threads: np.ndarray, buffer: Buffer, offset: np.ndarray, nbytes: int
    ) -> _Shadow:
        """Checks and records each thread's access to an offset, or one thread's accesses to all offsets."""
        shadow = self._shadows.get(buffer)
        if shadow is None:
            shadow = self._shadows[buffer] = _Shadow()
        blocks, warps = self._block_of[threads], threads >> 5
        if len(threads) != len(offset):
            offset = offset[None, :]
        for (other, width), accesses in shadow.accesses.items():
            if other in _CONFLICTS[kind]:
                found = accesses.of_others(_places(offset, nbytes, width), blocks)
                if found is not None:
                    self._check_order(what, threads, buffer, shadow, other, width, found)
        accesses = shadow.accesses.get((kind, nbytes))
        if accesses is None:
            accesses = (_LastWrites if kind == "write" else _LastOfBlocks)(self.num_blocks, len(buffer.data), nbytes)
            shadow.accesses[kind, nbytes] = accesses
        places = _places(offset, nbytes, nbytes)
        stamps = self.race.clock(warps) * self.block_warps + warps % self.block_warps
        strong = kind in ("strong read", "strong write", "atomic")
        self._time += strong
        accesses.enter(places, blocks, stamps, self._time if strong else 0)
        if isinstance(accesses, _LastWrites):
            lost = accesses.writer[places] != blocks[:, None] + 1
            if np.count_nonzero(lost):
                row, k = np.argwhere(lost)[0]
                place = int(places[row, k])
                other = int(accesses.writer[place]) - 1
                self._raise(what, int(threads[row]), buffer, place, nbytes, "write in the same instruction", other)
        return shadow

    # Synchronisation

    def fence(self, threads: np.ndarray) -> None:
        """Turns later strong writes into releases and earlier strong reads into acquires; ticks no clock."""
        for warp in warps_of(threads).tolist():
            behind = self._behind_fence.pop(warp, None)
            if behind is not None:
                self._acquire(threads[threads >> 5 == warp], behind)
            self._before_fence[warp] = self._view(warp)
            self._has_fenced[warp] = True

    def _leave(self, threads: np.ndarray, offset: np.ndarray, shadow: _Shadow, order: Order) -> None:
        """Leaves views at strong writes: atomics continue the release that they find, stores begin anew."""
        for k, place in enumerate(offset.tolist()):
            thread, warp = threads[k : k + 1], int(threads[k]) >> 5
            found = shadow.views.pop(place, None)
            if "rmw" not in order:
                found = None
            elif found is not None:
                self._observe(thread, found, "acquire" in order)
            left = self._before_fence.get(warp)
            if "release" in order:
                left = self._view(warp)
                self.race.release(thread, None)  # what comes later has a later clock
            if left is not None:
                found = left if found is None else np.maximum(found, left)
            if found is not None:
                shadow.views[place] = found

    def _observe(self, thread: np.ndarray, view: View, acquires: bool) -> None:
        """Handles a strong read that has found the view of a release."""
        if acquires:
            self._acquire(thread, view)
            return
        warp = int(thread[0]) >> 5
        pending = self._behind_fence.get(warp)
        self._behind_fence[warp] = view if pending is None else np.maximum(pending, view)

    def _acquire(self, threads: np.ndarray, view: View) -> None:
        """Orders threads of one warp after what the view holds, of other clusters and of their own."""
        race, warp = self.race, int(threads[0]) >> 5
        published = np.zeros_like(race.seen[0])
        published[: race.warps] = view[self._own_cluster(warp)]
        race.acquire(threads, published)
        acquired = self._acquired.setdefault(int(race.cluster[warp]), [])
        local = int(race.local[warp])
        if not any(by == local and seen is view for by, _, seen in acquired):  # a loop polls one release many times
            acquired.append((local, int(race.seen[warp, local]), view))

    def _view(self, warp: int) -> View:
        """Returns the view that a warp of the batch comes after."""
        race = self.race
        view = np.zeros(self.num_blocks * self.block_warps, np.int32)
        for by, clock, acquired in self._acquired.get(int(race.cluster[warp]), ()):
            if race.seen[warp, by] >= clock:
                np.maximum(view, acquired, out=view)
        own = self._own_cluster(warp)
        view[own] = np.maximum(view[own], race.seen[warp, : race.warps])
        return view

    def _own_cluster(self, warp: int) -> slice:
        """Returns the range of a warp's cluster among the warps of the launch."""
        start = self._first_warp + int(self.race.cluster[warp]) * self.race.warps
        return slice(start, start + self.race.warps)

    # Checks

    def _check_order(
        self, what: str, threads: np.ndarray, buffer: Buffer, shadow: _Shadow, other: str, width: int, found: _Found
    ) -> None:
        """Checks that every access that was found comes before that of the thread that found it."""
        row, place, block, stamp = found
        clock, warp = stamp // self.block_warps, block * self.block_warps + stamp % self.block_warps
        finder = threads[row] >> 5
        for mine in np.unique(finder).tolist():
            view = self._view(mine)
            for k in np.flatnonzero((finder == mine) & (clock > view[warp])).tolist():
                if not self._has_observed(view, shadow, other, width, int(place[k]), int(block[k])):
                    self._raise(what, int(threads[row[k]]), buffer, int(place[k]), width, other, int(block[k]))

    def _has_observed(self, view: View, shadow: _Shadow, kind: str, width: int, place: int, block: int) -> bool:
        """Returns True if an atomic or strong read in the view has found a block's strong write or atomics after it."""
        if kind not in ("strong write", "atomic"):
            return False
        start = shadow.times(kind, width, place)[block]
        stores = shadow.times("strong write", width, place)
        end = min(stores[stores > start], default=self._time + 1)  # atomics after another store continue that one
        for other in ("atomic", "strong read"):
            times = shadow.times(other, width, place)
            observers = np.flatnonzero((times > start) & (times < end))
            if len(observers):
                clock, warp = np.divmod(shadow.accesses[other, width].stamps[observers, place], self.block_warps)
                if (clock <= view[observers * self.block_warps + warp]).any():
                    return True
        return False

    def _raise(
        self, what: str, thread: int, buffer: Buffer, place: int, width: int, how: str, other_block: int
    ) -> None:
        mine, other = (
            ",".join(map(str, self.machine.block_coordinates(number)))
            for number in (int(self._block_of[thread]), other_block)
        )
        raise PtxError(
            f"global memory race: the {what} at offset {place * width} of {buffer.name}, which has {buffer.nbytes} "
            f"bytes, by block ({mine}) is not ordered after the {how} of {width} bytes there by block ({other})",
            thread,
        )


def _places(offset: np.ndarray, nbytes: int, width: int) -> np.ndarray:
    """Returns the places of a width under accesses: (accesses, places of each), or one row for a single thread."""
    first = offset // width
    if nbytes <= width:
        return first if first.ndim == 2 else first[:, None]
    places = first[..., None] + np.arange(nbytes // width)
    return places.reshape(len(places), -1)
