"""Gradients that are summed over heads, such as that of a bias that several heads share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..problem.attention import AttentionProblem
from .scores import BiasGradient
from .threads import in_threads
from .tiles import Heads, multiplications

__all__ = ["Sums", "in_shares"]

#: Shares of the heads that have sums of their own: each takes as much memory as the results.
_SHARES = 8


class Sums:
    """Gradients that are summed over the heads of a share.

    Parameters
    ----------
    results : mapping of ndarray
        The arrays for the totals by name: dbias, dsink, and those of the arrays of `score_mod`, such as
        ``"dscore_args[0]"``.
    problem : AttentionProblem

    Attributes
    ----------
    bias : BiasGradient or None
        None if it is not requested.
    others : dict of ndarray
        Those of the arrays of `score_mod` are in float64: an element of a table may be the sum of as many numbers as
        there are scores.
    arguments : dict of ndarray
        Of the others, those of the arrays of `score_mod`.
    """

    def __init__(self, results: Mapping[str, np.ndarray], problem: AttentionProblem):
        accumulator = problem.accumulator_dtype
        self.bias = BiasGradient(results["dbias"].shape, accumulator) if "dbias" in results else None
        self.others = {
            name: np.zeros(result.shape, accumulator if name == "dsink" else "float64")
            for name, result in results.items()
            if name != "dbias"
        }
        self.arguments = {name: total for name, total in self.others.items() if name != "dsink"}


def in_shares(
    work: Callable[[Heads, Sums], None],
    heads: Sequence[Heads],
    problem: AttentionProblem,
    results: Mapping[str, np.ndarray],
) -> None:
    """Calls `work` for each head, in threads, with the sums of its share, and writes the totals to `results`."""

    def of_share(share: Sequence[Heads]) -> Sums:
        sums = Sums(results, problem)
        for head in share:
            work(head, sums)
        return sums

    found = in_threads(of_share, _shares(heads) if results else [[head] for head in heads], multiplications(heads))
    for name, result in results.items():
        if name == "dbias":
            BiasGradient.store([sums.bias for sums in found if sums.bias is not None], result)
        else:
            result[...] = sum(sums.others[name] for sums in found)


def _shares(heads: Sequence[Heads]) -> list[Sequence[Heads]]:
    """The heads in shares, so that sums are in an order that does not depend on the number of threads.

    The same head of several sequences is in as few shares as possible, since a bias is often the same for all of them.
    """
    ordered = sorted(heads, key=lambda head: head.shared.start)
    size = -(-len(heads) // _SHARES)
    return [ordered[start : start + size] for start in range(0, len(heads), size)] if heads else []
