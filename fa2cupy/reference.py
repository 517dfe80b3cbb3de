"""What the results should be: the formulas written out with whole score matrices, one head at a time.

`forward`, `delta` and `backward` work in float64. `baseline_forward` and `baseline_backward` do the same naively in the
working precision, each matrix product rounded to the dtype of the inputs. `fa2cupy.testing` holds results against both.

Arguments, shapes and errors are those of the functions of the package. NumPy and CuPy arrays are taken alike and stay
where they are. Of the rest of the package only the argument checks are used. A NaN in a key that the mask hides may
reach the rows that it is hidden from (0 * NaN), here as in the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arguments import check_array
from .arrays import array_module, device_context, matmul
from .problem import AttentionProblem

__all__ = [
    "backward",
    "baseline_backward",
    "baseline_forward",
    "delta",
    "forward",
    "gradient_noise",
]


def forward(q, k, v, *, causal: bool = False, softmax_scale: float | None = None, layout: str = "bshd"):
    """`fa2cupy.forward` in float64.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, layout
        As for `fa2cupy.forward`.

    Returns
    -------
    o : ndarray of float64, shape of q
    lse : ndarray of float64, shape (batch, num_heads, seqlen_q)
    """
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    with device_context(q):
        return _Formulas(problem, q, "float64", "float64").forward(q, k, v)


def delta(o, do, *, layout: str = "bshd"):
    """`fa2cupy.delta` in float64.

    Parameters
    ----------
    o, do, layout
        As for `fa2cupy.delta`.

    Returns
    -------
    delta : ndarray of float64, shape (batch, num_heads, seqlen_q)
    """
    problem = AttentionProblem.from_outputs(o, do, layout=layout)
    with device_context(o):
        products = problem.canonical_view(o).astype("float64") * problem.canonical_view(do).astype("float64")
        return products.sum(axis=-1).transpose(0, 2, 1).reshape(problem.lse_shape)


def backward(q, k, v, o, lse, do, *, causal: bool = False, softmax_scale: float | None = None, layout: str = "bshd"):
    """`fa2cupy.backward` in float64.

    Parameters
    ----------
    q, k, v, do, causal, softmax_scale, layout
        As for `fa2cupy.backward`.
    o, lse : ndarray
        As for `fa2cupy.backward`, or in float64 as `forward` returns them.

    Returns
    -------
    dq, dk, dv : ndarray of float64, shapes of q, k, v
    """
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    for name, array, shape in (("o", o, problem.q_shape), ("lse", lse, problem.lse_shape), ("do", do, problem.q_shape)):
        check_array(name, array, shape, array.dtype, "q")
    with device_context(q):
        return _Formulas(problem, q, "float64", "float64").backward(q, k, v, o, lse, do)


def baseline_forward(q, k, v, *, causal: bool = False, softmax_scale: float | None = None, layout: str = "bshd"):
    """The formulas of `forward` in the working precision.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, layout
        As for `fa2cupy.forward`.

    Returns
    -------
    o : ndarray, shape and dtype of q
    lse : ndarray of float32 or float64, shape (batch, num_heads, seqlen_q)

    Notes
    -----
    Matrix products, here and in `baseline_backward`, are summed in float32 (float64 for float64 data) and rounded to
    the dtype of q, and so are P and dS before they enter one. NumPy and CuPy differ by the order of sums only.
    """
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    with device_context(q):
        return _Formulas(problem, q, problem.accumulator_dtype, q.dtype).forward(q, k, v)


def baseline_backward(q, k, v, do, *, causal: bool = False, softmax_scale: float | None = None, layout: str = "bshd"):
    """The formulas of `backward` in the working precision, with o and lse of `baseline_forward`.

    Parameters
    ----------
    q, k, v, do, causal, softmax_scale, layout
        As for `fa2cupy.backward`.

    Returns
    -------
    dq, dk, dv : ndarray, shapes and dtype of q, k, v
    """
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    with device_context(q):
        formulas = _Formulas(problem, q, problem.accumulator_dtype, q.dtype)
        return formulas.backward(q, k, v, *formulas.forward(q, k, v), do)


def gradient_noise(
    q, k, v, lse, do, *, causal: bool = False, softmax_scale: float | None = None, layout: str = "bshd"
) -> tuple[float, float]:
    """What one rounding of every product in dP and delta can do to dq and dk.

    Where rows see one key, P = 1 and dP = delta: dq and dk are 0, and an implementation returns the difference of two
    equal sums. No error relative to the result bounds it; this does.

    Parameters
    ----------
    q, k, v, lse, do, causal, softmax_scale, layout
        As for `backward`.

    Returns
    -------
    dq, dk : float
        In units of the rounding error: to be multiplied with the machine epsilon of the sums.
    """
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    with device_context(q):
        return _Formulas(problem, q, "float64", "float64").noise(q, k, v, lse, do)


class _Formulas:
    """The formulas for one problem, on the module of the array `like`, in one precision.

    Sums and what is done element by element are in the dtype `work`. Operands and results of matrix products are
    rounded to the dtype `rounded`, which is that of the results.
    """

    def __init__(self, problem: AttentionProblem, like, work, rounded):
        self.problem = problem
        self.xp = array_module(like)
        self.work = work
        self.rounded = rounded

    def forward(self, q, k, v):
        o = self.xp.zeros(self.problem.q_shape, self.rounded)
        lse = self.xp.full(self.problem.lse_shape, -np.inf, self.work)
        for own, shared in self._heads():
            s = self._scores(self._head(q, own), self._head(k, shared))
            row_max = s.max(axis=1)
            row_max = self.xp.where(row_max == -np.inf, 0, row_max)
            row_lse = row_max + self.xp.log(self.xp.exp(s - row_max[:, None]).sum(axis=1))
            self._statistics(lse)[own] = row_lse
            self._heads_first(o)[own] = self._product(self._probabilities(s, row_lse), self._head(v, shared))
        return o, lse

    def backward(self, q, k, v, o, lse, do):
        dq, dk, dv = (self.xp.zeros(shape, self.work) for shape in (q.shape, k.shape, v.shape))
        scale = self.problem.softmax_scale
        for own, shared in self._heads():
            q_head, k_head, do_head = self._head(q, own), self._head(k, shared), self._head(do, own)
            delta_head = (do_head * self._head(o, own)).sum(axis=1)
            p = self._probabilities(self._scores(q_head, k_head), self._statistics(lse)[own])
            dp = self._product(do_head, self._head(v, shared).T)
            ds = self._round(p * (dp - delta_head[:, None]))
            self._heads_first(dq)[own] = scale * self._product(ds, k_head)
            self._heads_first(dk)[shared] += scale * self._product(ds.T, q_head)
            self._heads_first(dv)[shared] += self._product(p.T, do_head)
        return tuple(gradient.astype(self.rounded, copy=False) for gradient in (dq, dk, dv))

    def noise(self, q, k, v, lse, do) -> tuple[float, float]:
        dq = dk = 0.0
        for own, shared in self._heads():
            q_head, k_head = self._head(q, own), self._head(k, shared)
            p = self._probabilities(self._scores(q_head, k_head), self._statistics(lse)[own])
            # dP and delta are two sums of the same products. Errors of different elements of dS add up in quadrature.
            ds = 2 * p * matmul(abs(self._head(do, own)), abs(self._head(v, shared)).T)
            dq = max(dq, float((ds * ds).sum(axis=1).max()) ** 0.5 * float(abs(k_head).max()))
            dk = max(dk, float((ds * ds).sum(axis=0).max()) ** 0.5 * float(abs(q_head).max()))
        scale = abs(self.problem.softmax_scale)
        return scale * dq, scale * dk * self.problem.heads_per_group**0.5

    def _scores(self, q_head, k_head):
        s = self._product(q_head, k_head.T) * self.problem.softmax_scale
        if self.problem.causal:
            query, key = self.xp.arange(s.shape[0])[:, None], self.xp.arange(s.shape[1])
            visible = key <= query + self.problem.seqlen_k - self.problem.seqlen_q
            s = self.xp.where(visible, s, -np.inf)
        return s

    def _probabilities(self, s, row_lse):
        # exp(-inf - -inf) would be NaN where a row sees no key and P is 0.
        row_lse = self.xp.where(row_lse == -np.inf, np.inf, row_lse)
        return self._round(self.xp.exp(s - row_lse[:, None]))

    def _product(self, a, b):
        return self._round(matmul(a, b))

    def _round(self, matrix):
        return matrix.astype(self.rounded, copy=False).astype(self.work, copy=False)

    def _heads(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        # (batch, query head) and (batch, K/V head). Without rows or keys there are no scores, and nothing to add.
        if self.problem.seqlen_q and self.problem.seqlen_k:
            for batch, head in np.ndindex(self.problem.batch, self.problem.num_heads):
                yield (batch, head), (batch, head // self.problem.heads_per_group)

    def _head(self, array, index: tuple[int, int]):
        return self._heads_first(array)[index].astype(self.work)

    def _heads_first(self, array):
        return self.problem.canonical_view(array).transpose(0, 2, 1, 3)

    def _statistics(self, array):
        return array[(None,) * (4 - self.problem.rank)]
