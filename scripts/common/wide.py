"""The section wide of benchmark.py: head_dims beyond 256, and decoding of latent attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from .decoding import OURS, CachedProblem
from .measure import DEFAULT, Problem
from .tables import ratio_table, smallest_ratio

__all__ = [
    "COLUMNS",
    "DECODE",
    "OPERATIONS",
    "SEQLENS",
    "latent_problems",
    "row_of",
    "wide_problems",
    "wide_table",
]

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "head_dim_v", "seqlen", "batch", "num_heads", "causal", "operation",
    "provider", "tile", "ms_median", "ms_min", "ms_max", "tflops", "gbs", "of_copy", "ratio", "extra_bytes",
)  # fmt: skip
OPERATIONS, DECODE = ("forward", DEFAULT), "decode"
#: head_dim and that of v.
PAIRS = ((512, 512), (384, 384), (320, 320), (512, 256))
SEQLENS, HEADS = (2048, 8192), 8
#: Columns of the keys of latent attention, and of the values in them; query heads, and batch and length of caches.
LATENT, LATENT_HEADS, LATENT_CACHES = (576, 512), (16, 128), ((64, 4096), (1, 32768))


def wide_problems() -> Iterator[Problem]:
    """Yields the problems of forwards and backwards."""
    for (head_dim, head_dim_v), seqlen, causal in itertools.product(PAIRS, SEQLENS, (False, True)):
        own_v = None if head_dim_v == head_dim else head_dim_v
        yield Problem("bfloat16", head_dim, seqlen, 1, HEADS, causal, head_dim_v=own_v)


def latent_problems() -> Iterator[CachedProblem]:
    """Yields the problems of decode, whose query heads share one head of the cache."""
    for heads, (batch, length) in itertools.product(LATENT_HEADS, LATENT_CACHES):
        yield CachedProblem(f"{batch} x {length}", (length,) * batch, (heads, 1), LATENT[0], 1, head_dim_v=LATENT[1])


def row_of(problem: CachedProblem, row: Mapping[str, object]) -> dict[str, object]:
    """Returns a row of `common.decoding` as one of this section."""
    columns, columns_v = problem.head_dim, problem.head_dim_v or problem.head_dim
    found = {name: row[name] for name in COLUMNS if name in row}
    found |= {"head_dim_v": columns_v, "seqlen": problem.lengths[0], "batch": len(problem.lengths), "causal": 0}
    found |= {f"ms_{what}": float(str(row[f"us_{what}"])) / 1e3 for what in ("median", "min", "max")}
    pairs = sum(problem.lengths) * problem.seqlen_q * problem.heads[0]
    if row["provider"] == OURS:
        found["tflops"] = 2 * pairs * (columns + columns_v) / found["ms_median"] / 1e9
    return found | {"operation": DECODE}


def wide_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the best peer's time over ours by both head_dims and mask, and by length, and the speed of decode."""
    masks = ("full", "causal")
    named = [
        {**row, "what": f"{row['head_dim']}/{row['head_dim_v']}, {masks[int(str(row['causal']))]}"}
        for row in rows
        if row["operation"] != DECODE
    ]
    lines = [*ratio_table(named, "what", "seqlen", OPERATIONS), *smallest_ratio(named, "what", "seqlen")]
    return lines + [
        f"decode {row['head_dim']}/{row['head_dim_v']}, {row['num_heads']} heads, {row['batch']} x {row['seqlen']}: "
        f"{float(str(row['ms_median'])):.3f} ms, {row['of_copy']} of a copy's speed, {float(str(row['tflops'])):.0f} "
        "TFLOP/s"
        for row in rows
        if row["operation"] == DECODE and row["provider"] == OURS
    ]
