"""A head on the NumPy backend: its views of the arrays, its pairs of tiles, and the scores of a pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..problem.attention import AttentionProblem
from ..problem.features import FEATURES
from ..problem.sequences import Sequence, sequences_of
from .scores import NO_SLOPES, HeadTerms, ScoreTerms, Slopes

__all__ = ["Head", "heads_of", "multiplications", "rows", "store"]


@dataclass(frozen=True)
class Head:
    """A K/V head of one sequence with the query heads that share it.

    Views have the axes (position, head of the group, column). Rows are the first two axes as one.

    Attributes
    ----------
    problem : AttentionProblem
    sequence : Sequence
    index : int
        Number of the K/V head.
    terms : HeadTerms or None
        Features of the head; None for plain attention.
    """

    problem: AttentionProblem
    sequence: Sequence
    index: int
    terms: HeadTerms | None = None

    @property
    def group(self) -> slice:
        """The query heads that share the K/V head."""
        return _group(self.problem, self.index)

    def queries(self, array: np.ndarray) -> np.ndarray:
        """View of the head's part of q, o or their gradients."""
        return self.problem.canonical_view(array)[self.sequence.batch, self.sequence.queries, self.group]

    def keys(self, array: np.ndarray) -> np.ndarray:
        """View of the head's part of k, v or their gradients."""
        return self.problem.canonical_view(array)[self.sequence.batch, self.sequence.keys, self.index, None]

    def statistics(self, array: np.ndarray) -> np.ndarray:
        """View of the head's part of lse or delta, as one column."""
        whole = array[(None,) * (4 - self.problem.rank)]
        return whole[self.sequence.batch, self.group, self.sequence.queries].T[..., None]

    def query_tiles(self, b_r: int, keys: slice | None = None) -> Iterator[slice]:
        """Tiles of b_r positions, as rows: all, or those from the first to the last row that sees the tile `keys`."""
        group = self.problem.heads_per_group
        left, right = self.problem.band
        first, end = 0, self.sequence.seqlen_q
        if keys and right is not None:
            first = max(0, keys.start - self.sequence.diagonal - right)
        if keys and left is not None:
            end = min(end, keys.stop - self.sequence.diagonal + left)
        for start in range(first * group, end * group, max(1, b_r * group)):
            tile = slice(start, min(start + b_r * group, end * group))
            if keys is None or self._has_visible_tiles(tile, keys):
                yield tile

    def key_tiles(self, b_c: int, queries: slice | None = None) -> Iterator[slice]:
        """Tiles of b_c keys: all, or those from the first to the last key that the tile `queries` sees."""
        group = self.problem.heads_per_group
        left, right = self.problem.band
        first, end = 0, self.sequence.seqlen_k
        if queries and right is not None:
            end = min(end, queries.stop // group + self.sequence.diagonal + right)
        if queries and left is not None:
            first = max(0, queries.start // group + self.sequence.diagonal - left)
        for start in range(first // b_c * b_c, end, b_c):
            tile = slice(start, min(start + b_c, end))
            if queries is None or self._has_visible_tiles(queries, tile):
                yield tile

    def _has_visible_tiles(self, queries: slice, keys: slice) -> bool:
        return self.terms is None or self.terms.has_visible_tiles(queries, keys)

    def scores(self, scaled_q: np.ndarray, k: np.ndarray, queries: slice, keys: slice) -> tuple[np.ndarray, Slopes]:
        """Scores of a pair of tiles, and their derivatives by the scaled products."""
        s = scaled_q[queries] @ k[keys].T
        slopes = self.terms.apply(s, queries, keys) if self.terms else NO_SLOPES
        self._hide(s, queries, keys)
        return s, slopes

    def _hide(self, s: np.ndarray, queries: slice, keys: slice) -> None:
        # Only pairs of tiles that an edge of the band crosses need a mask.
        group, diagonal = self.problem.heads_per_group, self.sequence.diagonal
        left, right = self.problem.band
        if left is None and right is None:
            return
        aligned = np.arange(queries.start, queries.stop)[:, None] // group + diagonal
        if right is not None and keys.stop - 1 > queries.start // group + diagonal + right:
            np.copyto(s, -np.inf, where=np.arange(keys.start, keys.stop) > aligned + right)
        if left is not None and keys.start < (queries.stop - 1) // group + diagonal - left:
            np.copyto(s, -np.inf, where=np.arange(keys.start, keys.stop) < aligned - left)


def heads_of(problem: AttentionProblem, keywords: Mapping[str, object]) -> list[Head]:
    """The K/V heads of a call, sequence by sequence. `keywords` are those of features."""
    sequences = sequences_of(problem, keywords)
    has_terms = problem.settings.arrays or any(FEATURES[name].acts_on for name in problem.features)
    terms = ScoreTerms(problem, keywords) if has_terms else None
    return [
        Head(problem, sequence, index, HeadTerms(terms, sequence, _group(problem, index)) if terms else None)
        for sequence in sequences
        for index in range(problem.num_heads_kv)
    ]


def multiplications(heads: Iterable[Head]) -> int:
    """The multiplications of a product of the heads' queries and keys."""
    return sum(
        head.problem.heads_per_group * head.sequence.seqlen_q * head.sequence.seqlen_k * head.problem.head_dim
        for head in heads
    )


def _group(problem: AttentionProblem, index: int) -> slice:
    size = problem.heads_per_group
    return slice(index * size, (index + 1) * size)


def rows(view: np.ndarray) -> np.ndarray:
    """A view as a contiguous matrix in the accumulators' dtype."""
    accumulator = "float64" if view.dtype.name == "float64" else "float32"
    return np.ascontiguousarray(view, dtype=accumulator).reshape(-1, view.shape[-1])


def store(matrix: np.ndarray, view: np.ndarray) -> None:
    """Writes a matrix to a view, in the order in which `rows` reads it."""
    view[...] = matrix.reshape(view.shape)
