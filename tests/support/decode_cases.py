"""Calls of `fa2cupy.decode`: their arguments, and the check of their results against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from support.feature_cases import accumulator

from fa2cupy.problem.attention import MAX_HEAD_DIM
from fa2cupy.testing import Expectation


def paged(rows: np.ndarray, page_size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows (batch, row, head, column) in pages in random order, some of them unused, and the block table."""
    batch, capacity = rows.shape[:2]
    count = batch * (capacity // page_size)
    table = rng.permutation(count + 3)[:count].astype("int32").reshape(batch, -1)
    pages = np.full((count + 3, page_size, *rows.shape[2:]), np.nan, rows.dtype)
    pages[table] = rows.reshape(batch, -1, page_size, *rows.shape[2:])
    return pages, table


@dataclass(frozen=True)
class Case:
    """Sizes of a call.

    Attributes
    ----------
    dtype : str
    lengths : tuple of int
        Rows of each sequence in the cache; the rows after them are NaN.
    seqlen_q, heads, head_dim : int, (int, int), int
        Queries, heads of q and of the cache, columns.
    num_new : int
        Rows that are appended; 0 is a call without k and v.
    page_size : int or None
        None is a cache without a block table.
    capacity : int or None
        Rows that a sequence has in the cache; None means as many as the longest needs, in whole pages. Entries of the
        block table behind its last row are numbers of no page.
    head_dim_v : int or None
        Columns of v and o; None if there are head_dim. Those of v are the first of k where head_dim is above 512.
    dominant : int
        If not 0, sequence i has weights of e**100 and more for the i-th of its groups of so many keys, beside others.
    """

    dtype: str
    lengths: tuple[int, ...]
    seqlen_q: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    num_new: int = 0
    page_size: int | None = None
    capacity: int | None = None
    layout: str = "bshd"
    seed: int = 0
    dominant: int = 0
    head_dim_v: int | None = None

    @property
    def room(self) -> int:
        """Rows that a sequence has in the cache."""
        step = self.page_size or 1
        return self.capacity or -(-(max(self.lengths, default=0) + self.num_new) // step) * step

    def dense(self) -> tuple[np.ndarray, ...]:
        """Returns q, keys and values of whole sequences, and new rows of both: (batch, row, head, column)."""
        rng = np.random.default_rng(self.seed)
        batch, (num_heads, num_heads_kv) = len(self.lengths), self.heads
        dtype = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype

        def draw(rows: int, heads: int, columns: int = self.head_dim) -> np.ndarray:
            return rng.standard_normal((batch, rows, heads, columns)).astype(dtype)

        of_v = (num_heads_kv, self.head_dim_v or self.head_dim)
        q, k, v = draw(self.seqlen_q, num_heads), draw(self.room, num_heads_kv), draw(self.room, *of_v)
        new = draw(self.num_new, num_heads_kv), draw(self.num_new, *of_v)
        if self.dominant:
            q[...] = np.copysign(np.float32(4), rng.standard_normal(self.head_dim)).astype(dtype)
            k *= np.asarray(0.1, dtype)
            for number in range(batch):
                own = slice(number * self.dominant, (number + 1) * self.dominant)
                k[number, own] += q[0, 0, 0] * np.asarray(100 / (16 * self.head_dim**0.5), dtype)
        for rows in (k, v):
            for number, length in enumerate(self.lengths):
                rows[number, length:] = np.nan
        if self.has_values_in_keys:
            return q, k, k[..., : self.head_dim_v], new[0], new[0][..., : self.head_dim_v]
        return q, k, v, *new

    @property
    def has_values_in_keys(self) -> bool:
        return self.head_dim > MAX_HEAD_DIM

    def arguments(self) -> tuple:
        """Returns q, k_cache, v_cache, cache_seqlens and the keywords, in the layout of the case."""
        q, k, v, new_k, new_v = self.dense()
        options: dict = {"layout": self.layout} if self.layout != "bshd" else {}
        if self.num_new:
            options |= {"k": self._laid_out(new_k), "v": self._laid_out(new_v)}
        if self.page_size:
            (k, options["block_table"]), (v, _) = (
                paged(rows, self.page_size, np.random.default_rng(self.seed + 1)) for rows in (k, v)
            )
            ends = np.array(self.lengths) + self.num_new
            behind = np.arange(options["block_table"].shape[1]) * self.page_size >= ends[:, None]
            options["block_table"][behind] = 10**6
        caches = [self._laid_out(k), self._laid_out(v)]
        if self.has_values_in_keys:
            caches[1] = caches[0][..., : self.head_dim_v]
            options |= {"v": options["k"][..., : self.head_dim_v]} if self.num_new else {}
        return self._laid_out(q), *caches, np.array(self.lengths, "int32"), options

    def _laid_out(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.layout == "bshd" else np.ascontiguousarray(rows.swapaxes(1, 2))

    def features(self, **options) -> dict:
        """Returns the options with arrays in place of "head", "batch" and True."""
        wide = "float64" if self.dtype == "float64" else "float32"
        rng, heads = np.random.default_rng(self.seed + 2), self.heads[0]
        slopes = {"head": (heads,), "batch": (len(self.lengths), heads)}
        if "alibi_slopes" in options:
            options["alibi_slopes"] = rng.uniform(-0.1, 0.5, slopes[options["alibi_slopes"]]).astype(wide)
        if "sink" in options:
            options["sink"] = rng.standard_normal(heads).astype(wide)
        return options


#: Lengths, with several queries, and windows whose ends pass borders of 16, 32 and 128 keys one by one.
BORDERS = Case("float16", tuple(range(124, 142)), seqlen_q=3, heads=(2, 1), head_dim=16)
WINDOWS = (
    {},
    {"causal": False},
    {"window": (2, 0)},
    {"window": (30, None), "causal": False},
    {"window": (20, 1), "causal": False},
)
#: Sequences that end with their last page, before new rows or with them, and have unused entries behind it.
WHOLE_PAGES = Case("float16", (16, 32, 48, 64, 15, 31), page_size=16, capacity=96)
#: Sequences each with another dominant part, on a device of 23 blocks: of a tile's 8 warps, of a sequence's 4 blocks.
DOMINANT_WARP = Case("float16", (256,) * 8, heads=(2, 1), dominant=32)
DOMINANT_BLOCK = Case("float16", (4 * 128,) * 4, heads=(2, 1), dominant=128)


def check(decode: Callable, case: Case, **options) -> tuple[np.ndarray, np.ndarray]:
    """Calls `decode`, and checks its results and the cache that it leaves; `options` as for `Case.features`."""
    options = case.features(**options)
    q, k_cache, v_cache, lengths, call = case.arguments()
    expected_caches = [cache.copy() for cache in (k_cache, v_cache)]
    o, lse = decode(q, k_cache, v_cache, lengths, **call, **options)
    _append(case, expected_caches, call)
    for cache, expected in zip((k_cache, v_cache), expected_caches, strict=True):
        np.testing.assert_array_equal(cache.view(f"u{cache.itemsize}"), expected.view(f"u{cache.itemsize}"))
    dense = replace(case, layout="bshd")
    q, k, v, new_k, new_v = dense.dense()
    of_reference = {"causal": True, **options}
    for number, length in enumerate(case.lengths):
        own = slice(number, number + 1)
        keys, values = (
            np.concatenate([rows[own, :length], new[own]], axis=1) for rows, new in ((k, new_k), (v, new_v))
        )
        slopes = options.get("alibi_slopes")
        if slopes is not None and slopes.ndim == 2:
            of_reference["alibi_slopes"] = slopes[own]
        rows = q[own]
        if case.has_values_in_keys:  # the reference has the last products as a bias
            scale = case.head_dim**-0.5
            of_reference |= {"softmax_scale": scale, "bias": last_products(rows, keys, scale)}
            rows, keys = rows[..., :MAX_HEAD_DIM], keys[..., :MAX_HEAD_DIM]
        o_rows = o[own] if case.layout == "bshd" else o[own].swapaxes(1, 2)
        Expectation(rows, keys, values, **of_reference).check(spec=(case, number), o=o_rows, lse=lse[own])
    return o, lse


def last_products(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """Returns the part of the scores that the columns beyond `MAX_HEAD_DIM` make."""
    q, k = (x[..., MAX_HEAD_DIM:].astype(accumulator(q.dtype.name)) for x in (q, k))
    return np.einsum("bqhd,bkhd->bhqk", q, k.repeat(q.shape[2] // k.shape[2], axis=2)) * q.dtype.type(scale)


def _append(case: Case, caches: list[np.ndarray], call: dict) -> None:
    """Writes the new rows to their places, one by one."""
    for cache, name in zip(caches, ("k", "v"), strict=True):
        for number, length in enumerate(case.lengths):
            for row in range(case.num_new):
                page, place = number, length + row
                if case.page_size:
                    page, place = call["block_table"][number, place // case.page_size], place % case.page_size
                new = call[name][number]
                if case.layout == "bshd":
                    cache[page, place] = new[row]
                else:
                    cache[page, :, place] = new[:, row]
