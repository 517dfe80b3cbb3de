"""The formulas of second order, with whole score matrices, one head at a time. Here ' is a tangent, o elementwise.

    T   = f' softmax_scale (Q' K^T + Q K'^T) + bias'        f is what features make of the scaled products
    lse' = rowsum(P o T) + P_sink sink'
    O'  = (keep o P o T) V - lse' o O + (keep o P) V'

    dP' = keep o (dO V'^T + dO' V^T)        delta' = rowsum(dO o O' + dO' o O) - dlse'
    dS' = P o ((T - lse') o (dP - delta) + dP' - delta')
    dV' = (keep o P o (T - lse'))^T dO + (keep o P)^T dO'
    dQ' = softmax_scale (dU' K + dU K')     dU = f' dS,  dU' = f' dS' + f'' dS o softmax_scale (Q' K^T + Q K'^T)
    dK' = softmax_scale (dU'^T Q + dU^T Q')
    dbias' = dS'                            dsink' = -sum_i P_sink ((sink' - lse') delta + delta')

The double backward needs no others: with cotangents of dQ, dK and dV in place of Q', K' and V', the gradients of Q, K
and V are dQ', dK' and dV', and that of dO is O', because second derivatives are symmetric.

Along a second direction, whose tangents are Q", K", V", T" and lse", T' and O' change by

    T'" = f' softmax_scale (Q' K"^T + Q" K'^T) + f'' (softmax_scale (Q' K^T + Q K'^T)) o (the same of Q", K")
    W   = (T' - lse') o (T" - lse") + T'"               lse'" = rowsum(P o W) + P_sink lse' lse"
    O'" = (keep o P o (W - lse'")) V + (keep o P o (T' - lse')) V" + (keep o P o (T" - lse")) V'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..problem.array_types import Array
from ..problem.tangents import Tangents
from .formulas import Formulas, Head, Slopes

__all__ = ["SecondOrder"]


class _Weights(NamedTuple):
    """What the tangents of a head's results are made of."""

    p: Array
    products: Array
    scores: Array
    slopes: Slopes


