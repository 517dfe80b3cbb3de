"""The numbers by which kernels cap scores: of tanh, and of the polynomial that stands for it where scores are small.

``tanh(x)`` is ``x (a + b x^2 + c x^4)`` for ``|x| <= LARGEST``, up to 1.2e-6: a least-squares fit at 4000 Chebyshev
points of x^2, their weights multiplied by their errors until the largest errors were equal. Under a cap of 80 that is
less than the 1e-4 that `testing` allows for lse, and further than 0.4 a polynomial so short would not stay in that.
With x = rate * product, two FMAs and a product do, in a unit that is left to what multiplies the score anyhow:

    tanh(x) = unit * product * ((product^2 + shift)^2 + rest)
"""

from __future__ import annotations

import math

__all__ = ["COEFFICIENTS", "LARGEST", "softcap_values"]

COEFFICIENTS = (0.99997883, -0.33225425, 0.11942388)
LARGEST = 0.4

# Outside of these float32 might not hold fifth powers of the rate times the cap, or what they divide.
_RATES = (1e-5, 1e4)
_CAPS = (1e-4, 1e6)


def softcap_values(softcap: float, softmax_scale: float) -> dict[str, float]:
    """What the record has of a cap. Where no polynomial can be used, no score is small enough for it."""
    rate = softmax_scale / softcap
    cap_log2 = softcap * math.log2(math.e)
    unit, shift, rest, largest = 1.0, 0.0, 0.0, -1.0
    if _RATES[0] <= rate <= _RATES[1] and _CAPS[0] <= softcap <= _CAPS[1]:
        a, b, c = COEFFICIENTS
        vertex = b / (2 * c)
        unit, shift, rest = c * rate**5, vertex / rate**2, (a / c - vertex**2) / rate**4
        largest = LARGEST / rate
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
