"""Tangents of the forward and of the backward on NumPy arrays, tile by tile like ``cpu/attention.py``.

P is computed again from lse for each pair of tiles. ``numerics/second_order.py`` has the formulas. A tangent that is
None costs no product.

    forward    for each query tile, a loop over key tiles: O' and lse'
    backward   for each key tile, a loop over query tiles: dk' and dv' of the tile, and its share of dq'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..problem.arguments import array_backend
from ..problem.options import CallOptions
from ..problem.strides import with_score_axes
from ..problem.tangents import (
    COTANGENTS,
    TANGENTS,
    Tangents,
    check_backward_jvp,
    check_double_backward,
    check_jvp,
    check_output_jvp,
)
from .attention import arrays_of, attend, default_tile, fill_unused, row_sums
from .results import results_for
from .scores import by_group
from .sums import Sums, in_shares
from .threads import in_threads
from .tiles import Heads, heads_of, multiplications, rows, store

__all__ = ["backward_jvp", "double_backward", "jvp", "output_jvp"]

_Tile = tuple[int, int]


def jvp(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    tangents: Tangents,
    out: tuple[np.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[np.ndarray, ...]:
    """`fa2cupy.jvp` on NumPy arrays."""
    inputs = {"q": q, "k": k, "v": v}
    request = check_jvp(inputs, tangents, options, keywords)
    problem = request.problem
    heads = heads_of(problem, keywords)
    o, lse, ot, lset = results_for(request.results, out, inputs | _given(TANGENTS, tangents) | arrays_of(keywords))
    fill_unused(problem, (o, 0), (lse, -np.inf), (ot, 0), (lset, 0))
    tile = default_tile(problem.heads_per_group, problem.score_shape[2])
    attend(heads, tile, (q, k, v), (o, lse))
    _write_tangents(heads, tile, (q, k, v), (o, lse), tangents, (ot, lset))
    return o, lse, ot, lset


def output_jvp(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    results: Mapping[str, np.ndarray | None],
    tangents: Tangents,
    out: tuple[np.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[np.ndarray, ...]:
    """The tangents that `fa2cupy.jvp` returns for given `results`, o and lse, on NumPy arrays."""
    arrays = _checked_arrays(inputs, results, ())
    request = check_output_jvp(arrays, tangents, options, keywords)
    problem = request.problem
    heads = heads_of(problem, keywords)
    ot, lset = results_for(request.results, out, arrays | _given(TANGENTS, tangents) | arrays_of(keywords))
    fill_unused(problem, (ot, 0), (lset, 0))
    tile = default_tile(problem.heads_per_group, problem.score_shape[2])
    _write_tangents(heads, tile, inputs, (arrays["o"], arrays["lse"]), tangents, (ot, lset))
    return ot, lset


def _write_tangents(
    heads: Sequence[Heads],
    tile: _Tile,
    inputs: tuple[np.ndarray, ...],
    results: tuple[np.ndarray, np.ndarray],
    tangents: Tangents,
    moved: tuple[np.ndarray, np.ndarray],
) -> None:
    """Writes the tangents `moved` of `results`, o and lse."""
    (o, lse), (ot, lset) = results, moved

    def of_head(head: Heads) -> None:
        ot_rows, lset_rows = _Tangent(head, inputs, lse, tangents).results(o, tile)
        store(ot_rows, head.queries(ot))
        store(lset_rows, head.statistics(lset))

    in_threads(of_head, heads, multiplications(heads))


def backward_jvp(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    results: Mapping[str, np.ndarray | None],
    tangents: Tangents,
    out: tuple[np.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[np.ndarray, ...]:
    """`fa2cupy.backward_jvp` on NumPy arrays; `results` are o, lse, their gradients and the tangents of all."""
    arrays = _checked_arrays(inputs, results, ("dot", "dlse", "dlset"))
    request = check_backward_jvp(arrays, tangents, options, keywords)
    problem = request.problem
    heads = heads_of(problem, keywords)
    found = results_for(request.results, out, arrays | _given(TANGENTS, tangents) | arrays_of(keywords))
    fill_unused(problem, *((array, 0) for array in found[:3]))
    tile = default_tile(problem.heads_per_group, problem.score_shape[2], by_keys=True)

    def of_head(head: Heads, sums: Sums) -> None:
        tangent = _Tangent(head, inputs, arrays["lse"], tangents)
        moved = rows(head.queries(arrays["ot"])), rows(head.statistics(arrays["lset"]))
        _GradientTangent(tangent, arrays, moved, sums).write(tile, found)

    names = [result.name.removesuffix("t") for result in request.results]
    in_shares(of_head, heads, problem, dict(zip(names[3:], found[3:], strict=True)))
    return tuple(found)


def double_backward(
    inputs: tuple[np.ndarray, np.ndarray, np.ndarray],
    results: Mapping[str, np.ndarray | None],
    cotangents: Tangents,
    out: tuple[np.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[np.ndarray, ...]:
    """`fa2cupy.double_backward` on NumPy arrays; `results` are o, lse and their gradients."""
    arrays = _checked_arrays(inputs, results, ("dlse",))
    request = check_double_backward(arrays, cotangents, options, keywords)
    problem = request.problem
    heads = heads_of(problem, keywords)
    found = results_for(request.results, out, arrays | _given(COTANGENTS, cotangents) | arrays_of(keywords))
    named = {result.name: array for result, array in zip(request.results, found, strict=True)}
    gdo, gdlse = named["gdo"], named.get("gdlse")
    summed = {f"d{source}": named[f"g{source}"] for source in ("bias", "sink") if f"g{source}" in named}
    fill_unused(problem, *((array, 0) for array in found[: len(found) - len(summed)]))
    by_queries, by_keys = (
        default_tile(problem.heads_per_group, problem.score_shape[2], by_keys) for by_keys in (False, True)
    )

    def of_head(head: Heads, sums: Sums) -> None:
        tangent = _Tangent(head, inputs, arrays["lse"], cotangents)
        ot, lset = tangent.results(arrays["o"], by_queries)
        store(ot, head.queries(gdo))
        if gdlse is not None:
            store(lset, head.statistics(gdlse))
        _GradientTangent(tangent, arrays, (ot, lset), sums).write(by_keys, found)

    in_shares(of_head, heads, problem, summed)
    return tuple(found)


def _checked_arrays(
    inputs: tuple[np.ndarray, ...], results: Mapping[str, np.ndarray | None], optional: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """All arrays by name, without those that are None; only those in `optional` may be."""
    arrays = {**dict(zip(("q", "k", "v"), inputs, strict=True)), **results}
    array_backend(
        {name: array for name, array in arrays.items() if name not in optional},
        {name: arrays[name] for name in optional},
    )
    return {name: array for name, array in arrays.items() if array is not None}


def _given(names: tuple[str, ...], tangents: Tangents) -> dict[str, np.ndarray]:
    return {name: array for name, array in zip(names, tangents, strict=True) if array is not None}


class _Weights(NamedTuple):
    """What a pair of tiles contributes to tangents.

    Attributes
    ----------
    p : ndarray
    keep : ndarray or None
        Factors of dropout.
    products, scores : ndarray or None
        Tangents of the scaled products and of the scores; None if nothing changes them. They are one array if `slope`
        is None.
    slope, curvature : ndarray or None
        Derivatives of the scores by the products; None if they are 1 and 0.
    """

    p: np.ndarray
    keep: np.ndarray | None
    products: np.ndarray | None
    scores: np.ndarray | None
    slope: np.ndarray | None
    curvature: np.ndarray | None


class _Tangent:
    """The direction of one head, as rows. q and its tangent have the factor softmax_scale."""

    def __init__(self, head: Heads, inputs: tuple[np.ndarray, ...], lse: np.ndarray, tangents: Tangents):
        q, k, v = inputs
        scale = head.problem.softmax_scale
        self.head = head
        self.q, self.k, self.v = rows(head.queries(q), factor=scale), rows(head.keys(k)), rows(head.keys(v))
        self.qt = None if tangents.q is None else rows(head.queries(tangents.q), factor=scale)
        self.kt, self.vt = (None if x is None else rows(head.keys(x)) for x in (tangents.k, tangents.v))
        self.bias = self.sink = None
        if tangents.bias is not None:
            whole = np.broadcast_to(with_score_axes("bias", tangents.bias), head.problem.broadcast_shape)
            place: Any = (*head.sequence.place, head.own)
            self.bias = by_group(whole[place], head.problem.heads_per_group)
        if tangents.sink is not None:
            self.sink = by_group(tangents.sink[head.own][:, None], head.problem.heads_per_group)
        lse = rows(head.statistics(lse))
        # Rows that see no key contribute nothing, even if they have NaN: their P is exp(-inf).
        self.hidden = lse == -np.inf
        self.lse = np.where(self.hidden, np.inf, lse)
        self.q = self.visible(self.q)
        if self.qt is not None:
            self.qt = self.visible(self.qt)

    def visible(self, array: np.ndarray) -> np.ndarray:
        """Rows with zeros in place of those that see no key."""
        return np.where(self.hidden, 0, array) if self.hidden.any() else array

    def sink_shares(self) -> np.ndarray:
        """P of the sink in each row, of the axes (K/V head, position, head of the group)."""
        terms = self.head.terms
        assert terms is not None and terms.sink is not None
        return np.exp(np.minimum(terms.sink - terms.split(self.lse)[..., 0], 0))

    def results(self, o: np.ndarray, tile: _Tile) -> tuple[np.ndarray, np.ndarray]:
        """O' and lse' of the head, as rows, given o."""
        b_r, b_c = tile
        ot = np.zeros((*self.q.shape[:2], self.v.shape[2]), self.q.dtype)
        lset = np.zeros_like(self.lse)
        if self.sink is not None:
            lset[..., 0] = (self.sink_shares() * self.sink).reshape(lset.shape[:2])
        for queries in self.head.query_tiles(b_r):
            for keys in self.head.key_tiles(b_c, queries):
                p, keep, _, scores, *_ = self.weights(queries, keys)
                if scores is not None:
                    scores *= p
                    lset[:, queries] += scores.sum(axis=2, keepdims=True)
                    ot[:, queries] += (scores if keep is None else scores * keep) @ self.v[:, keys]
                if self.vt is not None:
                    ot[:, queries] += (p if keep is None else p * keep) @ self.vt[:, keys]
        ot -= lset * self.visible(rows(self.head.queries(o), are_contiguous=False))
        return ot, lset

    def weights(self, queries: slice, keys: slice) -> _Weights:
        """P of a pair of tiles, and how its scores change."""
        head, k_tile = self.head, self.k[:, keys]
        s, slopes = head.scores(self.q[:, queries], k_tile, queries, keys, is_curved=True)
        s -= self.lse[:, queries]
        p = np.exp(np.minimum(s, 0, out=s), out=s)
        products = scores = None
        if self.qt is not None:
            products = self.qt[:, queries] @ k_tile.swapaxes(1, 2)
        if self.kt is not None:
            of_k = self.q[:, queries] @ self.kt[:, keys].swapaxes(1, 2)
            products = of_k if products is None else np.add(products, of_k, out=products)
        slope, curvature = slopes.by_products(p)
        if products is not None:
            scores = products if slope is None else slope * products
        if self.bias is not None:
            scores = np.zeros_like(p) if scores is None else scores
            split = scores.reshape(len(scores), -1, head.problem.heads_per_group, scores.shape[2])
            split += self.bias[:, head.positions(queries), :, keys]
            np.copyto(scores, 0, where=p == 0)  # elements for hidden keys are ignored, even if they are NaN
        keep = head.terms.keep(queries, keys, p.dtype) if head.terms else None
        return _Weights(p, keep, products, scores, slope, curvature)


class _GradientTangent:
    """The tangents of the gradients of one head: operands and results, as rows. dq lacks the factor softmax_scale.

    Parameters
    ----------
    tangent : _Tangent
    arrays : mapping of ndarray
        o and do; perhaps dlse, dot and dlset.
    moved : tuple of ndarray
        O' and lse', as rows.
    sums : Sums
    """

    def __init__(
        self,
        tangent: _Tangent,
        arrays: Mapping[str, np.ndarray],
        moved: tuple[np.ndarray, np.ndarray],
        sums: Sums,
    ):
        head = tangent.head
        ot, lset = moved
        self.tangent, self.sums = tangent, sums
        o, self.do = rows(head.queries(arrays["o"])), tangent.visible(rows(head.queries(arrays["do"])))
        self.dot = tangent.visible(rows(head.queries(arrays["dot"]))) if "dot" in arrays else None
        delta, deltat = row_sums(self.do, o), row_sums(self.do, ot)
        if self.dot is not None:
            deltat += row_sums(self.dot, o)
        if "dlse" in arrays:
            delta -= rows(head.statistics(arrays["dlse"]))
        if "dlset" in arrays:
            deltat -= rows(head.statistics(arrays["dlset"]))
        self.delta, self.deltat, self.lset = map(tangent.visible, (delta, deltat, lset))
        self.dq, self.dk, self.dv = (np.zeros_like(x) for x in (tangent.q, tangent.k, tangent.v))

    def write(self, tile: _Tile, results: Sequence[np.ndarray]) -> None:
        """Writes the tangents of dq, dk and dv, the first ones of `results`, and adds the others to the sums."""
        b_r, b_c = tile
        head = self.tangent.head
        for keys in head.key_tiles(b_c):
            for queries in head.query_tiles(b_r, keys):
                self._add(queries, keys)
        self._sum_sink()
        self.dq *= head.problem.softmax_scale
        dq, dk, dv = results[:3]
        store(self.dq, head.queries(dq))
        store(self.dk, head.keys(dk))
        store(self.dv, head.keys(dv))

    def _sum_sink(self) -> None:
        head, sink = self.tangent.head, self.tangent.sink
        if "dsink" in self.sums.others and head.terms is not None:
            delta, deltat, lset = (head.terms.split(x)[..., 0] for x in (self.delta, self.deltat, self.lset))
            moved = (-lset if sink is None else sink - lset) * delta + deltat
            self.sums.others["dsink"][head.own] -= (self.tangent.sink_shares() * moved).sum(axis=1).ravel()

    def _add(self, queries: slice, keys: slice) -> None:
        tangent, do = self.tangent, self.do[:, queries]
        k, v = tangent.k[:, keys], tangent.v[:, keys]
        p, keep, products, scores, slope, curvature = tangent.weights(queries, keys)
        ds = do @ v.swapaxes(1, 2)
        dst = np.zeros_like(ds)
        if tangent.vt is not None:
            dst += do @ tangent.vt[:, keys].swapaxes(1, 2)
        if self.dot is not None:
            dst += self.dot[:, queries] @ v.swapaxes(1, 2)
        if keep is not None:
            ds *= keep
            dst *= keep
        ds -= self.delta[:, queries]
        ds *= p
        dst -= self.deltat[:, queries]
        change = -self.lset[:, queries] if scores is None else np.subtract(scores, self.lset[:, queries], out=scores)
        dst *= p
        dst += change * ds
        if self.sums.bias is not None:
            assert tangent.head.terms is not None
            self.sums.bias.add(dst, tangent.head.terms, queries, keys)
        if slope is not None:
            dst *= slope
            if curvature is not None and products is not None:
                dst += curvature * products * ds
            ds *= slope
        if keep is not None:
            p *= keep
        self.dv[:, keys] += (change * p).swapaxes(1, 2) @ do
        if self.dot is not None:
            self.dv[:, keys] += p.swapaxes(1, 2) @ self.dot[:, queries]
        self.dq[:, queries] += dst @ k
        self.dk[:, keys] += dst.swapaxes(1, 2) @ tangent.q[:, queries]
        if tangent.kt is not None:
            self.dq[:, queries] += ds @ tangent.kt[:, keys]
        if tangent.qt is not None:
            self.dk[:, keys] += ds.swapaxes(1, 2) @ tangent.qt[:, queries]
