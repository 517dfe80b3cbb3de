"""Features on a tile of scores on NumPy, between the two matrix products.

Tiles have a row for each (position, head of the group) and a column for each key. The formulas are at the top of
``problem/features.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..problem import philox
from ..problem.attention import AttentionProblem
from ..problem.features import feature_arrays
from ..problem.sequences import Sequence

__all__ = ["BiasGradient", "HeadTerms", "ScoreTerms"]


class ScoreTerms:
    """The features of a call, with their arrays as views of (batch, head, query, key): broadcast axes have stride 0.

    Parameters
    ----------
    problem : AttentionProblem
    keywords : mapping
        Keywords of features, checked.
    """

    def __init__(self, problem: AttentionProblem, keywords: Mapping[str, object]):
        shape = problem.score_shape
        batch, heads, _, seqlen_k = shape
        arrays = feature_arrays(keywords)
        self.settings = problem.settings
        self.bias = np.broadcast_to(arrays["bias"], shape) if "bias" in arrays else None
        self.masks = [np.broadcast_to(arrays["mask"], shape)] if "mask" in arrays else []
        if "key_padding_mask" in arrays:
            padding = arrays["key_padding_mask"].reshape(batch, 1, 1, seqlen_k)
            self.masks.append(np.broadcast_to(padding, shape))
        self.slopes = np.broadcast_to(arrays["alibi_slopes"], (batch, heads)) if "alibi_slopes" in arrays else None
        self.sink = arrays.get("sink")


class HeadTerms:
    """The features of the query heads `group` of one sequence."""

    def __init__(self, terms: ScoreTerms, sequence: Sequence, group: slice):
        self.settings = terms.settings
        self.sequence = sequence
        self.group = group
        self.size = group.stop - group.start
        self.sink = None if terms.sink is None else terms.sink[group]
        self._slopes = None if terms.slopes is None else terms.slopes[sequence.number, group]
        self._bias = None if terms.bias is None else self._part(terms.bias)
        self._masks = [self._part(mask) for mask in terms.masks]

    def _part(self, over_scores: np.ndarray) -> np.ndarray:
        """The part of an array with the axes (position, head of the group, key)."""
        return over_scores[self.sequence.number, self.group].transpose(1, 0, 2)

    def apply(self, s: np.ndarray, queries: slice, keys: slice) -> np.ndarray | None:
        """Applies features to a tile of scaled scores, in place; returns the derivative, or None if it is 1."""
        slope = None
        if self.settings.softcap is not None:
            cap = np.asarray(self.settings.softcap, s.dtype)
            tanh = np.tanh(np.divide(s, cap, out=s), out=s)
            slope = 1 - tanh * tanh
            s *= cap
        positions = self.positions(queries)
        tile = s.reshape(-1, self.size, s.shape[1])  # (position, head of the group, key), a view
        if self._slopes is not None:
            query, key = np.arange(positions.start, positions.stop), np.arange(keys.start, keys.stop)
            distance = abs(query[:, None] + self.sequence.diagonal - key).astype(s.dtype)
            tile -= self._slopes[:, None] * distance[:, None, :]
        if self._bias is not None:
            tile += self._bias[positions, :, keys].astype(s.dtype, copy=False)
        for mask in self._masks:
            np.copyto(tile, -np.inf, where=~mask[positions, :, keys])
        return slope

    def keep(self, queries: slice, keys: slice, dtype: np.dtype) -> np.ndarray | None:
        """Factors of dropout for a tile of P: 0 or the inverse of the probability of being kept. None: no dropout."""
        probability = self.settings.dropout_p
        if not probability:
            return None
        drawn = philox.kept(
            probability, self.settings.seed, self.sequence.number, self.group, self.positions(queries), keys
        )
        rows = drawn.transpose(1, 0, 2).reshape(-1, drawn.shape[2])
        return rows * np.asarray(philox.dropout_scale(probability), dtype)

    def positions(self, queries: slice) -> slice:
        """The positions of a tile's rows."""
        return slice(queries.start // self.size, queries.stop // self.size)


class BiasGradient:
    """Sums tiles of dS into an array of the bias's shape, so that dS is never held for all scores.

    Attributes
    ----------
    sums : ndarray, shape of the bias with axes of length 1 in front, up to four axes
    """

    def __init__(self, shape: tuple[int, ...], dtype: str):
        self.sums = np.zeros((1,) * (4 - len(shape)) + shape, dtype)

    def add(self, ds: np.ndarray, terms: HeadTerms, queries: slice, keys: slice) -> None:
        """Adds a tile of dS of one head."""
        tile = ds.reshape(-1, terms.size, ds.shape[1]).transpose(1, 0, 2)
        parts = (terms.group, terms.positions(queries), keys)
        repeated = [length == 1 for length in self.sums.shape]
        tile = tile.sum(axis=tuple(axis for axis in range(3) if repeated[1 + axis]), keepdims=True)
        places = [slice(0, 1) if once else part for once, part in zip(repeated[1:], parts, strict=True)]
        place = (0 if repeated[0] else terms.sequence.number, *places)
        self.sums[place] += tile
