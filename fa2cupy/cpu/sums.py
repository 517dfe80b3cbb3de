"""Gradients that are summed over heads, such as that of a bias that several heads share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..problem.attention import AttentionProblem
from .scores import BiasGradient
from .tiles import Heads

__all__ = ["Sums", "shares_of"]

#: Shares of the heads that have sums of their own: each takes as much memory as the results.
_SHARES = 8


def shares_of(heads: Sequence[Heads]) -> list[Sequence[Heads]]:
    """The heads in shares, so that sums are in an order that does not depend on the number of threads.

    The same head of several sequences is in as few shares as possible, since a bias is often the same for all of them.
    """
    ordered = sorted(heads, key=lambda head: head.shared.start)
    size = -(-len(heads) // _SHARES)
    return [ordered[start : start + size] for start in range(0, len(heads), size)] if heads else []


class Sums:
    """Gradients that are summed over the heads of a share.

    Attributes
    ----------
    bias : BiasGradient or None
        None if it is not requested.
    others : dict of ndarray
        dsink, and those of the arrays of `score_mod`, by names such as ``"dscore_args[0]"``. These are in float64: an
        element of a table may be the sum of as many numbers as there are scores.
    """

    def __init__(self, extra: Mapping[str, np.ndarray], problem: AttentionProblem):
        accumulator = problem.accumulator_dtype
        self.bias = BiasGradient(extra["dbias"].shape, accumulator) if "dbias" in extra else None
        self.others = {
            name: np.zeros(like.shape, accumulator if name == "dsink" else "float64")
            for name, like in extra.items()
            if name != "dbias"
        }

    @staticmethod
    def store(sums: Sequence[Sums], results: Mapping[str, np.ndarray]) -> None:
        """Writes the total of several, in their order."""
        for name, result in results.items():
            if name == "dbias":
                BiasGradient.store([one.bias for one in sums if one.bias is not None], result)
            else:
                result[...] = sum(one.others[name] for one in sums)
