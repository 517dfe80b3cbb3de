"""A script that counts the Python calls of a process's first call of each kind, until it renders kernels; prints JSON.

A move is a call of a function in another file of the package than its caller's. Files and moves are what a reader of a
call goes through; unlike times, they are the same on every machine.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import fa2cupy

PACKAGE = str(Path(fa2cupy.__file__).parent)


class Counts:
    """What has been counted.

    Attributes
    ----------
    calls, moves : int
    files : set of str
    """

    def __init__(self) -> None:
        self.calls, self.moves, self.files = 0, 0, set()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts in the body."""
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count(self, frame, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        self.calls += 1
        self.files.add(file)
        self.moves += caller is None or caller.f_code.co_filename != file


def count(kind: str) -> tuple[str, dict[str, int]]:
    """Returns the counts of a plain call on a fake H100."""
    from support.fake_cupy import place
    from support.fake_gpu import backward, decode, delta, fake_gpu, forward, merge

    from fa2cupy.gpu import prepared

    def zeros(*shape: int, dtype: str = "float16") -> np.ndarray:
        return place(np.zeros(shape, dtype))

    q, lse = zeros(2, 128, 4, 64), zeros(2, 4, 128, dtype="float32")
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: forward(q, q, q),
        "delta": lambda: delta(q, q),
        "backward": lambda: backward(q, q, q, q, lse, q),
        "decode": lambda: decode(q, q, q, zeros(2, dtype="int32")),
        "merge": lambda: merge(zeros(3, 2, 128, 4, 64), zeros(3, 2, 4, 128, dtype="float32")),
    }
    call, counts = calls[kind], Counts()
    with pytest.MonkeyPatch.context() as patch, fake_gpu(patch, "sm_90"):
        patch.setattr(prepared, "bind_plan", lambda plan, positions: sys.setprofile(None) or ())
        with counts.counting():
            call()
    assert "fa2cupy.families.sm90_shared_rows" not in sys.modules, "only kernels beyond 256 columns need it"
    return kind, {"calls": counts.calls, "files": len(counts.files), "moves": counts.moves}


if __name__ == "__main__":
    # Each kind has a process of its own, in which nothing has been kept by an earlier call.
    from support import fake_gpu as _  # noqa: F401  (imported once, before the processes)

    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps(dict(pool.map(count, sys.argv[1:], chunksize=1))))
