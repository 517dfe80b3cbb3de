"""The scheme `heads` with copies in place of messages, on GPUs that reach each other's memory.

NCCL's blocks cannot start while a persistent kernel has all multiprocessors, so that its messages wait for the end of
kernels. Copy engines need none: they write a group's rows to the other ranks while another group is computed, from the
caller's strided arrays and to their places. Each of their copies takes about 3 us besides: before the first group is
computed and after the last one, where multiprocessors are idle, a kernel writes to all ranks at once.

    comm    writes to other ranks: the rows of a group, and its results when it is computed
    back    copies on this rank: its own results, and those that others have written

The lane of a group copies this rank's own rows itself. Lanes have falling priorities, so that the rows of later groups
do not delay the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..problem.array_types import Array
from .by_copies import query_groups
from .copies import copy
from .heads import Heads
from .lanes import Lane
from .operands import Operands
from .orders import RowOrder
from .run import Run
from .windows import Copy, Signal, padded_bytes

__all__ = ["backward", "forward"]

#: Inputs whose copies to other ranks do not wait for the last one, delta: they take longer than its kernel.
_EARLY = 3
#: Where a part begins in an array of all rows of a group's heads, where in one of a rank's rows of all heads, and its
#: shape.
_Part: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]"


class _Shape(NamedTuple):
    """The shape of an array, with the axes of its rows and heads: (batch, row, head, column) or (batch, head, row).

    Attributes
    ----------
    order : RowOrder
    sizes : tuple of int
        Those of this rank's rows of all heads.
    heads : tuple of (int, int)
        Where each group begins and ends, among those of a rank.
    """

    order: RowOrder
    sizes: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]

    def with_sizes(self, rows: int, heads: int, of: Sequence[int]) -> tuple[int, ...]:
        """Numbers for each axis: two for rows and heads, and others."""
        numbers = list(of)
        row, head = (1, 2) if len(numbers) == 4 else (2, 1)
        numbers[row], numbers[head] = rows, heads
        return tuple(numbers)

    def whole(self, group: int) -> tuple[int, ...]:
        """The shape of all rows of the heads of a group."""
        return self.with_sizes(self.order.seqlen, self.width(group), self.sizes)

    def width(self, group: int) -> int:
        """The number of heads of a group."""
        start, stop = self.heads[group]
        return stop - start

    def first_head(self, rank: int, group: int) -> int:
        """The first head of a group of a rank."""
        return rank * self.heads[-1][1] + self.heads[group][0]

    def is_again(self, group: int) -> bool:
        """True if a group has the heads of the group before."""
        return group > 0 and self.heads[group] == self.heads[group - 1]


@functools.lru_cache(maxsize=4096)
def _parts(shape: _Shape, rows_of: int, heads_of: int, group: int) -> tuple[_Part, ...]:
    """The parts of the rows of one rank and the heads of a group of another."""
    zeros = (0,) * len(shape.sizes)
    head = shape.first_head(heads_of, group)
    return tuple(
        (
            shape.with_sizes(chunk.whole.start, 0, zeros),
            shape.with_sizes(chunk.local.start, head, zeros),
            shape.with_sizes(chunk.local.stop - chunk.local.start, shape.width(group), shape.sizes),
        )
        for chunk in shape.order.chunks(rows_of)
    )


@functools.lru_cache(maxsize=4096)
def _heads_of(shape: _Shape, heads_of: int, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the heads of a group of a rank begin in an array of a rank's rows, and the shape of that part."""
    start = shape.with_sizes(0, shape.first_head(heads_of, group), (0,) * len(shape.sizes))
    return start, shape.with_sizes(shape.order.local, shape.width(group), shape.sizes)


