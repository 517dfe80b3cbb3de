"""Moves by copies, on GPUs that reach each other's memory.

NCCL's blocks cannot start while a persistent kernel has all multiprocessors, so that its messages wait for the end of
kernels. Copy engines need none: they write a part to another rank's window while something else is computed, from the
caller's strided arrays and to its place. Each of their copies takes about 3 us besides: where nothing is computed, a
kernel writes to all ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...problem.array_types import Array
from ..copies import copy, copy_parts
from ..lanes import Lane
from ..run import Run
from ..windows import Copy, Signal, Window, padded_bytes
from .move import Late, Memory, Mover, Moves, Shape

__all__ = ["ByCopies"]


class ByCopies(Mover):
    """Moves by copies to a window of each other rank: see `Mover`."""

    ahead = 1

    def __init__(self, run: Run, window: Window):
        super().__init__(run)
        self.window = window
        self._slow: list[tuple[Array, Array]] = []
        self._steps = 0

    def begin(self, shapes: Sequence[Shape], results: Sequence[Array], steps: int) -> tuple[list[Memory], list[Memory]]:
        """See `Mover`."""
        run, window, self._steps = self.run, self.window, steps
        quick = [x if window.can_copy(x) else run.empty(x.shape, x.dtype) for x in results]
        self._slow = [(x, y) for x, y in zip(results, quick, strict=True) if x is not y]
        landings = [(x.shape, x.dtype) for x in results]
        window.begin(run.main, padded_bytes([*shapes, *landings]), steps, run.request.number, run.is_captured)
        plain = [self._memory(shape) for shape in shapes]
        return plain, [self._memory(shape, result) for shape, result in zip(landings, quick, strict=True)]

    def _memory(self, shape: Shape, result: Array | None = None) -> Memory:
        arrays = self.window.arrays(*shape)
        return Memory(self.run.rank, shape[0], lambda: arrays, result)

    def enter(self, *lanes: Lane, cleared: bool = False) -> None:
        """See `Mover`."""
        super().enter(*lanes)
        self.window.enter(self.run.comm)
        if cleared:
            self.release(self.run.comm, Signal.USED, 0)
            self.may_overwrite(Signal.USED, 0)

    def source(self, array: Array, lane: Lane | None = None) -> Array:
        """See `Mover`."""
        return array if self.window.can_copy(array) else self.run.packed(lane or self.run.main, array)

    def put(self, kind: Signal, step: int, moves: Moves, late: Late | None = None, is_idle: bool = False) -> None:
        """See `Mover`."""
        comm, send = self.run.comm, copy_parts if is_idle else self.window.send
        comm(send, self._to_others(step, moves))
        if late is not None:
            later, written = late
            comm.wait(written)
            comm(send, self._to_others(step, later))
        self.window.signal(comm, kind, step)

    def sent(self) -> Any:
        """See `Mover`."""
        return self.run.comm.record()

    def _to_others(self, step: int, moves: Moves) -> list[Copy]:
        return [
            Copy(move.target.by_rank[peer], *move[1:])
            for peer in self.window.others
            for move in moves(self.run.rank, peer, step)
        ]

    def arrived(self, lane: Lane, kind: Signal, step: int) -> None:
        """See `Mover`."""
        self.window.wait(lane, kind, step)

    def collect(self, kind: Signal, step: int, moves: Moves) -> None:
        """See `Mover`."""
        super().collect(kind, step, moves)
        run = self.run
        landed = (
            Copy(move.target.result, move.target_start, move.target.own, move.target_start, move.shape)
            for peer in self.window.others
            for move in moves(peer, run.rank, step)
            if move.target.result is not None
        )
        run.back(copy_parts, _joined(landed))
        if step == self._steps - 1:
            for result, quick in self._slow:
                run.back(copy, result, quick)

    def release(self, lane: Lane, kind: Signal, step: int) -> None:
        """See `Mover`."""
        self.window.signal(lane, kind, step)

    def may_overwrite(self, kind: Signal, step: int) -> None:
        """See `Mover`."""
        self.window.wait(self.run.comm, kind, step)

    def end(self, *lanes: Lane) -> None:
        """See `Mover`."""
        self.window.end(self.run.comm, *lanes)


def _joined(copies: Iterable[Copy]) -> list[Copy]:
    """The copies between equal places of two arrays, with one for each two of which one follows the other."""
    found: list[Copy] = []
    for one in copies:
        last = found[-1] if found else one
        axes = [axis for axis, (a, b) in enumerate(zip(last.target_start, one.target_start, strict=False)) if a != b]
        if last.target is one.target and len(axes) == 1:
            (axis,) = axes
            rest = [shape[:axis] + shape[axis + 1 :] for shape in (last.shape, one.shape)]
            if rest[0] == rest[1] and last.target_start[axis] + last.shape[axis] == one.target_start[axis]:
                length = last.shape[axis] + one.shape[axis]
                found[-1] = last._replace(shape=(*one.shape[:axis], length, *one.shape[axis + 1 :]))
                continue
        found.append(one)
    return found
