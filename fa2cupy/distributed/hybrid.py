"""Two levels (Fang and Zhao 2024, USP): all-to-all over heads in a host, all-gather of keys between hosts.

Each rank gets all rows of its host for its share of the heads. It then calls `gather` with the ranks of the other hosts
that have the same heads, as if it were a host with these heads alone. The slower links between hosts carry the keys and
values of a share of the heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..problem.array_types import Array
from . import gather
from .gathered import OfHeads
from .heads import Batch, Heads, HeadShares
from .operands import Operands
from .run import Run

__all__ = ["backward", "forward"]


class _Levels:
    """The two levels of a rank.

    Attributes
    ----------
    within, between : Run
        The part of the call that the ranks of this host make, and that of the ranks of all hosts with the same heads.
    heads : Heads
        The heads of the ranks of this host.
    """

    def __init__(self, run: Run, operands: Operands):
        request, ranks = run.request, run.ranks_per_host
        queries, keys = request.queries, request.keys
        first, number = run.rank - run.rank % ranks, run.rank % ranks
        heads = request.problem.num_heads_kv // ranks
        own = replace(request, queries=queries.within_host(ranks), keys=keys.within_host(ranks), groups=(heads,))
        everyones = replace(request, queries=queries.of_hosts(ranks), keys=keys.of_hosts(ranks))
        self.within = run.among(range(first, first + ranks), own)
        self.between = run.among(range(number, run.size, ranks), everyones)
        self.heads = Heads(self.within, operands)

    def of_heads(self, scores: dict[str, Array]) -> OfHeads:
        """What belongs to the heads of this rank, with their biases and masks."""
        return OfHeads(self.heads.q_heads(self.within.rank, 0).start, scores)


def forward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes o and lse of this rank's rows."""
    levels = _Levels(run, operands)
    heads, batch, (o, lse) = levels.heads, Batch(levels.within), out
    run.begin()
    q = heads.rows(batch, operands.q, 0, is_keys=False)
    k, v = (heads.rows(batch, x, 0, is_keys=True) for x in (operands.k, operands.v))
    scores = {name: heads.over_scores(batch, name, 0) for name in heads.scores}
    batch.queue()
    whole_o = run.empty((*q.shape[:3], v.shape[3]), q.dtype)
    whole_lse = run.empty((len(q), q.shape[2], q.shape[1]), lse.dtype)
    gather.forward(levels.between, Operands(q, k, v), (whole_o, whole_lse), levels.of_heads(scores))
    for lane in (run.main, run.side):
        run.comm.wait(lane.record())
    batch = Batch(levels.within)
    heads.return_rows(batch, whole_o, o, 0, is_keys=False)
    heads.return_statistics(batch, whole_lse, lse, 0)
    batch.queue()


def backward(run: Run, operands: Operands, out: Sequence[Array]) -> None:
    """Computes dq, dk and dv of this rank's rows, and this rank's shares of the gradients of features."""
    levels = _Levels(run, operands)
    heads, batch = levels.heads, Batch(levels.within)
    _, lse, do = operands.of_backward
    dq, dk, dv, *extra = out
    delta = operands.row_delta(run, run.main)
    run.begin()
    q, whole_do = (heads.rows(batch, x, 0, is_keys=False) for x in (operands.q, do))
    k, v = (heads.rows(batch, x, 0, is_keys=True) for x in (operands.k, operands.v))
    whole_lse, whole_delta = (heads.statistics(batch, x, 0) for x in (lse, delta))
    scores = {name: heads.over_scores(batch, name, 0) for name in heads.scores}
    batch.queue()
    gradients = [run.empty(x.shape, x.dtype) for x in (q, k, v)]
    own = HeadShares(levels.within, heads, extra, scores)
    # o is not read where delta is given.
    inputs = Operands(q, k, v, whole_do, whole_lse, whole_do, whole_delta)
    gather.backward(levels.between, inputs, (*gradients, *own.results), levels.of_heads(scores))
    own.store(run.main)
    run.comm.wait(run.main.record())
    batch = Batch(levels.within)
    for whole, target, is_keys in zip(gradients, (dq, dk, dv), (False, True, True), strict=True):
        heads.return_rows(batch, whole, target, 0, is_keys)
    own.send(batch)
    batch.queue()
