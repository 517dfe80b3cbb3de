"""The functions that take the keywords of attention, by the names that messages give them."""

from __future__ import annotations

import fa2cupy
from fa2cupy import reference, testing

FUNCTIONS = {
    "fa2cupy.forward": fa2cupy.forward,
    "fa2cupy.backward": fa2cupy.backward,
    "fa2cupy.attention": fa2cupy.attention,
    "fa2cupy.reference.forward": reference.forward,
    "fa2cupy.reference.backward": reference.backward,
    "fa2cupy.reference.baseline_forward": reference.baseline_forward,
    "fa2cupy.reference.baseline_backward": reference.baseline_backward,
    "fa2cupy.reference.gradient_noise": reference.gradient_noise,
    "fa2cupy.testing.Expectation": testing.Expectation,
}
