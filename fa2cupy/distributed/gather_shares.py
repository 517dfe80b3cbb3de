"""Shares of gradients of `gather`: those of keys, which go to their owners, and those of the arrays of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..problem.array_types import Array
from .copies import copy
from .gathered import Call, Gather, length
from .parts import of_part
from .run import Run
from .sums import add, clear, store, sum_into

__all__ = ["ExtraShares", "Shares"]


class Shares:
    """Shares of dk and dv of one group: those of this rank's calls, and those that other ranks send."""

    def __init__(self, gather: Gather):
        run, operands = gather.run, gather.operands
        self.gather = gather
        self.shapes = [(len(x), gather.heads_kv, x.shape[3]) for x in (operands.k, operands.v)]
        self.own = {
            call.queries.start: [run.empty((b, call.keys.stop, h, d), operands.k.dtype) for b, h, d in self.shapes]
            for call in gather.calls[run.rank]
        }
        # For each rank and each of its calls, the part of each of my chunks that it sees: where it lies among my rows.
        self.landing: dict[int, list[tuple[slice, list[Array]]]] = {}
        for rank in range(run.size):
            self.landing[rank] = [
                (slice(seen.start - shift, seen.stop - shift), self._pieces(rank, call, seen))
                for call, seen, shift in self._seen(rank, run.rank)
            ]
        # Shares for each other rank, and the contiguous arrays that are sent: copies if there are several sequences.
        self.outgoing: dict[int, list[tuple[Array, Array]]] = {}
        for to in range(run.size):
            if to != run.rank:
                seen_of = self._seen(run.rank, to)
                shares = [share[:, seen] for call, seen, _ in seen_of for share in self.own[call.queries.start]]
                self.outgoing[to] = [(x, x if x.flags.c_contiguous else run.empty(x.shape, x.dtype)) for x in shares]
        wide = run.request.problem.accumulator_dtype
        rows = run.request.keys.local
        self.sums = [run.empty((b, rows, h, d), wide) for b, h, d in self.shapes]
        self.sent: Any = None

    def _seen(self, rank: int, owner: int) -> list[tuple[Call, slice, int]]:
        """What calls of a rank see of the keys of an owner: the call, the rows, and how far they lie from its own."""
        return [
            (call, seen, chunk.whole.start - chunk.local.start)
            for call in self.gather.calls[rank]
            for chunk in self.gather.run.request.keys.chunks(owner)
            if length(seen := call.seen(chunk.whole))
        ]

    def _pieces(self, rank: int, call: Call, seen: slice) -> list[Array]:
        run = self.gather.run
        if rank == run.rank:
            return [share[:, seen] for share in self.own[call.queries.start]]
        dtype = self.gather.operands.k.dtype
        return [run.empty((b, length(seen), h, d), dtype) for b, h, d in self.shapes]

    def send(self) -> None:
        """Queues the messages with shares to the owners of the keys."""
        run = self.gather.run
        sends, recvs = [], []
        for step in range(1, run.size):
            to, source = (run.rank + step) % run.size, (run.rank - step) % run.size
            for share, packed in self.outgoing[to]:
                if packed is not share:
                    run.comm(copy, packed, share)
                sends.append((packed, to))
            recvs += [(piece, source) for _, pieces in self.landing[source] for piece in pieces]
        run.exchange(sends, recvs)

    def add_up(self, targets: Sequence[Array]) -> None:
        """Queues the sums, in the order of the ranks, and their rounding."""
        lane = self.gather.run.comm
        for number, (total, target) in enumerate(zip(self.sums, targets, strict=True)):
            lane(clear, total)
            for rank in range(self.gather.run.size):
                for rows, pieces in self.landing[rank]:
                    lane(add, total[:, rows], pieces[number])
            lane(store, target, total)
        self.sent = lane.record()


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
            run.main(clear, array)  # elements of keys that no row of a call sees are not written

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
        """Queues the sums over the calls of this rank."""
        self.run.main.wait(self.run.side.record())
        wide = self.run.request.problem.accumulator_dtype
        for number, shares in self.shares.items():
            if shares:
                self.run.main(sum_into, self.extra[number], shares, wide)
