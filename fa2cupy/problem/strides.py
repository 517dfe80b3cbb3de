"""Array layouts as kernels take them: element strides along fixed axes.

Tensors have strides of (batch, row, head). Arrays of features are broadcast over the scores and have strides of
(batch, head, query, key), 0 along the axes on which the array is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .array_types import Array
from .features import ARRAYS, feature_arrays

__all__ = [
    "AnyStrides",
    "ArrayLayout",
    "ScoreStrides",
    "Strides",
    "argument_layouts",
    "array_layout",
    "contiguous_layout",
    "contiguous_score_strides",
    "feature_strides",
    "is_full",
    "score_strides",
    "with_score_axes",
]

#: Element strides along the batch, row and head axes of a tensor.
Strides = tuple[int, int, int]

#: Element strides along the batch, head, query and key axes of the scores.
ScoreStrides = tuple[int, int, int, int]

#: Strides and lengths of the axes of an array that the caller's function reads.
ArrayLayout = tuple[int, ...]

AnyStrides = Strides | ScoreStrides | ArrayLayout


def is_full(shape: tuple[int, ...], score_shape: tuple[int, ...]) -> bool:
    """True if an array of this shape, which can be broadcast to the scores, has an element for each score."""
    return math.prod(shape) == math.prod(score_shape)


def with_score_axes(name: str, array: Array) -> Array:
    """A view of a feature's array with all four axes of the scores, of length 1 where it has none."""
    own = ARRAYS[name].score_axes(array.ndim)
    return array[tuple(slice(None) if axis in own else None for axis in range(4))]


def score_strides(name: str, array: Array) -> ScoreStrides:
    """Element strides over the scores of a feature's array, whose shape has been checked."""
    lengths = dict(zip(ARRAYS[name].score_axes(array.ndim), zip(array.shape, array.strides, strict=True), strict=True))
    batch, head, query, key = (lengths.get(axis, (1, 0)) for axis in range(4))

    def elements(length: int, stride: int) -> int:
        return 0 if length == 1 else stride // array.itemsize

    return elements(*batch), elements(*head), elements(*query), elements(*key)


def contiguous_score_strides(shape: tuple[int, ...]) -> ScoreStrides:
    """Element strides of an array in C order whose axes are the last axes of the scores."""
    batch, heads, queries, keys = (1,) * (4 - len(shape)) + shape

    def elements(length: int, *inner: int) -> int:
        return 0 if length == 1 else math.prod(inner)

    return (
        elements(batch, heads, queries, keys),
        elements(heads, queries, keys),
        elements(queries, keys),
        elements(keys),
    )


def array_layout(array: Array) -> ArrayLayout:
    """Element strides of an array, then the lengths of its axes."""
    return (*(stride // array.itemsize for stride in array.strides), *array.shape)


def contiguous_layout(shape: tuple[int, ...]) -> ArrayLayout:
    """The same for an array in C order."""
    return (*(math.prod(shape[axis + 1 :]) for axis in range(len(shape))), *shape)


def argument_layouts(keywords: Mapping[str, Any]) -> dict[str, AnyStrides]:
    """Layouts of the arrays of functions, and of their gradients in C order, by their names in kernels."""
    found: dict[str, AnyStrides] = {}
    for keyword in ("score_args", "mask_args"):
        for number, array in enumerate(keywords.get(keyword, ())):
            found[f"{keyword}{number}"] = array_layout(array)
            found[f"d{keyword}{number}"] = contiguous_layout(array.shape)
    return found


def feature_strides(keywords: Mapping[str, Any]) -> dict[str, ScoreStrides]:
    """Element strides of the arrays that are broadcast over the scores, by name; other keywords are ignored."""
    given = feature_arrays(keywords)
    return {name: score_strides(name, array) for name, array in given.items() if ARRAYS[name].axes is not None}
