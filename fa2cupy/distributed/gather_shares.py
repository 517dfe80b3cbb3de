"""Shares of gradients of `gather`: those of keys, which go to their owners, and those of the arrays of features."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..problem.array_types import Array
from .copies import copy
from .gathered import Call, Gather, length
from .parts import of_part
from .run import Run
from .sums import clear, sum_into

__all__ = ["ExtraShares", "Seen", "Shares"]


class Seen(NamedTuple):
    """What a call of a rank sees of a chunk of an owner's keys.

    Attributes
    ----------
    call : Call
    keys : slice
        In the whole sequence.
    rows : slice
        The same keys among the owner's rows.
    place : tuple of int
        The numbers of the call and of the chunk.
    """

    call: Call
    keys: slice
    rows: slice
    place: tuple[int, int]


class Shares:
    """Shares of dk and dv of one group: those of this rank's calls, and those that other ranks send.

    Parameters
    ----------
    gather : Gather
    heads : int
        K/V heads that its memory has, of which a group takes the first ones.

    Attributes
    ----------
    own : dict of list of ndarray
        dk and dv of each call, by its first query, of the keys from the first one on.
    landing : dict of list of (slice, list of ndarray)
        For each rank the shares of its calls: which of this rank's rows they are of, and dk and dv.
    sums : list of (slice, list of list of ndarray)
        For all parts of this rank's rows the shares of dk, and those of dv, in the order of the ranks.
    sent : event or None
        The last group's shares have been read; where messages bring them, those of the other ranks are here.
    """

    def __init__(self, gather: Gather, heads: int):
        run, operands = gather.run, gather.operands
        self.gather = gather
        self.shapes = [(len(x), heads, x.shape[3]) for x in (operands.k, operands.v)]
        self.own = {
            call.queries.start: [run.empty((b, call.keys.stop, h, d), operands.k.dtype) for b, h, d in self.shapes]
            for call in gather.calls[run.rank]
        }
        self.landing = {
            rank: [(seen.rows, self._pieces(rank, seen)) for seen in self.seen(rank, run.rank)]
            for rank in range(run.size)
        }
        self.sums = self._sums()
        self.sent: Any = None
        self.prepare()

    def prepare(self) -> None:
        """Makes the arrays that are sent to each other rank: copies of the shares of several sequences."""
        run = self.gather.run
        self.outgoing: dict[int, list[tuple[Array, Array]]] = {}
        for to in range(run.size):
            if to != run.rank:
                shares = [
                    x[:, seen.keys] for seen in self.seen(run.rank, to) for x in self.own[seen.call.queries.start]
                ]
                self.outgoing[to] = [(x, x if x.flags.c_contiguous else run.empty(x.shape, x.dtype)) for x in shares]

    def seen(self, rank: int, owner: int) -> list[Seen]:
        """What the calls of a rank see of the keys of an owner."""
        found = []
        for i, call in enumerate(self.gather.calls[rank]):
            for j, chunk in enumerate(self.gather.run.request.keys.chunks(owner)):
                keys, shift = call.seen(chunk.whole), chunk.whole.start - chunk.local.start
                if length(keys):
                    found.append(Seen(call, keys, slice(keys.start - shift, keys.stop - shift), (i, j)))
        return found

    def _pieces(self, rank: int, seen: Seen) -> list[Array]:
        if rank == self.gather.run.rank:
            return [share[:, seen.keys] for share in self.own[seen.call.queries.start]]
        return self.arriving(rank, seen)

    def arriving(self, rank: int, seen: Seen) -> list[Array]:
        """Memory for shares that a rank sends."""
        run, dtype = self.gather.run, self.gather.operands.k.dtype
        return [run.empty((b, length(seen.keys), h, d), dtype) for b, h, d in self.shapes]

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
        """Queues the messages with the shares of a group to the owners of the keys."""
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
        self.sent = run.comm.record()

    def add_up(self, group: int, targets: Sequence[Array]) -> None:
        """Queues the sums of a group on the caller's lane, in the order of the ranks, and their rounding."""
        run = self.gather.run
        run.main.wait(self.sent)
        for part, shares in self.sums:
            for target, shares_of_target in zip(targets, shares, strict=True):
                own = [share[:, :, : target.shape[2]] for share in shares_of_target]
                run.main(sum_into, target[:, part], own, run.request.problem.accumulator_dtype)


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
        """Queues the sums over the calls of this rank, all of which the caller's lane has waited for."""
        wide = self.run.request.problem.accumulator_dtype
        for number, shares in self.shares.items():
            if shares:
                self.run.main(sum_into, self.extra[number], shares, wide)
