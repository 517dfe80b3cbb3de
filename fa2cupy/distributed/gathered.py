"""The calls of `gather`, and the messages that bring their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..problem.array_types import Array
from .copies import copy
from .lanes import Lane
from .operands import Operands
from .parts import Part, needs_place, of_part, over_scores, part_keywords
from .run import Run
from .schemes import is_positional
from .sums import clear

__all__ = ["Call", "Gather", "OfHeads", "Slot", "length"]

#: Rows of all query heads of a K/V head in a call, from which on q, do and dq do not stay in the L2 cache.
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
        The keys that these rows see. The call gets those before them, too, so that its tiles are those of the whole.
    """

    local: slice
    queries: slice
    keys: slice

    def seen(self, rows: slice) -> slice:
        """The part of a chunk of keys that the rows see."""
        start = max(rows.start, self.keys.start)
        return slice(start, max(start, min(rows.stop, self.keys.stop)))


class Slot(NamedTuple):
    """Memory of the keys of a group.

    Attributes
    ----------
    whole : list of ndarray, shape (batch, row, head, column)
        k and v.
    own : list of ndarray, shape (chunk, batch, row, head, column)
        This rank's k and v, to be sent.
    landing : list of list of ndarray, shape (chunk, batch, row, head, column)
        What comes from each rank. It is empty for a single sequence, whose messages arrive in `whole`.
    """

    whole: list[Array]
    own: list[Array]
    landing: list[list[Array]]


