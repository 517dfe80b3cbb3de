"""All-to-all over heads (DeepSpeed-Ulysses, Jacobs et al. 2023): each rank gets all rows of its share of the heads.

A rank makes one call on the whole sequence for each group of its heads, so that all results but gradients of features
are those of one call, bit for bit. While one group is computed, the rows of another one travel.

    comm    what goes to other ranks: the rows of a group, and its results when it is computed
    back    what comes from them, and this rank's own results; those of the last group are on `comm`, too

The lane of a group copies this rank's own rows itself. Lanes have falling priorities, so that the rows of later groups
do not delay the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...problem.array_types import Array
from ..call.choice import neighbours
from ..call.operands import Operands
from ..call.parts import Part, needs_place, of_part, over_scores, part_keywords
from ..call.requests import OF_FEATURES, OF_KEYS
from ..call.run import Run
from ..local.copies import copy
from ..local.lanes import Lane
from ..local.sums import clear, sum_into
from ..movers.move import Late, Memory, Move, Mover
from ..transport.windows import Signal
from .head_parts import GroupedShape, Route, landed_of_group, parts_of_group

__all__ = ["HeadShares", "Heads", "backward", "backward_jvp", "double_backward", "forward", "jvp", "output_jvp"]

#: The first inputs, q, k and v, do not wait for the kernel that writes delta: copying them takes longer than it.
_EARLY = 3
#: The axes of rows and heads in (batch, row, head, column), and in (batch, head, row) or (batch, head, query, key).
_ROWS, _STATISTICS = (1, 2), (2, 1)


class Heads:
    """A call: the groups of heads of a rank, and how its arrays get from rows to heads and back.

    The heads of a rank are neighbours, and so are those of one of its groups.

    Parameters
    ----------
    run : Run
    mover : Mover
    operands : Operands
    inputs : sequence of (ndarray, bool)
        What the kernels read, and whether its rows are those of the keys.
    out : sequence of ndarray
        The results of this rank, such as dq, dk and dv, with gradients of features behind them.
    groups : sequence of slice, optional
        The query heads of each group, among those of a rank: all query heads of some K/V heads, or some query heads of
        one. By default, those of the request's groups.

    Attributes
    ----------
    groups : sequence of slice
    count : int
        Number of groups.
    """

    def __init__(
        self,
        run: Run,
        mover: Mover,
        operands: Operands,
        inputs: Sequence[tuple[Array, bool]],
        out: Sequence[Array],
        groups: Sequence[slice] = (),
    ):
        self.run, self.mover, request = run, mover, run.request
        self._ratio = operands.q.shape[2] // operands.k.shape[2]
        self.groups = groups or neighbours([self._ratio * heads for heads in request.groups])
        self.count = len(self.groups)
        self._scores = over_scores(request.keywords)
        self._rows_of_scores = [
            name for name, x in self._scores.items() if x.shape[2] > 1 and not request.problem.is_packed
        ]
        self._places: list[Array | None] = [None] * self.count
        if needs_place(request.keywords, has_all_queries=True):
            self._places = [run.place((self.q_heads(run.rank, group).start, 0)) for group in range(self.count)]
        self._inputs = [self._route(mover.source(x), is_keys) for x, is_keys in inputs]
        scores = [self._scores[name] for name in self._rows_of_scores]
        self._inputs += [self._route(mover.source(x), axes=_STATISTICS) for x in scores]
        names = [result.name for result in request.results]
        with_rows = zip(names[: request.with_rows], out, strict=False)
        self._out = [self._route(x, name in OF_KEYS) for name, x in with_rows]
        self._returned = list(range(len(self._out)))
        self._summed: tuple[Array, Array] | None = None
        of_bias = [number for number, name in enumerate(names) if OF_FEATURES.get(name) == "bias"]
        if of_bias and self.has_rows("bias"):
            self._return_bias(out, of_bias[0])
        self._written: Any = None
        self._results: list[list[Array]] = []
        self._begin()

    def _return_bias(self, out: Sequence[Array], number: int) -> None:
        """Lets each row of dbias go to its owner, which sums the rows of all ranks if heads share the bias."""
        target = out[number][(None,) * (4 - out[number].ndim)]
        array = target
        if target.shape[1] == 1:  # as if each rank had one head of it
            array = self.run.empty((len(target), self.run.size, *target.shape[2:]), target.dtype)
            self._summed = target, array
        heads = ((0, array.shape[1] // self.run.size),)
        self._out.append(Route(array, GroupedShape(self.run.request.queries, array.shape, _STATISTICS, heads)))
        self._returned.append(number)

    def has_rows(self, name: str) -> bool:
        """True if each rank has its own rows of a bias or a mask."""
        return name in self._rows_of_scores

    def q_heads(self, rank: int, group: int) -> slice:
        """The query heads of a group of a rank."""
        first, heads = rank * self.groups[-1].stop, self.groups[group]
        return slice(first + heads.start, first + heads.stop)

    def lane(self, group: int) -> Lane:
        """The lane of a group."""
        lanes = (self.run.main,) if self.count == 1 else self.run.of_groups
        return lanes[group % len(lanes)]

    def keywords(self, group: int, scores: dict[str, Array]) -> dict[str, Any]:
        """The keywords of features for a group of this rank."""
        request = self.run.request
        everything = slice(0, request.problem.seqlen_q)
        part = Part(self.q_heads(self.run.rank, group), everything, request.problem.seqlen_k)
        return part_keywords(request.problem, request.keywords, part, scores, self._places[group])

    def _route(self, array: Array, is_keys: bool = False, axes: tuple[int, int] | None = None) -> Route:
        order = self.run.request.keys if is_keys else self.run.request.queries
        axes = axes or (_ROWS if array.ndim == 4 else _STATISTICS)
        ratio = self._ratio if is_keys else 1
        heads = tuple((group.start // ratio, -(-group.stop // ratio)) for group in self.groups)
        if array.shape[axes[1]] == 1:
            heads = ((0, 1),) * self.count
        return Route(array, GroupedShape(order, array.shape, axes, heads))

    def _begin(self) -> None:
        groups = range(self.count)
        shapes = [route.whole(group) for group in groups for route in self._inputs if not route.shape.is_again(group)]
        found, self._landings = self.mover.begin(shapes, [route.array for route in self._out], self.count)
        memories = iter(found)
        self._wholes: list[list[Memory]] = []
        for group in groups:
            self._wholes.append(
                [
                    self._wholes[-1][number] if route.shape.is_again(group) else next(memories)
                    for number, route in enumerate(self._inputs)
                ]
            )
        self.mover.enter(*(self.lane(group) for group in groups))

    def set_input(self, number: int, array: Array, lane: Lane) -> None:
        """Replaces an input by an array that a lane writes. The first inputs (`_EARLY`) do not wait for it."""
        self._inputs[number] = self._inputs[number]._replace(array=self.mover.source(array, lane))
        self._written = lane.record()

    # -- from rows to heads

    def _to_heads(self, source: int, target: int, group: int, inputs: slice = slice(None)) -> list[Move]:
        return [
            (memory, part.whole, route.array, part.own, part.shape)
            for route, memory in zip(self._inputs[inputs], self._wholes[group][inputs], strict=True)
            if not route.shape.is_again(group)
            for part in parts_of_group(route.shape, source, target, group)
        ]

    def send(self, group: int) -> None:
        """Queues the moves of this rank's rows of a group to the other ranks."""
        first = group == 0
        if first and self._written is not None:
            late: Late = functools.partial(self._to_heads, inputs=slice(_EARLY, None)), self._written
            early = functools.partial(self._to_heads, inputs=slice(_EARLY))
            self.mover.put(Signal.SENT, group, early, late, is_idle=True)
        else:
            self.mover.put(Signal.SENT, group, self._to_heads, is_idle=first)

    def keep(self) -> None:
        """Queues the copies of this rank's own rows. A group that has heads of the group before waits for them."""
        kept: Any = None
        for group in range(self.count):
            lane = self.lane(group)
            if self._written is not None:
                lane.wait(self._written)
            if any(route.shape.is_again(group) for route in self._inputs):
                lane.wait(kept)
            self.mover.keep(lane, Signal.SENT, group, self._to_heads)
            kept = lane.record()

    def arrived(self, group: int) -> tuple[list[Array], dict[str, Array]]:
        """The inputs of a group, which its lane waits for; and its biases and masks."""
        self.mover.arrived(self.lane(group), Signal.SENT, group)
        wholes = [memory.own for memory in self._wholes[group]]
        count = len(wholes) - len(self._rows_of_scores)
        scores = dict(zip(self._rows_of_scores, wholes[count:], strict=True))
        heads = self.q_heads(self.run.rank, group)
        for name, array in self._scores.items():
            if name not in scores:
                scores[name] = of_part(array, heads, slice(0, array.shape[2]), array.shape[3])
        return wholes[:count], scores

    # -- from heads to rows

    def results(self, group: int) -> list[Array]:
        """Arrays for the results of a group, without gradients of features."""
        return [self.run.empty(*route.whole(group)[:2]) for route in self._out[: self.run.request.with_rows]]

    def _to_rows(self, source: int, target: int, group: int) -> list[Move]:
        return [
            (landing, part.own, whole, part.whole, part.shape)
            for route, landing, whole in zip(self._out, self._landings, self._results[group], strict=True)
            for part in parts_of_group(route.shape, target, source, group)
        ]

    def send_back(self, group: int, results: Sequence[Array]) -> None:
        """Queues what follows the kernels of a group: its results go to the ranks that have the rows."""
        run = self.run
        computed = self.lane(group).record()
        self._results.append([results[number] for number in self._returned])
        run.comm.wait(computed)
        self.mover.put(Signal.RETURNED, group, self._to_rows, is_idle=self._is_last(group))
        lane = self._lane_of_results(group)
        lane.wait(computed)
        self.mover.keep(lane, Signal.RETURNED, group, self._to_rows)

    def _is_last(self, group: int) -> bool:
        return group == self.count - 1

    def _lane_of_results(self, group: int) -> Lane:
        """The lane of copies; behind the messages of the last group there are no others."""
        return self.run.comm if self._is_last(group) else self.run.back

    def collect(self, group: int) -> None:
        """Queues the arrival of a group's results."""
        rank, size = self.run.rank, self.run.size
        landed = [
            (landing, *landed_of_group(route.shape, (rank + distance) % size, group))
            for distance in range(1, size)
            for route, landing in zip(self._out, self._landings, strict=True)
        ]
        self.mover.collect(self._lane_of_results(group), Signal.RETURNED, group, landed)

    def end(self) -> None:
        """Queues the arrival of the last results on the lane of messages, behind that of all others."""
        if self.count > 1:  # else the lane of copies has been given nothing, and belongs to no capture
            self.run.comm.wait(self.run.back.record())
        self.collect(self.count - 1)
        if self._summed is not None:
            target, array = self._summed
            shares = [array[:, rank : rank + 1] for rank in range(self.run.size)]
            self.run.comm(sum_into, target, shares, self.run.request.problem.accumulator_dtype)
        self.mover.end()

    def compute(self, kernels: Callable[[int, list[Array], dict[str, Array]], list[Array]]) -> None:
        """Queues all moves, and the kernels of each group, whose results ``kernels(group, inputs, scores)`` returns."""
        groups, ahead = range(self.count), self.mover.ahead
        for group in groups[:ahead]:
            self.send(group)
        self.keep()
        for group in groups:
            results = kernels(group, *self.arrived(group))
            if group + ahead in groups:
                self.send(group + ahead)
            if group:
                self.collect(group - 1)
            self.send_back(group, results)
        self.end()


