"""The scheme `gather` with copies in place of messages, on GPUs that reach each other's memory: see `heads_by_copies`.

    comm    writes to other ranks: the keys and values of a group, and shares of the gradients of keys
    back    copies on this rank: its own keys and values

A group's memory is that of the group before the last one. Ranks tell each other when they have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..problem.array_types import Array
from .gather import backward_of, forward_of
from .gather_shares import Seen, Shares
from .gathered import Gather, Slot, length
from .operands import Operands
from .run import Run
from .windows import Copy, Signal, Window, padded_bytes

__all__ = ["backward", "forward"]

_Arrays: TypeAlias = "list[tuple[tuple[int, ...], np.dtype]]"


class _Gather(Gather):
    """The calls of a rank, and the copies of its groups.

    Attributes
    ----------
    window : Window
    has_shares : bool
        True in a backward.
    share_places : list of (int, (int, int))
        The rank, and the numbers of the call and the chunk, of all shares that any other rank gets.
    """

    def __init__(self, run: Run, operands: Operands, has_shares: bool):
        assert run.window is not None, "the caller has asked for it"
        self.window: Window = run.window
        self.has_shares = has_shares
        self._windows: list[list[list[Array]]] = []
        super().__init__(run, operands, None)

    def prepare(self) -> None:
        """Reserves the window, and replaces keys and values that are slow to copy."""
        run, window = self.run, self.window
        self._sources = [run.quick(x) for x in (self.operands.k, self.operands.v)]
        self.share_places = list(self._share_places()) if self.has_shares else []
        nbytes = sum(padded_bytes(self.wholes(heads) + self.landings(heads)) for heads in self.widths)
        window.begin(run.main, nbytes, self.count, run.request.number, run.is_captured)

    def _share_places(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields the elements of `share_places`."""
        size, keys = self.run.size, self.run.request.keys
        for rank, calls in enumerate(self.calls):
            for i, call in enumerate(calls):
                for j in range(len(keys.chunks(0))):
                    owned = [keys.chunks(owner)[j].whole for owner in range(size) if owner != rank]
                    if any(length(call.seen(rows)) for rows in owned):
                        yield rank, (i, j)

    def landings(self, heads: int) -> _Arrays:
        """Shapes and dtypes of the arrays for shares of some heads: dk and dv for each of the places."""
        chunks = self.run.request.keys.chunks(0)
        rows = length(chunks[0].local)
        arrays = (self.operands.k, self.operands.v)
        own: _Arrays = [((len(x), rows, heads, x.shape[3]), x.dtype) for x in arrays]
        return own * len(self.share_places)

    def slot(self, heads: int) -> Slot:
        """Memory of the keys of some heads, in the window."""
        arrays = [self.window.arrays(*one) for one in self.wholes(heads)]
        self._windows.append(arrays)
        whole = [by_rank[self.run.rank] for by_rank in arrays]
        self.clear(whole)
        return Slot(whole, [], [])

    def begin(self) -> None:
        """Lets copies wait for what the caller's lane has been given so far, and for the other ranks."""
        run, window = self.run, self.window
        begun = run.main.record()
        run.comm.wait(begun)
        run.back.wait(begun)
        window.enter(run.comm)
        if self.has_gaps:  # which this rank has cleared
            window.signal(run.comm, Signal.USED)
            window.wait(run.comm, Signal.USED)

    def fetch(self, group: int) -> Any:
        """Queues the copies of the keys of a group; returns the event of their arrival."""
        run, window, number = self.run, self.window, group % len(self.slots)
        for event in self.free[number]:
            run.comm.wait(event)
            run.back.wait(event)
        if self.free[number]:
            window.signal(run.comm, Signal.USED, group)
            window.wait(run.comm, Signal.USED, group)
        run.comm(window.send, self._copies(group, window.others))
        window.signal(run.comm, Signal.SENT, group)
        run.back(window.copy, self._copies(group, (run.rank,)))
        window.wait(run.back, Signal.SENT, group)
        return run.back.record()

    def _copies(self, group: int, ranks: Sequence[int]) -> list[Copy]:
        """Copies of the keys of this rank that some ranks see, in a group."""
        heads = self.kv_heads(group)
        return [
            Copy(
                by_rank[rank],
                (0, chunk.whole.start, 0, 0),
                source,
                (0, chunk.local.start, heads.start, 0),
                (len(source), length(chunk.local), length(heads), source.shape[3]),
            )
            for rank in ranks
            for by_rank, source in zip(self._windows[group % len(self.slots)], self._sources, strict=True)
            for chunk in self.run.request.keys.chunks(self.run.rank)
            if self.sees(rank, chunk.whole)
        ]


class _Shares(Shares):
    """Shares of dk and dv of one group, which other ranks write."""

    gather: _Gather

    def __init__(self, gather: _Gather, heads: int):
        window = gather.window
        shapes = iter(gather.landings(heads))
        self._places = {place: [window.arrays(*next(shapes)) for _ in range(2)] for place in gather.share_places}
        super().__init__(gather, heads)

    def prepare(self) -> None:
        """Nothing: shares are copied from where they are."""

    def arriving(self, rank: int, seen: Seen) -> list[Array]:
        """Memory for shares that a rank sends."""
        own, rows = self.gather.run.rank, slice(0, length(seen.keys))
        return [by_rank[own][:, rows] for by_rank in self._places[rank, seen.place]]

    def send(self, group: int) -> None:
        """Queues the copies of the shares of a group to the owners of the keys."""
        run, window = self.gather.run, self.gather.window
        if group >= len(self.gather.slots):
            window.wait(run.comm, Signal.ADDED, group)
        copies = [
            Copy(
                by_rank[to],
                (0, 0, 0, 0),
                share,
                (0, seen.keys.start, 0, 0),
                (len(share), length(seen.keys), self.gather.groups[group], share.shape[3]),
            )
            for to in window.others
            for seen in self.seen(run.rank, to)
            for by_rank, share in zip(
                self._places[run.rank, seen.place], self.own[seen.call.queries.start], strict=True
            )
        ]
        run.comm(window.send, copies)
        window.signal(run.comm, Signal.RETURNED, group)
        self.sent = run.comm.record()

    def add_up(self, group: int, targets: Sequence[Array]) -> None:
        """Queues the sums of a group on the caller's lane, in the order of the ranks, and their rounding."""
        gather = self.gather
        gather.window.wait(gather.run.main, Signal.RETURNED, group)
        super().add_up(group, targets)
        if group + len(gather.slots) < gather.count:
            gather.window.signal(gather.run.main, Signal.ADDED, group + len(gather.slots))


def forward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes o and lse of this rank's rows."""
    gather = _Gather(run, operands, has_shares=False)
    forward_of(gather, out)
    gather.window.end(run.comm, run.main, run.side)


def backward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes dq, dk and dv of this rank's rows, and this rank's shares of the gradients of features."""
    gather = _Gather(run, operands, has_shares=True)
    backward_of(gather, [_Shares(gather, heads) for heads in gather.widths], out)
    gather.window.end(run.comm, run.main, run.side)