class OfHeads(NamedTuple):
    """What belongs to the heads of `Operands` that have not all heads of the whole sequence.

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
    """The calls of a rank, and the messages of its groups. Groups of several sizes are for copies alone.

    Attributes
    ----------
    groups : tuple of int
        The K/V heads of each.
    count : int
        Their number.
    widths : list of int
        The K/V heads that the memory of each slot has.
    """

    def __init__(self, run: Run, operands: Operands, of_heads: OfHeads | None):
        request = run.request
        self.run, self.operands = run, operands
        self.of_heads = of_heads or OfHeads(0, over_scores(request.keywords))
        self.groups = request.groups
        self.count = len(self.groups)
        self.ratio = operands.q.shape[2] // operands.k.shape[2]
        self.calls = [self.calls_of(rank) for rank in range(run.size)]
        self.widths = [max(self.groups[first::2]) for first in range(min(2, self.count))]
        self.prepare()
        self.slots = [self.slot(heads) for heads in self.widths]
        self.free: list[list[Any]] = [[] for _ in self.slots]
        self.places: dict[tuple[int, int], Array] = {}
        if needs_place(request.keywords, has_all_queries=False):
            for call in self.calls[run.rank]:
                for group in range(self.count):
                    self.places[group, call.queries.start] = run.place((self.first_head(group), call.queries.start))
        self.begin()

    def prepare(self) -> None:
        """Prepares the memory that messages arrive in."""

    def begin(self) -> None:
        """Lets messages wait for what the caller's lane has been given so far."""
        self.run.begin()

    def calls_of(self, rank: int) -> list[Call]:
        """The calls of any rank: all ranks know what the others need."""
        request = self.run.request
        problem, queries = request.problem, request.queries
        everything = slice(0, problem.seqlen_k)
        if not is_positional(problem):
            return [Call(slice(0, queries.local), slice(0, problem.seqlen_q), everything)]
        diagonal = problem.seqlen_k - problem.seqlen_q
        left, right = problem.band
        calls = []
        for local, rows in queries.chunks(rank):
            stop, start = problem.seqlen_k, 0
            if right is not None:
                stop = min(max(0, rows.stop + diagonal + right), stop)
            if left is not None:
                start = min(max(0, rows.start + diagonal - left), stop)
            calls.append(Call(local, rows, slice(start, stop)))
        return calls

    def slot(self, heads: int) -> Slot:
        """Memory of the keys of some heads."""
        run, arrays = self.run, (self.operands.k, self.operands.v)
        batch = len(self.operands.k)
        whole = [run.empty(*one) for one in self.wholes(heads)]
        self.clear(whole)

        def chunks() -> list[Array]:
            count = len(run.request.keys.chunks(run.rank))
            rows = run.request.keys.local // count
            return [run.empty((count, batch, rows, heads, x.shape[3]), x.dtype) for x in arrays]

        return Slot(whole, chunks(), [chunks() for _ in range(run.size)] if batch > 1 else [])

    def wholes(self, heads: int) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shapes and dtypes of the keys and values of some heads."""
        arrays, seqlen = (self.operands.k, self.operands.v), self.run.request.problem.seqlen_k
        return [((len(x), seqlen, heads, x.shape[3]), x.dtype) for x in arrays]

    @property
    def has_gaps(self) -> bool:
        """True if some keys may not be sent because no row sees them."""
        return self.run.request.problem.band[0] is not None

    def clear(self, whole: Sequence[Array]) -> None:
        """Clears keys if there are gaps. Kernels read some of these beside those that are sent: they must be finite."""
        if self.has_gaps:
            for array in whole:
                self.run.main(clear, array)

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
        """The calls of this rank with their lanes: the one with the most keys comes first, on the caller's."""
        calls = sorted(self.calls[self.run.rank], key=lambda call: -call.keys.stop)
        return list(zip(calls, (self.run.main, self.run.side), strict=False))

    def own_backward_calls(self) -> list[tuple[Call, Lane]]:
        """The same for a backward, whose long calls take turns on the caller's lane, the one with the most keys last.

        Blocks that begin together read the same query rows at the same time, all but the first of them from the cache.
        Where other kernels hold some multiprocessors at the beginning, blocks are apart until the kernel ends.
        """
        calls = self.own_calls()
        if self.ratio * max(length(call.local) for call, _ in calls) < _UNCACHED_ROWS:
            return calls
        return [(call, self.run.main) for call, _ in reversed(calls)]

    def fetch(self, group: int) -> Any:
        """Queues the messages with the keys of a group; returns the event of their arrival."""
        run, number = self.run, group % len(self.slots)
        slot = self.slots[number]
        for event in self.free[number]:
            run.comm.wait(event)
        for array, own in zip((self.operands.k, self.operands.v), slot.own, strict=True):
            count, _, rows, *columns = own.shape
            chunks = array[:, :, self.kv_heads(group)].reshape(len(array), count, rows, *columns)
            run.comm(copy, own, chunks.swapaxes(0, 1))
        order, sends, recvs = run.request.keys, [], []
        landed: list[tuple[Array, Array]] = []
        for step in range(run.size):
            to, source = (run.rank + step) % run.size, (run.rank - step) % run.size
            wanted = [i for i, chunk in enumerate(order.chunks(run.rank)) if self.sees(to, chunk.whole)]
            sends += [(own[i], to) for own in slot.own for i in wanted]
            seen = [(i, rows) for i, (_, rows) in enumerate(order.chunks(source)) if self.sees(run.rank, rows)]
            places = [whole[:, rows] for whole in slot.whole for _, rows in seen]
            if slot.landing:
                landings = [landing[i] for landing in slot.landing[source] for i, _ in seen]
                landed += zip(places, landings, strict=True)
                places = landings
            recvs += [(place, source) for place in places]
        run.exchange(sends, recvs)
        for place, landing in landed:
            run.comm(copy, place, landing)
        return run.comm.record()

    def sees(self, rank: int, rows: slice) -> bool:
        """True if a rank sees some of the keys of a chunk."""
        return any(length(call.seen(rows)) for call in self.calls[rank])

    def keys(self, group: int, call: Call) -> tuple[Array, Array]:
        """The keys and values of a group for a call."""
        k, v = (x[:, : call.keys.stop, : self.groups[group]] for x in self.slots[group % len(self.slots)].whole)
        return k, v

    def keywords(self, group: int, call: Call) -> dict[str, Any]:
        """The keywords of features for a call."""
        request, heads, first = self.run.request, self.q_heads(group), self.first_head(group)
        part = Part(slice(first, first + length(heads)), call.queries, call.keys.stop)
        scores = {name: of_part(x, heads, call.local, part.keys) for name, x in self.of_heads.scores.items()}
        place = self.places.get((group, call.queries.start))
        return part_keywords(request.problem, request.keywords, part, scores, place)


def length(rows: slice) -> int:
    """The number of rows, or of heads."""
    return rows.stop - rows.start
