"""Attention on NumPy arrays: the tiled algorithm of FlashAttention-2 with BLAS matrix products.

Each thread takes one K/V head after the other, or several at a time where these have few rows. The query heads that
share a K/V head are stacked as rows, in the order (position, head of the group), so that a tile of B_r positions is one
contiguous matrix for all of them and no K/V head is repeated.

    forward      for each query tile, a loop over key tiles with an online softmax (Algorithm 1)
    single_pass  for each key tile, a loop over query tiles: dk and dv of the tile, and its share of dq (Algorithm 2)
    two_pass     for each key tile dk and dv, then for each query tile dq

Memory beyond inputs and results is, for each thread, one head's rows in the accumulators' dtype and a few tiles.
``cpu/tiles.py`` selects the pairs of tiles, ``cpu/scores.py`` applies features to a tile of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ..families.choice import check_on_any_gpu
from ..families.tile import requested_tile
from ..problem.arguments import array_backend
from ..problem.attention import AttentionProblem
from ..problem.checks import check_backward, check_delta, check_forward, with_band
from ..problem.features import feature_arrays
from ..problem.function_checks import function_arrays
from ..problem.options import CallOptions
from .results import results_for
from .sums import Sums, in_shares
from .threads import in_threads
from .tiles import Heads, heads_of, multiplications, rows, store

__all__ = ["arrays_of", "attend", "backward", "default_tile", "delta", "fill_unused", "forward", "row_sums"]

#: Tiles of queries that a thread takes with the same keys: so few that a long sequence of one head has several parts.
_PART = 4
#: Up to so many rows are few.
_DECODED_ROWS = 16
_NOTHING: Mapping[str, object] = MappingProxyType({})


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: tuple[np.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object] = _NOTHING,
) -> tuple[np.ndarray, np.ndarray]:
    """`fa2cupy.forward` on NumPy arrays."""
    inputs = {"q": q, "k": k, "v": v}
    request = check_forward(inputs, options, keywords)
    problem = request.problem
    check_on_any_gpu("forward", with_band(problem), options)
    tile = _tile_shape("forward", problem, options)
    heads = heads_of(problem, keywords)
    o, lse = results_for(request.results, out, inputs | arrays_of(keywords))
    fill_unused(problem, (o, 0), (lse, -np.inf))
    attend(heads, tile, (q, k, v), (o, lse))
    return o, lse


def attend(
    heads: Sequence[Heads],
    tile: tuple[int, int],
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    results: tuple[np.ndarray, np.ndarray],
) -> None:
    """Writes o and lse of heads, from q, k and v."""
    q, k, v = inputs
    o, lse = results
    b_r, b_c = tile

    def of_part(part: tuple[Heads, list[slice]]) -> None:
        head, tiles = part
        is_read_again = len(tiles) > 1
        k_rows, v_rows = (rows(head.keys(x), are_contiguous=is_read_again) for x in (k, v))
        for queries in tiles:
            own = head.positions(queries)
            q_tile = rows(head.queries(q)[:, own], factor=head.problem.softmax_scale)
            o_tile, lse_tile = _online_softmax(head, queries, q_tile, k_rows, v_rows, b_c)
            store(o_tile, head.queries(o)[:, own])
            store(lse_tile, head.statistics(lse)[:, own])

    tiles = [(head, list(head.query_tiles(b_r))) for head in heads]
    parts = [(head, own[i : i + _PART]) for head, own in tiles for i in range(0, len(own), _PART)]
    in_threads(of_part, parts, multiplications(heads))


def delta(o: np.ndarray, do: np.ndarray, out: np.ndarray | None, options: CallOptions) -> np.ndarray:
    """`fa2cupy.delta` on NumPy arrays."""
    inputs = {"o": o, "do": do}
    request = check_delta(inputs, options)
    (result,) = results_for(request.results, (out,), inputs)

    def of_head(head: Heads) -> None:
        both = (rows(head.queries(x), are_contiguous=False) for x in (do, o))
        store(row_sums(*both), head.statistics(result))

    heads = heads_of(request.problem, _NOTHING)
    in_threads(of_head, heads, sum(head.queries(do).size for head in heads))
    return result


def backward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    do: np.ndarray,
    given_delta: np.ndarray | None,
    dlse: np.ndarray | None,
    out: tuple[np.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object] = _NOTHING,
) -> tuple[np.ndarray, ...]:
    """`fa2cupy.backward` on NumPy arrays."""
    inputs = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
    optional = {name: array for name, array in (("delta", given_delta), ("dlse", dlse)) if array is not None}
    array_backend(inputs, optional)
    request = check_backward(inputs | optional, options, keywords)
    problem = request.problem
    check_on_any_gpu("backward", with_band(problem), options)
    one_pass = options.method != "two_pass"
    operations = ("backward",) if one_pass else ("backward_dkdv", "backward_dq")
    tiles = [_tile_shape(operation, problem, options) for operation in operations]
    heads = heads_of(problem, keywords)
    results = results_for(request.results, out, inputs | optional | arrays_of(keywords))
    named = {result.name: array for result, array in zip(request.results, results, strict=True)}
    dq, dk, dv = (named.pop(name) for name in ("dq", "dk", "dv"))
    fill_unused(problem, (dq, 0), (dk, 0), (dv, 0))

    def of_head(head: Heads, sums: Sums) -> None:
        gradient = _Gradient(head, q, k, v, o, lse, do, given_delta, dlse, sums)
        gradient.by_key_tiles(*tiles[0], with_dq=one_pass)
        if not one_pass:
            gradient.by_query_tiles(*tiles[1])
        gradient.sum_sink()
        gradient.dq *= problem.softmax_scale
        store(gradient.dq, head.queries(dq))
        store(gradient.dk, head.keys(dk))
        store(gradient.dv, head.keys(dv))

    in_shares(of_head, heads, problem, named)
    return tuple(results)


def arrays_of(keywords: Mapping[str, object]) -> dict[str, np.ndarray]:
    """All arrays of features, which no result may overlap."""
    return feature_arrays(keywords) | function_arrays(keywords)


def row_sums(do: np.ndarray, o: np.ndarray) -> np.ndarray:
    """Delta of rows, as a column."""
    return np.einsum("hij,hij->hi", do, o)[..., None]


def _online_softmax(
    head: Heads, queries: slice, q_tile: np.ndarray, k: np.ndarray, v: np.ndarray, b_c: int
) -> tuple[np.ndarray, np.ndarray]:
    """O and lse of one tile of queries, which are scaled."""
    o_tile = np.zeros((*q_tile.shape[:2], v.shape[2]), q_tile.dtype)
    row_max, row_sum = _start(head, o_tile)
    for keys in head.key_tiles(b_c, queries):
        s, _ = head.scores(q_tile, k[:, keys], queries, keys)
        new_max = np.maximum(row_max, s.max(axis=2, keepdims=True))
        # The maximum of a row without a visible key is -inf so far; exp(-inf - -inf) would be NaN instead of 0.
        shift = np.where(new_max == -np.inf, 0, new_max)
        p = np.exp(np.subtract(s, shift, out=s), out=s)
        rescale = np.exp(row_max - shift)
        row_sum = row_sum * rescale + p @ np.ones((p.shape[2], 1), p.dtype)  # faster than p.sum
        keep = head.terms.keep(queries, keys, p.dtype) if head.terms else None
        if keep is not None:
            p *= keep
        o_tile *= rescale
        o_tile += p @ v[:, keys]
        row_max = new_max
    o_tile /= np.where(row_sum == 0, 1, row_sum)
    return o_tile, row_max + np.log(row_sum)


def _start(head: Heads, o_tile: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row maxima and row sums before the first key: those of the sink alone."""
    row_max = np.full((*o_tile.shape[:2], 1), -np.inf, o_tile.dtype)
    if head.terms is None or head.terms.sink is None:
        return row_max, np.zeros_like(row_max)
    head.terms.split(row_max)[..., 0] = head.terms.sink
    return row_max, np.exp(row_max - np.where(row_max == -np.inf, 0, row_max))


