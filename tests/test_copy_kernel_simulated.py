"""The kernel that copies matrices, in the interpreter of PTX."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from ptxsim.memory import Memory
from support.ptxsim_kernels import cuda_module

from fa2cupy.distributed.movers import copy_kernel
from fa2cupy.distributed.movers.copy_kernel import _RECORD_BYTES, SOURCE, THREADS, launches_of
from fa2cupy.distributed.movers.matrices import Matrix

BYTES = 1 << 16

#: Place, pitch and place, pitch of target and source, width and height.
CASES = {
    16: [(0, 256, 4096, 1024, 256, 11), (40960, 512, 64, 512, 512, 1), (20480, 32, 0, 16, 16, 33)],
    8: [(8, 256, 4096, 1024, 256, 5)],
    4: [(0, 260, 4096, 1024, 256, 5), (4096, 1, 8192, 3, 4, 1)],
    2: [(2, 256, 4096, 1024, 256, 3), (4096, 100, 8192, 102, 98, 7)],
    1: [(4096, 33, 8192, 40, 5, 20)],
}


@pytest.mark.simulated
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("word", CASES)
def test_matrices_are_copied_and_nothing_else(word, blocks):
    memory, rng = Memory(), np.random.default_rng(word)
    source, before = (rng.integers(0, 256, BYTES).astype(np.uint8) for _ in range(2))
    of, to = memory.alloc(source, "source"), memory.alloc(before.copy(), "target")
    ((name, shares, record),) = launches_of(
        [Matrix(to + one[0], one[1], of + one[2], one[3], *one[4:]) for one in CASES[word]]
    )
    assert name.endswith(f"_{word}")
    launch = cuda_module(SOURCE, "compute_80").launch
    launch(name, min(blocks, shares), THREADS, [record.ljust(_RECORD_BYTES, b"\xff")], memory=memory, race_check=True)
    expected = before.copy()
    for target, target_pitch, first, pitch, width, height in CASES[word]:
        for row in range(height):
            row_of = first + row * pitch
            expected[target + row * target_pitch :][:width] = source[row_of : row_of + width]
    np.testing.assert_array_equal(memory.read(to), expected)


def test_large_and_many_matrices_are_several(monkeypatch):
    monkeypatch.setattr(copy_kernel, "_MOST_WORDS", 100)
    matrices = [Matrix(1 << 20, 512, 1 << 30, 1024, 160, 33)] * 10  # 10 rows of 10 words at a time: 4 parts
    assert [len(record) for _, _, record in launches_of(matrices)] == [8 + 40 * 48]
    monkeypatch.setattr(copy_kernel, "_MOST_MATRICES", 16)
    launches = [(shares, list(struct.iter_unpack("<5q2I", record[8:]))) for _, shares, record in launches_of(matrices)]
    assert [len(parts) for _, parts in launches] == [16, 16, 8]
    assert all(parts[-1][4] == shares for shares, parts in launches)
    assert sum(words for _, parts in launches for *_, words in parts) == 10 * 33 * 10
    assert list(launches_of([])) == []
