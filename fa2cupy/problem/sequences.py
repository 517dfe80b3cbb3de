"""Which rows of the arrays belong together: one sequence of the batch after the other, packed or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .attention import AttentionProblem

__all__ = ["Sequence", "sequences_of"]


class Sequence(NamedTuple):
    """One sequence.

    Attributes
    ----------
    number : int
        Its place in the batch, which a bias, a mask, slopes and dropout go by.
    batch : int
        Where it is along the first axis of `AttentionProblem.canonical_view`: 0 if sequences are packed.
    queries, keys : slice
        Its rows there.
    """

    number: int
    batch: int
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
        """Query i is aligned with key i + diagonal: bottom right."""
        return self.seqlen_k - self.seqlen_q


def sequences_of(problem: AttentionProblem, keywords: Mapping[str, object]) -> list[Sequence]:
    """The sequences of a problem. For packed ones this reads the offsets, on the host.

    Raises
    ------
    ValueError
        Offsets do not grow, leave the arrays, or are further apart than max_seqlen_q or max_seqlen_k.
    """
    settings = problem.settings
    if settings.num_sequences is None:
        queries, keys = slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
        return [Sequence(batch, batch, queries, keys) for batch in range(problem.batch)]
    queries = _rows("q", keywords["cu_seqlens_q"], problem.seqlen_q, settings.max_seqlen_q)
    keys = _rows("k", keywords["cu_seqlens_k"], problem.seqlen_k, settings.max_seqlen_k)
    return [Sequence(number, 0, *rows) for number, rows in enumerate(zip(queries, keys, strict=True))]


def _rows(side: str, offsets, total: int, longest: int) -> list[slice]:
    host = np.asarray(offsets if isinstance(offsets, np.ndarray) else offsets.get()).astype("int64")
    lengths = np.diff(host)
    if (lengths < 0).any() or host[0] < 0 or host[-1] > total:
        wanted = f"offsets that grow from 0 to at most {total}"
        raise ValueError(f"cu_seqlens_{side}: expected {wanted}, got {host.tolist()}")
    if (lengths > longest).any():
        raise ValueError(f"max_seqlen_{side}: a sequence has {lengths.max()} rows, more than {longest}")
    return [slice(int(start), int(stop)) for start, stop in zip(host[:-1], host[1:], strict=True)]
