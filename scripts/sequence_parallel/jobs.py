"""The jobs that are measured, and the measurements of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from common.measure import TRAINING, Problem

from fa2cupy.scaleout import two_hosts

from .torch_ring import TorchRing

SCHEMES, PEER = ("heads", "gather", "hybrid"), TorchRing.name
OPERATIONS = ("forward", "backward", TRAINING)
#: ``training`` as a CUDA graph, whose baseline is that of ``training``.
GRAPH = "graph"

#: Largest error over the largest value. Shares of gradients are rounded before they are summed.
ALLOWED = {"float64": 1e-12, "bfloat16": 2e-2}


class Job(NamedTuple):
    """One scheme on one problem of the whole sequence, or of as many documents packed in one."""

    problem: Problem
    ranks: int
    scheme: str
    documents: int = 1

    @property
    def offsets(self) -> np.ndarray:
        """Where documents begin, and the end of the last one; their lengths are any."""
        seqlen = self.problem.seqlen
        starts = np.random.default_rng(0).choice(np.arange(1, seqlen), self.documents - 1, replace=False)
        return np.array([0, *np.sort(starts), seqlen], "int32")

    def tflops(self, operation: str, milliseconds: float) -> float:
        """Returns the TFLOP/s of a call."""
        share = ((np.diff(self.offsets) / self.problem.seqlen) ** 2).sum()
        return share * self.problem.tflops(operation, milliseconds)

    def __str__(self) -> str:
        documents = f", {self.documents} documents" if self.documents > 1 else ""
        return f"{self.scheme} on {self.ranks} ranks, {self.problem}{documents}"


class Measurement(NamedTuple):
    """The measurements of one rank.

    Attributes
    ----------
    check : str
        The standard of the comparison: ``one call`` or ``samples``; for a peer ``gather``.
    error : float
        The largest error of all ranks.
    equal : bool or None
        True if o and lse are those of one call bit for bit, or if repeated calls are equal, on all ranks.
    extra_bytes : int or None
    times, alone : dict of list of float
        Milliseconds of each call by operation, of the scheme and of the baseline; none if a result was wrong.
    host : dict of float
        The least milliseconds of the host, which does not wait for the GPU, for a call of the scheme by operation.
    missing : str
        The reason why there is no result of a peer.
    """

    check: str
    error: float
    equal: bool | None
    extra_bytes: int | None = None
    times: Mapping[str, Sequence[float]] = {}
    alone: Mapping[str, Sequence[float]] = {}
    host: Mapping[str, float] = {}
    missing: str = ""

    def wrong(self, dtype: str) -> str:
        """Returns the reason why the result is wrong; empty if it is not."""
        if not self.error <= ALLOWED[dtype]:
            return f"error {self.error:.1e} of the largest value, {ALLOWED[dtype]:.0e} is allowed"
        return "repeated calls differ" if self.check == "samples" and not self.equal else ""


def is_possible(scheme: str, heads_kv: int, ranks: int) -> bool:
    """Returns True if the ranks divide the K/V heads as the scheme needs it; ``hybrid`` has two hosts of several."""
    if scheme == "hybrid":
        return 1 < two_hosts(ranks) < ranks and heads_kv % two_hosts(ranks) == 0
    return scheme != "heads" or heads_kv % ranks == 0


def part_of(problem: Problem, **sizes: int) -> Problem:
    """Returns a problem with other sizes."""
    return Problem(**{**vars(problem), **sizes})


def share_of(problem: Problem, ranks: int) -> Problem | None:
    """Returns the work of one rank as one call, a share of the heads, or None if the ranks do not divide them."""
    heads, heads_kv = problem.num_heads // ranks, max(1, problem.heads_kv // ranks)
    if problem.num_heads % ranks or (problem.heads_kv % ranks and problem.heads_kv > ranks) or heads % heads_kv:
        return None
    return part_of(problem, num_heads=heads, num_heads_kv=heads_kv)
