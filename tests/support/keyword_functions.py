"""The functions that take the keywords of attention, by the names that messages give them."""

from __future__ import annotations

import numpy as np

import fa2cupy
from fa2cupy import reference, testing

FUNCTIONS = {
    "fa2cupy.forward": fa2cupy.forward,
    "fa2cupy.backward": fa2cupy.backward,
    "fa2cupy.attention": fa2cupy.attention,
    "fa2cupy.jvp": fa2cupy.jvp,
    "fa2cupy.backward_jvp": fa2cupy.backward_jvp,
    "fa2cupy.double_backward": fa2cupy.double_backward,
    "fa2cupy.reference.forward": reference.forward,
    "fa2cupy.reference.backward": reference.backward,
    "fa2cupy.reference.baseline_forward": reference.baseline_forward,
    "fa2cupy.reference.baseline_backward": reference.baseline_backward,
    "fa2cupy.reference.gradient_noise": reference.gradient_noise,
    "fa2cupy.reference.jvp": reference.jvp,
    "fa2cupy.reference.second_jvp": reference.second_jvp,
    "fa2cupy.reference.backward_jvp": reference.backward_jvp,
    "fa2cupy.reference.double_backward": reference.double_backward,
    "fa2cupy.testing.Expectation": testing.Expectation,
}


def positional_arguments(inputs: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Returns arrays for all positional arguments of these functions, given q, k, v and do."""
    q, k, v, do = inputs
    o, lse, ot, lset = fa2cupy.jvp(q, k, v, q, k, v)
    tangents = {"qt": q, "kt": k, "vt": v, "ot": ot, "lset": lset, "dot": do, "qu": q, "ku": k, "vu": v}
    return {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, **tangents, "gdq": q, "gdk": k, "gdv": v}
