"""Array layouts as kernels take them: element strides along fixed axes.

Tensors have strides of (batch, row, head). Arrays of features are broadcast over the scores and have strides of
(batch, head, query, key), 0 along the axes on which the array is repeated. With several leading axes, one array may
repeat others than the next one, so that no single stride leads from a sequence to the following one: strides of
(head, query, key) are then followed by the terms of the distance (`batch_terms`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .array_types import Array
from .features import ARRAYS, feature_arrays

__all__ = [
    "AnyStrides",
    "ArrayLayout",
    "ScoreStrides",
    "Sharers",
    "Strides",
    "argument_layouts",
    "array_layout",
    "atomics_of",
    "batch_terms",
    "contiguous_layout",
    "contiguous_like",
    "contiguous_score_strides",
    "feature_strides",
    "flat_stride",
    "has_aligned_rows",
    "is_full",
    "num_terms",
    "recorded_strides",
    "score_strides",
    "sharers",
    "sharers_of",
    "with_score_axes",
]

#: Element strides along the batch, row and head axes of a tensor.
Strides = tuple[int, int, int]

#: Element strides along the batch, head, query and key axes of the scores; or along the last three, followed by the
#: distance and the divisor of each term.
ScoreStrides = tuple[int, ...]

#: Strides and lengths of the axes of an array that the caller's function reads.
ArrayLayout = tuple[int, ...]

AnyStrides = Strides | ScoreStrides | ArrayLayout


def is_full(shape: tuple[int, ...], score_shape: tuple[int, ...]) -> bool:
    """True if an array of this shape, which can be broadcast to the scores, has an element for each score."""
    return math.prod(shape) == math.prod(score_shape)


def with_score_axes(name: str, array: Array) -> Array:
    """A view of a feature's array with all axes of the scores, at least four, of length 1 where it has none."""
    own = ARRAYS[name].score_axes(array.ndim)
    first = min((-4, *own))
    return array[tuple(slice(None) if axis in own else None for axis in range(first, 0))]


def batch_terms(lengths: Sequence[int], strides: Sequence[int]) -> dict[int, int]:
    """Where the sequences of leading axes begin: number b at the sum of ``b // divisor * distance``.

    The index along an axis of length n, behind which there are d sequences, is ``b // d - n * (b // (n * d))``. Axes
    that follow each other in memory as in C order have one term together, and repeated axes behind all others none.

    Parameters
    ----------
    lengths : sequence of int
        Those of all leading axes of the scores.
    strides : sequence of int
        Those of the array, 0 along axes on which it is repeated.

    Returns
    -------
    dict of int by int
        Distances, which are not 0, by divisor.
    """
    terms: dict[int, int] = {}
    divisor, inner = 1, 0
    for length, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if length != 1:
            if stride != inner:
                terms[divisor] = stride - inner
            divisor, inner = divisor * length, length * stride
    return terms if divisor else {}


