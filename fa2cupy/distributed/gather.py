"""All-gather of keys and values, a group of heads at a time (Llama 3, 2024).

Each of a rank's chunks of queries meets all keys that it sees in one call, aligned to the bottom right: the chunk that
ends at query `stop` gets the keys up to ``stop + seqlen_k - seqlen_q``. Nothing is merged, so that o and lse are those
of one call on the whole sequence. A rank's shares of dk and dv go to their owner as they are, and are summed there
once, in the dtype of lse and in the order of the ranks.

The messages of the next two groups are queued before the kernels of a group. The two calls of a group are on two lanes,
where each fills the multiprocessors that the other one leaves idle at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..problem.array_types import Array
from .copies import copy
from .lanes import Lane
from .operands import Operands
from .parts import Part, needs_place, of_part, over_scores, part_keywords
from .run import Run
from .schemes import is_positional
from .sums import add, clear, store, sum_into

__all__ = ["OfHeads", "backward", "forward"]


class _Call(NamedTuple):
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


class _Slot(NamedTuple):
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


class _Gather:
    """The calls of a rank, and the messages of its groups."""

    def __init__(self, run: Run, operands: Operands, of_heads: OfHeads | None):
        request = run.request
        self.run, self.operands = run, operands
        self.of_heads = of_heads or OfHeads(0, over_scores(request.keywords))
        self.count = request.groups
        self.heads_kv = operands.k.shape[2] // self.count
        self.heads = operands.q.shape[2] // self.count
        self.calls = [self.calls_of(rank) for rank in range(run.size)]
        self.slots = [self._slot() for _ in range(min(2, self.count))]
        self.free: list[list[Any]] = [[] for _ in self.slots]
        self.places: dict[tuple[int, int], Array] = {}
        if needs_place(request.keywords, has_all_queries=False):
            for call in self.calls[run.rank]:
                for group in range(self.count):
                    self.places[group, call.queries.start] = run.place((self.first_head(group), call.queries.start))
        run.begin()

    def calls_of(self, rank: int) -> list[_Call]:
        """The calls of any rank: all ranks know what the others need."""
        request = self.run.request
        problem, queries = request.problem, request.queries
        everything = slice(0, problem.seqlen_k)
        if not is_positional(problem):
            return [_Call(slice(0, queries.local), slice(0, problem.seqlen_q), everything)]
        diagonal = problem.seqlen_k - problem.seqlen_q
        left, right = problem.band
        calls = []
        for local, rows in queries.chunks(rank):
            stop, start = problem.seqlen_k, 0
            if right is not None:
                stop = min(max(0, rows.stop + diagonal + right), stop)
            if left is not None:
                start = min(max(0, rows.start + diagonal - left), stop)
            calls.append(_Call(local, rows, slice(start, stop)))
        return calls

    def _slot(self) -> _Slot:
        """Keys that no row sees are not sent. Kernels read some of them beside those that are: they must be finite."""
        run, arrays = self.run, (self.operands.k, self.operands.v)
        seqlen, batch = run.request.problem.seqlen_k, len(self.operands.k)
        whole = [run.empty((batch, seqlen, self.heads_kv, x.shape[3]), x.dtype) for x in arrays]
        if run.request.problem.band[0] is not None:
            for array in whole:
                run.main(clear, array)

        def chunks() -> list[Array]:
            count = len(run.request.keys.chunks(run.rank))
            rows = run.request.keys.local // count
            return [run.empty((count, batch, rows, self.heads_kv, x.shape[3]), x.dtype) for x in arrays]

        return _Slot(whole, chunks(), [chunks() for _ in range(run.size)] if batch > 1 else [])

    def kv_heads(self, group: int) -> slice:
        """The K/V heads of a group."""
        return slice(group * self.heads_kv, (group + 1) * self.heads_kv)

    def q_heads(self, group: int) -> slice:
        """The query heads of a group."""
        return slice(group * self.heads, (group + 1) * self.heads)

    def first_head(self, group: int) -> int:
        """The first query head of a group, among those of the call on the whole sequence."""
        return self.of_heads.first + group * self.heads

    def own_calls(self) -> list[tuple[_Call, Lane]]:
        """The calls of this rank with their lanes: the one with the most keys comes first, on the caller's."""
        calls = sorted(self.calls[self.run.rank], key=lambda call: -call.keys.stop)
        return list(zip(calls, (self.run.main, self.run.side), strict=False))

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
        order, sends, recvs, landed = run.request.keys, [], [], []
        for step in range(run.size):
            to, source = (run.rank + step) % run.size, (run.rank - step) % run.size
            wanted = [i for i, chunk in enumerate(order.chunks(run.rank)) if self._sees(to, chunk.whole)]
            sends += [(own[i], to) for own in slot.own for i in wanted]
            for number, whole in enumerate(slot.whole):
                for i, (_, rows) in enumerate(order.chunks(source)):
                    if not self._sees(run.rank, rows):
                        continue
                    place = whole[:, rows]
                    if slot.landing:
                        landed.append((place, slot.landing[source][number][i]))
                    recvs.append((landed[-1][1] if slot.landing else place, source))
        run.exchange(sends, recvs)
        for place, landing in landed:
            run.comm(copy, place, landing)
        return run.comm.record()

    def _sees(self, rank: int, rows: slice) -> bool:
        return any(_length(call.seen(rows)) for call in self.calls[rank])

    def keys(self, group: int, call: _Call) -> tuple[Array, Array]:
        """The keys and values of a group for a call."""
        k, v = self.slots[group % len(self.slots)].whole
        return k[:, : call.keys.stop], v[:, : call.keys.stop]

    def keywords(self, group: int, call: _Call) -> dict[str, Any]:
        """The keywords of features for a call."""
        request, heads, first = self.run.request, self.q_heads(group), self.first_head(group)
        part = Part(slice(first, first + self.heads), call.queries, call.keys.stop)
        scores = {name: of_part(x, heads, call.local, part.keys) for name, x in self.of_heads.scores.items()}
        place = self.places.get((group, call.queries.start))
        return part_keywords(request.problem, request.keywords, part, scores, place)


