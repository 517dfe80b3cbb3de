"""Copies many matrices with one kernel, within a GPU or to another. CUDA would start one copy for each matrix."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from ...families.device import DeviceInfo
from ...plan.ranks import LONGEST_WORD, WORDS_OF_BLOCK, copy_spec
from .kernels import Work, launch
from .matrices import Matrix

__all__ = ["copy_matrices", "launches_of", "works_of"]

#: A launch takes at most so many matrices (a record has at most 4 KiB), and a matrix has fewer words than this.
_MOST_MATRICES, _MOST_WORDS = 64, 1 << 31
_HEAD, _MATRIX = "<q", "5q2I"
_BLOCKS_PER_MULTIPROCESSOR = 8


def copy_matrices(matrices: Sequence[Matrix]) -> None:
    """Queues copies on CuPy's current stream; the places of the matrices are addresses."""
    for work in works_of(matrices):
        launch(work)


def works_of(matrices: Sequence[Matrix]) -> Iterator[Work]:
    """The launches that copy matrices. Those of a matrix are of its target and of its source."""
    for word, slices, record in launches_of(matrices):
        count = (len(record) - struct.calcsize(_HEAD)) // struct.calcsize("=" + _MATRIX)
        places = tuple([1 + 6 * n + of for n in range(count) for of in (0, 2)])
        yield Work(copy_spec, (word,), _blocks_of(slices), record, places)


def _blocks_of(slices: int) -> int:
    return min(slices, _BLOCKS_PER_MULTIPROCESSOR * DeviceInfo.current().multiprocessors)


def launches_of(matrices: Sequence[Matrix]) -> Iterator[tuple[int, int, bytes]]:
    """Yields the bytes of a word, the number of slices and the front of the record of each launch."""
    together = LONGEST_WORD
    for target, target_pitch, source, source_pitch, width, height in matrices:
        together |= target | source | width | (target_pitch | source_pitch if height > 1 else 0)
    word = together & -together  # divides all of these
    if any(one.width * one.height >= _MOST_WORDS * word for one in matrices):
        matrices = [part for one in matrices for part in _of_some_words(one, word)]
    for begin in range(0, len(matrices), _MOST_MATRICES):
        values: list[int] = []
        slices, some = 0, matrices[begin : begin + _MOST_MATRICES]
        for target, target_pitch, source, source_pitch, width, height in some:
            words_of_row = width // word
            words = words_of_row * height
            slices += -(-words // WORDS_OF_BLOCK)
            values += (target, target_pitch, source, source_pitch, slices, words_of_row, words)
        yield word, slices, struct.pack(_HEAD + _MATRIX * len(some), len(some), *values)


def _of_some_words(matrix: Matrix, word: int) -> Iterator[Matrix]:
    """Divides a matrix into matrices of fewer rows, which are small enough for a launch."""
    most = max(1, _MOST_WORDS * word // matrix.width)
    for first in range(0, matrix.height, most):
        yield matrix._replace(
            target=matrix.target + first * matrix.target_pitch,
            source=matrix.source + first * matrix.source_pitch,
            height=min(most, matrix.height - first),
        )
