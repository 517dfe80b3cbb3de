"""How right is right: results against the float64 reference, by the error that a naive baseline makes.

With ``e = max|result - reference|`` and ``E = max|baseline - reference|`` a result passes if ``e`` is at most

    o of 16-bit data           2 E + 1e-5 of the largest reference value
    dq, dk, dv of 16-bit data  3 E + 1e-5 of the largest
    lse of 16-bit data         1e-4; 1e-3 if the largest is above 32; 1e-6 of the largest where that is more
    o, dq, dk, dv of float32   1e-5 of the largest (1e-12 for float64)
    lse of float32             1e-5 of the largest, or of 1 where that is more (1e-12 for float64)
    delta                      1e-5 of the largest (1e-12 for float64)

and if NaN and infinities are where the reference has them and nowhere else. Where terms cancel, delta, dq and dk may
keep their rounding errors besides (`reference.gradient_noise`). NumPy and CuPy arrays are taken alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from . import reference
from .arrays import array_module, device_context
from .problem import AttentionProblem

__all__ = ["Comparison", "Expectation", "assert_within_baseline", "check_delta", "make_inputs"]

_BASELINE_FACTORS = {"o": 2, "dq": 3, "dk": 3, "dv": 3}


@dataclass(frozen=True)
class Comparison:
    """A result that passed: its largest distance from the reference, the baseline's, and what is allowed."""

    name: str
    error: float
    baseline_error: float
    allowed: float

    @property
    def percent(self) -> float:
        """The error in percent of the allowed one."""
        if self.allowed:
            return 100 * self.error / self.allowed
        return np.inf if self.error else 0.0

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.2e}, {self.percent:.0f} % of the allowed {self.allowed:.2e}"