def _length(rows: slice) -> int:
    return rows.stop - rows.start


def forward(run: Run, operands: Operands, out: Sequence[Array], of_heads: OfHeads | None = None) -> None:
    """Computes o and lse of this rank's rows."""
    gather = _Gather(run, operands, of_heads)
    o, lse = out
    arrived = [gather.fetch(group) for group in range(len(gather.slots))]
    for group in range(gather.count):
        heads, computed = gather.q_heads(group), []
        for call, lane in gather.own_calls():
            # Kernels take contiguous statistics alone.
            statistics = run.empty((len(lse), gather.heads, _length(call.local)), lse.dtype)
            lane.wait(arrived[group])
            inputs = (operands.q[:, call.local, heads], *gather.keys(group, call))
            run.forward(lane, inputs, (o[:, call.local, heads], statistics), gather.keywords(group, call))
            computed.append(lane.record())
            lane(copy, lse[:, heads, call.local], statistics)
        gather.free[group % len(gather.slots)] = computed
        if group + 2 < gather.count:
            arrived.append(gather.fetch(group + 2))


class _Shares:
    """Shares of dk and dv of one group: those of this rank's calls, and those that other ranks send."""

    def __init__(self, gather: _Gather):
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

    def _seen(self, rank: int, owner: int) -> list[tuple[_Call, slice, int]]:
        """What calls of a rank see of the keys of an owner: the call, the rows, and how far they lie from its own."""
        return [
            (call, seen, chunk.whole.start - chunk.local.start)
            for call in self.gather.calls[rank]
            for chunk in self.gather.run.request.keys.chunks(owner)
            if _length(seen := call.seen(chunk.whole))
        ]

    def _pieces(self, rank: int, call: _Call, seen: slice) -> list[Array]:
        run = self.gather.run
        if rank == run.rank:
            return [share[:, seen] for share in self.own[call.queries.start]]
        dtype = self.gather.operands.k.dtype
        return [run.empty((b, _length(seen), h, d), dtype) for b, h, d in self.shapes]

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


def backward(run: Run, operands: Operands, out: Sequence[Array], of_heads: OfHeads | None = None) -> None:
    """Computes dq, dk and dv of this rank's rows, and this rank's shares of the gradients of features."""
    gather = _Gather(run, operands, of_heads)
    dq, dk, dv, *extra = out
    arrived = [gather.fetch(group) for group in range(len(gather.slots))]
    delta = operands.row_delta(run)
    own = _ExtraShares(run, gather, extra)
    run.side.wait(run.main.record())
    shares = [_Shares(gather) for _ in gather.slots]
    o, lse, do = operands.of_backward
    for group in range(gather.count):
        heads, computed = gather.q_heads(group), []
        share = shares[group % len(shares)]
        for call, lane in gather.own_calls():
            statistics = [run.empty((len(delta), gather.heads, _length(call.local)), delta.dtype) for _ in range(2)]
            lane.wait(arrived[group])
            if share.sent is not None:
                lane.wait(share.sent)
            for copied, whole in zip(statistics, (lse, delta), strict=True):
                lane(copy, copied, whole[:, heads, call.local])
            own_q, own_o, own_do = (x[:, call.local, heads] for x in (operands.q, o, do))
            inputs = (own_q, *gather.keys(group, call), own_o, statistics[0], own_do)
            results = (dq[:, call.local, heads], *share.own[call.queries.start], *own.of(call))
            run.backward(lane, inputs, statistics[1], results, gather.keywords(group, call))
            computed.append(lane.record())
        gather.free[group % len(gather.slots)] = computed
        if group + 2 < gather.count:
            arrived.append(gather.fetch(group + 2))
        for event in computed:
            run.comm.wait(event)
        share.send()
        share.add_up([x[:, :, gather.kv_heads(group)] for x in (dk, dv)])
    own.add_up()


class _ExtraShares:
    """Gradients of biases, sinks and the arrays of score functions: each call's share, summed over a rank's calls."""

    def __init__(self, run: Run, gather: _Gather, extra: Sequence[Array]):
        self.run, self.gather, self.extra = run, gather, extra
        names = [result.name for result in run.request.results[3:]]
        self.rows: dict[int, Array] = {}
        self.shares: dict[int, list[Array]] = {number: [] for number in range(len(extra))}
        if "dbias" in names and gather.of_heads.scores["bias"].shape[2] > 1:
            number = names.index("dbias")
            array = extra[number]
            self.rows[number] = array[(None,) * (4 - array.ndim)]
            run.main(clear, array)  # elements of keys that no row of a call sees are not written

    def of(self, call: _Call) -> list[Array]:
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

    def _of_call(self, number: int, array: Array, call: _Call) -> Array:
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
