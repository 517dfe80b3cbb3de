"""The section decode of benchmark.py: attention to a cache beside the speed of the memory and other operators."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import fa2cupy

from .measure import (
    Candidate,
    Gpu,
    host_microseconds,
    progress,
    rotating,
    sets_beyond_cache,
    stamp_of,
    time_in_rounds,
    write_csv,
)

__all__ = [
    "COLUMNS",
    "OURS",
    "PEERS",
    "CachedProblem",
    "cached_problems",
    "copy_candidate",
    "measured",
    "run_decode",
    "table",
]

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "num_heads", "num_heads_kv", "seqlen_q", "cache", "page_size",
    "provider", "us_median", "us_min", "us_max", "gbs", "of_copy", "ratio", "host_us",
)  # fmt: skip
#: The operators that take such shapes: caches without pages whose sequences have one length.
PEERS = ("torch flash", "torch cudnn")
COPY, OURS = "device copy", "fa2cupy"
_COPIED_BYTES = 1 << 30
_CHECKED = 2e-2  # of the largest element of a checked head


@dataclass(frozen=True)
class CachedProblem:
    """One call in bfloat16: the lengths of its sequences in a cache.

    Attributes
    ----------
    name : str
        Batch and length, for the column cache.
    lengths : tuple of int
    heads : tuple (num_heads, num_heads_kv)
    head_dim, seqlen_q : int
    page_size : int or None
        None for a cache without a block table.
    head_dim_v : int or None
        Columns of v, which then are the first ones of k; None if v has an array of its own, with head_dim columns.
    """

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    seqlen_q: int
    page_size: int | None = None
    head_dim_v: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that a call must read."""
        return (1 if self.head_dim_v else 2) * 2 * sum(self.lengths) * self.heads[1] * self.head_dim

    @property
    def is_even(self) -> bool:
        """True if operators without lengths and pages compute the same."""
        return self.page_size is None and len(set(self.lengths)) == 1

    def columns(self) -> dict[str, object]:
        """Returns its part of a row."""
        sizes = {"dtype": "bfloat16", "head_dim": self.head_dim, "num_heads": self.heads[0]}
        sizes |= {"num_heads_kv": self.heads[1], "seqlen_q": self.seqlen_q}
        return sizes | {"cache": self.name, "page_size": self.page_size or ""}


def cached_problems() -> Iterable[CachedProblem]:
    """Yields the problems of the section, those of one head_dim after the other."""
    even = ((1, 1024), (1, 16384), (1, 131072), (16, 4096), (64, 1024), (128, 8192))
    ragged = tuple(int(n) for n in np.random.default_rng(0).integers(1, 8193, 64))
    for head_dim in (64, 128):
        for heads in ((32, 8), (8, 1)):
            for seqlen_q in (1, 4):
                sizes = (heads, head_dim, seqlen_q)
                for batch, length in even:
                    yield CachedProblem(f"{batch} x {length}", (length,) * batch, *sizes)
                yield CachedProblem("64 x (1 to 8192)", ragged, *sizes)
                for page_size in (16, 64):
                    yield CachedProblem("16 x 4096", (4096,) * 16, *sizes, page_size)


