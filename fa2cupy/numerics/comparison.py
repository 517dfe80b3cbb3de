"""One result against its reference: how far it is, how far it may be, what a failure tells. `testing` has the rule."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..problem.attention import AttentionProblem
from .arrays import device_context

__all__ = ["Comparison", "assert_within_baseline", "largest"]

_BASELINE_FACTORS = {"o": 2, "dq": 3, "dk": 3, "dv": 3, "dbias": 3, "dsink": 3}
_RMS_FACTORS = {"o": 0.75, "dq": 0.9, "dk": 0.9, "dv": 0.75}
_ROUNDINGS = (2.3, 5.0)  # of the reference, that the baseline's is worth
_FEWEST_ERRORS, _FEWEST_KEYS, _FEWEST_SMALLEST = 100, 64, 32
_ACCUMULATED = ("lse", "delta", "dsink")  # results in the accumulators' dtype


@dataclass(frozen=True)
class Comparison:
    """A result that passed: its largest distance from the reference, the baseline's, and what is allowed.

    `rms` is the root mean square of the distances and `rms_allowed` what is allowed of it; inf where the rule has no bound.
    """

    name: str
    error: float
    baseline_error: float
    allowed: float
    rms: float = 0.0
    rms_allowed: float = np.inf

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
        rms_allowed = _rms_allowed(name, problem, wanted, baseline, baseline_distance)
        comparison = Comparison(name, largest(distance), baseline_error, allowed, _rms(distance), rms_allowed)
        if not (comparison.error <= allowed and comparison.rms <= rms_allowed):
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


def _rms_allowed(name: str, problem: AttentionProblem, wanted, baseline, baseline_distance) -> float:
    if name not in _RMS_FACTORS or problem.itemsize != 2 or problem.score_shape[3] < _FEWEST_KEYS:
        return np.inf
    rms, rounding = _rms(baseline_distance), _rms(_distance(wanted.astype(baseline.dtype), wanted))
    if _rms(wanted) < _FEWEST_SMALLEST * float(ml_dtypes.finfo(problem.dtype).smallest_normal):
        return np.inf
    fewest, most = _ROUNDINGS
    applies = rms > 0 and fewest * rounding <= rms <= most * rounding
    return (
        _RMS_FACTORS[name] * rms if applies and _number_of_errors(baseline_distance, rms) >= _FEWEST_ERRORS else np.inf
    )


def _number_of_errors(distance, rms: float) -> float:
    """How many errors of one size would scatter as much as these: few, if few are much larger than the others."""
    finite = distance[np.isfinite(distance)]
    return finite.size / float(((finite / rms) ** 4).mean())


def _rms(distance) -> float:
    finite = distance[np.isfinite(distance)]
    return float((finite**2).mean()) ** 0.5 if finite.size else 0.0


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
        _rms_failure(comparison) if comparison.error <= comparison.allowed else "",
        f"problem: {problem}",
        f"spec: {spec}" if spec is not None else "",
        f"worst: {comparison.name}{list(worst)} is {got:.8g} instead of {right:.8g}",
        f"not finite: {_nonfinite(result)} of {result.size}; in the reference {_nonfinite(wanted)}",
    )
    return "\n  ".join(filter(None, lines))


def _rms_failure(comparison: Comparison) -> str:
    percent = 100 * comparison.rms / comparison.rms_allowed
    return f"root mean square {comparison.rms:.2e}, {percent:.0f} % of the allowed {comparison.rms_allowed:.2e}"


def _nonfinite(array) -> str:
    array = array.astype("float64")
    return f"{int(np.isnan(array).sum())} NaN and {int(np.isinf(array).sum())} inf"
