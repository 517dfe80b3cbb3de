"""Ring attention by direct messages (Liu et al. 2023; zigzag order, Zhu 2024): the keys of one other rank at a time.

At step s a rank meets the keys of rank ``rank - s``. They come from their owner, not from the neighbour: on a switch
each pair of GPUs is one hop apart. Under a causal mask in zigzag order, a rank that is behind sends the one chunk that
is visible. Partial results are merged in the dtype of lse: o, lse and dq by this rank, dk and dv by the owners of the
keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..problem.array_types import Array
from .copies import copy
from .operands import Operands
from .run import Run
from .sums import add, clear, merge_into, store

__all__ = ["backward", "forward"]

_SLOTS = 3


class _Step(NamedTuple):
    """The rows of a pair of ranks that meet, both among their owner's; none if no key is visible.

    Attributes
    ----------
    queries, keys : slice
    """

    queries: slice
    keys: slice

    @property
    def is_empty(self) -> bool:
        """True if no query sees a key."""
        return self.queries.start == self.queries.stop


class _Ring:
    """The steps of a rank, and the memory of the keys that come."""

    def __init__(self, run: Run, operands: Operands):
        self.run, self.operands = run, operands
        self.k, self.v = (run.packed(run.main, x) for x in (operands.k, operands.v))
        run.begin()
        self.slots = [
            [run.empty((x.size,), x.dtype) for x in (self.k, self.v)] for _ in range(min(_SLOTS, run.size - 1))
        ]
        self.free: list[Any] = [None] * len(self.slots)
        self.arrived: dict[int, Any] = {}
        self.keywords = {name: x for name, x in run.request.keywords.items() if name == "softcap"}
        for step in range(1, 1 + len(self.slots)):
            self.fetch(step)

    def pair(self, receiver: int, owner: int) -> _Step:
        """Which queries of the receiver meet which keys of the owner."""
        request = self.run.request
        rows, keys = slice(0, request.queries.local), slice(0, request.keys.local)
        if not request.problem.causal or receiver == owner:
            return _Step(rows, keys)
        half = keys.stop // 2
        if not request.queries.is_zigzag:
            return _Step(rows, keys) if owner < receiver else _Step(slice(0, 0), slice(0, 0))
        return _Step(rows, slice(0, half)) if owner < receiver else _Step(slice(half, rows.stop), keys)

    def owner(self, step: int) -> int:
        """The rank whose keys this rank meets at a step."""
        return (self.run.rank - step) % self.run.size

    def fetch(self, step: int) -> None:
        """Queues the messages of a step, if there is such a step."""
        run = self.run
        if step >= run.size:
            return
        number = (step - 1) % len(self.slots)
        if self.free[number] is not None:
            run.comm.wait(self.free[number])
        to, owner = (run.rank + step) % run.size, self.owner(step)
        there, here = self.pair(to, run.rank).keys, self.pair(run.rank, owner).keys
        sends = [(x[b, there], to) for x in (self.k, self.v) for b in range(len(x))]
        recvs = [(x[b], owner) for x in self.landed(step, here) for b in range(len(x))]
        run.exchange(sends, recvs)
        self.arrived[step] = run.comm.record()

    def landed(self, step: int, keys: slice) -> list[Array]:
        """The keys and values of a step, with the axes (batch, row, head, column)."""
        slot = self.slots[(step - 1) % len(self.slots)]
        return [_front(x, like, keys) for x, like in zip(slot, (self.k, self.v), strict=True)]

    def at(self, step: int) -> tuple[_Step, list[Array]]:
        """The rows of a step, and k and v of it. The caller's lane waits for their arrival."""
        if step == 0:
            return self.pair(self.run.rank, self.run.rank), [self.k, self.v]
        self.run.main.wait(self.arrived[step])
        pair = self.pair(self.run.rank, self.owner(step))
        return pair, self.landed(step, pair.keys)

    def release(self, step: int) -> None:
        """Lets the slot of a step be filled again once what has been queued so far is done, and queues that."""
        if step:
            self.free[(step - 1) % len(self.slots)] = self.run.main.record()
            self.fetch(step + len(self.slots))


