"""Decoding on NumPy arrays: rows are appended to the cache, then each sequence is a forward over its own keys.

Without features and with few rows, sequences of one length are taken together, and their scores are held at once: a
step in Python takes as long as the products of a short sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from ..families.registry import family_of_decode
from ..problem.arguments import check_overlap
from ..problem.attention import MAX_HEAD_DIM, AttentionProblem, CacheShape
from ..problem.decoding import cache_lengths, check_caches, check_decode, check_pages
from ..problem.features import ARRAYS, feature_arrays
from ..problem.options import CallOptions
from .attention import attend, default_tile
from .results import results_for
from .threads import in_threads
from .tiles import heads_of

__all__ = ["decode"]

#: Sequences of one length are taken together up to so many rows of queries, each, and scores of all.
_FEW_ROWS, _FEW_SCORES = 16, 2**16
#: Keys are multiplied so many at a time: the rows of all heads, which lie side by side, stay in a core's cache.
_BLOCK = 128


def decode(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    cache_seqlens: np.ndarray,
    k: np.ndarray | None,
    v: np.ndarray | None,
    block_table: np.ndarray | None,
    out: tuple[np.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[np.ndarray, ...]:
    """`fa2cupy.decode` on NumPy arrays."""
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    optional = {"k": k, "v": v, "block_table": block_table}
    others = {"q": q, "cache_seqlens": cache_seqlens, **optional}
    problem, results = check_decode({**caches, **others}, options, keywords)
    shape = problem.cache
    assert shape is not None, "decode has one"
    family = family_of_decode(problem.dtype)
    # Where NumPy's memory begins says nothing of CuPy's, which begins on 512 bytes.
    check_caches(caches, problem, family.head_dim_step, family.row_alignment, (0, 0))
    given = {name: array for name, array in others.items() if array is not None} | feature_arrays(keywords)
    o, lse = results_for(results, out, given | caches)
    lengths = cache_lengths(cache_seqlens, shape)
    if block_table is not None:
        check_pages(block_table, lengths, shape)
    if shape.num_new:
        in_keys = problem.head_dim > MAX_HEAD_DIM  # v_cache lies in k_cache
        check_overlap({"k_cache": k_cache} if in_keys else caches, given)
    tables = [[number] for number in range(problem.batch)] if block_table is None else block_table
    for cache, new in ((k_cache, k), (v_cache, v)):
        if new is not None and shape.num_new:
            for pages, rows, length in zip(tables, _by_rows(problem, new), lengths.tolist(), strict=True):
                _append(_by_rows(problem, cache), rows, pages, length, shape)

    ends = (lengths + shape.num_new).tolist()
    num_rows = problem.seqlen_q * problem.heads_per_group
    is_at_once = not keywords and 0 < num_rows <= _FEW_ROWS and (problem.seqlen_q == 1 or not problem.causal)
    runs = list(_runs(ends, num_rows * problem.num_heads_kv if is_at_once else _FEW_SCORES))
    q, k_cache, v_cache, o_rows = (_by_rows(problem, array) for array in (q, k_cache, v_cache, o))

    tile = default_tile(problem.heads_per_group, problem.seqlen_q)

    def of_run(run: slice) -> None:
        end = ends[run.start]
        rows = functools.partial(_rows, table=block_table, run=run, end=end, shape=shape)
        if is_at_once and end:
            _attend_at_once(problem, q[run], (k_cache, v_cache), rows, (o_rows[run], lse[run]))
        else:
            heads = heads_of(_alone(problem, end), _of_sequence(keywords, run))
            attend(heads, tile, (q[run], rows(k_cache), rows(v_cache)), (o_rows[run], lse[run]))

    in_threads(of_run, runs, problem.num_heads * problem.head_dim * problem.seqlen_q * sum(ends))
    return o, lse


@functools.lru_cache(maxsize=256)
def _alone(problem: AttentionProblem, length: int) -> AttentionProblem:
    return dataclasses.replace(problem, batch=1, seqlen_k=length, layout="bshd", cache=None)


def _runs(ends: Sequence[int], scores: int) -> Iterator[slice]:
    """Sequences of one length side by side, up to `_FEW_SCORES` at a time, with so many scores for each key."""
    start = 0
    for end, equal in itertools.groupby(ends):
        stop = start + len(list(equal))
        step = max(1, _FEW_SCORES // (scores * end)) if scores * end else 1
        yield from (slice(first, min(first + step, stop)) for first in range(start, stop, step))
        start = stop


def _attend_at_once(
    problem: AttentionProblem,
    q: np.ndarray,
    caches: tuple[np.ndarray, np.ndarray],
    rows: Callable[[np.ndarray], np.ndarray],
    results: tuple[np.ndarray, np.ndarray],
) -> None:
    """Writes o and lse of sequences of one length, whose queries see all keys. Axes are those of `_by_rows`.

    `rows` gives the sequences' rows of a cache: those of v_cache when those of k_cache, which may be a copy, are freed.
    """
    k_cache, v_cache = caches
    accumulator = problem.accumulator_dtype
    count, seqlen_q, _, columns = q.shape
    group = problem.heads_per_group
    grouped = (count, seqlen_q, problem.num_heads_kv, group, columns)
    q_rows = q.astype(accumulator, copy=False) * problem.softmax_scale
    s = _scores(
        q_rows.reshape(grouped).swapaxes(1, 2).reshape(count, grouped[2], -1, columns),
        rows(k_cache).astype(accumulator, copy=False),
    )
    row_max = s.max(axis=3, keepdims=True)
    s -= np.where(row_max == -np.inf, 0, row_max)
    p = np.exp(s, out=s)
    row_sum = p.sum(axis=3, keepdims=True)
    v = rows(v_cache).astype(accumulator, copy=False).swapaxes(1, 2)
    found = p[..., : v.shape[2]] @ v
    found /= np.maximum(row_sum, 1)  # only the sum of a row without a visible key is less: 0
    o, lse = results
    o[...] = found.reshape(count, grouped[2], seqlen_q, group, o.shape[3]).swapaxes(1, 2).reshape(o.shape)
    found_lse = (row_max + np.log(row_sum)).reshape(count, grouped[2], seqlen_q, group)
    lse[...] = found_lse.swapaxes(2, 3).reshape(lse.shape)


def _scores(q_rows: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scores (sequence, K/V head, row, key); keys up to a whole block are hidden."""
    count, seqlen_k, heads, columns = k.shape
    blocks, rest = divmod(seqlen_k, _BLOCK)
    s = np.full((*q_rows.shape[:3], -(-seqlen_k // _BLOCK), _BLOCK), -np.inf, k.dtype)
    by_column = q_rows.swapaxes(2, 3)
    if blocks:
        whole = k[:, : blocks * _BLOCK].reshape(count, blocks, _BLOCK, heads, columns).swapaxes(2, 3)
        s[..., :blocks, :] = (whole @ by_column[:, None]).transpose(0, 2, 4, 1, 3)
    if rest:
        s[..., blocks, :rest] = (k[:, blocks * _BLOCK :].swapaxes(1, 2) @ by_column).swapaxes(2, 3)
    return s.reshape(*q_rows.shape[:3], -1)


def _by_rows(problem: AttentionProblem, array: np.ndarray) -> np.ndarray:
    """A view with the axes (batch or page, row, head, column)."""
    return array if problem.layout == "bshd" else array.swapaxes(1, 2)


def _append(cache: np.ndarray, rows: np.ndarray, pages: list[int] | np.ndarray, first: int, shape: CacheShape) -> None:
    """Writes rows to their places from row `first` of a sequence on."""
    places = np.arange(first, first + len(rows))
    cache[np.asarray(pages)[places // max(1, shape.page_size)], places % max(1, shape.page_size)] = rows


def _rows(cache: np.ndarray, table: np.ndarray | None, run: slice, end: int, shape: CacheShape) -> np.ndarray:
    """The rows below `end` of some sequences: a view unless the cache has pages."""
    if table is None:
        return cache[run, :end]
    pages = table[run, : -(-end // max(1, shape.page_size))]
    return cache[pages].reshape(len(pages), pages.shape[1] * shape.page_size, *cache.shape[2:])[:, :end]


def _of_sequence(keywords: Mapping[str, object], own: slice) -> dict[str, object]:
    """The keywords of features for one sequence."""
    given = feature_arrays(keywords).items()
    batched = {name: array for name, array in given if -4 in ARRAYS[name].score_axes(array.ndim)}
    return {**keywords, **{name: array[own] for name, array in batched.items() if len(array) > 1}}
