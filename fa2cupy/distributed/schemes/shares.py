"""Shares of gradients of `gather`: those of keys, which go to their owners, and those of the arrays of features."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ...problem.array_types import Array
from ..call.orders import length
from ..call.parts import of_part
from ..call.run import Run
from ..local.sums import clear, sum_into
from ..movers.move import Move
from ..transport.windows import Signal
from .gather_calls import Call, Gather, Seen, seen_by

__all__ = ["ExtraShares", "Shares"]


class Shares:
    """Shares of dk and dv in one slot, for one group at a time: those of this rank's calls, and those of other ranks.

    Parameters
    ----------
    gather : Gather
    slot : int
        Its memory has room for the largest of its groups; a smaller group takes the first heads.

    Attributes
    ----------
    own : dict of list of ndarray
        By the first query of a call: its dk and dv, for the keys from the first one on.
    landing : dict of list of (slice, list of ndarray)
        By rank: the shares of its calls, each with the rows of this rank that it belongs to, and its dk and dv.
    sums : list of (slice, list of list of ndarray)
        For each part of this rank's rows: the shares of dk, and those of dv, in the order of the ranks.
    sent : event or None
        After it the last group's shares may be overwritten. None if the arrival of the others' shares says so, too.
    """

    def __init__(self, gather: Gather, slot: int):
        run, operands = gather.run, gather.operands
        self.gather = gather
        self.shapes = [(len(x), gather.widths[slot], x.shape[3]) for x in (operands.k, operands.v)]
        self.own = {
            call.queries.start: [run.empty((b, call.keys.stop, h, d), operands.k.dtype) for b, h, d in self.shapes]
            for call in gather.calls
        }
        memories = iter(gather.landings[slot])
        self._places = {place: [next(memories) for _ in range(2)] for place in gather.share_places}
        self.landing = {
            rank: [(seen.rows, self._pieces(rank, seen)) for seen in found]
            for rank, found in enumerate(gather.seen_here)
        }
        self.sums = self._sums()
        self.sent: Any = None

    def _pieces(self, rank: int, seen: Seen) -> list[Array]:
        if rank == self.gather.run.rank:
            return [share[:, seen.keys] for share in self.own[seen.call.queries.start]]
        rows = slice(0, length(seen.keys))
        return [memory.own[:, rows] for memory in self._places[rank, seen.place]]

    def results(self, group: int, call: Call) -> list[Array]:
        """Arrays for dk and dv of a call."""
        return [share[:, :, : self.gather.groups[group]] for share in self.own[call.queries.start]]

    def _sums(self) -> list[tuple[slice, list[list[Array]]]]:
        landed = [one for rank in range(self.gather.run.size) for one in self.landing[rank]]
        ends = {0, self.gather.run.request.keys.local}.union(*((rows.start, rows.stop) for rows, _ in landed))
        found = []
        for part in (slice(*pair) for pair in itertools.pairwise(sorted(ends))):
            here = [
                [piece[:, part.start - rows.start : part.stop - rows.start] for piece in pieces]
                for rows, pieces in landed
                if rows.start <= part.start and part.stop <= rows.stop
            ]
            found.append((part, [[pieces[number] for pieces in here] for number in range(len(self.shapes))]))
        return found

    def send(self, group: int) -> None:
        """Queues the moves of the shares of a group to the owners of the keys."""
        gather = self.gather
        if group >= len(gather.slots):
            gather.mover.may_overwrite(Signal.ADDED, group)
        gather.mover.put(Signal.RETURNED, group, self._moves)
        self.sent = gather.mover.sent()

    def _moves(self, source: int, target: int, group: int) -> list[Move]:
        """The moves of the shares that `source` has for keys of `target`."""
        is_own, heads = source == self.gather.run.rank, self.gather.groups[group]
        return [
            (
                memory,
                (0, 0, 0, 0),
                self.own[seen.call.queries.start][number] if is_own else None,
                (0, seen.keys.start, 0, 0),
                (memory.shape[0], length(seen.keys), heads, memory.shape[3]),
            )
            for seen in seen_by(self.gather.sight, source, target)
            for number, memory in enumerate(self._places[source, seen.place])
        ]

    def add_up(self, group: int, targets: Sequence[Array]) -> None:
        """Queues the sums of a group on the caller's lane, in the order of the ranks, and their rounding."""
        gather, run = self.gather, self.gather.run
        gather.mover.arrived(run.main, Signal.RETURNED, group)
        if self.sent is not None:
            run.main.wait(self.sent)
        for part, shares in self.sums:
            for target, shares_of_target in zip(targets, shares, strict=True):
                own = [share[:, :, : target.shape[2]] for share in shares_of_target]
                run.main(sum_into, target[:, part], own, run.request.problem.accumulator_dtype)
        if group + len(gather.slots) < gather.count:
            gather.mover.release(run.main, Signal.ADDED, group + len(gather.slots))


class ExtraShares:
    """Gradients of biases, sinks and the arrays of score functions: each call's share, summed over a rank's calls."""

    def __init__(self, run: Run, gather: Gather, extra: Sequence[Array]):
        self.run, self.gather, self.extra = run, gather, extra
        names = [result.name for result in run.request.results[3:]]
        self.rows: dict[int, Array] = {}
        self.shares: dict[int, list[Array]] = {number: [] for number in range(len(extra))}
        if "dbias" in names and gather.of_heads.scores["bias"].shape[2] > 1:
            number = names.index("dbias")
            array = extra[number]
            self.rows[number] = array[(None,) * (4 - array.ndim)]
            run.main(clear, array)  # kernels do not write the elements of keys that no row of a call sees

    def of(self, call: Call) -> list[Array]:
        """Arrays for the results of a call."""
        heads = self.gather.q_heads(0)
        found = []
        for number, array in enumerate(self.extra):
            if number in self.rows:
                found.append(of_part(self.rows[number], heads, call.local, call.keys.stop))
                continue
            whole = self._of_call(number, array, call)
            found.append(whole)
        return found

    def _of_call(self, number: int, array: Array, call: Call) -> Array:
        name = self.run.request.results[3 + number].name
        share = self.run.empty(array.shape, array.dtype)
        self.shares[number].append(share)
        if name != "dbias":
            return share
        self.run.main(clear, share)
        self.run.side.wait(self.run.main.record())
        four = share[(None,) * (4 - share.ndim)]
        return of_part(four, self.gather.q_heads(0), call.local, call.keys.stop)

    def add_up(self) -> None:
        """Queues the sums over the calls of this rank, all of which the caller's lane has waited for."""
        wide = self.run.request.problem.accumulator_dtype
        for number, shares in self.shares.items():
            if shares:
                self.run.main(sum_into, self.extra[number], shares, wide)
