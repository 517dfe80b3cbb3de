"""All-to-all over heads (DeepSpeed-Ulysses, Jacobs et al. 2023): each rank gets all rows of its share of the heads.

A rank makes one call on the whole sequence for each group of its heads, so that all results but gradients of features
are the ones of one call, bit for bit. While one group is computed, the messages of another one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..problem.array_types import Array
from .copies import copy
from .lanes import Lane
from .operands import Operands
from .orders import RowOrder
from .parts import Part, needs_place, of_part, over_scores, part_keywords
from .run import Run
from .schemes import neighbours
from .sums import clear, sum_into

__all__ = ["Batch", "HeadShares", "Heads", "backward", "forward"]

_Pairs = list[tuple[Array, int]]


class Batch:
    """A group of messages, and the copies that follow their arrival."""

    def __init__(self, run: Run):
        self._run = run
        self._sends: _Pairs = []
        self._recvs: _Pairs = []
        self._after: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def message(self, sends: Callable[[int], Sequence[Array]], recvs: Callable[[int], Sequence[Array]]) -> None:
        """Adds messages between all ranks: arrays for a rank, and arrays for what it sends."""
        rank, size = self._run.rank, self._run.size
        for step in range(size):
            to, source = (rank + step) % size, (rank - step) % size
            self._sends += [(array, to) for array in sends(to)]
            self._recvs += [(array, source) for array in recvs(source)]

    def then(self, function: Callable[..., None], *args: Any) -> None:
        """Adds a call that follows the arrival."""
        self._after.append((function, args))

    def queue(self) -> Any:
        """Queues it all; returns the event of its end."""
        run = self._run
        run.exchange(self._sends, self._recvs)
        for function, args in self._after:
            run.comm(function, *args)
        return run.comm.record()


class Heads:
    """The groups of heads of a rank, and how arrays get from rows to heads and back.

    The heads of a rank are neighbours, and so are those of one of its groups.

    Parameters
    ----------
    run : Run
    operands : Operands
    groups : sequence of slice, optional
        The query heads of each group, among those of a rank: whole groups of query heads that share a K/V head, or some
        of one of these. By default, those of the K/V heads of the request's groups.

    Attributes
    ----------
    groups : sequence of slice
    count : int
        Number of groups.
    ratio : int
        Query heads of a K/V head.
    """

    def __init__(self, run: Run, operands: Operands, groups: Sequence[slice] | None = None):
        request = run.request
        self.run, self.operands = run, operands
        self.ratio = operands.q.shape[2] // operands.k.shape[2]
        self.groups = groups or neighbours([self.ratio * heads for heads in request.groups])
        self.count = len(self.groups)
        self.scores = over_scores(request.keywords)
        self.rows_of_scores = {
            name for name, x in self.scores.items() if x.shape[2] > 1 and not request.problem.is_packed
        }
        self.places: list[Array | None] = [None] * self.count
        if needs_place(request.keywords, has_all_queries=True):
            self.places = [run.place((self.q_heads(run.rank, group).start, 0)) for group in range(self.count)]

    def q_heads(self, rank: int, group: int) -> slice:
        """The query heads of a group of a rank."""
        first, heads = rank * self.groups[-1].stop, self.groups[group]
        return slice(first + heads.start, first + heads.stop)

    def _by_rank(self, array: Array, axis: int, group: int) -> Array:
        """A view of the heads of a group of all ranks, with the axis of ranks in front, for groups of one size."""
        per = array.shape[axis] // (self.run.size * self.count)
        shape = (*array.shape[:axis], self.run.size, self.count, per, *array.shape[axis + 1 :])
        divided = array.reshape(shape)[(slice(None),) * (axis + 1) + (group,)]
        return divided.transpose(axis, *(i for i in range(divided.ndim) if i != axis))

    def _order(self, is_keys: bool) -> RowOrder:
        return self.run.request.keys if is_keys else self.run.request.queries

    # -- from rows to heads

    def rows(self, batch: Batch, array: Array, group: int, is_keys: bool) -> Array:
        """All rows of this rank's heads of q, k, v or do: (batch, row, head, column)."""
        run, order = self.run, self._order(is_keys)
        view = self._by_rank(array, 2, group)
        if view.shape[1] != 1:
            return self._landed(batch, view, 1, order)
        packed = run.empty(view.shape, array.dtype)
        run.comm(copy, packed, view)
        whole = run.empty((1, order.seqlen, *view.shape[3:]), array.dtype)
        own = order.chunks(run.rank)
        batch.message(
            lambda to: [packed[to, 0, chunk.local] for chunk in own],
            lambda source: [whole[0, chunk.whole] for chunk in order.chunks(source)],
        )
        return whole

    def statistics(self, batch: Batch, array: Array, group: int) -> Array:
        """All rows of this rank's heads of lse or delta: (batch, head, row)."""
        return self._landed(batch, self._by_rank(array, 1, group), 2, self.run.request.queries)

    def over_scores(self, batch: Batch, name: str, group: int) -> Array:
        """All rows of this rank's heads of a bias or a mask: (batch, head, query, key)."""
        array, heads = self.scores[name], self.q_heads(self.run.rank, group)
        if name not in self.rows_of_scores:
            return of_part(array, heads, slice(0, array.shape[2]), array.shape[3])
        if array.shape[1] > 1:
            view = self._by_rank(array, 1, group)
        else:
            view = self.run.xp.broadcast_to(array, (self.run.size, *array.shape))
        return self._landed(batch, view, 2, self.run.request.queries)

    def _landed(self, batch: Batch, view: Array, axis: int, order: RowOrder) -> Array:
        """Sends element `r` of a view to rank `r`, and puts together what comes along an axis of its elements.

        This is one message to each rank, whatever the lengths of the axes in front. Where there are none, messages can
        arrive in their places.
        """
        run, shape = self.run, view.shape[1:]
        packed = run.empty(view.shape, view.dtype)
        run.comm(copy, packed, view)
        landing = run.empty(view.shape, view.dtype)
        whole = run.empty((*shape[:axis], order.seqlen, *shape[axis + 1 :]), view.dtype)
        batch.message(lambda to: [packed[to]], lambda source: [landing[source]])
        for chunks, local in order.by_rank(whole, axis):
            batch.then(copy, chunks, landing[(slice(None),) * (axis + 1) + (local,)])
        return whole

    # -- from heads to rows

    def return_rows(self, batch: Batch, whole: Array, target: Array, group: int, is_keys: bool) -> None:
        """The reverse of `rows`."""
        run, order = self.run, self._order(is_keys)
        view = self._by_rank(target, 2, group)
        if view.shape[1] != 1:
            batch.then(copy, view, self._returned(batch, whole, view.shape, 1, order))
            return
        landing = run.empty(view.shape, whole.dtype)
        own = order.chunks(run.rank)
        batch.message(
            lambda to: [whole[0, chunk.whole] for chunk in order.chunks(to)],
            lambda source: [landing[source, 0, chunk.local] for chunk in own],
        )
        batch.then(copy, view, landing)

    def return_statistics(self, batch: Batch, whole: Array, target: Array, group: int) -> None:
        """The reverse of `statistics`."""
        view = self._by_rank(target, 1, group)
        batch.then(copy, view, self._returned(batch, whole, view.shape, 2, self.run.request.queries))

    def return_over_scores(self, batch: Batch, whole: Array, target: Array) -> None:
        """The gradient of a bias with rows: that of each row goes to its owner, summed over ranks if heads share it."""
        queries = self.run.request.queries
        if target.shape[1] > 1:
            view = self._by_rank(target, 1, 0)
            batch.then(copy, view, self._returned(batch, whole, view.shape, 2, queries))
        else:
            landing = self._returned(batch, whole, (self.run.size, *target.shape), 2, queries)
            batch.then(sum_into, target, list(landing), self.run.request.problem.accumulator_dtype)

    def _returned(self, batch: Batch, whole: Array, shape: tuple[int, ...], axis: int, order: RowOrder) -> Array:
        """Sends each rank its rows, and returns what comes, by rank."""
        run = self.run
        packed, landing = (run.empty(shape, whole.dtype) for _ in range(2))
        for chunks, local in order.by_rank(whole, axis):
            run.comm(copy, packed[(slice(None),) * (axis + 1) + (local,)], chunks)
        batch.message(lambda to: [packed[to]], lambda source: [landing[source]])
        return landing

    def keywords(self, group: int, scores: dict[str, Array]) -> dict[str, Any]:
        """The keywords of features for a group of this rank."""
        request = self.run.request
        everything = slice(0, request.problem.seqlen_q)
        part = Part(self.q_heads(self.run.rank, group), everything, request.problem.seqlen_k)
        return part_keywords(request.problem, request.keywords, part, scores, self.places[group])

    def lane(self, group: int) -> Lane:
        """The lane of a group."""
        lanes = (self.run.main,) if self.count == 1 else self.run.of_groups
        return lanes[group % len(lanes)]


