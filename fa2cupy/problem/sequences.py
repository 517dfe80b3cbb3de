"""The sequences of a problem: the rows of each, in packed arrays or along a batch axis."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .array_types import Array
from .attention import AttentionProblem

__all__ = ["Sequence", "sequences_of"]


class Sequence(NamedTuple):
    """One sequence.

    Attributes
    ----------
    number : int
        Its number in the batch, an input of functions and of dropout.
    batch : tuple of int
        Its index along the leading axes of `AttentionProblem.canonical_view`: 0 if sequences are packed.
    place : tuple of int
        Its index along the leading axes of a bias, a mask and slopes.
    queries, keys : slice
        Its rows along the second axis.
    """

    number: int
    batch: tuple[int, ...]
    place: tuple[int, ...]
    queries: slice
    keys: slice

    @property
    def seqlen_q(self) -> int:
        """Number of queries."""
        return self.queries.stop - self.queries.start

    @property
    def seqlen_k(self) -> int:
        """Number of keys."""
        return self.keys.stop - self.keys.start

    @property
    def diagonal(self) -> int:
        """The offset of the diagonal: query i is aligned with key i + diagonal (bottom right)."""
        return self.seqlen_k - self.seqlen_q


def sequences_of(problem: AttentionProblem, keywords: Mapping[str, Any]) -> list[Sequence]:
    """The sequences of a problem. The offsets of packed ones are read on the host.

    Raises
    ------
    ValueError
        Offsets decrease, leave the arrays, or are further apart than max_seqlen_q or max_seqlen_k.
    """
    settings = problem.settings
    if settings.num_sequences is None:
        all_rows = slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
        places = itertools.product(*map(range, problem.broadcast_shape[:-3]))
        return [Sequence(number, place, place, *all_rows) for number, place in enumerate(places)]
    queries = _rows("q", keywords["cu_seqlens_q"], problem.seqlen_q, settings.max_seqlen_q)
    keys = _rows("k", keywords["cu_seqlens_k"], problem.seqlen_k, settings.max_seqlen_k)
    return [Sequence(number, (0,), (number,), *rows) for number, rows in enumerate(zip(queries, keys, strict=True))]


def _rows(side: str, offsets: Array, total: int, longest: int) -> list[slice]:
    host = np.asarray(offsets if isinstance(offsets, np.ndarray) else offsets.get()).astype("int64")
    lengths = np.diff(host)
    if (lengths < 0).any() or host[0] < 0 or host[-1] > total:
        wanted = f"offsets that grow from 0 to at most {total}"
        raise ValueError(f"cu_seqlens_{side}: expected {wanted}, got {host.tolist()}")
    if (lengths > longest).any():
        raise ValueError(f"max_seqlen_{side}: a sequence has {lengths.max()} rows, more than {longest}")
    return [slice(start, stop) for start, stop in itertools.pairwise(host.tolist())]
