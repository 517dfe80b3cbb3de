"""Ranks that share a training: each has some rows of every context, and all have the same weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from language_model.arrays import SetupError

import fa2cupy
from fa2cupy import distributed as dist

__all__ = ["OneRank", "SeveralRanks"]


class OneRank:
    """A training on one device.

    Attributes
    ----------
    size : int
        Number of ranks.
    is_first : bool
        True on the rank that prints and writes files.
    """

    size, is_first = 1, True

    def rows(self, context: int) -> slice | np.ndarray:
        """Returns the positions of this rank's rows in a context."""
        return slice(0, context)

    def attention(self, **options: object) -> Callable:
        """Returns ``fa2cupy.attention`` over the rows of all ranks."""
        return functools.partial(fa2cupy.attention, **options)

    def total(self, share):
        """Returns the sum over all ranks, which call this together."""
        return share


class SeveralRanks(OneRank):
    """A sequence-parallel training.

    Parameters
    ----------
    comm : fa2cupy.distributed.Communicator
    """

    def __init__(self, comm: dist.Communicator):
        self._comm, self.size, self.is_first = comm, comm.size, comm.rank == 0

    def rows(self, context):
        """Does the same as `OneRank.rows`, in zigzag order.

        Raises
        ------
        SetupError
            The ranks do not divide the context into two chunks each.
        """
        if context % (2 * self.size):
            raise SetupError(f"the context must be a multiple of {2 * self.size} for {self.size} ranks, got {context}")
        return dist.positions(self._comm, context)

    def attention(self, **options):
        """Does the same as `OneRank.attention`: ranks exchange keys and values, or heads."""
        return functools.partial(dist.attention, self._comm, **options)

    def total(self, share):
        """Does the same as `OneRank.total`: all ranks get the same bits, so that their weights stay the same."""
        return dist.total(self._comm, share)
