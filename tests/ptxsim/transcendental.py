"""Roots, exponentials and their like, in float64 and rounded once: better than the hardware's approximations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import directed_rounding, unary
from .decode import Plain, plain
from .errors import PtxError
from .syntax import Inst

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []

_FUNCTIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


@plain(*_FUNCTIONS, allow="approx rn rz rm rp ftz full")
def _function(machine: Machine, inst: Inst) -> Plain:
    if directed_rounding(inst):
        raise PtxError(f"directed rounding of {inst.op} is not implemented")
    function = _FUNCTIONS[inst.op]
    return unary(machine, inst, lambda x: function(x.astype(np.float64)))
