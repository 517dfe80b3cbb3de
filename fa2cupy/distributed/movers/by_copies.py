"""Moves by copies, on GPUs that reach each other's memory.

NCCL's blocks cannot start while a persistent kernel holds all multiprocessors: its messages would wait until kernels
end. Copy engines need no multiprocessor. They copy a part of the caller's strided array to its place in another rank's
window while kernels compute. Each of their copies costs about 3 us more, so that a kernel writes to all ranks at once
where nothing is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ...problem.array_types import Array
from ..local.copies import Copy, copy, copy_parts
from ..local.lanes import Lane
from ..transport.windows import Signal, Window, padded_bytes
from .move import Landed, Late, Memory, Mover, Moves, Shape
from .resources import Resources

__all__ = ["ByCopies"]


class ByCopies(Mover):
    """Moves by copies to a window of each other rank: see `Mover`."""

    ahead = 1

    def __init__(self, own: Resources, window: Window):
        super().__init__(own)
        self.window = window
        self._slow: list[tuple[Array, Array]] = []
        self._kept: dict[tuple[Signal, int], Any] = {}
        self._steps = 0

    def begin(self, shapes: Sequence[Shape], results: Sequence[Array], steps: int) -> tuple[list[Memory], list[Memory]]:
        """See `Mover`."""
        own, window, self._steps = self.own, self.window, steps
        quick = [x if window.can_copy(x) else own.empty(x.shape, x.dtype) for x in results]
        self._slow = [(x, y) for x, y in zip(results, quick, strict=True) if x is not y]
        wanted = [(shape.shape, shape.dtype) for shape in shapes] + [(x.shape, x.dtype) for x in results]
        window.begin(own.main, padded_bytes(wanted), steps, own.call, own.is_captured)
        places = [None] * len(shapes) + quick
        found = []
        for (shape, dtype), place in zip(wanted, places, strict=True):
            arrays = window.arrays(shape, dtype)
            landing = arrays[own.rank]
            found.append(Memory(shape, landing, landing if place is None else place, arrays))
        return found[: len(shapes)], found[len(shapes) :]

    def enter(self, *lanes: Lane, cleared: bool = False) -> None:
        """See `Mover`."""
        super().enter(*lanes)
        self.window.enter(self.own.comm)
        if cleared:
            self.release(self.own.comm, Signal.USED, 0)
            self.may_overwrite(Signal.USED, 0)

    def source(self, array: Array, lane: Lane | None = None) -> Array:
        """See `Mover`."""
        if self.window.can_copy(array) or array.flags.c_contiguous:
            return array
        packed = self.own.empty(array.shape, array.dtype)
        (lane or self.own.main)(copy, packed, array)
        return packed

    def put(self, kind: Signal, step: int, moves: Moves, late: Late | None = None, is_idle: bool = False) -> None:
        """See `Mover`."""
        comm, peers = self.own.comm, self.window.others
        send = functools.partial(self.window.send, comm)
        if is_idle:  # the kernel takes what stays on this rank along
            send, peers = functools.partial(comm, copy_parts), (*peers, self.own.rank)
        send(self._copies(peers, step, moves))
        if late is not None:
            later, written = late
            comm.wait(written)
            send(self._copies(peers, step, later))
        if is_idle:
            self._kept[kind, step] = comm.record()
        self.window.signal(comm, kind, step)

    def keep(self, lane: Lane, kind: Signal, step: int, moves: Moves) -> None:
        """See `Mover`."""
        kept = self._kept.get((kind, step))
        if kept is None:
            super().keep(lane, kind, step, moves)
        elif lane is not self.own.comm:
            lane.wait(kept)

    def sent(self) -> Any:
        """See `Mover`."""
        return self.own.comm.record()

    def _copies(self, peers: Sequence[int], step: int, moves: Moves) -> list[Copy]:
        rank = self.own.rank
        return [
            (memory.place if peer == rank else memory.by_rank[peer], *part)
            for peer in peers
            for memory, *part in moves(rank, peer, step)
        ]

    def arrived(self, lane: Lane, kind: Signal, step: int) -> None:
        """See `Mover`."""
        self.window.wait(lane, kind, step)

    def collect(self, lane: Lane, kind: Signal, step: int, landed: Sequence[Landed]) -> None:
        """See `Mover`."""
        self.arrived(lane, kind, step)
        lane(copy_parts, [(memory.place, start, memory.own, start, shape) for memory, start, shape in landed])
        if step == self._steps - 1:
            for result, quick in self._slow:
                lane(copy, result, quick)

    def release(self, lane: Lane, kind: Signal, step: int) -> None:
        """See `Mover`."""
        self.window.signal(lane, kind, step)

    def may_overwrite(self, kind: Signal, step: int) -> None:
        """See `Mover`."""
        self.window.wait(self.own.comm, kind, step)

    def end(self, *lanes: Lane) -> None:
        """See `Mover`."""
        self.window.end(self.own.comm, *lanes)
        self.own.at_end.append(self.window.ended)
