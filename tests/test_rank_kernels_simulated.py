"""The kernels between the calls of several ranks, in the interpreter of PTX: copies of matrices, and sums."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import numpy as np
import pytest
from ptxsim import Memory
from support.feature_cases import accumulator, numbers
from support.simulator import compiled_module

from fa2cupy.distributed.local import copy_kernel, sums
from fa2cupy.distributed.local.matrices import Matrix
from fa2cupy.jit.source import render_kernel
from fa2cupy.plan.ranks import LONGEST_WORD, SUMS_OF_BLOCK, copy_spec, specs_of_ranks, sum_spec

BYTES = 1 << 16

#: Place, pitch and place, pitch of target and source, width and height.
CASES = {
    16: [(0, 256, 4096, 1024, 256, 11), (40960, 512, 64, 512, 512, 1), (20480, 32, 0, 16, 16, 33)],
    8: [(8, 256, 4096, 1024, 256, 5)],
    4: [(0, 260, 4096, 1024, 256, 5), (4096, 1, 8192, 3, 4, 1)],
    2: [(2, 256, 4096, 1024, 256, 3), (4096, 100, 8192, 102, 98, 7)],
    1: [(4096, 33, 8192, 40, 5, 20)],
}


def launch(spec, blocks: int, record: bytes, memory: Memory) -> None:
    """Launches a kernel; what is behind the content of its record is no memory."""
    module = compiled_module(render_kernel(spec).text, spec.arch)
    arguments = [record.ljust(spec.params.nbytes, b"\xff")]
    module.launch(spec.symbol, blocks, spec.tile.num_threads, arguments, memory=memory, race_check=True)


@pytest.mark.simulated
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("word", CASES)
def test_matrices_are_copied_and_nothing_else(word, blocks):
    memory, rng = Memory(), np.random.default_rng(word)
    source, before = (rng.integers(0, 256, BYTES).astype(np.uint8) for _ in range(2))
    of, to = memory.alloc(source, "source"), memory.alloc(before.copy(), "target")
    ((found, slices, record),) = copy_kernel.launches_of(
        [Matrix(to + one[0], one[1], of + one[2], one[3], *one[4:]) for one in CASES[word]]
    )
    assert found == word
    launch(copy_spec("sm_80", word), min(blocks, slices), record, memory)
    expected = before.copy()
    for target, target_pitch, first, pitch, width, height in CASES[word]:
        for row in range(height):
            row_of = first + row * pitch
            expected[target + row * target_pitch :][:width] = source[row_of : row_of + width]
    np.testing.assert_array_equal(memory.read(to), expected)


def test_large_and_many_matrices_are_several(monkeypatch):
    monkeypatch.setattr(copy_kernel, "_MOST_WORDS", 100)
    matrices = [Matrix(1 << 20, 512, 1 << 30, 1024, 160, 33)] * 10  # 10 rows of 10 words at a time: 4 parts
    assert [len(record) for _, _, record in copy_kernel.launches_of(matrices)] == [8 + 40 * 48]
    monkeypatch.setattr(copy_kernel, "_MOST_MATRICES", 16)
    launches = [
        (slices, list(struct.iter_unpack("<5q2I", record[8:])))
        for _, slices, record in copy_kernel.launches_of(matrices)
    ]
    assert [len(parts) for _, parts in launches] == [16, 16, 8]
    assert all(parts[-1][4] == slices for slices, parts in launches)
    assert sum(words for _, parts in launches for *_, words in parts) == 10 * 33 * 10
    assert list(copy_kernel.launches_of([])) == []


def in_memory(memory: Memory, array: np.ndarray, name: str) -> SimpleNamespace:
    """What the launches of sums ask of an array, whose memory is that of the interpreter."""
    whole = array if array.base is None else array.base
    address = memory.alloc(whole, name)
    layout = {name: getattr(array, name) for name in ("shape", "strides", "size", "itemsize")}
    pointer = SimpleNamespace(ptr=address + array.ctypes.data - whole.ctypes.data)
    return SimpleNamespace(**layout, data=pointer, address=address)


@pytest.mark.simulated
@pytest.mark.parametrize("count", [1, 4, 6])
@pytest.mark.parametrize("columns", [8, 5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_sums_are_rounded_once_and_nothing_else_is_written(dtype, columns, count):
    """Arrays have strides of their own, so that words of several elements, and single ones, lie apart."""
    memory, rows = Memory(), 9
    target = numbers((2, rows, 4, columns), dtype)[:, :, 1:3]
    shares = [numbers((2, rows + n, 2, columns), dtype, seed=n)[:, n:] for n in range(count)]
    wide = accumulator(dtype)
    expected = sum((share.astype(wide) for share in shares), np.zeros(target.shape, wide)).astype(target.dtype)
    arrays = [in_memory(memory, array, f"array {n}") for n, array in enumerate((target, *shares))]
    ((items, words, record),) = sums.launches_of(arrays[0], arrays[1:])
    assert items == (1 if columns % 8 else LONGEST_WORD // target.itemsize)
    launch(sum_spec("sm_80", dtype, items), -(-words // SUMS_OF_BLOCK), record, memory)
    whole = target.base.copy()
    whole[:, :, 1:3] = expected
    np.testing.assert_array_equal(memory.read(arrays[0].address), whole)


class Placed(np.ndarray):
    """An array with the address that those of CuPy have."""

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.ctypes.data)


def test_sums_of_many_axes_and_of_large_arrays_are_several(monkeypatch):
    whole = np.zeros((2, 3, 2, 2, 2, 4)).view(Placed)
    assert [words for _, words, _ in sums.launches_of(whole, [whole])] == [96]
    apart = whole[:, :2, ::-1, :, ::-1, :2]
    assert [words for _, words, _ in sums.launches_of(apart, [apart])] == [8] * 4
    monkeypatch.setattr(sums, "_MOST_WORDS", 100)
    sums._layout.cache_clear()
    assert [words for _, words, _ in sums.launches_of(whole, [whole])] == [48] * 2
    assert list(sums.launches_of(whole[:0], [whole[:0]])) == []
    sums._layout.cache_clear()


def test_a_sum_is_laid_out_once_for_arrays_of_the_same_strides():
    sums._layout.cache_clear()
    first, second = (list(sums.launches_of(*arrays)) for arrays in ([x, [x]] for x in np.zeros((2, 3, 8)).view(Placed)))
    assert first[0][:2] == second[0][:2] and first != second
    assert sums._layout.cache_info()[:2] == (1, 1)


def test_records_have_room_for_all_that_a_launch_takes():
    assert copy_spec("sm_80", 16).params.nbytes == 8 + copy_kernel._MOST_MATRICES * 48 <= 4096
    assert sum_spec("sm_80", "float16", 1).params.nbytes == 24 + (1 + sums._MOST_SHARES) * 40 <= 4096
    assert len(list(specs_of_ranks("sm_80", ["float16", "float64"]))) == 5 + 2 * 2