def _front(memory: Array, like: Array, rows: slice) -> Array:
    """The front of some memory as an array with so many rows."""
    shape = (like.shape[0], rows.stop - rows.start, *like.shape[2:])
    count = shape[0] * shape[1] * shape[2] * shape[3]
    return memory[:count].reshape(shape)


def forward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes o and lse of this rank's rows."""
    ring = _Ring(run, operands)
    o, lse = out
    wide = lse.dtype
    total, total_lse = run.empty(o.shape, wide), run.empty(lse.shape, wide)
    run.main(clear, total)
    run.main(_clear_lse, run.xp, total_lse)
    for step in range(run.size):
        pair, (k, v) = ring.at(step)
        # Keys of other ranks are visible to all queries that meet them.
        run.options = run.options._replace(causal=run.request.problem.causal and step == 0)
        if not pair.is_empty:
            q = operands.q[:, pair.queries]
            part = run.empty((*q.shape[:3], v.shape[3]), q.dtype)
            part_lse = run.empty((q.shape[0], q.shape[2], q.shape[1]), wide)
            run.forward(run.main, (q, k, v), (part, part_lse), ring.keywords)
            run.main(merge_into, run.xp, total[:, pair.queries], total_lse[:, :, pair.queries], part, part_lse)
        ring.release(step)
    run.main(store, o, total)
    run.main(copy, lse, total_lse)


def _clear_lse(xp: Any, total_lse: Array) -> None:
    total_lse[...] = -xp.inf


def backward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes dq, dk and dv of this rank's rows."""
    ring = _Ring(run, operands)
    delta = operands.row_delta(run, run.main)
    o, lse, do = operands.of_backward
    dq, dk, dv = out
    wide = run.request.problem.accumulator_dtype
    total = run.empty(dq.shape, wide)
    sums = [run.empty(x.shape, wide) for x in (dk, dv)]
    run.main(clear, total)
    for array in sums:
        run.comm(clear, array)
    memory = [[[run.empty((x.size,), x.dtype) for x in (dk, dv)] for _ in range(2)] for _ in range(2)]
    sent: list[Any] = [None, None]
    for step in range(run.size):
        pair, (k, v) = ring.at(step)
        run.options = run.options._replace(causal=run.request.problem.causal and step == 0)
        number = step % 2
        if sent[number] is not None:
            run.main.wait(sent[number])
        shares = [_front(x, like, pair.keys) for x, like in zip(memory[0][number], (dk, dv), strict=True)]
        if not pair.is_empty:
            q, own_o, own_do = (x[:, pair.queries] for x in (operands.q, o, do))
            statistics = [run.empty((q.shape[0], q.shape[2], q.shape[1]), delta.dtype) for _ in range(2)]
            for copied, whole in zip(statistics, (lse, delta), strict=True):
                run.main(copy, copied, whole[:, :, pair.queries])
            part = run.empty(q.shape, q.dtype)
            inputs = (q, k, v, own_o, statistics[0], own_do)
            run.backward(run.main, inputs, statistics[1], (part, *shares), ring.keywords)
            run.main(add, total[:, pair.queries], part)
        computed = run.main.record()
        ring.release(step)
        run.comm.wait(computed)
        _send_shares(run, ring, step, shares, memory[1][number], sums)
        sent[number] = run.comm.record()
    run.main(store, dq, total)
    for array, target in zip(sums, (dk, dv), strict=True):
        run.comm(store, target, array)


def _send_shares(
    run: Run, ring: _Ring, step: int, shares: Sequence[Array], landing: Sequence[Array], sums: Sequence[Array]
) -> None:
    """Queues the messages of a step's shares to the owner of the keys, and the sums of those that come."""
    if step == 0:
        for total, share in zip(sums, shares, strict=True):
            run.comm(add, total, share)
        return
    owner, other = ring.owner(step), (run.rank + step) % run.size  # whose keys this rank met, and who met its own
    mine = ring.pair(other, run.rank).keys
    landed = [_front(x, like, mine) for x, like in zip(landing, sums, strict=True)]
    run.exchange(
        [(x[b], owner) for x in shares for b in range(len(x))], [(x[b], other) for x in landed for b in range(len(x))]
    )
    for total, share in zip(sums, landed, strict=True):
        run.comm(add, total[:, mine], share)
