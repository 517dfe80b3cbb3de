"""The formulas of attention with whole score matrices, one head at a time. `reference` has the public functions.

The order in which features change scores is at the top of ``problem/features.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ..functions.evaluation import Evaluation, add_elements, reduced
from ..functions.tracing import Program
from ..problem import philox
from ..problem.array_types import Array
from ..problem.attention import AttentionProblem
from ..problem.block_mask import EMPTY
from ..problem.features import feature_arrays
from ..problem.sequences import Sequence, sequences_of
from ..problem.strides import with_score_axes
from .arrays import array_module, matmul

__all__ = ["Formulas", "Head", "Slopes"]


#: Leading axes, head and rows.
Index = tuple[int | slice, ...]


class Head(NamedTuple):
    """A query head of one sequence, and its indices into q, o and lse (`own`), and into k and v (`shared`)."""

    sequence: Sequence
    head: int
    own: Index
    shared: Index


class Slopes(NamedTuple):
    """The derivatives of scores by the scaled products.

    Attributes
    ----------
    cap, bend : ndarray or float
        First and second derivative of the soft cap by its input.
    mod : Evaluation or None
        The caller's function.
    """

    cap: Array | float
    bend: Array | float
    mod: Evaluation | None

    def total(self, xp: Any, p: Array) -> Array | float:
        """The derivative by the products, 0 where P is 0: a function may have no finite one for hidden keys."""
        return self.cap if self.mod is None else self.cap * xp.where(p != 0, self.mod.slope(), 0)

    def curvature(self, xp: Any, p: Array) -> Array | float:
        """The second derivative by the products, 0 where P is 0."""
        if self.mod is None:
            return self.bend
        slope, curvature = (xp.where(p != 0, x, 0) for x in (self.mod.slope(), self.mod.curvature()))
        return self.bend * slope**2 + self.cap * curvature


class Formulas:
    """The formulas for one problem, in one precision.

    Parameters
    ----------
    problem : AttentionProblem
    keywords : mapping
        Keywords of features, checked.
    like : ndarray
        An array of the module, NumPy or CuPy, that computes.
    work : dtype
        dtype of sums and of elementwise operations.
    rounded : dtype
        dtype of the results, to which operands and results of matrix products are rounded.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        keywords: Mapping[str, object],
        like: Array,
        work: DTypeLike,
        rounded: DTypeLike,
    ):
        self.problem = problem
        self.arrays = feature_arrays(keywords)
        self.arguments: dict[str, Any] = {
            name: keywords.get(name.replace("mod", "args"), ()) for name in ("score_mod", "mask_mod")
        }
        self.block_mask: Any = keywords.get("block_mask")
        self.xp = array_module(like)
        self.work = work
        self.rounded = rounded
        self.sequences = sequences_of(problem, keywords)

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Any, Any]:
        """O and lse."""
        o = self.xp.zeros(self.problem.o_shape, self.rounded)
        lse = self.xp.full(self.problem.lse_shape, -np.inf, self.work)
        for part in self._heads():
            s, _ = self._scores(self._head(q, part.own), self._head(k, part.shared), part)
            with_sink = self._with_sink(s, part)
            row_max = with_sink.max(axis=1)
            row_max = self.xp.where(row_max == -np.inf, 0, row_max)
            row_sum = self.xp.exp(with_sink - row_max[:, None]).sum(axis=1)
            self._statistics(lse)[part.own] = row_max + self.xp.log(row_sum)
            # P is not computed from lse, which may have lost the logarithm of the sum.
            p = self.xp.exp(s - row_max[:, None]) / self.xp.where(row_sum == 0, 1, row_sum)[:, None]
            p = self._round(self._dropped(self._round(p), part))
            self._heads_first(o)[part.own] = self._product(p, self._head(v, part.shared))
        return o, lse

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        do: Array,
        dlse: Array | None = None,
        extra: Mapping[str, Array] | None = None,
    ) -> tuple[Any, ...]:
        """dq, dk and dv, then the gradients that `extra` names, each with an array of its shape and dtype."""
        dq, dk, dv = (self.xp.zeros(shape, self.work) for shape in (q.shape, k.shape, v.shape))
        extra = extra or {}
        sums = {name: self.xp.zeros(self._all_axes(name, like.shape), self.work) for name, like in extra.items()}
        scale = self.problem.softmax_scale
        for part in self._heads():
            row_lse = self._statistics(lse)[part.own]
            q_head, do_head = (self._visible_rows(self._head(x, part.own), row_lse) for x in (q, do))
            k_head = self._head(k, part.shared)
            delta_head = (do_head * self._head(o, part.own)).sum(axis=1)
            if dlse is not None:
                delta_head = delta_head - self._statistics(dlse)[part.own].astype(self.work)
            delta_head = self._visible_rows(delta_head, row_lse)
            s, slopes = self._scores(q_head, k_head, part)
            p = self._probabilities(s, row_lse)
            dp = self._dropped(self._product(do_head, self._head(v, part.shared).T), part)
            ds = p * (dp - delta_head[:, None])
            if "dbias" in sums:
                self._add_reduced(sums["dbias"], ds, part)
            if "dsink" in sums:
                sums["dsink"][part.head] -= (self._sink_share(row_lse, part) * delta_head).sum()
            self._add_arguments(sums, ds * slopes.cap, slopes.mod, p)
            ds = self._round(ds * slopes.total(self.xp, p))
            self._heads_first(dq)[part.own] = scale * self._product(ds, k_head)
            self._heads_first(dk)[part.shared] += scale * self._product(ds.T, q_head)
            self._heads_first(dv)[part.shared] += self._product(self._round(self._dropped(p, part)).T, do_head)
        exact = self.rounded == "float64"
        more = [sums[name].reshape(a.shape).astype("float64" if exact else a.dtype) for name, a in extra.items()]
        return (*(gradient.astype(self.rounded, copy=False) for gradient in (dq, dk, dv)), *more)

    def noise(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: Array,
        do: Array,
        dlse: Array | None = None,
        extra: Mapping[str, Array] | None = None,
    ) -> dict[str, float]:
        """Rounding errors of gradients where terms cancel: see `reference.gradient_noise`."""
        largest = {"dq": 0.0, "dk": 0.0}
        # The rounding error of o, which has the dtype of do, over that of sums.
        o_rounding = float(ml_dtypes.finfo(do.dtype).eps / np.finfo(self.problem.accumulator_dtype).eps)
        extra = extra or {}
        squares = {name: self.xp.zeros(self._all_axes(name, like.shape), self.work) for name, like in extra.items()}
        for part in self._heads():
            row_lse = self._statistics(lse)[part.own]
            q_head, do_head = (self._visible_rows(self._head(x, part.own), row_lse) for x in (q, do))
            k_head, do_head = self._head(k, part.shared), abs(do_head)
            s, slopes = self._scores(q_head, k_head, part)
            in_dp = self._dropped(matmul(do_head, abs(self._head(v, part.shared)).T), part, at_most=True)
            p = self._probabilities(s, row_lse)
            # dP and delta are sums of the same products. Errors of different elements of dS add in quadrature.
            ds = 2 * p * in_dp
            in_delta = (p * in_dp).sum(axis=1, keepdims=True)
            in_o = o_rounding * ((do_head * self._head(o, part.own)) ** 2).sum(axis=1, keepdims=True) ** 0.5
            if dlse is not None:
                row_dlse = self._visible_rows(self._statistics(dlse)[part.own].astype(self.work), row_lse)
                row_dlse = abs(row_dlse)[:, None]
                ds, in_delta = ds + p * row_dlse, in_delta + row_dlse
            if "dbias" in squares:
                from_delta = p * in_delta
                if squares["dbias"].shape[-1] == 1:
                    # The sum of a row of dS over its keys is 0 except for the error of delta, which all terms share.
                    from_delta = (p * (in_delta + in_o)).sum(axis=1, keepdims=True)
                self._add_reduced(squares["dbias"], (p * in_dp) ** 2, part)
                self._add_reduced(squares["dbias"], from_delta**2, part)
            if "dsink" in squares:
                squares["dsink"][part.head] += ((self._sink_share(row_lse, part)[:, None] * in_o) ** 2).sum()
            cap = abs(slopes.cap)
            self._add_argument_squares(squares, cap * p * in_dp, cap * p * (in_delta + in_o), slopes.mod, p)
            ds = ds * slopes.total(self.xp, p)
            largest["dq"] = max(largest["dq"], _largest((ds * ds).sum(axis=1)) ** 0.5 * _largest(abs(k_head)))
            largest["dk"] = max(largest["dk"], _largest((ds * ds).sum(axis=0)) ** 0.5 * _largest(abs(q_head)))
        scale = abs(self.problem.softmax_scale)
        return {
            "dq": scale * largest["dq"],
            "dk": scale * largest["dk"] * self.problem.heads_per_group**0.5,
            **{name: _largest(total) ** 0.5 for name, total in squares.items()},
        }

    def _scores(self, q_head: Array, k_head: Array, part: Head) -> tuple[Array, Slopes]:
        """Scores with all features, and their derivatives by the scaled products."""
        s = self._product(q_head, k_head.T) * self.problem.softmax_scale
        settings, arrays = self.problem.settings, self.arrays
        slope: Array | float = 1.0
        bend: Array | float = 0.0
        query, key = self.xp.arange(s.shape[0])[:, None], self.xp.arange(s.shape[1])
        mod = None
        if settings.score_mod is not None:
            mod = self._evaluation(settings.score_mod.program, query, key, part, score=s)
            s = self.xp.broadcast_to(mod.result(), s.shape)
        if settings.softcap is not None:
            tanh = self.xp.tanh(s / settings.softcap)
            s, slope = settings.softcap * tanh, 1 - tanh * tanh
            bend = -2 / settings.softcap * tanh * slope
        if "alibi_slopes" in arrays:
            slopes = self._of_head("alibi_slopes", part).astype(self.work)
            s = s - slopes * abs(query + part.sequence.diagonal - key).astype(self.work)
        if "bias" in arrays:
            s = s + self._of_head("bias", part).astype(self.work)
        visible = self._visible(query, key, part)
        return s if visible is None else self.xp.where(visible, s, -np.inf), Slopes(slope, bend, mod)

    def _evaluation(self, program: Program, query: Array, key: Array, part: Head, **inputs: Array) -> Evaluation:
        places = {"b": part.sequence.number, "h": part.head, "q": query, "k": key}
        return Evaluation(program, self.arguments[program.role], self.work, self.xp, **places, **inputs)

    def _add_arguments(self, sums: Mapping[str, Array], gradient: Array, mod: Evaluation | None, p: Array) -> None:
        """Adds the gradients of a function's arrays, given that of the scores that it returns."""
        if mod is None or not any(name.startswith("dscore_args") for name in sums):
            return
        for argument, indices, derivative in mod.gradient_parts():
            tile = self.xp.where(p != 0, gradient * derivative, 0)
            add_elements(sums[f"dscore_args[{argument}]"], indices, reduced(tile, indices), self.xp)

    def _add_argument_squares(
        self, squares: Mapping[str, Array], of_dp: Array, of_delta: Array, mod: Evaluation | None, p: Array
    ) -> None:
        """Adds the squares of errors: those of dP are independent, and that of delta is the same for a row's keys."""
        if mod is None or not any(name.startswith("dscore_args") for name in squares):
            return
        for argument, indices, derivative in mod.gradient_parts():
            slope = self.xp.where(p != 0, abs(derivative), 0)
            of_row = slope * of_delta
            if all(index.ndim == 0 or index.shape[-1] == 1 for index in indices):
                of_row = of_row.sum(axis=-1, keepdims=True)
            for errors in (slope * of_dp, of_row):
                tile = reduced(errors**2, indices)
                add_elements(squares[f"dscore_args[{argument}]"], indices, tile, self.xp)

    def _visible(self, query: Array, key: Array, part: Head) -> Array | None:
        aligned = query + part.sequence.diagonal
        left, right = self.problem.settings.window
        conditions = [key <= aligned] if self.problem.causal else []
        conditions += [aligned - left <= key] if left is not None else []
        conditions += [key <= aligned + right] if right is not None else []
        conditions += [self._of_head(name, part) for name in ("mask", "key_padding_mask") if name in self.arrays]
        if self.problem.settings.mask_mod is not None:
            conditions.append(self._evaluation(self.problem.settings.mask_mod.program, query, key, part).result())
        if self.block_mask is not None:
            height, width = self.block_mask.tile
            states = self.block_mask.part(part.sequence.number, slice(part.head, part.head + 1))[0]
            conditions.append((states != EMPTY)[query // height, key // width])
        visible = None
        for condition in conditions:
            visible = condition if visible is None else visible & condition
        return visible

    def _of_head(self, name: str, part: Head, array: Array | None = None) -> Array:
        """The part of a head in an array that is broadcast over the scores, or in another `array` of its shape."""
        array = self.arrays[name] if array is None else array
        whole = self.xp.broadcast_to(with_score_axes(name, array), self.problem.broadcast_shape)
        place = (*part.sequence.place, part.head)
        return whole[place][: part.sequence.seqlen_q, : part.sequence.seqlen_k]

    def _add_reduced(self, total: Array, ds: Array, part: Head) -> None:
        """Adds dS of a head to the gradient of an array that is broadcast over the scores."""
        for axis in (0, 1):
            if total.shape[axis - 2] == 1:
                ds = ds.sum(axis=axis, keepdims=True)
        index = (i % length for i, length in zip((*part.sequence.place, part.head), total.shape[:-2], strict=True))
        total[tuple(index)][: ds.shape[0], : ds.shape[1]] += ds

    def _all_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) * (len(self.problem.broadcast_shape) - len(shape)) + shape if name == "dbias" else shape

    def _with_sink(self, s: Array, part: Head) -> Array:
        """The scores, with the sink as one more key."""
        if "sink" not in self.arrays:
            return s
        column = self.xp.full((s.shape[0], 1), 1, self.work) * self.arrays["sink"][part.head].astype(self.work)
        return self.xp.concatenate([s, column], axis=1)

    def _sink_share(self, row_lse: Array, part: Head) -> Array:
        sink = self.arrays["sink"][part.head].astype(self.work)
        return self.xp.exp(self.xp.minimum(sink - self._without_empty(row_lse), 0))

    def _dropped(self, matrix: Array, part: Head, at_most: bool = False) -> Array:
        """Dropout of a matrix of P's shape. `at_most` keeps all elements, which gives a bound of the result."""
        settings = self.problem.settings
        if not settings.dropout_p:
            return matrix
        scale = philox.dropout_scale(settings.dropout_p)
        if at_most:
            return scale * matrix
        head, query = settings.dropout_origin
        place = (part.sequence.number, slice(head + part.head, head + part.head + 1))
        tile = (slice(query, query + matrix.shape[0]), slice(0, matrix.shape[1]))
        keep = philox.kept(settings.dropout_p, settings.seed, *place, *tile, self.xp)[0]
        return self.xp.where(keep, matrix * self.xp.asarray(scale, self.work), 0)

    def _probabilities(self, s: Array, row_lse: Array) -> Array:
        return self._round(self.xp.exp(self.xp.minimum(s - self._without_empty(row_lse)[:, None], 0)))

    def _visible_rows(self, array: Array, row_lse: Array) -> Array:
        """Zeros in place of rows that see no key: they contribute nothing, even if they have NaN."""
        hidden = row_lse == -np.inf
        return self.xp.where(hidden.reshape(-1, *(1,) * (array.ndim - 1)), 0, array)

    def _without_empty(self, row_lse: Array) -> Array:
        # In a row without visible keys P is 0; exp(-inf - -inf) would be NaN.
        return self.xp.where(row_lse == -np.inf, np.inf, row_lse)

    def _product(self, a: Array, b: Array) -> Array:
        return self._round(matmul(a, b))

    def _round(self, matrix: Array) -> Array:
        return matrix.astype(self.rounded, copy=False).astype(self.work, copy=False)

    def _heads(self) -> Iterator[Head]:
        # A sequence without keys contributes only if there is a sink.
        sink = "sink" in self.arrays
        for sequence in self.sequences:
            if sequence.seqlen_q and (sequence.seqlen_k or sink):
                for head in range(self.problem.num_heads):
                    group = head // self.problem.heads_per_group
                    own, shared = (head, sequence.queries), (group, sequence.keys)
                    yield Head(sequence, head, (*sequence.batch, *own), (*sequence.batch, *shared))

    def _head(self, array: Array, index: Index) -> Array:
        return self._heads_first(array)[index].astype(self.work)

    def _heads_first(self, array: Array) -> Array:
        return self.problem.canonical_view(array).swapaxes(-2, -3)

    def _statistics(self, array: Array) -> Array:
        return self.problem.statistics_view(array)


def _largest(array: Array) -> float:
    return float(array.max()) if array.size else 0.0
