"""A call on one rank: what the ranks have agreed on, and the attention calls of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy as shallow_copy
from typing import Any

from ...backends import backend_of
from ...problem.array_types import Array
from ..communicator import Communicator
from ..local.lanes import Lane
from ..local.prepared import PreparedCall
from ..movers.by_copies import ByCopies
from ..movers.by_messages import ByMessages
from ..movers.move import Mover
from ..movers.resources import Resources
from .groups import of_copies, takes_copies
from .requests import Request
from .second_order import CALLS, TANGENTS_OF_FEATURES, call_backend

__all__ = ["Run"]


class Run(Resources):
    """One call on one rank.

    Attributes
    ----------
    ranks_per_host : int
    request : Request
    backend : module
        The calls of the package for the arrays' library.
    options : CallOptions
        Those of the attention calls of parts.

    Notes
    -----
    Schemes queue messages before the kernels that need not wait for them: a persistent kernel holds all
    multiprocessors, and NCCL's blocks wait until it ends.
    """

    def __init__(self, comm: Communicator, request: Request, array: Array, prepared: PreparedCall | None = None):
        super().__init__(comm, array, request.number, prepared)
        self.ranks_per_host = comm.ranks_per_host
        self.request = request
        self.options = request.options._replace(layout="bshd")
        self.backend = backend_of("q", array)

    def mover(self, number: int) -> Mover:
        """What carries the arrays of the communicator's call with this number. All ranks ask for it together."""
        window = self.window() if takes_copies(self.request) else None
        if window is not None:
            self.request = of_copies(self.request)
            return ByCopies(self, window)
        self.announce(number)
        return ByMessages(self)

    def among(self, ranks: Sequence[int], request: Request) -> Run:
        """A run with the same lanes and memory, for the part of the call that these ranks make, in this order."""
        run = shallow_copy(self)
        run.rank, run.size = ranks.index(self.rank), len(ranks)
        run.request, run._peers = request, ranks
        return run

    def forward(self, lane: Lane, inputs: Sequence[Array], out: Sequence[Array], keywords: dict[str, Any]) -> None:
        """Queues a forward of q, k and v with the axes (batch, row, head, column)."""
        inputs, out = self._axes(inputs), self._axes(out)
        lane.kernels(self.backend.forward, *inputs, tuple(out), self.options, keywords)

    def backward(
        self, lane: Lane, inputs: Sequence[Array], delta: Array, out: Sequence[Array], keywords: dict[str, Any]
    ) -> None:
        """Queues a backward of q, k, v, o, lse and do, with the delta from which dlse is subtracted."""
        own, extra = self._axes(out[:3]), out[3:]
        arrays, (delta,) = self._axes(inputs), self._axes([delta])
        lane.kernels(self.backend.backward, *arrays, delta, None, (*own, *extra), self.options, keywords)

    def second_order(
        self, lane: Lane, call: str, arrays: Mapping[str, Array], out: Sequence[Array], keywords: dict[str, Any]
    ) -> None:
        """Queues a call of second order of arrays by name, given keywords and tangents of features."""
        rows = self.request.with_rows
        own = dict(zip(arrays, self._axes(list(arrays.values())), strict=True))
        of_features = zip(TANGENTS_OF_FEATURES, CALLS[call][3:], strict=True)
        own |= {name: keywords.pop(kept) for kept, name in of_features if kept in keywords}
        results = (*self._axes(out[:rows]), *out[rows:])
        lane(call_backend, self.backend, call, own, results, self.options, keywords)

    def _axes(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays without the axis of sequences, which packed ones do not have."""
        return [array[0] for array in arrays] if self.request.problem.is_packed else list(arrays)
