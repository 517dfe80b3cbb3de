"""Decoding on NumPy arrays: rows are appended to the cache, then each sequence is a forward over its own keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from ..families.registry import family_of_decode
from ..problem.arguments import check_overlap
from ..problem.attention import AttentionProblem, CacheShape
from ..problem.decoding import cache_lengths, check_caches, check_decode, check_pages
from ..problem.features import ARRAYS, feature_arrays
from ..problem.options import CallOptions
from .attention import attend, default_tile
from .results import results_for
from .threads import in_threads
from .tiles import heads_of

__all__ = ["decode"]


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
        check_overlap(caches, given)
    tables = [[number] for number in range(problem.batch)] if block_table is None else block_table
    for cache, new in ((k_cache, k), (v_cache, v)):
        if new is not None and shape.num_new:
            for pages, rows, length in zip(tables, _by_rows(problem, new), lengths.tolist(), strict=True):
                _append(_by_rows(problem, cache), rows, pages, length, shape)

    @functools.lru_cache(maxsize=None)
    def alone(length: int) -> AttentionProblem:
        return dataclasses.replace(problem, batch=1, seqlen_k=length, layout="bshd", cache=None)

    tile = default_tile(problem.heads_per_group, problem.seqlen_q)

    def of_sequence(number: int) -> None:
        own, end = slice(number, number + 1), int(lengths[number]) + shape.num_new
        keys, values = (_rows(_by_rows(problem, cache), tables[number], end, shape) for cache in (k_cache, v_cache))
        heads = heads_of(alone(end), _of_sequence(keywords, own))
        attend(heads, tile, (_by_rows(problem, q)[own], keys, values), (_by_rows(problem, o)[own], lse[own]))

    pairs = problem.seqlen_q * (int(lengths.sum()) + problem.batch * shape.num_new)
    in_threads(of_sequence, range(problem.batch), problem.num_heads * problem.head_dim * pairs)
    return o, lse


def _by_rows(problem: AttentionProblem, array: np.ndarray) -> np.ndarray:
    """A view with the axes (batch or page, row, head, column)."""
    return array if problem.layout == "bshd" else array.swapaxes(1, 2)


def _append(cache: np.ndarray, rows: np.ndarray, pages: list[int] | np.ndarray, first: int, shape: CacheShape) -> None:
    """Writes rows to their places from row `first` of a sequence on."""
    places = np.arange(first, first + len(rows))
    cache[np.asarray(pages)[places // max(1, shape.page_size)], places % max(1, shape.page_size)] = rows


def _rows(cache: np.ndarray, pages: list[int] | np.ndarray, end: int, shape: CacheShape) -> np.ndarray:
    """The rows of a sequence below `end`, with an axis of one sequence in front."""
    needed = np.asarray(pages[: -(-end // max(1, shape.page_size))], dtype=int)
    if len(needed) == 1:
        return cache[needed[0], :end][None]
    return cache[needed].reshape(1, -1, *cache.shape[2:])[:, :end]


def _of_sequence(keywords: Mapping[str, object], own: slice) -> dict[str, object]:
    """The keywords of features for one sequence."""
    given = feature_arrays(keywords).items()
    return {**keywords, **{name: array[own] for name, array in given if 0 in ARRAYS[name].score_axes(array.ndim)}}