def flat_stride(lengths: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of several axes as one; None if they have none in common."""
    terms = batch_terms(lengths, strides)
    return terms.get(1, 0) if terms.keys() <= {1} else None


def score_strides(name: str, array: Array, leading: Sequence[int] = ()) -> ScoreStrides:
    """Element strides over the scores of a feature's array, whose shape has been checked.

    `leading` has the lengths of the leading axes of the scores if there are several. An array without elements is
    repeated along all axes, so that whatever is read in its place is read at its start.
    """
    strides = [stride // array.itemsize if array.size else 0 for stride in array.strides]
    return _over_scores(ARRAYS[name].score_axes(array.ndim), array.shape, strides, leading)


def contiguous_score_strides(shape: tuple[int, ...], leading: Sequence[int] = ()) -> ScoreStrides:
    """Element strides of an array in C order whose axes are the last axes of the scores."""
    return _over_scores(range(-len(shape), 0), shape, contiguous_layout(shape)[: len(shape)], leading)


def _over_scores(
    axes: Iterable[int], shape: tuple[int, ...], strides: Sequence[int], leading: Sequence[int]
) -> ScoreStrides:
    own = {axis: stride for axis, length, stride in zip(axes, shape, strides, strict=True) if length != 1}
    head, query, key = (own.get(axis, 0) for axis in (-3, -2, -1))
    if not leading:
        return own.get(-4, 0), head, query, key
    return _with_terms(
        batch_terms(leading, [own.get(axis, 0) for axis in range(-3 - len(leading), -3)]), head, query, key
    )


def _with_terms(terms: Mapping[int, int], head: int = 0, query: int = 0, key: int = 0) -> ScoreStrides:
    if terms.keys() <= {1}:
        return terms.get(1, 0), head, query, key
    return head, query, key, *(number for divisor, distance in terms.items() for number in (distance, divisor))


class Sharers(NamedTuple):
    """The sequences that share the elements of an array over the scores.

    Attributes
    ----------
    num_owned, num_shared : int
        Sequences of the array, and sequences of the scores for each of them.
    owned, shared : ScoreStrides
        Where they are among those of the scores: number o of the array is the first of those that share it, at
        ``owned``'s offset of sequence o; number s of them is ``shared``'s offset of sequence s further on.
    """

    num_owned: int
    num_shared: int
    owned: ScoreStrides
    shared: ScoreStrides


def sharers_of(strides: ScoreStrides, sequences: int) -> Sharers:
    """The sequences that share the elements of an array, by its strides over the scores of so many sequences."""
    axes = _leading_axes(strides, sequences)
    found = {}
    for has in (True, False):
        lengths = [length for length, _, stride in axes if (stride != 0) is has]
        steps = [divisor for _, divisor, stride in axes if (stride != 0) is has]
        found[has] = math.prod(lengths), _with_terms(batch_terms(lengths, steps))
    return Sharers(found[True][0], found[False][0], found[True][1], found[False][1])


def contiguous_like(strides: ScoreStrides, score_shape: tuple[int, ...]) -> tuple[ScoreStrides, int]:
    """The strides of an array in C order that is repeated as another one is, and its elements."""
    sequences, *lengths = score_shape
    axes = [(length, stride) for length, _, stride in _leading_axes(strides, sequences)]
    axes += zip(lengths, _within(strides), strict=True)
    own = contiguous_layout(tuple(length if stride else 1 for length, stride in axes))
    found = [step if stride else 0 for step, (_, stride) in zip(own, axes, strict=False)]
    terms = batch_terms([length for length, _ in axes[:-3]], found[:-3])
    return _with_terms(terms, *found[-3:]), math.prod(length for length, stride in axes if stride)


def atomics_of(strides: ScoreStrides, score_shape: tuple[int, ...]) -> int:
    """The scores whose gradients are added atomically to an array that is repeated over some of their axes.

    Warps sum those of a row or of a column first, which leaves few.
    """
    _, row, column = _within(strides)
    return math.prod(score_shape) if row and column else 0


def has_aligned_rows(strides: ScoreStrides) -> bool:
    """True if neighbouring keys are neighbours in memory, and rows begin at multiples of four elements."""
    _, row, column = _within(strides)
    return column == 1 and row % 4 == 0


def _within(strides: ScoreStrides) -> tuple[int, ...]:
    """The strides along the head, query and key axes."""
    return strides[:3] if num_terms(strides) else strides[1:]


def _leading_axes(strides: ScoreStrides, sequences: int) -> list[tuple[int, int, int]]:
    """The axes of the sequences as an array tells them apart: length, divisor (see `batch_terms`) and stride."""
    numbers = strides[3:] if num_terms(strides) else (strides[0], 1)
    distances = {1: 0} | dict(zip(numbers[1::2], numbers[::2], strict=True))
    axes: list[tuple[int, int, int]] = []
    inner = 0
    for divisor, behind in itertools.pairwise([*sorted(distances), sequences]):
        length, stride = behind // divisor, distances[divisor] + inner
        axes.append((length, divisor, stride))
        inner = length * stride
    return axes[::-1]


def num_terms(strides: ScoreStrides) -> int:
    """The terms of an array over the scores; 0 if it has one stride for all sequences."""
    return (len(strides) - 3) // 2


def sharers(strides: ScoreStrides, batch: int) -> int:
    """How many sequences that follow each other have the same part of an array. The batch is a multiple of them."""
    if not num_terms(strides):
        return 1 if strides[0] else batch
    return min(strides[4::2])  # the divisors of the terms


def recorded_strides(strides: ScoreStrides, count: int) -> tuple[int, ...]:
    """Strides as a record has them, with so many terms, which are at least their own.

    A term has its distance, and the factor and the shift by which kernels divide. Further terms are 0.
    """
    if not count:
        return strides
    head, query, key, *terms = strides if num_terms(strides) else (*strides[1:], strides[0], 1)
    found = [head, query, key]
    for distance, divisor in zip(terms[::2], terms[1::2], strict=True):
        found += [distance, *_division(divisor)]
    return *found, *(0, 0, 0) * (count - len(terms) // 2)


def _division(divisor: int) -> tuple[int, int]:
    """The factor and the shift of a division: ``b // divisor == (2 * b * factor >> 32) >> shift`` for b below 2**31."""
    shift = (divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // divisor), shift


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


def feature_strides(keywords: Mapping[str, Any], leading: Sequence[int] = ()) -> dict[str, ScoreStrides]:
    """Element strides of the arrays that are broadcast over the scores, by name; other keywords are ignored."""
    given = feature_arrays(keywords)
    return {name: score_strides(name, array, leading) for name, array in given.items() if ARRAYS[name].axes is not None}
