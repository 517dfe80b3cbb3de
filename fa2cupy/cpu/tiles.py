"""Heads on the NumPy backend: their views of the arrays, their pairs of tiles, and the scores of a pair."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem.attention import AttentionProblem
from ..problem.features import FEATURES
from ..problem.sequences import Sequence, sequences_of
from .scores import NO_SLOPES, HeadTerms, ScoreTerms, Slopes, by_group

__all__ = ["Heads", "heads_of", "multiplications", "rows", "store"]

#: K/V heads are taken together up to so many rows and scores.
_FEW_ROWS, _FEW_SCORES = 256, 2**14


@dataclass(frozen=True)
class Heads:
    """K/V heads of one sequence with the query heads that share them: one, or several whose tiles are small.

    Views have the axes (K/V head, position, head of the group, column). Rows are the middle axes as one.

    Attributes
    ----------
    problem : AttentionProblem
    sequence : Sequence
    shared : slice
        The K/V heads.
    terms : HeadTerms or None
        Features of the heads; None for plain attention.
    """

    problem: AttentionProblem
    sequence: Sequence
    shared: slice
    terms: HeadTerms | None = None

    @property
    def own(self) -> slice:
        """The query heads that share the K/V heads."""
        return _query_heads(self.problem, self.shared)

    def queries(self, array: np.ndarray) -> np.ndarray:
        """View of the heads' part of q, o or their gradients."""
        index: Any = (*self.sequence.batch, self.sequence.queries, self.own)
        view = self.problem.canonical_view(array)[index]
        return by_group(view.swapaxes(0, 1), self.problem.heads_per_group)

    def keys(self, array: np.ndarray) -> np.ndarray:
        """View of the heads' part of k, v or their gradients."""
        index: Any = (*self.sequence.batch, self.sequence.keys, self.shared)
        view = self.problem.canonical_view(array)[index]
        return by_group(view.swapaxes(0, 1), 1)

    def statistics(self, array: np.ndarray) -> np.ndarray:
        """View of the heads' part of lse or delta, as one column."""
        index: Any = (*self.sequence.batch, self.own, self.sequence.queries, None)
        view = self.problem.statistics_view(array)[index]
        return by_group(view, self.problem.heads_per_group)

    def positions(self, queries: slice) -> slice:
        """The positions of a tile's rows."""
        return slice(queries.start // self.problem.heads_per_group, queries.stop // self.problem.heads_per_group)

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

    def scores(
        self, q_tile: np.ndarray, k_tile: np.ndarray, queries: slice, keys: slice, is_curved: bool = False
    ) -> tuple[np.ndarray, Slopes]:
        """Scores of a pair of tiles, and their derivatives by the scaled products. Queries are scaled.

        The second derivatives are among them if `is_curved`.
        """
        s = q_tile @ k_tile.swapaxes(1, 2)
        slopes = self.terms.apply(s, queries, keys, is_curved) if self.terms else NO_SLOPES
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


def heads_of(problem: AttentionProblem, keywords: Mapping[str, object]) -> list[Heads]:
    """The K/V heads of a call, sequence by sequence. `keywords` are those of features."""
    sequences = sequences_of(problem, keywords)
    has_terms = problem.settings.arrays or any(FEATURES[name].acts_on for name in problem.features)
    terms = ScoreTerms(problem, keywords) if has_terms else None
    return [
        Heads(problem, sequence, shared, HeadTerms(terms, sequence, _query_heads(problem, shared)) if terms else None)
        for sequence in sequences
        for shared in _together(problem, sequence)
    ]


def _together(problem: AttentionProblem, sequence: Sequence) -> Iterator[slice]:
    """As many K/V heads at a time as have few rows and scores: a step in Python takes as long as a small tile."""
    num_rows = max(1, sequence.seqlen_q * problem.heads_per_group)
    count = max(1, min(_FEW_ROWS // num_rows, _FEW_SCORES // max(1, num_rows * sequence.seqlen_k)))
    for start in range(0, problem.num_heads_kv, count):
        yield slice(start, min(start + count, problem.num_heads_kv))


def multiplications(heads: Iterable[Heads]) -> int:
    """The multiplications of a product of the heads' queries and keys."""
    return sum(
        (one.own.stop - one.own.start) * one.sequence.seqlen_q * one.sequence.seqlen_k * one.problem.head_dim
        for one in heads
    )


def _query_heads(problem: AttentionProblem, shared: slice) -> slice:
    size = problem.heads_per_group
    return slice(shared.start * size, shared.stop * size)


def rows(view: np.ndarray, are_contiguous: bool = True, factor: float | None = None) -> np.ndarray:
    """A view as a matrix for each K/V head in the accumulators' dtype, by default contiguous, times a factor."""
    accumulator = np.float64 if view.itemsize == 8 else np.float32
    if factor is not None:
        whole = np.multiply(view, factor, dtype=accumulator, order="C")
    elif are_contiguous:
        whole = np.ascontiguousarray(view, dtype=accumulator)
    else:
        whole = view.astype(accumulator, copy=False)
    heads, positions, group, columns = view.shape
    return whole.reshape(heads, positions * group, columns)


def store(matrices: np.ndarray, view: np.ndarray) -> None:
    """Writes matrices to a view, in the order in which `rows` reads it."""
    view[...] = matrices.reshape(view.shape)
