"""Decoding: the key/value cache of a call, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedProblemError
from .arguments import array_backend, check_array, check_bool, check_writable, dtype_name, takes_rows
from .array_types import Array
from .attention import MAX_HEAD_DIM, MAX_KEY_COLUMNS, MAX_SEQLEN, AttentionProblem, CacheShape, array_shape
from .checks import Request, Result, check_heads, sizes_of, with_features
from .conversions import as_dtype
from .feature_checks import finite_number
from .options import CallOptions, check_options

__all__ = [
    "CACHES",
    "PAGE_STEP",
    "cache_lengths",
    "check_caches",
    "check_decode",
    "check_pages",
    "check_values_in_keys",
]

#: The arrays of a cache.
CACHES = ("k_cache", "v_cache")

#: Rows of a page are a multiple of this, so that no tile of keys of a warp crosses the end of a page.
PAGE_STEP = 16


def check_decode(arrays: Mapping[str, Any], options: CallOptions, keywords: Mapping[str, Any]) -> Request:
    """Checks a call of `fa2cupy.decode`, except for lengths, block table and addresses, which may be on a GPU.

    Parameters
    ----------
    arrays : mapping
        q, k_cache, v_cache and cache_seqlens by name, and k, v and block_table, which may be None.
    options : CallOptions
        `causal`, `softmax_scale`, `layout` and `num_splits` are read.
    keywords : mapping
        Keywords of features.
    """
    required = {name: arrays[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens")}
    optional = {name: arrays[name] for name in ("k", "v", "block_table")}
    array_backend(required, optional)
    check_bool("causal", options.causal)
    q, layout, dtype = arrays["q"], options.layout, dtype_name(arrays["q"].dtype)
    check_options(options, dtype, most_splits=1)
    batch, seqlen_q, num_heads, head_dim = sizes_of("q", q, layout, MAX_KEY_COLUMNS)
    if q.ndim != 4:
        raise ValueError(f"q: expected 4 axes, {_axes(layout)}, got shape {q.shape}")
    cache, num_heads_kv, head_dim_v = _check_cache(arrays, batch, head_dim, layout)
    check_heads("k_cache", num_heads, num_heads_kv)
    scale = head_dim**-0.5 if options.softmax_scale is None else finite_number("softmax_scale", options.softmax_scale)
    sizes = (batch, seqlen_q, cache.capacity, num_heads, num_heads_kv, head_dim)
    own_v = None if head_dim_v == head_dim else head_dim_v
    problem = AttentionProblem(dtype, *sizes, bool(options.causal), scale, layout, q.ndim, own_v, cache=cache)
    for name, length in (("q", seqlen_q), ("k_cache", cache.capacity)):
        if length > MAX_SEQLEN:
            raise UnsupportedProblemError(f"{name}: sequences of up to {MAX_SEQLEN} rows are supported, got {length}")
    problem = with_features(problem, q, keywords) if keywords else problem
    statistic = np.dtype(problem.accumulator_dtype)
    results = (Result("o", problem.o_shape, q.dtype), Result("lse", problem.lse_shape, statistic))
    return Request(problem, results)


def _check_cache(arrays: Mapping[str, Any], batch: int, head_dim: int, layout: str) -> tuple[CacheShape, int, int]:
    """The division of the cache, its number of heads, and its columns of v."""
    q, k_cache, v_cache, table = (arrays[name] for name in ("q", "k_cache", "v_cache", "block_table"))
    for name in ("k_cache", "v_cache"):
        if arrays[name].dtype != q.dtype:
            hint = as_dtype("q", q.dtype, arrays[name].dtype.name)
            raise TypeError(f"{name}: expected dtype {q.dtype} to match q, got {arrays[name].dtype}{hint}")
    first = "batch" if table is None else "pages"
    if k_cache.ndim != 4:
        raise ValueError(f"k_cache: expected 4 axes, {_axes(layout, first)}, got shape {k_cache.shape}")
    num_pages, page_size, num_heads_kv, columns = sizes_of("k_cache", k_cache, layout, MAX_KEY_COLUMNS)
    if columns != head_dim or (table is None and num_pages != batch):
        wanted: tuple[int | str, ...] = array_shape(
            layout, 4, batch if table is None else "pages", "rows", "num_heads_kv", head_dim
        )
        listed = ", ".join(map(str, wanted))
        raise ValueError(f"k_cache: expected shape ({listed}) to match q {q.shape}, got {k_cache.shape}")
    pages_per_sequence = 1
    if table is not None:
        if page_size == 0 or page_size % PAGE_STEP:
            raise ValueError(
                f"k_cache: expected pages of a multiple of {PAGE_STEP} rows, got {page_size} (shape {k_cache.shape})"
            )
        if table.ndim != 2:
            raise ValueError(f"block_table: expected shape (batch, pages of a sequence), got {table.shape}")
        pages_per_sequence = table.shape[1]
        _check_int32("block_table", table, (batch, pages_per_sequence))
    head_dim_v = sizes_of("v_cache", v_cache, layout)[3] if v_cache.ndim == 4 else head_dim
    check_array("v_cache", v_cache, (*k_cache.shape[:-1], head_dim_v), q.dtype, "k_cache")
    _check_int32("cache_seqlens", arrays["cache_seqlens"], (batch,))
    num_new = _check_new_rows(arrays, batch, num_heads_kv, head_dim, head_dim_v, layout)
    cache = CacheShape(num_pages, page_size, pages_per_sequence, num_new)
    if num_new > cache.capacity:
        raise ValueError(f"k: {num_new} rows are more than the {cache.capacity} that a sequence has in the cache")
    if num_new:
        for name in ("k_cache", "v_cache"):
            check_writable(name, arrays[name], "new rows")
    return cache, num_heads_kv, head_dim_v


def check_values_in_keys(arrays: Mapping[str, Any]) -> None:
    """Checks that v_cache, and v, are the first columns of k_cache, and k, by their addresses.

    Beyond `MAX_HEAD_DIM` kernels read them there. Other properties of the arrays are not checked.
    """
    for name, own in (("k_cache", "v_cache"), ("k", "v")):
        keys, values = arrays[name], arrays[own]
        if keys is None or values is None:
            continue  # which another check names
        array_backend({name: keys, own: values})
        same = _address(keys) == _address(values) and keys.strides == values.strides
        if not same or keys.shape[:-1] != values.shape[:-1] or values.shape[-1] > keys.shape[-1]:
            raise ValueError(
                f"{own}: beyond head_dim {MAX_HEAD_DIM} expected the first columns of {name}, such as "
                f"{name}[..., :{MAX_HEAD_DIM}]"
            )


def _address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def check_caches(
    arrays: Mapping[str, Any], problem: AttentionProblem, head_dim_step: int, alignment: int, addresses: Sequence[int]
) -> None:
    """Checks that kernels can take the caches as they are: a cache is written in place, and too large to copy.

    Parameters
    ----------
    arrays : mapping
        Those of `check_decode`.
    problem : AttentionProblem
    head_dim_step, alignment : int
        What the kernels take: multiples of columns, and of bytes at which rows start.
    addresses : sequence of int
        Those of the caches.
    """
    for name, address in zip(CACHES, addresses, strict=True):
        array, columns = arrays[name], problem.columns_of(name)
        if columns % head_dim_step:
            raise UnsupportedProblemError(
                f"{name}: for {problem.dtype} a head_dim that is a multiple of {head_dim_step} is supported, "
                f"got {columns}"
            )
        if array.size and not takes_rows(alignment, array, address):
            starts = f" that start on {alignment} bytes" if alignment > 1 else ""
            place = f" at {address:#x}" if address else ""
            raise ValueError(
                f"{name}: expected contiguous rows{starts}, because a cache is not copied, got strides {array.strides}"
                f"{place}"
            )


def _check_new_rows(
    arrays: Mapping[str, Any], batch: int, num_heads_kv: int, head_dim: int, head_dim_v: int, layout: str
) -> int:
    """The number of rows that are appended."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    if (k is None) != (v is None):
        missing, given = ("v", "k") if v is None else ("k", "v")
        raise ValueError(f"{missing}: rows are appended to both caches; pass it together with {given}")
    if k is None:
        return 0
    num_new = sizes_of("k", k, layout, MAX_KEY_COLUMNS)[1] if k.ndim == 4 else 0
    shape = array_shape(layout, 4, batch, num_new, num_heads_kv, head_dim)
    if k.ndim != 4 or k.shape != shape:
        wanted = ", ".join(map(str, array_shape(layout, 4, batch, "new rows", num_heads_kv, head_dim)))
        raise ValueError(f"k: expected shape ({wanted}) to match q and k_cache, got {k.shape}")
    check_array("k", k, shape, q.dtype, "q and k_cache")
    check_array("v", v, (*shape[:-1], head_dim_v), q.dtype, "k" if head_dim_v == head_dim else "k and v_cache")
    return num_new


