"""Copies by one kernel for many matrices, inside a GPU and to others: CUDA has a kernel or an engine copy each."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from .matrices import Matrix

__all__ = ["SOURCE", "THREADS", "copy_matrices", "launches_of"]

THREADS = 256
#: Words that a thread copies at a time, and the bytes of the longest ones.
_EACH, _LONGEST = 4, 16
#: Matrices of a launch, whose record is limited to 4 KiB, and words of a matrix, of which there are fewer.
_MOST_MATRICES, _MOST_WORDS = 64, 1 << 31
_BLOCKS_PER_MULTIPROCESSOR = 8

#: Matrices are divided into shares, which blocks take in turn: `end` is the number of shares up to the end of a matrix.
SOURCE = f"""
struct Matrix {{
  long long target, target_pitch, source, source_pitch, end;
  unsigned words_of_row, words;
}};
struct Record {{
  long long count;
  Matrix matrices[{_MOST_MATRICES}];
}};

template <class Word>
__device__ Word* word_at(long long address, long long pitch, unsigned words_of_row, unsigned word) {{
  return reinterpret_cast<Word*>(address + word / words_of_row * pitch) + word % words_of_row;
}}

template <class Word>
__device__ void copy(const Record& record) {{
  int number = 0;
  long long begin = 0;
  for (long long share = blockIdx.x; share < record.matrices[record.count - 1].end; share += gridDim.x) {{
    while (share >= record.matrices[number].end) begin = record.matrices[number++].end;
    const Matrix& one = record.matrices[number];
    const unsigned first = unsigned(share - begin) * {THREADS * _EACH} + threadIdx.x;
    Word held[{_EACH}];
    #pragma unroll
    for (int i = 0; i < {_EACH}; ++i) {{
      const unsigned word = first + i * {THREADS};
      if (word < one.words) held[i] = *word_at<Word>(one.source, one.source_pitch, one.words_of_row, word);
    }}
    #pragma unroll
    for (int i = 0; i < {_EACH}; ++i) {{
      const unsigned word = first + i * {THREADS};
      if (word < one.words) *word_at<Word>(one.target, one.target_pitch, one.words_of_row, word) = held[i];
    }}
  }}
}}

#define KERNEL(bytes, Word) \\
  extern "C" __global__ void __launch_bounds__({THREADS}) fa2_copy_matrices_##bytes(const Record record) {{ \\
    copy<Word>(record); \\
  }}
KERNEL(16, uint4)
KERNEL(8, unsigned long long)
KERNEL(4, unsigned)
KERNEL(2, unsigned short)
KERNEL(1, unsigned char)
"""
_COUNT_BYTES, _MATRIX_BYTES = 8, 48
_RECORD_BYTES = _COUNT_BYTES + _MOST_MATRICES * _MATRIX_BYTES


def copy_matrices(matrices: Sequence[Matrix]) -> None:
    """Queues copies on CuPy's current stream; the places of the matrices are addresses."""
    import cupy
    from cupy.cuda import driver

    device = cupy.cuda.Device()
    most, stream = _BLOCKS_PER_MULTIPROCESSOR * _multiprocessors(device.id), cupy.cuda.get_current_stream().ptr
    for name, shares, record in launches_of(matrices):
        buffer = ctypes.create_string_buffer(record, _RECORD_BYTES)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        blocks = min(shares, most)
        function = _function(name, device.id).ptr
        driver.launchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(parameters), 0)


def launches_of(matrices: Sequence[Matrix]) -> Iterator[tuple[str, int, bytes]]:
    """Yields the kernel, the number of shares and the front of the record of each launch."""
    together = _LONGEST
    for target, target_pitch, source, source_pitch, width, height in matrices:
        together |= target | source | width | (target_pitch | source_pitch if height > 1 else 0)
    word = together & -together  # divides all of these
    if any(one.width * one.height >= _MOST_WORDS * word for one in matrices):
        matrices = [part for one in matrices for part in _of_some_words(one, word)]
    for begin in range(0, len(matrices), _MOST_MATRICES):
        values: list[int] = []
        shares, some = 0, matrices[begin : begin + _MOST_MATRICES]
        for target, target_pitch, source, source_pitch, width, height in some:
            words_of_row = width // word
            words = words_of_row * height
            shares += -(-words // (THREADS * _EACH))
            values += (target, target_pitch, source, source_pitch, shares, words_of_row, words)
        yield f"fa2_copy_matrices_{word}", shares, struct.pack("<q" + "5q2I" * len(some), len(some), *values)


def _of_some_words(matrix: Matrix, word: int) -> Iterator[Matrix]:
    """Yields matrices of some of the rows."""
    most = max(1, _MOST_WORDS * word // matrix.width)
    for first in range(0, matrix.height, most):
        yield matrix._replace(
            target=matrix.target + first * matrix.target_pitch,
            source=matrix.source + first * matrix.source_pitch,
            height=min(most, matrix.height - first),
        )


@functools.lru_cache(maxsize=None)
def _multiprocessors(device: int) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@functools.lru_cache(maxsize=None)
def _function(name: str, device: int) -> Any:
    """The kernel as a ``cupy.cuda.Function`` of the device, which is the current one."""
    return _module().get_function(name).kernel


@functools.lru_cache(maxsize=None)
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE, options=("-std=c++17",))