class _Route(NamedTuple):
    """An array of a rank's rows of all heads that travels by groups of heads."""

    array: Array
    shape: _Shape

    def whole(self, group: int) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of all rows of the heads of a group."""
        return self.shape.whole(group), self.array.dtype


class _Call:
    """A call: its window, its lanes, and the routes of its arrays.

    Parameters
    ----------
    run : Run
    operands : Operands
    inputs : sequence of (ndarray, bool)
        What the kernels read, and whether its rows are those of the keys.
    out : sequence of ndarray
        The results of this rank: o and lse, or dq, dk and dv.
    groups : sequence of slice, optional
        As for `Heads`.

    Attributes
    ----------
    heads : Heads
    """

    def __init__(
        self,
        run: Run,
        operands: Operands,
        inputs: Sequence[tuple[Array, bool]],
        out: Sequence[Array],
        groups: Sequence[slice] | None = None,
    ):
        assert run.window is not None, "the caller has asked for it"
        self._run, self._window = run, run.window
        self.heads = Heads(run, operands, groups)
        self._inputs = [self._route(run.quick(x), is_keys) for x, is_keys in inputs]
        self._results = out
        are_keys = (False, False) if len(out) == 2 else (False, True, True)
        self._out = [self._route(self._quick_target(x), is_keys) for x, is_keys in zip(out, are_keys, strict=True)]
        self._written: Any = None
        self._begin()

    def _route(self, array: Array, is_keys: bool) -> _Route:
        order = self._run.request.keys if is_keys else self._run.request.queries
        ratio = self.heads.ratio if is_keys else 1
        heads = tuple((group.start // ratio, -(-group.stop // ratio)) for group in self.heads.groups)
        return _Route(array, _Shape(order, array.shape, heads))

    def _quick_target(self, array: Array) -> Array:
        """The array, or memory for its elements if its layout is slow to copy."""
        return array if self._window.can_copy(array) else self._run.empty(array.shape, array.dtype)

    def _begin(self) -> None:
        run, window, count = self._run, self._window, self.heads.count
        landings = [(route.array.shape, route.array.dtype) for route in self._out]
        wholes = [
            route.whole(group) for group in range(count) for route in self._inputs if not route.shape.is_again(group)
        ]
        nbytes = padded_bytes(wholes) + padded_bytes(landings)
        window.begin(run.main, nbytes, count, run.request.number, run.is_captured)
        self._wholes: list[list[list[Array]]] = []
        for group in range(count):
            self._wholes.append([self._whole(number, group) for number in range(len(self._inputs))])
        self._landings = [window.arrays(*one) for one in landings]
        begun = run.main.record()
        for lane in (run.comm, *(self.heads.lane(group) for group in range(count))):
            lane.wait(begun)
        window.enter(run.comm)

    def _whole(self, number: int, group: int) -> list[Array]:
        """An input's memory for all rows of the heads of a group, in the windows of all ranks."""
        route = self._inputs[number]
        if route.shape.is_again(group):
            return self._wholes[-1][number]
        return self._window.arrays(*route.whole(group))

    def set_last(self, array: Array, lane: Lane) -> None:
        """Gives the last input, which a lane has written. The copies of the first ones do not wait for it."""
        self._inputs[-1] = self._inputs[-1]._replace(array=self._run.quick(array, lane))
        self._written = lane.record()

    def compute(self, kernels: Callable[[int, list[Array], list[Array]], None]) -> None:
        """Queues all messages, and the kernels of each group: ``kernels(group, inputs, results)``."""
        groups = range(self.heads.count)
        self._send(0)
        kept: Any = None
        for group in groups:
            kept = self._keep(group, kept)
        for group in groups:
            results = [self._run.empty(*route.whole(group)) for route in self._out]
            kernels(group, self._arrived(group), results)
            if group + 1 in groups:
                self._send(group + 1)
            if group:
                self._receive(group - 1)
            self._send_back(group, results)
        self._receive(groups[-1])
        self._end()

    def _send(self, group: int) -> None:
        """Queues the copies of this rank's rows of a group to the windows of the other ranks."""
        run, window = self._run, self._window
        send = window.send if group else window.copy
        if group == 0 and self._written is not None:
            run.comm(send, self._to_windows(group, window.others, slice(_EARLY)))
            run.comm.wait(self._written)
            run.comm(send, self._to_windows(group, window.others, slice(_EARLY, None)))
        else:
            run.comm(send, self._to_windows(group, window.others))
        window.signal(run.comm, Signal.SENT, group)

    def _keep(self, group: int, kept: Any) -> Any:
        """Queues the copies of this rank's rows of a group to its own window.

        A group that has heads of the group before waits for its event, `kept`. Returns that of the end.
        """
        lane = self.heads.lane(group)
        if self._written is not None:
            lane.wait(self._written)
        if any(route.shape.is_again(group) for route in self._inputs):
            lane.wait(kept)
        lane(self._window.copy, self._to_windows(group, (self._run.rank,)))
        return lane.record()

    def _to_windows(self, group: int, ranks: Sequence[int], inputs: slice = slice(None)) -> list[Copy]:
        return [
            Copy(wholes[rank], to, route.array, of, shape)
            for rank in ranks
            for route, wholes in zip(self._inputs[inputs], self._wholes[group][inputs], strict=True)
            if not route.shape.is_again(group)
            for to, of, shape in _parts(route.shape, self._run.rank, rank, group)
        ]

    def _arrived(self, group: int) -> list[Array]:
        """The inputs of a group, which its lane waits for."""
        self._window.wait(self.heads.lane(group), Signal.SENT, group)
        return [wholes[self._run.rank] for wholes in self._wholes[group]]

    def _send_back(self, group: int, results: Sequence[Array]) -> None:
        """Queues what follows the kernels of a group: its results go to the ranks that have the rows."""
        run, window = self._run, self._window
        computed = self.heads.lane(group).record()
        run.comm.wait(computed)
        is_last = group == self.heads.count - 1
        run.comm(window.copy if is_last else window.send, self._to_rows(group, results, window.others))
        window.signal(run.comm, Signal.RETURNED, group)
        run.back.wait(computed)
        run.back(window.copy, self._to_rows(group, results, (run.rank,)))

    def _to_rows(self, group: int, results: Sequence[Array], ranks: Sequence[int]) -> list[Copy]:
        own = self._run.rank
        return [
            Copy(route.array if rank == own else landings[rank], to, whole, of, shape)
            for rank in ranks
            for route, landings, whole in zip(self._out, self._landings, results, strict=True)
            for of, to, shape in _parts(route.shape, rank, own, group)
        ]

    def _receive(self, group: int) -> None:
        """Queues the copies of a group's results that other ranks have sent."""
        run, window = self._run, self._window
        window.wait(run.back, Signal.RETURNED, group)
        copies = []
        for peer in window.others:
            for route, landings in zip(self._out, self._landings, strict=True):
                start, shape = _heads_of(route.shape, peer, group)
                copies.append(Copy(route.array, start, landings[run.rank], start, shape))
        run.back(window.copy, copies)

    def _end(self) -> None:
        """Lets the lane of messages, which the caller's lane waits for, wait for the copies on this rank."""
        run = self._run
        for route, result in zip(self._out, self._results, strict=True):
            if route.array is not result:
                run.back(copy, result, route.array)
        run.comm.wait(run.back.record())
        self._window.end(run.comm)


def forward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes o and lse of this rank's rows."""
    inputs = ((operands.q, False), (operands.k, True), (operands.v, True))
    call = _Call(run, operands, inputs, out, query_groups(run.request))

    def kernels(group: int, inputs: list[Array], results: list[Array]) -> None:
        run.forward(call.heads.lane(group), inputs, results, call.heads.keywords(group, {}))

    call.compute(kernels)


def backward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes dq, dk and dv of this rank's rows."""
    _, lse, do = operands.of_backward
    inputs = ((operands.q, False), (operands.k, True), (operands.v, True), (do, False), (lse, False), (lse, False))
    call = _Call(run, operands, inputs, out)
    first = call.heads.lane(0)
    call.set_last(operands.row_delta(run, first), first)

    def kernels(group: int, inputs: list[Array], results: list[Array]) -> None:
        q, k, v, do, lse, delta = inputs
        # o is not read where delta is given.
        run.backward(call.heads.lane(group), (q, k, v, do, lse, do), delta, results, call.heads.keywords(group, {}))

    call.compute(kernels)
