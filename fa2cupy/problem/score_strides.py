"""How arrays of features lie over the scores: strides of (batch, head, query, key), 0 where an array repeats."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .features import ARRAY_FEATURES, OFFSETS

__all__ = ["contiguous_score_strides", "feature_strides", "score_strides"]

#: The axes of scores that arrays have which are not broadcast from the right, by rank.
_AXES = {
    "alibi_slopes": {1: (1,), 2: (0, 1)},
    "key_padding_mask": {1: (3,), 2: (0, 3)},
    "sink": {1: (1,)},
}


def score_strides(name: str, array) -> tuple[int, int, int, int]:
    """Element strides over the scores of an array of a feature that fits the problem."""
    axes = _AXES[name][array.ndim] if name in _AXES else range(4 - array.ndim, 4)
    strides = [0, 0, 0, 0]
    for axis, length, stride in zip(axes, array.shape, array.strides, strict=True):
        strides[axis] = 0 if length == 1 else stride // array.itemsize
    return tuple(strides)


def contiguous_score_strides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The same of an array in C order whose last axes are the scores' last."""
    full = (1,) * (4 - len(shape)) + shape
    return tuple(0 if full[axis] == 1 else math.prod(full[axis + 1 :]) for axis in range(4))


def feature_strides(features: Mapping[str, object]) -> dict[str, tuple[int, int, int, int]]:
    """Those of all arrays of features that lie over scores, by name."""
    given = {name: features[name] for name in ARRAY_FEATURES if features.get(name) is not None}
    return {name: score_strides(name, array) for name, array in given.items() if name not in OFFSETS}