class _Gradient:
    """The backward of one head: its operands and its results, as rows. dq lacks the factor softmax_scale."""

    def __init__(
        self,
        head: Heads,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        o: np.ndarray,
        lse: np.ndarray,
        do: np.ndarray,
        delta: np.ndarray | None,
        dlse: np.ndarray | None,
        sums: Sums,
    ):
        self.head = head
        self.sums = sums
        self.q = rows(head.queries(q), factor=head.problem.softmax_scale)
        self.k = rows(head.keys(k))
        self.v = rows(head.keys(v))
        self.do = rows(head.queries(do))
        self.delta = (
            row_sums(self.do, rows(head.queries(o), are_contiguous=False))
            if delta is None
            else rows(head.statistics(delta))
        )
        if dlse is not None:
            self.delta = self.delta - rows(head.statistics(dlse))
        lse = rows(head.statistics(lse))
        # In a row without visible keys P = exp(-inf - inf) = 0; exp(-inf - -inf) would be NaN. The row contributes
        # nothing, even if it has NaN, so that it is cleared: 0 * NaN would be NaN.
        hidden = lse == -np.inf
        self.lse = np.where(hidden, np.inf, lse)
        if hidden.any():
            self.q, self.do, self.delta = (np.where(hidden, 0, x) for x in (self.q, self.do, self.delta))
        self.dq, self.dk, self.dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)

    def by_key_tiles(self, b_r: int, b_c: int, with_dq: bool) -> None:
        """Computes dk, dv and dbias with four matrix products for a pair of tiles; with five, also dq."""
        for keys in self.head.key_tiles(b_c):
            for queries in self.head.query_tiles(b_r, keys):
                p, ds = self._score_gradients(queries, keys, self.sums)
                self.dv[:, keys] += p.swapaxes(1, 2) @ self.do[:, queries]
                self.dk[:, keys] += ds.swapaxes(1, 2) @ self.q[:, queries]
                if with_dq:
                    self.dq[:, queries] += ds @ self.k[:, keys]

    def by_query_tiles(self, b_r: int, b_c: int) -> None:
        """Computes dq with three matrix products for a pair of tiles."""
        for queries in self.head.query_tiles(b_r):
            for keys in self.head.key_tiles(b_c, queries):
                _, ds = self._score_gradients(queries, keys)
                self.dq[:, queries] += ds @ self.k[:, keys]

    def sum_sink(self) -> None:
        """Adds dsink: minus the sum over the rows of the sink's share of the softmax times delta."""
        terms = self.head.terms
        if "dsink" in self.sums.others and terms is not None and terms.sink is not None:
            shares = np.exp(np.minimum(terms.sink - terms.split(self.lse)[..., 0], 0))
            of_heads = (shares * terms.split(self.delta)[..., 0]).sum(axis=1)
            self.sums.others["dsink"][self.head.own] -= of_heads.ravel()

    def _score_gradients(self, queries: slice, keys: slice, sums: Sums | None = None) -> tuple[np.ndarray, np.ndarray]:
        """P after dropout, for dV, and the gradient of the scaled products. Gradients of features are added to sums."""
        terms = self.head.terms
        s, slopes = self.head.scores(self.q[:, queries], self.k[:, keys], queries, keys)
        s -= self.lse[:, queries]
        if not s.max() <= 0:  # scores may exceed an lse that has lost its last bits
            np.minimum(s, 0, out=s)
        p = np.exp(s, out=s)
        ds = self.do[:, queries] @ self.v[:, keys].swapaxes(1, 2)
        keep = terms.keep(queries, keys, p.dtype) if terms else None
        if keep is not None:
            ds *= keep
        ds -= self.delta[:, queries]
        ds *= p
        if terms is not None:
            if sums is not None and sums.bias is not None:
                sums.bias.add(ds, terms, queries, keys)
            slopes.apply(ds, p, {} if sums is None else sums.arguments)
        if keep is not None:
            p *= keep
        return p, ds


