"""Two levels (Fang and Zhao 2024, USP): all-to-all over heads in a host, all-gather of keys between hosts.

Each rank gets all rows of its host for its share of the heads. It then calls `gather` together with the ranks of other
hosts that have the same heads: each of them stands for its host, and these heads are all that there are. The slower
links between hosts carry the keys and values of a share of the heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...problem.array_types import Array
from ..call.operands import Operands
from ..call.run import Run
from ..movers.by_messages import ByMessages
from ..movers.move import Mover
from . import gather
from .gather_calls import OfHeads
from .heads import Heads, HeadShares

__all__ = ["backward", "forward"]


class _Levels:
    """The two levels of a rank.

    Attributes
    ----------
    heads : Heads
        The part of the call that the ranks of this host make, and their heads.
    between : (Run, Mover)
        The part that the ranks of all hosts with the same heads make.
    inputs : list of ndarray
        All rows of this host, for this rank's heads.
    scores : dict of ndarray
        Their biases and masks.
    of_heads : OfHeads
    """

    def __init__(self, run: Run, operands: Operands, inputs: Sequence[tuple[Array, bool]], out: Sequence[Array]):
        request, ranks = run.request, run.ranks_per_host
        queries, keys = request.queries, request.keys
        first, number = run.rank - run.rank % ranks, run.rank % ranks
        heads = request.problem.num_heads_kv // ranks
        own = replace(request, queries=queries.within_host(ranks), keys=keys.within_host(ranks), groups=(heads,))
        everyones = replace(request, queries=queries.of_hosts(ranks), keys=keys.of_hosts(ranks))
        within = run.among(range(first, first + ranks), own)
        between = run.among(range(number, run.size, ranks), everyones)
        self.between = between, ByMessages(between)
        self.heads = Heads(within, ByMessages(within), operands, inputs, out)
        self.heads.send(0)
        self.heads.keep()
        self.inputs, self.scores = self.heads.arrived(0)
        self.of_heads = OfHeads(self.heads.q_heads(within.rank, 0).start, self.scores)

    def send_back(self, results: Sequence[Array]) -> None:
        """Queues the return of the results."""
        self.heads.send_back(0, results)
        self.heads.end()


def forward(run: Run, mover: Mover, operands: Operands, out: Sequence[Array]) -> None:
    """Computes o and lse of this rank's rows. Each level has a mover of its own."""
    inputs = ((operands.q, False), (operands.k, True), (operands.v, True))
    levels = _Levels(run, operands, inputs, out)
    results = levels.heads.results(0)
    gather.forward(*levels.between, Operands(*levels.inputs), results, levels.of_heads)
    run.main.wait(run.side.record())
    levels.send_back(results)


def backward(run: Run, mover: Mover, operands: Operands, out: Sequence[Array]) -> None:
    """Computes dq, dk and dv of this rank's rows, and this rank's shares of the gradients of features.

    Each level has a mover of its own.
    """
    _, lse, do = operands.of_backward
    delta = operands.row_delta(run, run.main)
    inputs = ((operands.q, False), (operands.k, True), (operands.v, True), (do, False), (lse, False), (delta, False))
    levels = _Levels(run, operands, inputs, out)
    own = HeadShares(levels.heads, out[3:], levels.scores)
    results = [*levels.heads.results(0), *own.results]
    q, k, v, do, lse, delta = levels.inputs
    # Kernels do not read o if delta is given: do stands in its place.
    gather.backward(*levels.between, Operands(q, k, v, do, lse, do, delta), results, levels.of_heads)
    own.store(run.main)
    levels.send_back(results)