class Expectation:
    """Reference and baseline of one problem, computed at first use, to hold any number of results against.

    Parameters
    ----------
    q, k, v : ndarray
    do : ndarray, optional
        Gradient for o; the gradients need it.
    **options
        causal, softmax_scale and layout as for `fa2cupy.forward`.

    Examples
    --------
    >>> import fa2cupy
    >>> q, k, v, do = make_inputs("float16", seqlen_q=100)
    >>> expected = Expectation(q, k, v, do, causal=True)
    >>> o, lse = fa2cupy.forward(q, k, v, causal=True, out=expected.unwritten("o", "lse"))
    >>> expected.check(o=o, lse=lse)["o"].percent <= 100
    True
    """

    def __init__(self, q, k, v, do=None, **options):
        self._inputs, self._do, self._options = (q, k, v), do, options
        self.problem = AttentionProblem.from_arrays(q, k, v, **options)

    def unwritten(self, *names: str) -> tuple:
        """New arrays for the results named, to be passed as ``out=``: all NaN, so that an unwritten element shows."""
        q, k, _ = self._inputs
        xp = array_module(q)
        with device_context(q):
            lse = xp.empty(self.problem.lse_shape, self.problem.accumulator_dtype)
            like = {"o": q, "lse": lse, "dq": q, "dk": k, "dv": k}
            return tuple(xp.full(like[name].shape, np.nan, like[name].dtype) for name in names)

    def check(self, *, spec: object = None, **results) -> dict[str, Comparison]:
        """Holds any of o, lse, dq, dk and dv, given by name, against the reference.

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
        wanted = reference.backward(*self._inputs, o, lse, self._do, **self._options)
        baseline = reference.baseline_backward(*self._inputs, self._do, **self._options)
        noise = (*reference.gradient_noise(*self._inputs, lse, self._do, **self._options), 0.0)
        return dict(zip(("dq", "dk", "dv"), zip(wanted, baseline, noise, strict=True), strict=True))


def check_delta(o, do, delta, *, layout: str = "bshd", spec: object = None) -> Comparison:
    """Holds a result of `fa2cupy.delta` against the reference, as `Expectation.check` does for the others."""
    problem = AttentionProblem.from_outputs(o, do, layout=layout)
    wanted = reference.delta(o, do, layout=layout)
    with device_context(o):
        noise = _largest(reference.delta(abs(o.astype("float64")), abs(do.astype("float64")), layout=layout))
    return assert_within_baseline("delta", delta, wanted, wanted, noise, problem=problem, spec=spec)


def assert_within_baseline(
    name: str, result, wanted, baseline, noise: float = 0.0, *, problem: AttentionProblem, spec: object = None
) -> Comparison:
    """Raises unless a result is within the rule at the top of this module.

    Parameters
    ----------
    name : {"o", "lse", "delta", "dq", "dk", "dv"}
    result, wanted, baseline : ndarray
        The result, its float64 reference, and what the naive formulas give.
    noise : float, optional
        Rounding errors that are allowed besides, in units of the accumulators' machine epsilon.
    problem : AttentionProblem
    spec : object, optional
        The kernel or tile that a failure is to name.

    Returns
    -------
    Comparison

    Raises
    ------
    AssertionError
        Wrong shape, dtype or element. The text has the problem, the spec, both errors, the percent of the allowed one,
        the worst element and the numbers of NaN and inf.
    """
    dtype = problem.accumulator_dtype if name in ("lse", "delta") else problem.dtype
    if result.shape != wanted.shape or result.dtype.name != dtype:
        raise AssertionError(f"{name}: expected {dtype} of shape {wanted.shape}, got {result.dtype} of {result.shape}")
    with device_context(result):
        distance = _distance(result, wanted)
        baseline_distance = _distance(baseline, wanted)
        baseline_error = _largest(baseline_distance[np.isfinite(baseline_distance)])
        largest = _largest(abs(wanted[np.isfinite(wanted)]))
        allowed = _allowed(name, problem, largest, baseline_error, noise)
        comparison = Comparison(name, _largest(distance), baseline_error, allowed)
        if not comparison.error <= allowed:
            raise AssertionError(_failure(comparison, result, wanted, distance, problem, spec))
    return comparison


def _allowed(name: str, problem: AttentionProblem, largest: float, baseline_error: float, noise: float) -> float:
    if name == "lse" and problem.itemsize == 2:
        return max(1e-3 if largest > 32 else 1e-4, 1e-6 * largest)
    relative = 1e-12 if problem.dtype == "float64" else 1e-5
    if name == "lse":
        return relative * max(1.0, largest)
    factor = _BASELINE_FACTORS.get(name, 0) if problem.itemsize == 2 else 0
    rounding = float(np.finfo(problem.accumulator_dtype).eps) * noise if np.isfinite(noise) else 0.0
    return factor * baseline_error + relative * largest + rounding


def _distance(array, wanted):
    """Elementwise |array - wanted|: 0 where both are the same infinity or NaN, inf where only one is."""
    array = array.astype("float64")
    distance = abs(array - wanted)
    distance[(array == wanted) | (np.isnan(array) & np.isnan(wanted))] = 0
    distance[np.isnan(distance)] = np.inf
    return distance


def _largest(array) -> float:
    return float(array.max()) if array.size else 0.0


def _failure(comparison: Comparison, result, wanted, distance, problem: AttentionProblem, spec: object) -> str:
    worst = tuple(map(int, np.unravel_index(int(distance.argmax()), distance.shape)))
    got, right = (float(array[worst].astype("float64")) for array in (result, wanted))
    lines = (
        f"{comparison}; the baseline's error is {comparison.baseline_error:.2e}",
        f"problem: {problem}",
        f"spec: {spec}" if spec is not None else "",
        f"worst: {comparison.name}{list(worst)} is {got:.8g} instead of {right:.8g}",
        f"not finite: {_nonfinite(result)} of {result.size}; in the reference {_nonfinite(wanted)}",
    )
    return "\n  ".join(filter(None, lines))


def _nonfinite(array) -> str:
    array = array.astype("float64")
    return f"{int(np.isnan(array).sum())} NaN and {int(np.isinf(array).sum())} inf"


def make_inputs(
    dtype="float32",
    *,
    batch: int = 1,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    num_heads: int = 2,
    num_heads_kv: int | None = None,
    head_dim: int = 64,
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
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, layout : optional
        As in the shapes of `fa2cupy.forward`. Those of k and v are q's by default.
    magnitude : float, optional
        Standard deviation.
    seed : int, optional
    xp : module, optional
        ``numpy`` or ``cupy``.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def draw(seqlen: int, heads: int):
        inner = (seqlen, heads) if layout == "bshd" else (heads, seqlen)
        drawn = rng.standard_normal((batch, *inner, head_dim), dtype="float64" if dtype == "float64" else "float32")
        return xp.asarray(magnitude * drawn).astype(dtype)

    q = (seqlen_q, num_heads)
    k = (seqlen_q if seqlen_k is None else seqlen_k, num_heads if num_heads_kv is None else num_heads_kv)
    return draw(*q), draw(*k), draw(*k), draw(*q)
