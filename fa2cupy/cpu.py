"""Calls on NumPy arrays: the tiled algorithm of FlashAttention-2 with BLAS matrix products.

One K/V head at a time. The query heads that share it are stacked as rows, in the order (position, head of the group),
so that a tile of B_r positions is one contiguous matrix for all of them and no K/V head is ever repeated.

    forward      each query tile meets its key tiles with an online softmax (Algorithm 1)
    single_pass  each key tile meets its query tiles: dk and dv of the tile, and a share of dq (Algorithm 2)
    two_pass     each query tile gives its dq, then each key tile its dk and dv

Memory beyond inputs and results is one head's rows in the accumulators' dtype and a few tiles of scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .arguments import array_backend, check_outputs, check_overlap, output_name, unpack_out
from .families import choose_method, requested_tile
from .problem import AttentionProblem

__all__ = ["backward", "default_tile", "delta", "forward"]


def forward(q, k, v, causal, softmax_scale, layout, out, config, family):
    """`fa2cupy.forward` on NumPy arrays."""
    array_backend({"q": q, "k": k, "v": v})
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    tile = _tile_shape("forward", problem, config)
    outputs = (("o", problem.q_shape, q.dtype), ("lse", problem.lse_shape, np.dtype(problem.accumulator_dtype)))
    o, lse = _results(outputs, unpack_out(out, ("o", "lse")), {"q": q, "k": k, "v": v})
    with np.errstate(all="ignore"):
        for head in _heads(problem):
            q_rows, k_rows, v_rows = _rows(head.queries(q)), _rows(head.keys(k)), _rows(head.keys(v))
            o_rows, lse_rows = _online_softmax(head, q_rows * problem.softmax_scale, k_rows, v_rows, *tile)
            _store(o_rows, head.queries(o))
            _store(lse_rows, head.statistics(lse))
    return o, lse


def delta(o, do, layout, out):
    """`fa2cupy.delta` on NumPy arrays."""
    array_backend({"o": o, "do": do})
    problem = AttentionProblem.from_outputs(o, do, layout=layout)
    outputs = (("delta", problem.lse_shape, np.dtype(problem.accumulator_dtype)),)
    (result,) = _results(outputs, (out,), {"o": o, "do": do})
    with np.errstate(all="ignore"):
        for head in _heads(problem):
            delta_rows = np.einsum("ij,ij->i", _rows(head.queries(do)), _rows(head.queries(o)))
            _store(delta_rows, head.statistics(result))
    return result


def backward(
    q, k, v, o, lse, do, causal, softmax_scale, given_delta, method, deterministic, layout, out, config, family
):
    """`fa2cupy.backward` on NumPy arrays."""
    inputs = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
    array_backend(inputs, {"delta": given_delta})
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    problem.check_backward_inputs(o, lse, do, given_delta)
    one_pass = choose_method("numpy", problem, method, deterministic) == "single_pass"
    operations = ("backward",) if one_pass else ("backward_dkdv", "backward_dq")
    tiles = [_tile_shape(operation, problem, config) for operation in operations]
    outputs = (("dq", problem.q_shape, q.dtype), ("dk", problem.k_shape, q.dtype), ("dv", problem.k_shape, q.dtype))
    if given_delta is not None:
        inputs["delta"] = given_delta
    dq, dk, dv = _results(outputs, unpack_out(out, ("dq", "dk", "dv")), inputs)
    row_delta = delta(o, do, layout, None) if given_delta is None else given_delta
    with np.errstate(all="ignore"):
        for head in _heads(problem):
            gradient = _Gradient(head, q, k, v, lse, do, row_delta)
            gradient.by_key_tiles(*tiles[0], with_dq=one_pass)
            if not one_pass:
                gradient.by_query_tiles(*tiles[1])
            _store(gradient.dq * problem.softmax_scale, head.queries(dq))
            _store(gradient.dk, head.keys(dk))
            _store(gradient.dv, head.keys(dv))
    return dq, dk, dv


def _online_softmax(head: _Head, q, k, v, b_r: int, b_c: int) -> tuple[np.ndarray, np.ndarray]:
    """o and lse of one head's rows; `q` comes scaled."""
    o, lse = np.zeros_like(q), np.empty((len(q), 1), q.dtype)
    for queries in head.query_tiles(b_r):
        o_tile = o[queries]
        row_max = np.full((len(o_tile), 1), -np.inf, q.dtype)
        row_sum = np.zeros_like(row_max)
        for keys in head.key_tiles(b_c, queries):
            s = head.scores(q, k, queries, keys)
            new_max = np.maximum(row_max, s.max(axis=1, keepdims=True))
            # Until a row has seen a key its maximum is -inf, and exp(-inf - 0) the 0 that exp(-inf - -inf) is not.
            shift = np.where(new_max == -np.inf, 0, new_max)
            p = np.exp(np.subtract(s, shift, out=s), out=s)
            rescale = np.exp(row_max - shift)
            row_sum = row_sum * rescale + p.sum(axis=1, keepdims=True)
            o_tile *= rescale
            o_tile += p @ v[keys]
            row_max = new_max
        o_tile /= np.where(row_sum == 0, 1, row_sum)
        lse[queries] = row_max + np.log(row_sum)
    return o, lse


