"""How right is right: results against the float64 reference, by the error that a naive baseline makes.

With ``e = max|result - reference|`` and ``E = max|baseline - reference|`` a result passes if ``e`` is at most

    o of 16-bit data           2 E + 1e-5 of the largest reference value
    dq, dk, dv of 16-bit data  3 E + 1e-5 of the largest
    lse of 16-bit data         1e-4; 1e-3 if the largest is above 32; 1e-6 of the largest where that is more
    o, dq, dk, dv of float32   1e-5 of the largest (1e-12 for float64)
    dbias, dsink               as dq
    lse of float32             1e-5 of the largest, or of 1 where that is more (1e-12 for float64)
    delta                      1e-5 of the largest (1e-12 for float64)

and if NaN and infinities are where the reference has them and nowhere else. Reference and baseline
have the features of the call. Where terms cancel, delta, dq, dk, dbias and dsink may keep their rounding errors besides
(`reference.gradient_noise`). NumPy and CuPy arrays are taken alike.

Largest errors are those of few elements, and leave room for a rounding too many. So the errors of 16-bit results are held
to the baseline's by their root mean square, too, which may be at most

    o, dv        0.75 of the baseline's        (kernels that round P once and no score: 0.11 to 0.65)
    dq, dk       0.90                          (0.18 to 0.75; 0.83 where P is rounded before dS is made of it)

In parentheses is what they have, of head_dim 8 to 256, with features and without; for normal inputs and a few hundred keys
0.5 to 0.6. Where they have that, scores that are rounded to 16 bits give 0.92 to 1.1 for o and dv, a P with a bit less 0.85
to 1.3, and a dS with a bit less 0.9 to 1.1 for dq and dk.

This bound is for 64 keys and more: of few visible keys P is often 1, which no rounding changes. It is for results of 32 times
the dtype's smallest normal number and more, as P is subnormal where they are smaller. It is for baselines whose error is 2.3
to 5 times that of rounding the reference: no implementation avoids that rounding, and where one key has nearly all of a row's P,
dS is a difference of large terms, and the error of o, which is given, is most of any. And it is for 100 errors and more, where
``sum(e**2)**2 / sum(e**4)`` of the baseline's errors counts how many they are. lse and delta are held closely enough by their
largest errors; dbias and dsink, sums of few terms or of many that cancel, have no such bound.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from . import reference
from .numerics.arrays import array_module, device_context
from .numerics.comparison import Comparison, assert_within_baseline, largest
from .problem.checks import problem_from_arrays, problem_from_outputs
from .problem.keywords import check_keywords

if TYPE_CHECKING:
    from typing import Unpack

    from .problem.features import FeatureKeywords

__all__ = ["Comparison", "Expectation", "assert_within_baseline", "check_delta", "make_inputs"]


class Expectation:
    """Reference and baseline of one problem, computed at first use, to hold any number of results against.

    Parameters
    ----------
    q, k, v : ndarray
    do : ndarray, optional
        Gradient for o; the gradients need it.
    dlse : ndarray, optional
        Gradient for lse.
    causal, softmax_scale, layout, **keywords
        As for `fa2cupy.forward`.

    Examples
    --------
    >>> import fa2cupy
    >>> q, k, v, do = make_inputs("float16", seqlen_q=100)
    >>> expected = Expectation(q, k, v, do, causal=True)
    >>> o, lse = fa2cupy.forward(q, k, v, causal=True, out=expected.unwritten("o", "lse"))
    >>> expected.check(o=o, lse=lse)["o"].percent <= 100
    True
    """

    def __init__(
        self,
        q,
        k,
        v,
        do=None,
        *,
        dlse=None,
        causal: bool = False,
        softmax_scale: float | None = None,
        layout: str = "bshd",
        **keywords: Unpack[FeatureKeywords],
    ):
        check_keywords(type(self), keywords)
        options = {"causal": causal, "softmax_scale": softmax_scale, "layout": layout, **keywords}
        self._inputs, self._do, self._options = (q, k, v), do, options
        self._gradient_options = options | {"dlse": dlse}
        self._extra = {f"d{name}": options[name] for name in ("bias", "sink") if options.get(name) is not None}
        self._gradient_options |= {f"return_{name}": True for name in self._extra}
        self.problem = problem_from_arrays(q, k, v, **options)

    def unwritten(self, *names: str) -> tuple:
        """New arrays for the results named, to be passed as ``out=``: all NaN, so that an unwritten element shows."""
        q, k, v = self._inputs
        xp = array_module(q)
        with device_context(q):
            lse = xp.empty(self.problem.lse_shape, self.problem.accumulator_dtype)
            o = xp.empty(self.problem.o_shape, q.dtype)
            like = {"o": o, "lse": lse, "dq": q, "dk": k, "dv": v, **self._extra}
            return tuple(xp.full(like[name].shape, np.nan, like[name].dtype) for name in names)

    def check(self, *, spec: object = None, **results) -> dict[str, Comparison]:
        """Holds any of o, lse, dq, dk, dv, dbias and dsink, given by name, against the reference.

        Returns
        -------
        dict of Comparison by name

        Raises
        ------
        AssertionError
            As for `assert_within_baseline`, which also says what `spec` is.
        """
        comparisons = {}
        for name, result in results.items():
            standards = self._forward[name] if name in ("o", "lse") else self._backward[name]
            comparisons[name] = assert_within_baseline(name, result, *standards, problem=self.problem, spec=spec)
        return comparisons

    @functools.cached_property
    def _forward(self) -> dict[str, tuple]:
        wanted = reference.forward(*self._inputs, **self._options)
        baseline = reference.baseline_forward(*self._inputs, **self._options)
        return dict(zip(("o", "lse"), zip(wanted, baseline, (0.0, 0.0), strict=True), strict=True))

    @functools.cached_property
    def _backward(self) -> dict[str, tuple]:
        o, lse = (self._forward[name][0] for name in ("o", "lse"))
        options = self._gradient_options
        names = ("dq", "dk", "dv", *self._extra)
        wanted = reference.backward(*self._inputs, o, lse, self._do, **options)
        baseline = reference.baseline_backward(*self._inputs, self._do, **options)
        noise = reference.gradient_noise(*self._inputs, o, lse, self._do, **options)
        return {name: (*pair, noise.get(name, 0.0)) for name, *pair in zip(names, wanted, baseline, strict=True)}


def check_delta(o, do, delta, *, layout: str = "bshd", spec: object = None) -> Comparison:
    """Holds a result of `fa2cupy.delta` against the reference, as `Expectation.check` does for the others."""
    problem = problem_from_outputs(o, do, layout=layout)
    wanted = reference.delta(o, do, layout=layout)
    with device_context(o):
        noise = largest(reference.delta(abs(o.astype("float64")), abs(do.astype("float64")), layout=layout))
    return assert_within_baseline("delta", delta, wanted, wanted, noise, problem=problem, spec=spec)


def make_inputs(
    dtype="float32",
    *,
    batch: int = 1,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    num_heads: int = 2,
    num_heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    layout: str = "bshd",
    magnitude: float = 1.0,
    seed: int = 0,
    xp=np,
) -> tuple:
    """Normally distributed q, k, v and do, the same for NumPy and CuPy.

    Parameters
    ----------
    dtype : str or dtype, optional
        One that `fa2cupy.forward` takes.
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, head_dim_v, layout : optional
        As in the shapes of `fa2cupy.forward`. Those of k and v are q's by default.
    magnitude : float, optional
        Standard deviation.
    seed : int, optional
    xp : module, optional
        ``numpy`` or ``cupy``.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def draw(seqlen: int, heads: int, columns: int):
        inner = (seqlen, heads) if layout == "bshd" else (heads, seqlen)
        drawn = rng.standard_normal((batch, *inner, columns), dtype="float64" if dtype == "float64" else "float32")
        return xp.asarray(magnitude * drawn).astype(dtype)

    q = (seqlen_q, num_heads)
    k = (seqlen_q if seqlen_k is None else seqlen_k, num_heads if num_heads_kv is None else num_heads_kv)
    columns_v = head_dim if head_dim_v is None else head_dim_v
    return draw(*q, head_dim), draw(*k, head_dim), draw(*k, columns_v), draw(*q, columns_v)