def _drawn(problem: CachedProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws 4096 rows of K and of V, which fill a cache by repetition, q, and a block table, on the host."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    batch = len(problem.lengths)
    rows = rng.standard_normal((2, 4096, problem.head_dim), dtype=np.float32).astype(ml_dtypes.bfloat16)
    q = rng.standard_normal((batch, problem.seqlen_q, problem.heads[0], problem.head_dim), dtype=np.float32)
    pages = -(-max(problem.lengths) // problem.page_size) if problem.page_size else 1
    return rows, q.astype(ml_dtypes.bfloat16), rng.permutation(batch * pages).astype("int32").reshape(batch, pages)


class _Inputs:
    """q, a cache, lengths and a table on the device, in memory of their own."""

    def __init__(self, gpu: Gpu, problem: CachedProblem, drawn: tuple[np.ndarray, np.ndarray, np.ndarray]):
        xp = gpu.xp
        period, q, table = map(xp.asarray, drawn)
        page_size, num_heads_kv = problem.page_size or max(problem.lengths), problem.heads[1]
        shape = (table.size, page_size, num_heads_kv, problem.head_dim)
        self.caches = []
        for rows in period[:1] if problem.head_dim_v else period:
            cache = xp.empty((table.size * page_size * num_heads_kv, problem.head_dim), rows.dtype)
            for first in range(0, len(cache), len(rows)):
                cache[first : first + len(rows)] = rows[: len(cache) - first]
            self.caches.append(cache.reshape(shape))
        if problem.head_dim_v:
            self.caches.append(self.caches[0][..., : problem.head_dim_v])
        self.q, self.lengths = q.copy(), xp.asarray(np.array(problem.lengths, "int32"))
        self.table = table if problem.page_size else None

    def decode(self) -> tuple:
        """Makes our call without a causal mask, so that operators that align it differently compute the same."""
        return fa2cupy.decode(self.q, *self.caches, self.lengths, block_table=self.table, causal=False)


def _check(gpu: Gpu, problem: CachedProblem, inputs: _Inputs) -> str | None:
    """Compares the last sequence's first group of heads with float64; returns what is wrong, or None."""
    number, length = len(problem.lengths) - 1, problem.lengths[-1]
    group = problem.heads[0] // problem.heads[1]
    rows = []
    for cache in inputs.caches:
        own = cache[number, :, :1] if inputs.table is None else cache[inputs.table[number]][:, :, :1]
        rows.append(own.reshape(-1, cache.shape[-1])[:length].astype("float64"))
    keys, values = rows
    scores = inputs.q[number, :, :group].astype("float64") @ keys.T * problem.head_dim**-0.5
    weights = gpu.xp.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights @ values / weights.sum(axis=-1, keepdims=True)
    found = inputs.decode()[0][number, :, :group].astype("float64")
    error = float(abs(found - expected).max() / abs(expected).max())
    return None if error < _CHECKED else f"{problem}: an error of {error:.3g} of the largest element"


def copy_candidate(gpu: Gpu) -> Candidate:
    """Returns a copy of 1 GiB, by whose speed others are judged."""
    source, target = (gpu.xp.zeros(_COPIED_BYTES, "uint8") for _ in range(2))

    def copy() -> tuple:
        target[...] = source
        return (target,)

    return Candidate(COPY, copy)


def _peer(peer, inputs: Sequence[_Inputs]) -> Candidate:
    sets = [(False, *map(peer.own, (one.q, *one.caches))) for one in inputs]
    return Candidate(peer.name, rotating(peer.forward, sets))


def run_decode(
    gpu: Gpu,
    peers: Sequence,
    rounds: int,
    budget_ms: float,
    path: Path,
    problems: Sequence[CachedProblem] | None = None,
) -> list[str]:
    """Measures all problems and writes the rows after each; returns the failures."""
    failures: list[str] = []
    rows: list[dict[str, object]] = []
    copy, rng = copy_candidate(gpu), random.Random(0)
    work = list(cached_problems()) if problems is None else list(problems)
    with progress(len(work), "decode") as bar:
        for problem in work:
            try:
                rows += measured(gpu, problem, copy, peers, rounds, budget_ms, rng, bar.write)
                write_csv(path, COLUMNS, rows)
            except AssertionError as error:
                failures.append(str(error))
            for each in (gpu, *peers):
                each.release()
            bar.update()
    print("", *table(rows), "", sep="\n")
    return failures


def measured(
    gpu: Gpu,
    problem: CachedProblem,
    copy: Candidate,
    peers: Sequence,
    rounds: int,
    budget_ms: float,
    rng: random.Random,
    write: Callable[[str], object],
) -> list[dict[str, object]]:
    """Checks and times a problem; returns its rows.

    Raises
    ------
    AssertionError
        Our result is wrong.
    """
    count, drawn = sets_beyond_cache(problem.nbytes, gpu.info.l2_bytes), _drawn(problem)
    inputs = [_Inputs(gpu, problem, drawn) for _ in range(count)]
    wrong = _check(gpu, problem, inputs[0])
    if wrong:
        raise AssertionError(wrong)
    ours = Candidate(OURS, rotating(_Inputs.decode, [(one,) for one in inputs]))
    others = [_peer(peer, inputs) for peer in peers if problem.is_even]
    candidates = [copy, ours, *_that_run(others, write)]
    times = time_in_rounds(gpu, candidates, rounds, budget_ms, rng)
    host = host_microseconds(gpu, [ours], rounds=2) if problem.nbytes < 1 << 22 else {}
    return _rows(gpu, problem, times, host)


def _that_run(candidates: Iterable[Candidate], write) -> list[Candidate]:
    """Returns the candidates that take the shape."""
    found = []
    for candidate in candidates:
        try:
            candidate.call()
        except Exception as error:  # an operator that does not take the shape
            write(f"{candidate.name}: {str(error).splitlines()[0]}")
        else:
            found.append(candidate)
    return found


def _rows(
    gpu: Gpu, problem: CachedProblem, times: Mapping[str, Sequence[float]], host: Mapping[str, float]
) -> list[dict[str, object]]:
    """Returns a row for each provider. A copy counts the bytes that it reads and those that it writes."""
    copied = 2 * _COPIED_BYTES / statistics.median(times[COPY]) / 1e6
    rows = []
    for name, of_rounds in times.items():
        median = statistics.median(of_rounds)
        speed = copied if name == COPY else problem.nbytes / median / 1e6
        ratios = [other / own for other, own in zip(of_rounds, times[OURS], strict=True)]
        rows.append(
            stamp_of(gpu)
            | problem.columns()
            | {
                "provider": name,
                "us_median": f"{1e3 * median:.2f}",
                "us_min": f"{1e3 * min(of_rounds):.2f}",
                "us_max": f"{1e3 * max(of_rounds):.2f}",
                "gbs": f"{speed:.0f}",
                "of_copy": f"{speed / copied:.3f}",
                "ratio": "" if name in (OURS, COPY) else f"{statistics.median(ratios):.3f}",
                "host_us": f"{host[name]:.1f}" if name in host else "",
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns our GB/s, their share of the copy's, and the time of the fastest other operator over ours, as lines."""
    keys = ("head_dim", "num_heads", "num_heads_kv", "seqlen_q", "cache", "page_size")
    ratios: dict[tuple, list[float]] = {}
    for row in rows:
        if row["ratio"]:
            ratios.setdefault(tuple(row[key] for key in keys), []).append(float(str(row["ratio"])))
    lines = ["| head_dim | heads | queries | cache | us | GB/s | of a copy | others' time |", f"|{'---|' * 8}"]
    for row in rows:
        if row["provider"] != OURS:
            continue
        cache = f"{row['cache']}, pages of {row['page_size']}" if row["page_size"] else row["cache"]
        best = ratios.get(tuple(row[key] for key in keys))
        cells = (
            row["head_dim"], f"{row['num_heads']}/{row['num_heads_kv']}", row["seqlen_q"], cache, row["us_median"],
            row["gbs"], row["of_copy"], f"{min(best):.2f}" if best else "",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
