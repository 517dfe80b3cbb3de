"""The process in which scripts/compare.py times one checkout. It only uses public functions that any version has.

Run as a script, it answers lines of JSON: it prepares a cell, or returns the milliseconds of a given number of calls.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import NamedTuple

TOKENS, MODEL_DIM = 16384, 2048
#: Lengths of packed sequences, as parts of all tokens.
PACKED = (2557, 131, 1801, 503, 1031, 249, 2297, 647, 1543, 377, 761, 1287, 199, 1913, 313, 775)
SAMPLES = 97


class Cell(NamedTuple):
    """A call. `feature` is empty in a plain one; the operation ``"default"`` is a backward without ``method``."""

    dtype: str
    head_dim: int
    seqlen: int
    causal: bool
    operation: str
    feature: str = ""

    def __str__(self) -> str:
        mask = " causal" if self.causal else ""
        return f"{self.dtype} d{self.head_dim} {self.seqlen}{mask} {self.feature or 'plain'} {self.operation}"


class Worker:
    """Times calls of the package that is importable here; `work` answers lines of JSON."""

    def __init__(self):
        import cupy
        import ml_dtypes

        import fa2cupy

        self._cupy, self._package = cupy, fa2cupy
        self._dtypes = {"float16": cupy.dtype("float16"), "bfloat16": cupy.dtype(ml_dtypes.bfloat16)}
        self._call = None
        self._key, self._arrays = None, ()

    def work(self) -> None:
        """Answers each line of the standard input until it ends."""
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # so that the output of a library does not come between the answers
        for line in sys.stdin:
            asked = json.loads(line)
            answer = self._time(asked) if isinstance(asked, int) else self._prepare(Cell(*asked))
            print(json.dumps(answer), file=answers, flush=True)

    def _gpu_name(self) -> str:
        return self._cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()

    def _prepare(self, cell: Cell) -> dict[str, object]:
        """Binds the call of a cell; returns its milliseconds, a sample of its results, and their largest value."""
        self._call = self._bind(cell)
        results = self._call()
        sample = [
            float(x) for array in results for x in array.ravel()[:: array.size // SAMPLES].astype("float32").get()
        ]
        largest = max(float(abs(array.astype("float32")).max()) for array in results)
        del results
        return {"ms": self._time(2), "sample": sample, "largest": largest, "gpu": self._gpu_name()}

    def _bind(self, cell: Cell):
        q, k, v, do = self._inputs(cell)
        options = {"causal": cell.causal, **self._options(cell)}
        if cell.operation == "forward":
            return lambda: self._package.forward(q, k, v, **options)[:1]
        method = None if cell.operation == "default" else cell.operation
        o, lse = self._package.forward(q, k, v, **options)
        return lambda: self._package.backward(q, k, v, o, lse, do, method=method, **options)

    def _inputs(self, cell: Cell) -> tuple:
        """Returns q, k, v and do, kept for the cells that share them."""
        key = (cell.dtype, cell.head_dim, cell.seqlen, cell.feature == "packed")
        if key != self._key:
            self._key, self._arrays = key, ()
            self._cupy.get_default_memory_pool().free_all_blocks()
            draw = self._cupy.random.RandomState(1).standard_normal
            shape = (TOKENS // cell.seqlen, cell.seqlen, MODEL_DIM // cell.head_dim, cell.head_dim)
            shape = (TOKENS, *shape[2:]) if cell.feature == "packed" else shape
            dtype = self._dtypes[cell.dtype]
            self._arrays = tuple(draw(shape, dtype="float32").astype(dtype) for _ in range(4))
        return self._arrays

    def _options(self, cell: Cell) -> dict[str, object]:
        xp, heads = self._cupy, MODEL_DIM // cell.head_dim
        if cell.feature == "softcap":
            return {"softcap": 30.0}
        if cell.feature.startswith("window"):
            return {"window": (int(cell.feature.removeprefix("window")), 0)}
        if cell.feature == "alibi":
            return {"alibi_slopes": 2.0 ** (-8 * xp.arange(1, heads + 1, dtype="float32") / heads)}
        if cell.feature == "sink":
            return {"sink": xp.linspace(-1, 2, heads, dtype="float32")}
        if cell.feature == "packed":
            offsets = [sum(PACKED[:n]) * TOKENS // sum(PACKED) for n in range(len(PACKED) + 1)]
            longest = max(end - start for start, end in itertools.pairwise(offsets))
            offsets = xp.asarray(offsets, "int32")
            lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
            return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **lengths}
        return {}

    def _time(self, calls: int) -> float:
        """Returns the mean milliseconds of a call. An untimed call runs first, while the host queues the others."""
        start, end = (self._cupy.cuda.Event() for _ in range(2))
        self._call()
        start.record()
        for _ in range(calls):
            self._call()
        end.record()
        end.synchronize()
        return self._cupy.cuda.get_elapsed_time(start, end) / calls


if __name__ == "__main__":
    Worker().work()