class SecondOrder(Formulas):
    """The formulas for one problem, in one precision, with tangents: parameters as of `Formulas`."""

    def jvp(self, arrays: Mapping[str, Any], tangents: Tangents) -> tuple[Any, Any]:
        """O' and lse'. `arrays` has q, k, v, o and lse."""
        q, k, v, o, lse = (arrays[name] for name in ("q", "k", "v", "o", "lse"))
        tangents = self._filled(tangents, q, k, v)
        ot, lset = self.xp.zeros(self.problem.o_shape, self.rounded), self.xp.zeros(lse.shape, self.work)
        for part in self._heads():
            row_lse = self._statistics(lse)[part.own]
            p, _, scores, _ = self._weights(q, k, row_lse, tangents, part)
            change = p * scores
            row_lset = change.sum(axis=1)
            if tangents.sink is not None:
                row_lset = row_lset + self._sink_share(row_lse, part) * self._of_sink(tangents, part)
            of_head = self._weighted(change, v, part) + self._weighted(p, tangents.v, part)
            of_head = of_head - row_lset[:, None] * self._head(o, part.own)
            self._statistics(lset)[part.own] = self._visible_rows(row_lset, row_lse)
            self._heads_first(ot)[part.own] = self._visible_rows(of_head, row_lse)
        return ot, lset

    def second_jvp(self, arrays: Mapping[str, Any], one: Tangents, other: Tangents) -> tuple[Any, Any]:
        """O'" and lse'" along two directions of q, k and v. `arrays` has q, k, v and lse."""
        q, k, v, lse = (arrays[name] for name in ("q", "k", "v", "lse"))
        one, other = (self._filled(tangents, q, k, v) for tangents in (one, other))
        ott, lsett = self.xp.zeros(self.problem.o_shape, self.rounded), self.xp.zeros(lse.shape, self.work)
        for part in self._heads():
            row_lse = self._statistics(lse)[part.own]
            p, products, scores, slopes = self._weights(q, k, row_lse, one, part)
            _, other_products, other_scores, _ = self._weights(q, k, row_lse, other, part)
            row_lset, other_row_lset = ((p * x).sum(axis=1) for x in (scores, other_scores))
            scores, other_scores = scores - row_lset[:, None], other_scores - other_row_lset[:, None]
            (qt, kt), (qu, ku) = ((self._rows(x.q, part, row_lse), self._head(x.k, part.shared)) for x in (one, other))
            mixed = self.problem.softmax_scale * (self._product(qt, ku.T) + self._product(qu, kt.T))
            bend = slopes.curvature(self.xp, p) * products * other_products
            change = scores * other_scores + slopes.total(self.xp, p) * mixed + bend
            row = (p * change).sum(axis=1)
            if "sink" in self.arrays:
                row = row + self._sink_share(row_lse, part) * row_lset * other_row_lset
            of_head = self._weighted(p * (change - row[:, None]), v, part)
            of_head = of_head + self._weighted(p * scores, other.v, part)
            of_head = of_head + self._weighted(p * other_scores, one.v, part)
            self._statistics(lsett)[part.own] = self._visible_rows(row, row_lse)
            self._heads_first(ott)[part.own] = self._visible_rows(of_head, row_lse)
        return ott, lsett

    def backward_jvp(
        self, arrays: Mapping[str, Any], tangents: Tangents, extra: Mapping[str, Array]
    ) -> tuple[Any, ...]:
        """dq', dk' and dv', then the tangents of the gradients that `extra` names.

        `arrays` has q, k, v, o, lse, do, ot and lset, and may have dlse, dot and dlset.
        """
        q, k, v, lse, do = (arrays[name] for name in ("q", "k", "v", "lse", "do"))
        tangents = self._filled(tangents, q, k, v)
        missing = {"dot": self.xp.zeros_like(do), **dict.fromkeys(("dlse", "dlset"), self.xp.zeros_like(lse))}
        arrays = missing | {name: array for name, array in arrays.items() if array is not None}
        dqt, dkt, dvt = (self.xp.zeros(x.shape, self.work) for x in (q, k, v))
        sums = {name: self.xp.zeros(self._all_axes(name, like.shape), self.work) for name, like in extra.items()}
        scale = self.problem.softmax_scale
        for part in self._heads():
            row_lse = self._statistics(lse)[part.own]
            rows = {name: self._rows(arrays[name], part, row_lse) for name in ("q", "o", "ot", "do", "dot")}
            of_rows = {name: self._of_rows(arrays[name], part, row_lse) for name in ("lset", "dlse", "dlset")}
            qt = self._rows(tangents.q, part, row_lse)
            k_head, kt, v_head, vt = (self._head(x, part.shared) for x in (k, tangents.k, v, tangents.v))
            p, products, scores, slopes = self._weights(q, k, row_lse, tangents, part)
            delta = (rows["do"] * rows["o"]).sum(axis=1) - of_rows["dlse"]
            deltat = (rows["do"] * rows["ot"] + rows["dot"] * rows["o"]).sum(axis=1) - of_rows["dlset"]
            dp = self._dropped(self._product(rows["do"], v_head.T), part) - delta[:, None]
            dpt = self._product(rows["do"], vt.T) + self._product(rows["dot"], v_head.T)
            dpt = self._dropped(dpt, part) - deltat[:, None]
            change = p * (scores - of_rows["lset"][:, None])
            ds, dst = p * dp, change * dp + p * dpt
            if "dbias" in sums:
                self._add_reduced(sums["dbias"], dst, part)
            if "dsink" in sums:
                moved = (self._of_sink(tangents, part) - of_rows["lset"]) * delta + deltat
                sums["dsink"][part.head] -= (self._sink_share(row_lse, part) * moved).sum()
            slope = slopes.total(self.xp, p)
            du, dut = ds * slope, dst * slope + ds * slopes.curvature(self.xp, p) * products
            du, dut, change, p = map(self._round, (du, dut, self._dropped(change, part), self._dropped(p, part)))
            of_q = self._product(dut, k_head) + self._product(du, kt)
            of_k = self._product(dut.T, rows["q"]) + self._product(du.T, qt)
            self._heads_first(dqt)[part.own] = scale * of_q
            self._heads_first(dkt)[part.shared] += scale * of_k
            of_v = self._product(change.T, rows["do"]) + self._product(p.T, rows["dot"])
            self._heads_first(dvt)[part.shared] += of_v
        exact = self.rounded == "float64"
        more = [sums[name].reshape(a.shape).astype("float64" if exact else a.dtype) for name, a in extra.items()]
        return (*(result.astype(self.rounded, copy=False) for result in (dqt, dkt, dvt)), *more)

    def double_backward(
        self, arrays: Mapping[str, Any], cotangents: Tangents, extra: Mapping[str, Array]
    ) -> tuple[Any, ...]:
        """The gradients of q, k, v and do, of dlse if there is one, and of the features that `extra` has gradients of.

        `arrays` are those of `backward_jvp`, without tangents.
        """
        ot, lset = self.jvp(arrays, cotangents)
        gq, gk, gv, *more = self.backward_jvp({**arrays, "ot": ot, "lset": lset}, cotangents, extra)
        return (gq, gk, gv, ot, *(() if arrays.get("dlse") is None else (lset,)), *more)

    def _weights(self, q: Array, k: Array, row_lse: Array, tangents: Tangents, part: Head) -> _Weights:
        """P, and what the scores of a head change by."""
        q_head, k_head = self._rows(q, part, row_lse), self._head(k, part.shared)
        s, slopes = self._scores(q_head, k_head, part)
        p = self._probabilities(s, row_lse)
        qt, kt = self._rows(tangents.q, part, row_lse), self._head(tangents.k, part.shared)
        products = self.problem.softmax_scale * (self._product(qt, k_head.T) + self._product(q_head, kt.T))
        scores = slopes.total(self.xp, p) * products
        if tangents.bias is not None:
            scores = scores + self._of_head("bias", part, tangents.bias).astype(self.work)
        # A hidden key may have a tangent of its score that is not finite.
        return _Weights(p, products, self.xp.where(p != 0, scores, 0), slopes)

    def _weighted(self, weights: Array, values: Array, part: Head) -> Array:
        return self._product(self._round(self._dropped(weights, part)), self._head(values, part.shared))

    def _rows(self, array: Array, part: Head, row_lse: Array) -> Array:
        """A head's part of q, o, or an array like these, with zeros in rows that see no key."""
        return self._visible_rows(self._head(array, part.own), row_lse)

    def _of_rows(self, array: Array, part: Head, row_lse: Array) -> Array:
        """The same of an array like lse."""
        return self._visible_rows(self._statistics(array)[part.own].astype(self.work), row_lse)

    def _of_sink(self, tangents: Tangents, part: Head) -> Array | float:
        return 0.0 if tangents.sink is None else tangents.sink[part.head].astype(self.work)

    def _filled(self, tangents: Tangents, q: Array, k: Array, v: Array) -> Tangents:
        """Tangents with zeros in place of those of q, k and v that are None."""
        given = tangents._asdict()
        zeros = {name: self.xp.zeros_like(x) for name, x in (("q", q), ("k", k), ("v", v)) if given[name] is None}
        return tangents._replace(**zeros)