def forward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes o and lse of this rank's rows."""
    heads = Heads(run, operands)
    run.begin()
    o, lse = out
    fetched: list[tuple[list[Array], dict[str, Array], Any]] = []

    def fetch(group: int) -> None:
        batch = Batch(run)
        wholes = [
            heads.rows(batch, x, group, is_keys)
            for x, is_keys in ((operands.q, False), (operands.k, True), (operands.v, True))
        ]
        scores = {name: heads.over_scores(batch, name, group) for name in heads.scores}
        fetched.append((wholes, scores, batch.queue()))

    for group in range(min(2, heads.count)):
        fetch(group)
    for group in range(heads.count):
        wholes, scores, arrived = fetched[group]
        lane = heads.lane(group)
        lane.wait(arrived)
        q, _, v = wholes
        whole_o = run.empty((*q.shape[:3], v.shape[3]), q.dtype)
        whole_lse = run.empty((len(q), q.shape[2], q.shape[1]), lse.dtype)
        run.forward(lane, wholes, (whole_o, whole_lse), heads.keywords(group, scores))
        computed = lane.record()
        if group + 2 < heads.count:
            fetch(group + 2)
        run.comm.wait(computed)
        batch = Batch(run)
        heads.return_rows(batch, whole_o, o, group, is_keys=False)
        heads.return_statistics(batch, whole_lse, lse, group)
        batch.queue()