def cache_lengths(seqlens: np.ndarray, cache: CacheShape) -> np.ndarray:
    """The lengths of the sequences before rows are appended, checked.

    Raises
    ------
    ValueError
        One is negative, or leaves no room for the appended rows.
    """
    most = cache.capacity - cache.num_new
    outside = (seqlens < 0) | (seqlens > most)
    if outside.any():
        room = f" (of {cache.capacity} rows, {cache.num_new} are for k and v)" if cache.num_new else ""
        index = int(outside.argmax())
        raise ValueError(
            f"cache_seqlens: expected lengths from 0 to {most}{room}, got {seqlens[index]} for sequence {index}"
        )
    return seqlens.astype("int64")


def check_pages(table: np.ndarray, lengths: np.ndarray, cache: CacheShape) -> None:
    """Checks the entries of a block table that sequences of `lengths` rows, and their new rows, need.

    Raises
    ------
    ValueError
        One is not the number of a page, or two sequences share a page that new rows are written to.
    """
    first = np.arange(cache.pages_per_sequence) * cache.page_size
    used = first < lengths[:, None] + cache.num_new
    outside = np.argwhere(used & ((table < 0) | (table >= cache.num_pages)))
    if len(outside):
        sequence, column = outside[0].tolist()
        raise ValueError(
            f"block_table: expected numbers of the {cache.num_pages} pages of k_cache, from 0 on, "
            f"got {table[sequence, column]} at [{sequence}, {column}]"
        )
    if not cache.num_new:
        return
    pages = np.unique([table[used], np.nonzero(used)[0]], axis=1)[0]  # once for each sequence that has it, sorted
    shared = pages[1:][pages[1:] == pages[:-1]]
    is_written = used & (first + cache.page_size > lengths[:, None])
    wrong = np.argwhere(is_written & np.isin(table, shared))
    if len(wrong):
        sequence, column = wrong[0].tolist()
        raise ValueError(
            f"block_table: expected pages of one sequence where new rows are written, got {table[sequence, column]} "
            f"at [{sequence}, {column}], which another sequence has, too"
        )


def _axes(layout: str, first: str = "batch") -> str:
    rows = "page_size" if first == "pages" else "seqlen"
    return f"({', '.join(array_shape(layout, 4, first, rows, 'heads', 'head_dim'))})"


def _check_int32(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if dtype_name(array.dtype) != "int32":
        raise TypeError(f"{name}: expected dtype int32, got {array.dtype}{as_dtype(name, array.dtype, 'int32')}")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape} to match q, got {array.shape}")
