"""The calls of `gather`, and the moves that bring their keys."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...problem.array_types import Array
from ..call.choice import is_positional
from ..call.operands import Operands
from ..call.orders import RowOrder, length
from ..call.parts import Part, needs_place, of_part, over_scores, part_keywords
from ..call.run import Run
from ..local.lanes import Lane
from ..local.sums import clear
from ..movers.move import Move, Mover, Shape
from ..transport.windows import Signal

__all__ = ["Call", "Gather", "OfHeads", "Seen", "seen_by"]

#: If a call has so many rows, over all query heads of a K/V head, q, do and dq do not stay in the L2 cache.
_UNCACHED_ROWS = 1 << 16


class Call(NamedTuple):
    """One attention call of a group.

    Attributes
    ----------
    local : slice
        This rank's rows.
    queries : slice
        The same rows in the whole sequence; all queries where positions do not matter.
    keys : slice
        The keys that these rows see. The call also gets the keys before them, so that key tiles begin where they do in
        one call on the whole sequence.
    """

    local: slice
    queries: slice
    keys: slice

    def seen(self, rows: slice) -> slice:
        """The part of a chunk of keys that the rows see."""
        start = max(rows.start, self.keys.start)
        return slice(start, max(start, min(rows.stop, self.keys.stop)))


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


class Sight(NamedTuple):
    """All that decides which keys the queries of a rank see.

    Attributes
    ----------
    queries, keys : RowOrder
    band : tuple of (int or None)
        Number of visible keys left and right of the diagonal; None is no limit.
    is_positional : bool
        False if results do not depend on the positions of queries.
    """

    queries: RowOrder
    keys: RowOrder
    band: tuple[int | None, int | None]
    is_positional: bool


@functools.lru_cache(maxsize=4096)
def calls_of(sight: Sight, rank: int) -> tuple[Call, ...]:
    """The calls of any rank: all ranks know what the others need."""
    queries, seqlen_k = sight.queries, sight.keys.seqlen
    if not sight.is_positional:
        return (Call(slice(0, queries.local), slice(0, queries.seqlen), slice(0, seqlen_k)),)
    diagonal = seqlen_k - queries.seqlen
    left, right = sight.band
    calls = []
    for local, rows in queries.chunks(rank):
        stop, start = seqlen_k, 0
        if right is not None:
            stop = min(max(0, rows.stop + diagonal + right), stop)
        if left is not None:
            start = min(max(0, rows.start + diagonal - left), stop)
        calls.append(Call(local, rows, slice(start, stop)))
    return tuple(calls)


@functools.lru_cache(maxsize=4096)
def seen_by(sight: Sight, rank: int, owner: int) -> tuple[Seen, ...]:
    """What the calls of a rank see of the keys of an owner."""
    found = []
    for i, call in enumerate(calls_of(sight, rank)):
        for j, chunk in enumerate(sight.keys.chunks(owner)):
            keys, shift = call.seen(chunk.whole), chunk.whole.start - chunk.local.start
            if length(keys):
                found.append(Seen(call, keys, slice(keys.start - shift, keys.stop - shift), (i, j)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def share_places(sight: Sight) -> tuple[tuple[int, tuple[int, int]], ...]:
    """All shares that go to another rank: the rank that computes them, and the numbers of the call and the chunk."""
    ranks = range(sight.keys.size)
    return tuple(
        (rank, place)
        for rank in ranks
        for place in sorted({one.place for owner in ranks if owner != rank for one in seen_by(sight, rank, owner)})
    )


class OfHeads(NamedTuple):
    """Which heads `Operands` have, if these are some of all heads, and what belongs to them.

    Attributes
    ----------
    first : int
        The first query head, among all.
    scores : mapping of str to ndarray
        Their biases and masks, with the axes (batch, head, query, key).
    """

    first: int
    scores: Mapping[str, Array]


class Gather:
    """The calls of a rank, and the moves of the keys of its groups.

    Groups use two slots of memory in turn: a group has the slot of the group two before it.

    Parameters
    ----------
    run : Run
    mover : Mover
    operands : Operands
    of_heads : OfHeads or None
    has_shares : bool
        True in a backward, whose calls have shares of the gradients of other ranks' keys.

    Attributes
    ----------
    groups : tuple of int
        The number of K/V heads of each group.
    count : int
        The number of groups.
    widths : list of int
        The number of K/V heads that each slot has room for.
    slots, landings : list of list of Memory
        k and v of each slot, and its shares of dk and dv for each of `share_places`.
    sight : Sight
    calls : tuple of Call
        Those of this rank.
    seen_here : list of tuple of Seen
        What the calls of each rank see of this rank's keys, in a backward.
    share_places : tuple of (int, (int, int))
        Those of `share_places`, in a backward.
    """

    def __init__(self, run: Run, mover: Mover, operands: Operands, of_heads: OfHeads | None, has_shares: bool = False):
        self.run, self.mover, request = run, mover, run.request
        self.operands = operands
        self.of_heads = of_heads or OfHeads(0, over_scores(request.keywords))
        self.groups = request.groups
        self.count = len(self.groups)
        self.ratio = operands.q.shape[2] // operands.k.shape[2]
        problem = request.problem
        self.sight = Sight(request.queries, request.keys, problem.band, is_positional(problem))
        self.calls = calls_of(self.sight, run.rank)
        self.widths = [max(self.groups[first::2]) for first in range(min(2, self.count))]
        self._sources = [mover.source(x) for x in (operands.k, operands.v)]
        self.share_places = share_places(self.sight) if has_shares else ()
        self.seen_here = [seen_by(self.sight, rank, run.rank) for rank in range(run.size)] if has_shares else []
        shapes = [shape for kind in (self._keys, self._landings) for heads in self.widths for shape in kind(heads)]
        memories = iter(mover.begin(shapes, (), self.count)[0])
        self.slots = [[next(memories) for _ in range(2)] for _ in self.widths]
        self.landings = [[next(memories) for _ in range(2 * len(self.share_places))] for _ in self.widths]
        # Some keys are not sent because no row sees them. Kernels read them beside others: they must be finite.
        has_gaps = problem.band[0] is not None
        for memory in (memory for slot in self.slots for memory in slot if has_gaps):
            run.main(clear, memory.own)
        self.free: list[list[Any]] = [[] for _ in self.slots]
        self.places: dict[tuple[int, int], Array] = {}
        if needs_place(request.keywords, has_all_queries=False):
            for call in self.calls:
                for group in range(self.count):
                    self.places[group, call.queries.start] = run.place((self.first_head(group), call.queries.start))
        mover.enter(run.back, cleared=has_gaps)

    def _keys(self, heads: int) -> list[Shape]:
        """Shapes and dtypes of the keys and values of some heads."""
        arrays, seqlen = (self.operands.k, self.operands.v), self.run.request.problem.seqlen_k
        return [Shape((len(x), seqlen, heads, x.shape[3]), x.dtype) for x in arrays]

    def _landings(self, heads: int) -> list[Shape]:
        """Shapes and dtypes of the shares of some heads: dk and dv for each of the places."""
        rows = length(self.run.request.keys.chunks(0)[0].local)
        arrays = (self.operands.k, self.operands.v)
        arriving = {(rank, one.place) for rank, found in enumerate(self.seen_here) for one in found}
        return [
            Shape((len(x), rows, heads, x.shape[3]), x.dtype, place in arriving)
            for place in self.share_places
            for x in arrays
        ]

    def kv_heads(self, group: int) -> slice:
        """The K/V heads of a group."""
        first = sum(self.groups[:group])
        return slice(first, first + self.groups[group])

    def q_heads(self, group: int) -> slice:
        """The query heads of a group."""
        heads = self.kv_heads(group)
        return slice(self.ratio * heads.start, self.ratio * heads.stop)

    def first_head(self, group: int) -> int:
        """The first query head of a group, among those of the call on the whole sequence."""
        return self.of_heads.first + self.q_heads(group).start

    def own_calls(self) -> list[tuple[Call, Lane]]:
        """The calls of this rank with their lanes: the one with the most keys comes first, on the caller's lane."""
        calls = sorted(self.calls, key=lambda call: -call.keys.stop)
        return list(zip(calls, (self.run.main, self.run.side), strict=False))

    def own_backward_calls(self) -> list[tuple[Call, Lane]]:
        """The same for a backward. Long calls follow each other on the caller's lane, the one with the most keys last.

        Blocks that begin together read the same query rows at the same time, all but the first of them from the cache.
        If other kernels hold some multiprocessors at the beginning, blocks do not begin together, and stay out of step
        until the kernel ends.
        """
        calls = self.own_calls()
        if self.ratio * max(length(call.local) for call, _ in calls) < _UNCACHED_ROWS:
            return calls
        return [(call, self.run.main) for call, _ in reversed(calls)]

    def fetch(self, group: int) -> Any:
        """Queues the moves of the keys of a group; returns the event of their arrival."""
        run, mover, free = self.run, self.mover, self.free[group % len(self.slots)]
        for event in free:
            run.comm.wait(event)
            run.back.wait(event)
        if free:
            mover.release(run.comm, Signal.USED, group)
            mover.may_overwrite(Signal.USED, group)
        mover.put(Signal.SENT, group, self._moves)
        mover.keep(run.back, Signal.SENT, group, self._moves)
        mover.arrived(run.back, Signal.SENT, group)
        return run.back.record()

    def _moves(self, source: int, target: int, group: int) -> list[Move]:
        """The moves of the keys of `source` that `target` sees."""
        heads, slot = self.kv_heads(group), self.slots[group % len(self.slots)]
        numbers = {number for *_, (_, number) in seen_by(self.sight, target, source)}
        seen = [chunk for number, chunk in enumerate(self.sight.keys.chunks(source)) if number in numbers]
        return [
            (
                memory,
                (0, chunk.whole.start, 0, 0),
                array,
                (0, chunk.local.start, heads.start, 0),
                (len(array), length(chunk.local), length(heads), array.shape[3]),
            )
            for memory, array in zip(slot, self._sources, strict=True)
            for chunk in seen
        ]

    def keys(self, group: int, call: Call) -> tuple[Array, Array]:
        """The keys and values of a group for a call."""
        slot = self.slots[group % len(self.slots)]
        k, v = (memory.own[:, : call.keys.stop, : self.groups[group]] for memory in slot)
        return k, v

    def keywords(self, group: int, call: Call) -> dict[str, Any]:
        """The keywords of features for a call."""
        request, heads, first = self.run.request, self.q_heads(group), self.first_head(group)
        part = Part(slice(first, first + length(heads)), call.queries, call.keys.stop)
        scores = {name: of_part(x, heads, call.local, part.keys) for name, x in self.of_heads.scores.items()}
        place = self.places.get((group, call.queries.start))
        return part_keywords(request.problem, request.keywords, part, scores, place)
