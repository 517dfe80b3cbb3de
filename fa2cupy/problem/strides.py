"""How arrays lie in memory, as kernels take it: element strides of the axes that they know.

Tensors have strides of (batch, row, head). Arrays of features lie over the scores and have strides of (batch, head, query,
key), 0 where an array repeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .features import FEATURES, feature_arrays

__all__ = ["AnyStrides", "ScoreStrides", "Strides", "contiguous_score_strides", "feature_strides", "score_strides"]

#: Of the batch, row and head axes of a tensor.
Strides = tuple[int, int, int]

#: Of the batch, head, query and key axes of the scores.
ScoreStrides = tuple[int, int, int, int]

AnyStrides = Strides | ScoreStrides

#: The axes of scores that arrays have which are not broadcast from the right, by rank.
_AXES = {
    "alibi_slopes": {1: (1,), 2: (0, 1)},
    "key_padding_mask": {1: (3,), 2: (0, 3)},
    "sink": {1: (1,)},
}


def score_strides(name: str, array) -> ScoreStrides:
    """Element strides over the scores of an array of a feature that fits the problem."""
    axes = _AXES[name][array.ndim] if name in _AXES else range(4 - array.ndim, 4)
    lengths = dict(zip(axes, zip(array.shape, array.strides, strict=True), strict=True))
    batch, head, query, key = (lengths.get(axis, (1, 0)) for axis in range(4))

    def elements(length: int, stride: int) -> int:
        return 0 if length == 1 else stride // array.itemsize

    return elements(*batch), elements(*head), elements(*query), elements(*key)


def contiguous_score_strides(shape: tuple[int, ...]) -> ScoreStrides:
    """Strides of an array in C order whose last axes are the scores' last."""
    batch, heads, queries, keys = (1,) * (4 - len(shape)) + shape

    def elements(length: int, *inner: int) -> int:
        return 0 if length == 1 else math.prod(inner)

    return (
        elements(batch, heads, queries, keys),
        elements(heads, queries, keys),
        elements(queries, keys),
        elements(keys),
    )


def feature_strides(keywords: Mapping[str, object]) -> dict[str, ScoreStrides]:
    """Strides of all arrays of features that lie over scores, by name; `keywords` may have others."""
    arrays = {name: array for feature in FEATURES.values() for name, array in feature.arrays.items()}
    given = feature_arrays(keywords)
    return {name: score_strides(name, array) for name, array in given.items() if arrays[name].is_over_scores}