def backward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes dq, dk and dv of this rank's rows, and this rank's shares of the gradients of features."""
    heads = Heads(run, operands)
    _, lse, do = operands.of_backward
    dq, dk, dv, *extra = out
    delta = operands.row_delta(run, run.main)
    run.begin()
    fetched: list[tuple[list[Array], list[Array], dict[str, Array], Any]] = []

    def fetch(group: int) -> None:
        batch = Batch(run)
        arrays = ((operands.q, False), (operands.k, True), (operands.v, True), (do, False))
        wholes = [heads.rows(batch, x, group, is_keys) for x, is_keys in arrays]
        statistics = [heads.statistics(batch, x, group) for x in (lse, delta)]
        scores = {name: heads.over_scores(batch, name, group) for name in heads.scores}
        fetched.append((wholes, statistics, scores, batch.queue()))

    for group in range(min(2, heads.count)):
        fetch(group)
    for group in range(heads.count):
        wholes, (whole_lse, whole_delta), scores, arrived = fetched[group]
        lane = heads.lane(group)
        lane.wait(arrived)
        gradients = [run.empty(x.shape, x.dtype) for x in wholes[:3]]
        own = HeadShares(run, heads, extra, scores)
        # o is not read where delta is given.
        inputs = (*wholes[:3], wholes[3], whole_lse, wholes[3])
        run.backward(lane, inputs, whole_delta, (*gradients, *own.results), heads.keywords(group, scores))
        own.store(lane)
        computed = lane.record()
        if group + 2 < heads.count:
            fetch(group + 2)
        run.comm.wait(computed)
        batch = Batch(run)
        for whole, target, is_keys in zip(gradients, (dq, dk, dv), (False, True, True), strict=True):
            heads.return_rows(batch, whole, target, group, is_keys)
        own.send(batch)
        batch.queue()


class HeadShares:
    """Gradients of biases, sinks and the arrays of score functions, by the heads of this rank.

    Attributes
    ----------
    results : list of ndarray
        Arrays for the results of the call.
    """

    def __init__(self, run: Run, heads: Heads, extra: Sequence[Array], scores: dict[str, Array]):
        self._heads, self._rank = heads, run.rank
        self._names = [result.name for result in run.request.results[3:]]
        self._extra = extra
        self.results: list[Array] = []
        for name, array in zip(self._names, extra, strict=True):
            if name == "dbias":
                self.results.append(run.empty(scores["bias"].shape, array.dtype))
            elif name == "dsink":
                self.results.append(run.empty((heads.groups[0].stop,), array.dtype))
            else:
                self.results.append(run.empty(array.shape, array.dtype))

    def store(self, lane: Lane) -> None:
        """Queues the copies of the shares that stay here. Those of other ranks' heads are 0."""
        own = self._heads.q_heads(self._rank, 0)
        for name, array, share in zip(self._names, self._extra, self.results, strict=True):
            if name == "dbias" and "bias" in self._heads.rows_of_scores:
                continue
            if name == "dbias":
                target = array[(None,) * (4 - array.ndim)]
                lane(clear, target)
                lane(copy, of_part(target, own, slice(None), target.shape[3]), share)
            elif name == "dsink":
                lane(clear, array)
                lane(copy, array[own], share)
            else:
                lane(copy, array, share)

    def send(self, batch: Batch) -> None:
        """Adds the messages with the shares of rows that other ranks have."""
        for name, array, share in zip(self._names, self._extra, self.results, strict=True):
            if name == "dbias" and "bias" in self._heads.rows_of_scores:
                target = array[(None,) * (4 - array.ndim)]
                self._heads.return_over_scores(batch, share, target)