class _Gradient:
    """The backward of one head: its operands and its results, as rows. dq comes without the softmax scale."""

    def __init__(self, head: _Head, q, k, v, lse, do, delta):
        self.head = head
        self.q = _rows(head.queries(q)) * head.problem.softmax_scale
        self.k = _rows(head.keys(k))
        self.v = _rows(head.keys(v))
        self.do = _rows(head.queries(do))
        self.delta = _rows(head.statistics(delta))
        lse = _rows(head.statistics(lse))
        # A row without visible keys has P = exp(-inf - inf) = 0, where exp(-inf - -inf) would be NaN.
        self.lse = np.where(lse == -np.inf, np.inf, lse)
        self.dq, self.dk, self.dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)

    def by_key_tiles(self, b_r: int, b_c: int, with_dq: bool) -> None:
        """dk and dv, and with five instead of four matrix products for a pair of tiles also dq."""
        for keys in self.head.key_tiles(b_c):
            for queries in self.head.query_tiles(b_r, keys):
                p, ds = self._score_gradients(queries, keys)
                self.dv[keys] += p.T @ self.do[queries]
                self.dk[keys] += ds.T @ self.q[queries]
                if with_dq:
                    self.dq[queries] += ds @ self.k[keys]

    def by_query_tiles(self, b_r: int, b_c: int) -> None:
        """dq, with three matrix products for a pair of tiles."""
        for queries in self.head.query_tiles(b_r):
            for keys in self.head.key_tiles(b_c, queries):
                _, ds = self._score_gradients(queries, keys)
                self.dq[queries] += ds @ self.k[keys]

    def _score_gradients(self, queries: slice, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        s = self.head.scores(self.q, self.k, queries, keys)
        s -= self.lse[queries]
        p = np.exp(s, out=s)
        ds = self.do[queries] @ self.v[keys].T
        ds -= self.delta[queries]
        ds *= p
        return p, ds


@dataclass(frozen=True)
class _Head:
    """A K/V head with the query heads that share it: its part of the arrays, and which tiles of it meet.

    Views have the axes (position, head of the group, column). Rows have the first two as one.
    """

    problem: AttentionProblem
    batch: int
    index: int

    @property
    def _group(self) -> slice:
        size = self.problem.heads_per_group
        return slice(self.index * size, (self.index + 1) * size)

    @property
    def _diagonal(self) -> int:
        # Query i sees the keys up to i + diagonal.
        return self.problem.seqlen_k - self.problem.seqlen_q

    def queries(self, array: np.ndarray) -> np.ndarray:
        """View of the head's part of q, o or their gradients."""
        return self.problem.canonical_view(array)[self.batch, :, self._group]

    def keys(self, array: np.ndarray) -> np.ndarray:
        """View of the head's part of k, v or their gradients."""
        return self.problem.canonical_view(array)[self.batch, :, self.index, None]

    def statistics(self, array: np.ndarray) -> np.ndarray:
        """View of the head's part of lse or delta, as one column."""
        return array[(None,) * (4 - self.problem.rank)][self.batch, self._group].T[..., None]

    def query_tiles(self, b_r: int, keys: slice | None = None) -> Iterator[slice]:
        """Rows of b_r positions at a time: all, or those from the first on that sees the tile `keys`."""
        group = self.problem.heads_per_group
        first = max(0, keys.start - self._diagonal) if keys and self.problem.causal else 0
        end = self.problem.seqlen_q * group
        for start in range(first * group, end, max(1, b_r * group)):
            yield slice(start, min(start + b_r * group, end))

    def key_tiles(self, b_c: int, queries: slice | None = None) -> Iterator[slice]:
        """Keys, b_c at a time: all, or those up to the last that the tile `queries` sees."""
        end = self.problem.seqlen_k
        if queries and self.problem.causal:
            end = min(end, queries.stop // self.problem.heads_per_group + self._diagonal)
        for start in range(0, end, b_c):
            yield slice(start, min(start + b_c, end))

    def scores(self, scaled_q, k, queries: slice, keys: slice) -> np.ndarray:
        """Masked scores of a pair of tiles. Mask arithmetic is for the pairs on the diagonal only."""
        s = scaled_q[queries] @ k[keys].T
        group = self.problem.heads_per_group
        if self.problem.causal and keys.stop - 1 > queries.start // group + self._diagonal:
            last_seen = np.arange(queries.start, queries.stop)[:, None] // group + self._diagonal
            np.copyto(s, -np.inf, where=np.arange(keys.start, keys.stop) > last_seen)
        return s


def _heads(problem: AttentionProblem) -> Iterator[_Head]:
    for batch, index in np.ndindex(problem.batch, problem.num_heads_kv):
        yield _Head(problem, batch, index)


def _rows(view: np.ndarray) -> np.ndarray:
    accumulator = "float64" if view.dtype.name == "float64" else "float32"
    return np.ascontiguousarray(view, dtype=accumulator).reshape(-1, view.shape[-1])


def _store(rows: np.ndarray, view: np.ndarray) -> None:
    view[...] = rows.reshape(view.shape)


def default_tile(heads_per_group: int = 1) -> tuple[int, int]:
    """B_r and B_c whose score tile, of all heads of a group, stays in a core's L2 cache between two matrix products."""
    return max(16, 256 // max(1, heads_per_group)), 512


def _tile_shape(operation: str, problem: AttentionProblem, config) -> tuple[int, int]:
    tile = requested_tile(operation, config)
    return default_tile(problem.heads_per_group) if tile is None else (tile.b_r, tile.b_c)


def _results(outputs: tuple, given: tuple, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The caller's arrays where there are any, checked, else new ones."""
    written = {output_name(kind[0]): array for kind, array in zip(outputs, given, strict=True) if array is not None}
    array_backend(inputs, written)
    check_outputs(outputs, given)
    check_overlap(written, inputs)
    return [np.empty(kind[1], kind[2]) if array is None else array for kind, array in zip(outputs, given, strict=True)]