def default_tile(heads_per_group: int = 1, seqlen_q: int | None = None, by_keys: bool = False) -> tuple[int, int]:
    """B_r and B_c such that a tile of scores of a group of heads stays in a core's L2 cache between matrix products.

    Tiles are longer along the inner loop, so that fewer pairs at a diagonal are hidden in part: over queries if the
    outer loop is `by_keys`, else over keys. With few rows, as in decoding, tiles have more keys.
    """
    group = max(1, heads_per_group)
    if seqlen_q is not None and seqlen_q * group <= _DECODED_ROWS:
        return max(16, 256 // group), 8192
    rows, keys = (512, 256) if by_keys else (256, 512)
    return max(16, rows // group), keys


def _tile_shape(operation: str, problem: AttentionProblem, options: CallOptions) -> tuple[int, int]:
    tile = requested_tile(operation, options.config)
    if tile is not None:
        return tile.b_r, tile.b_c
    by_keys = operation in ("backward", "backward_dkdv")
    return default_tile(problem.heads_per_group, problem.score_shape[2], by_keys)


def fill_unused(problem: AttentionProblem, *results: tuple[np.ndarray, float]) -> None:
    """Fills packed results: rows before the first and after the last offset belong to no sequence."""
    if problem.is_packed:
        for array, value in results:
            array[...] = value
