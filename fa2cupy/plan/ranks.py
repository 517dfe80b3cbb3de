"""The kernels that several ranks launch between attention calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..families.operations import OPERATIONS
from ..families.tile import TileConfig
from ..jit.spec import KernelSpec
from ..problem.dtypes import ITEMSIZE

__all__ = ["LONGEST_WORD", "SUMS_OF_BLOCK", "WORDS_OF_BLOCK", "copy_spec", "specs_of_ranks", "sum_spec"]

#: Bytes of the longest words that a thread reads and writes.
LONGEST_WORD = 16
_WARPS, _WORDS_OF_THREAD, _TERMS_AT_A_TIME = OPERATIONS["copy_matrices"].num_warps or 0, 4, 4
#: Words that a block copies at a time.
WORDS_OF_BLOCK = 32 * _WARPS * _WORDS_OF_THREAD
#: Words of the sums of a block.
SUMS_OF_BLOCK = 32 * _WARPS


def copy_spec(arch: str, word: int) -> KernelSpec:
    """The kernel that copies matrices by words of so many bytes, a power of 2 up to `LONGEST_WORD`."""
    return _spec("copy_matrices", arch, "float32", word, _WORDS_OF_THREAD)


def sum_spec(arch: str, dtype: str, items: int) -> KernelSpec:
    """The kernel that sums arrays by words of so many elements."""
    return _spec("sum_arrays", arch, dtype, items, _TERMS_AT_A_TIME)


def specs_of_ranks(arch: str, dtypes: Iterable[str]) -> Iterator[KernelSpec]:
    """Yields all of them for arrays of these dtypes."""
    for exponent in range(LONGEST_WORD.bit_length()):
        yield copy_spec(arch, 1 << exponent)
    for dtype in dtypes:
        for items in (1, LONGEST_WORD // ITEMSIZE[dtype]):
            yield sum_spec(arch, dtype, items)


def _spec(operation: str, arch: str, dtype: str, word: int, at_a_time: int) -> KernelSpec:
    return KernelSpec(operation, None, arch, dtype, word, False, TileConfig(at_a_time, 1, _WARPS))