class HeadShares:
    """What this rank's heads add to gradients of biases, sinks and arrays of score functions. There is one group.

    Attributes
    ----------
    results : list of ndarray
        Arrays for the results of the call.
    """

    def __init__(self, heads: Heads, extra: Sequence[Array], scores: dict[str, Array]):
        self._heads, self._extra = heads, extra
        request = heads.run.request
        #: The features; None is an array of a score function.
        self._of = [OF_FEATURES.get(result.name) for result in request.results[request.with_rows :]]
        self.results: list[Array] = []
        for of, array in zip(self._of, extra, strict=True):
            shape = array.shape
            if of == "bias":
                shape = scores["bias"].shape
            elif of == "sink":
                shape = (heads.groups[0].stop,)
            self.results.append(heads.run.empty(shape, array.dtype))

    def store(self, lane: Lane) -> None:
        """Queues the copies of the shares that stay here. Those of other ranks' heads are 0."""
        own = self._heads.q_heads(self._heads.run.rank, 0)
        for of, array, share in zip(self._of, self._extra, self.results, strict=True):
            if of == "bias" and self._heads.has_rows("bias"):
                continue
            if of == "bias":
                target = array[(None,) * (4 - array.ndim)]
                lane(clear, target)
                lane(copy, of_part(target, own, slice(None), target.shape[3]), share)
            elif of == "sink":
                lane(clear, array)
                lane(copy, array[own], share)
            else:
                lane(copy, array, share)


