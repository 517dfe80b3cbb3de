"""Compares a result with its reference: error, bound and message of failure. The rule is at the top of `testing`."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..problem.array_types import Array
from ..problem.attention import AttentionProblem
from .arrays import array_module, device_context

__all__ = ["Comparison", "assert_within_baseline", "largest"]

_BASELINE_FACTORS = {"o": 2, "dq": 3, "dk": 3, "dv": 3, "dbias": 3, "dsink": 3, "dscore_args": 3}
_RMS_FACTORS = {"o": 0.75, "dq": 0.9, "dk": 0.9, "dv": 0.75}
_ROUNDINGS = (2.3, 5.0)  # range of the baseline's error over the error of rounding the reference
_FEWEST_ERRORS, _FEWEST_ROWS, _FEWEST_KEYS, _FEWEST_SMALLEST = 100, 16, 64, 32
_ACCUMULATED = ("lse", "delta", "dsink")  # results in the accumulators' dtype


@dataclass(frozen=True)
class Comparison:
    """The errors of a result that passed, and their bounds.

    Attributes
    ----------
    name : str
        Name of the result, such as ``"dq"``.
    error : float
        Largest distance from the reference.
    baseline_error : float
        The baseline's largest distance from the reference.
    allowed : float
        Bound of `error`.
    rms : float
        Root mean square of the distances from the reference.
    rms_allowed : float
        Bound of `rms`; inf where the rule has none.
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
    name: str,
    result: Array,
    wanted: Array,
    baseline: Array,
    noise: float = 0.0,
    *,
    problem: AttentionProblem,
    spec: object = None,
) -> Comparison:
    """Raises AssertionError unless a result obeys the rule at the top of `fa2cupy.testing`.

    Parameters
    ----------
    name : {"o", "lse", "delta", "dq", "dk", "dv", "dbias", "dsink"}
    result, wanted, baseline : ndarray
        The result, its float64 reference, and the result of the naive formulas.
    noise : float, optional
        Further rounding errors that are allowed, in units of the accumulators' machine epsilon.
    problem : AttentionProblem
    spec : object, optional
        Kernel or tile that the text of a failure names.

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
    if name.startswith(("dbias", "dscore_args")):  # they have the dtypes of their arrays
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
    # A gradient of an array may be rounded to 16 bits, whatever the dtype of q.
    argument = name.partition("[")[0]
    factor = _BASELINE_FACTORS.get(argument, 0) if problem.itemsize == 2 or argument == "dscore_args" else 0
    rounding = float(np.finfo(problem.accumulator_dtype).eps) * noise if np.isfinite(noise) else 0.0
    return factor * baseline_error + relative * highest + rounding


def _rms_allowed(
    name: str, problem: AttentionProblem, wanted: Array, baseline: Array, baseline_distance: Array
) -> float:
    if name not in _RMS_FACTORS or problem.itemsize != 2 or problem.score_shape[3] < _FEWEST_KEYS:
        return np.inf
    rms, rounding = _rms(baseline_distance), _rms(_distance(wanted.astype(baseline.dtype), wanted))
    if _rms(wanted) < _FEWEST_SMALLEST * float(ml_dtypes.finfo(problem.dtype).smallest_normal):
        return np.inf
    fewest, most = _ROUNDINGS
    if not (rms > 0 and fewest * rounding <= rms <= most * rounding):
        return np.inf
    of_elements, of_rows = _number_of_errors(baseline_distance)
    return _RMS_FACTORS[name] * rms if of_elements >= _FEWEST_ERRORS and of_rows >= _FEWEST_ROWS else np.inf


def _number_of_errors(distance: Array) -> tuple[float, float]:
    """Effective numbers of errors and of rows with errors, each small if a few are much larger than the others."""
    squares = array_module(distance).where(np.isfinite(distance), distance, 0.0) ** 2
    return _effective(squares), _effective(squares.sum(axis=-1))


def _effective(squares: Array) -> float:
    total = float(squares.sum())
    return total / float((squares * (squares / total)).sum())


def _rms(distance: Array) -> float:
    finite = distance[np.isfinite(distance)]
    return float((finite**2).mean()) ** 0.5 if finite.size else 0.0


def _distance(array: Array, wanted: Array) -> Array:
    """Elementwise |array - wanted|: 0 where both are the same infinity or NaN, inf where only one is."""
    array = array.astype("float64")
    distance = array_module(array).asarray(abs(array - wanted))  # without axes, it is a scalar
    distance[(array == wanted) | (np.isnan(array) & np.isnan(wanted))] = 0
    distance[np.isnan(distance)] = np.inf
    return distance


def largest(array: Array) -> float:
    """The largest element of an array, 0 if it is empty."""
    return float(array.max()) if array.size else 0.0


def _failure(
    comparison: Comparison, result: Array, wanted: Array, distance: Array, problem: AttentionProblem, spec: object
) -> str:
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


def _nonfinite(array: Array) -> str:
    array = array.astype("float64")
    return f"{int(np.isnan(array).sum())} NaN and {int(np.isinf(array).sum())} inf"
