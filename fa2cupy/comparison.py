"""One result against its reference: how far it is, how far it may be, what a failure tells. `testing` has the rule."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import device_context
from .problem import AttentionProblem

__all__ = ["Comparison", "assert_within_baseline", "largest"]

_BASELINE_FACTORS = {"o": 2, "dq": 3, "dk": 3, "dv": 3, "dbias": 3, "dsink": 3}
_ACCUMULATED = ("lse", "delta", "dsink")  # results in the accumulators' dtype


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


def assert_within_baseline(
    name: str, result, wanted, baseline, noise: float = 0.0, *, problem: AttentionProblem, spec: object = None
) -> Comparison:
    """Raises unless a result is within the rule at the top of `testing`.

    Parameters
    ----------
    name : {"o", "lse", "delta", "dq", "dk", "dv", "dbias", "dsink"}
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
    dtype = problem.accumulator_dtype if name in _ACCUMULATED else problem.dtype
    if name == "dbias":  # a bias is of either dtype, and its gradient like it
        dtype = baseline.dtype.name
    if result.shape != wanted.shape or result.dtype.name != dtype:
        raise AssertionError(f"{name}: expected {dtype} of shape {wanted.shape}, got {result.dtype} of {result.shape}")
    with device_context(result):
        distance = _distance(result, wanted)
        baseline_distance = _distance(baseline, wanted)
        baseline_error = largest(baseline_distance[np.isfinite(baseline_distance)])
        highest = largest(abs(wanted[np.isfinite(wanted)]))
        allowed = _allowed(name, problem, highest, baseline_error, noise)
        comparison = Comparison(name, largest(distance), baseline_error, allowed)
        if not comparison.error <= allowed:
            raise AssertionError(_failure(comparison, result, wanted, distance, problem, spec))
    return comparison


def _allowed(name: str, problem: AttentionProblem, highest: float, baseline_error: float, noise: float) -> float:
    if name == "lse" and problem.itemsize == 2:
        return max(1e-3 if highest > 32 else 1e-4, 1e-6 * highest)
    relative = 1e-12 if problem.dtype == "float64" else 1e-5
    if name == "lse":
        return relative * max(1.0, highest)
    factor = _BASELINE_FACTORS.get(name, 0) if problem.itemsize == 2 else 0
    rounding = float(np.finfo(problem.accumulator_dtype).eps) * noise if np.isfinite(noise) else 0.0
    return factor * baseline_error + relative * highest + rounding


def _distance(array, wanted):
    """Elementwise |array - wanted|: 0 where both are the same infinity or NaN, inf where only one is."""
    array = array.astype("float64")
    distance = abs(array - wanted)
    distance[(array == wanted) | (np.isnan(array) & np.isnan(wanted))] = 0
    distance[np.isnan(distance)] = np.inf
    return distance


def largest(array) -> float:
    """Of an array's elements, 0 without any."""
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