def forward(run: Run, mover: Mover, operands: Operands, out: Sequence[Array]) -> None:
    """Computes o and lse of this rank's rows."""
    inputs = ((operands.q, False), (operands.k, True), (operands.v, True))
    heads = Heads(run, mover, operands, inputs, out, run.request.query_groups)

    def kernels(group: int, inputs: list[Array], scores: dict[str, Array]) -> list[Array]:
        results = heads.results(group)
        run.forward(heads.lane(group), inputs, results, heads.keywords(group, scores))
        return results

    heads.compute(kernels)


def backward(run: Run, mover: Mover, operands: Operands, out: Sequence[Array]) -> None:
    """Computes dq, dk and dv of this rank's rows, and this rank's shares of the gradients of features."""
    _, lse, do = operands.of_backward
    inputs = ((operands.q, False), (operands.k, True), (operands.v, True), (do, False), (lse, False), (lse, False))
    heads = Heads(run, mover, operands, inputs, out)
    first = heads.lane(0)
    heads.set_input(5, operands.row_delta(run, first), first)

    def kernels(group: int, inputs: list[Array], scores: dict[str, Array]) -> list[Array]:
        q, k, v, do, lse, delta = inputs
        lane, shares = heads.lane(group), HeadShares(heads, out[3:], scores)
        results = [*heads.results(group), *shares.results]
        # Kernels do not read o if delta is given: do stands in its place.
        run.backward(lane, (q, k, v, do, lse, do), delta, results, heads.keywords(group, scores))
        shares.store(lane)
        return results

    heads.compute(kernels)


def _second_order(call: str, run: Run, mover: Mover, operands: Operands, out: Sequence[Array]) -> None:
    """Computes what a call of second order returns: this rank's rows, and its shares of the gradients of features."""
    arrays, rows = operands.by_name(), run.request.with_rows
    heads = Heads(run, mover, operands, [(array, name in OF_KEYS) for name, array in arrays.items()], out)

    def kernels(group: int, inputs: list[Array], scores: dict[str, Array]) -> list[Array]:
        lane, shares = heads.lane(group), HeadShares(heads, out[rows:], scores)
        results = [*heads.results(group), *shares.results]
        whole = dict(zip(arrays, inputs, strict=True))
        run.second_order(lane, call, whole, results, heads.keywords(group, scores))
        shares.store(lane)
        return results

    heads.compute(kernels)


jvp = functools.partial(_second_order, "jvp")
output_jvp = functools.partial(_second_order, "output_jvp")
backward_jvp = functools.partial(_second_order, "backward_jvp")
double_backward = functools.partial(_second_order, "double_backward")
