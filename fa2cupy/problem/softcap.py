"""Constants for capping scores: those of tanh, and those of a polynomial that replaces it for small scores.

For ``|x| <= largest``, ``tanh(x)`` is approximated by ``x (a + b x^2 + c x^4)``. The coefficients are least-squares
fits at 4000 Chebyshev points of x^2; the weights were multiplied by the errors until the largest errors were equal
(Lawson's algorithm). The error of a score is the cap times that of the fit. A cap takes the fit with the largest range
whose error of scores is within the 1e-4 that `fa2cupy.testing` allows for lse.

With x = rate * product, the polynomial takes two FMAs and a multiplication. The factor `unit` costs nothing, because it
is folded into a factor that multiplies the score anyway:

    tanh(x) = unit * product * ((product^2 + shift)^2 + rest)
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["FITS", "Fit", "softcap_values"]


class Fit(NamedTuple):
    """A polynomial: the largest |x| of its range, its coefficients, and its largest absolute error in that range."""

    largest: float
    a: float
    b: float
    c: float
    error: float


FITS = (
    Fit(0.4, 0.99997883, -0.33225425, 0.11942388, 1.2e-6),
    Fit(0.3, 0.99999601, -0.33297480, 0.12522591, 1.7e-7),
    Fit(0.2, 0.999999635, -0.333259939, 0.129634941, 1.04e-8),
    Fit(0.1, 0.999999994147, -0.333328645434, 0.132393921946, 8.4e-11),
)

_ALLOWED = 1e-4  # the largest error of a score
_NORMAL = (1e-36, 1e36)  # normal float32 numbers, with a margin for the products in which they occur


def softcap_values(softcap: float, softmax_scale: float) -> dict[str, float]:
    """The members of a record for a cap.

    If no polynomial is usable, `tanh_largest` is -1, so that no score is small enough for it.
    """
    rate = softmax_scale / softcap
    cap_log2 = softcap * math.log2(math.e)
    unit, shift, rest, largest = 1.0, 0.0, 0.0, -1.0
    fit = next((fit for fit in FITS if softcap * fit.error <= _ALLOWED), None)
    if fit is not None and _NORMAL[0] <= rate <= _NORMAL[1]:
        vertex = fit.b / (2 * fit.c)
        found = fit.c * rate**5, vertex / rate**2, (fit.a / fit.c - vertex**2) / rate**4
        factors = (found[0], -found[1], found[1] ** 2, found[2], cap_log2 * found[0], 1 / found[0] if found[0] else 0.0)
        if all(_NORMAL[0] <= factor <= _NORMAL[1] for factor in factors):
            unit, shift, rest = found
            largest = fit.largest / rate
    return {
        "scale_over_softcap": rate,
        "softcap_log2": cap_log2,
        "capped_log2": cap_log2 * unit,
        "tanh_unit": unit,
        "tanh_limit": 1 / unit,
        "tanh_shift": shift,
        "tanh_rest": rest,
        "tanh_largest": largest,
    }
