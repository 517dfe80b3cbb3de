"""The process in which scripts/compare.py times one checkout. It only uses public functions that any version has.

Run as a script, it answers lines of JSON: it prepares a cell, or returns the milliseconds of a given number of calls.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class Sizes(NamedTuple):
    """What the keywords of a feature depend on. `mods` has the ready-made functions of the checkout."""

    xp: Any
    mods: Any
    dtype: object
    batch: int
    seqlen: int
    heads: int

    def scores(self, *leading: int) -> Any:
        """Returns normal float32 numbers for each query and key."""
        draw = self.xp.random.RandomState(2).standard_normal
        return draw((*leading, self.seqlen, self.seqlen)).astype("float32")


class Feature(NamedTuple):
    """A row of `FEATURES`.

    Attributes
    ----------
    options : callable
        The keywords of a call.
    of_backward : dict
        Keywords of a backward in addition.
    keys : float
        Keys in parts of the queries.
    is_short : bool
        True if it is timed with short sequences alone.
    """

    options: Callable[[Sizes], dict[str, object]] = lambda sizes: {}
    of_backward: Mapping[str, object] = {}
    keys: float = 1
    is_short: bool = False


def _slopes(sizes: Sizes) -> dict[str, object]:
    return {"alibi_slopes": 2.0 ** (-8 * sizes.xp.arange(1, sizes.heads + 1, dtype="float32") / sizes.heads)}


def _packed(sizes: Sizes) -> dict[str, object]:
    ends = [sum(PACKED[:n]) * TOKENS // sum(PACKED) for n in range(len(PACKED) + 1)]
    longest = max(end - start for start, end in itertools.pairwise(ends))
    offsets = sizes.xp.asarray(ends, "int32")
    lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **lengths}


def _padding(sizes: Sizes) -> dict[str, object]:
    lengths = sizes.seqlen - sizes.seqlen * sizes.xp.arange(sizes.batch) // (4 * sizes.batch)
    return {"key_padding_mask": sizes.xp.arange(sizes.seqlen) < lengths[:, None]}


def _bias(sizes: Sizes) -> dict[str, object]:
    return {"bias": sizes.scores(sizes.heads).astype(sizes.dtype)}


def _buckets(sizes: Sizes) -> dict[str, object]:
    table = sizes.xp.linspace(-1, 2, 32 * sizes.heads, dtype="float32").reshape(32, sizes.heads)
    return {"score_mod": sizes.mods.t5_relative(), "score_args": (table,)}


def _documents(sizes: Sizes) -> dict[str, object]:
    ids = sizes.xp.arange(sizes.batch * sizes.seqlen, dtype="int32").reshape(sizes.batch, sizes.seqlen) // 500
    return {"mask_mod": sizes.mods.document, "mask_args": (ids,)}


FEATURES = {
    "": Feature(),
    "softcap": Feature(lambda sizes: {"softcap": 30.0}),
    "window127": Feature(lambda sizes: {"window": (127, 0)}),
    "window1023": Feature(lambda sizes: {"window": (1023, 0)}),
    "alibi": Feature(_slopes),
    "packed": Feature(_packed, is_short=True),  # its sequences have lengths of their own
    "sink": Feature(lambda sizes: {"sink": sizes.xp.linspace(-1, 2, sizes.heads, dtype="float32")}),
    "mask": Feature(lambda sizes: {"mask": sizes.scores() < 1}, is_short=True),
    "padding": Feature(_padding),
    "bias": Feature(_bias, is_short=True),
    "dbias": Feature(_bias, {"return_dbias": True}, is_short=True),
    "score_mod": Feature(_buckets),
    "dscore_args": Feature(_buckets, {"return_dscore_args": True}),
    "mask_mod": Feature(_documents),
    "few keys": Feature(keys=1 / 8),
}


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
        feature, heads = FEATURES[cell.feature], MODEL_DIM // cell.head_dim
        sizes = Sizes(self._cupy, self._package.mods, q.dtype, TOKENS // cell.seqlen, cell.seqlen, heads)
        options = {"causal": cell.causal, **feature.options(sizes)}
        if feature.keys != 1:
            k, v = (x[:, : int(feature.keys * cell.seqlen)] for x in (k, v))
        if cell.operation == "forward":
            return lambda: self._package.forward(q, k, v, **options)[:1]
        method = None if cell.operation == "default" else cell.operation
        o, lse = self._package.forward(q, k, v, **options)
        return lambda: self._package.backward(q, k, v, o, lse, do, method=method, **options, **feature.of_backward)

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
