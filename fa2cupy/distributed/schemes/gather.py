"""All-gather of keys and values, a group of heads at a time (Llama 3, 2024).

For each chunk of a rank's queries, one call takes all keys that the chunk sees, aligned to the bottom right: the chunk
that ends at query `stop` gets the keys up to ``stop + seqlen_k - seqlen_q``. Nothing is merged, so that o and lse are
those of one call on the whole sequence. A rank's shares of dk and dv go to the owner of the keys as they are, and are
summed there once, in the dtype of lse and in the order of the ranks.

The moves of the next two groups are queued before the kernels of a group. The two calls of a group are on two lanes,
where each fills the multiprocessors that the other one leaves idle at its end. The calls of a long backward are on one
lane, because kernels beside them slow them down (`Gather.own_backward_calls`). For the same reason, sums are not queued
beside kernels: the sums of a group come after the kernels of the next group, before the kernels that write its shares
anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...problem.array_types import Array
from ..call.operands import Operands
from ..call.orders import length
from ..call.run import Run
from ..local.copies import copy
from ..movers.move import Mover
from .gather_calls import Gather, OfHeads
from .shares import ExtraShares, Shares

__all__ = ["backward", "forward"]


def forward(run: Run, mover: Mover, operands: Operands, out: Sequence[Array], of_heads: OfHeads | None = None) -> None:
    """Computes o and lse of this rank's rows."""
    gather = Gather(run, mover, operands, of_heads)
    o, lse = out
    arrived = [gather.fetch(group) for group in range(len(gather.slots))]
    calls = gather.own_calls()
    for group in range(gather.count):
        heads, computed = gather.q_heads(group), []
        for call, lane in calls:
            # Kernels only take contiguous statistics.
            statistics = run.empty((len(lse), length(heads), length(call.local)), lse.dtype)
            lane.wait(arrived[group])
            inputs = (operands.q[:, call.local, heads], *gather.keys(group, call))
            run.forward(lane, inputs, (o[:, call.local, heads], statistics), gather.keywords(group, call))
            computed.append(lane.record())
            lane(copy, lse[:, heads, call.local], statistics)
        gather.free[group % len(gather.slots)] = computed
        if group + 2 < gather.count:
            arrived.append(gather.fetch(group + 2))
    mover.end(run.main, run.side)


def backward(run: Run, mover: Mover, operands: Operands, out: Sequence[Array], of_heads: OfHeads | None = None) -> None:
    """Computes dq, dk and dv of this rank's rows, and this rank's shares of the gradients of features."""
    gather = Gather(run, mover, operands, of_heads, has_shares=True)
    dq, dk, dv, *extra = out
    shares = [Shares(gather, slot) for slot in range(len(gather.slots))]
    arrived = [gather.fetch(group) for group in range(len(gather.slots))]
    delta = operands.row_delta(run, run.main)
    own = ExtraShares(run, gather, extra)
    run.side.wait(run.main.record())
    o, lse, do = operands.of_backward
    calls = gather.own_backward_calls()

    def add_up(group: int) -> None:
        shares[group % len(shares)].add_up(group, [x[:, :, gather.kv_heads(group)] for x in (dk, dv)])

    for group in range(gather.count):
        heads, computed = gather.q_heads(group), []
        share = shares[group % len(shares)]
        if group >= 2:
            add_up(group - 2)
            run.side.wait(run.main.record())
        for call, lane in calls:
            statistics = [run.empty((len(delta), length(heads), length(call.local)), delta.dtype) for _ in range(2)]
            lane.wait(arrived[group])
            for copied, whole in zip(statistics, (lse, delta), strict=True):
                lane(copy, copied, whole[:, heads, call.local])
            own_q, own_o, own_do = (x[:, call.local, heads] for x in (operands.q, o, do))
            inputs = (own_q, *gather.keys(group, call), own_o, statistics[0], own_do)
            results = (dq[:, call.local, heads], *share.results(group, call), *own.of(call))
            run.backward(lane, inputs, statistics[1], results, gather.keywords(group, call))
            computed.append(lane.record())
        gather.free[group % len(gather.slots)] = computed
        if group + 2 < gather.count:
            arrived.append(gather.fetch(group + 2))
        for event in computed:
            run.comm.wait(event)
        share.send(group)
    for group in range(max(0, gather.count - 2), gather.count):
        add_up(group)
    own.add_up()
    mover.end(run.main, run.side)
