"""Calls on CuPy arrays."""

from __future__ import annotations

from collections.abc import Mapping

import cupy

from ..problem.arguments import unpack_out
from ..problem.feature_checks import extra_gradients, split_features
from ..problem.options import CallOptions
from .arguments import arguments_of
from .device_memory import temporaries
from .signatures import run

__all__ = ["backward", "delta", "forward"]

_FORWARD, _DELTA, _BACKWARD = arguments_of("forward"), arguments_of("delta"), arguments_of("backward")


def forward(q, k, v, out, options: CallOptions, features: Mapping[str, object]):
    """`fa2cupy.forward` on CuPy arrays."""
    o, lse = (None, None) if out is None else unpack_out(out, _FORWARD.results)
    if not features:
        return run(_FORWARD, (q, k, v, o, lse), options)
    names, arrays, settings, seed = split_features(features)
    return run(arguments_of("forward", names), (q, k, v, *arrays, o, lse), options, settings, seed)


def delta(o, do, out, options: CallOptions):
    """`fa2cupy.delta` on CuPy arrays."""
    return run(_DELTA, (o, do, out), options)[0]


def backward(
    q, k, v, o, lse, do, given_delta, dlse, out, options: CallOptions, features: Mapping[str, object]
):  # fmt: skip
    """`fa2cupy.backward` on CuPy arrays."""
    if not features and dlse is None and options.return_dbias is False and options.return_dsink is False:
        results = (None, None, None) if out is None else unpack_out(out, _BACKWARD.results)
        return run(_BACKWARD, (q, k, v, o, lse, do, given_delta, *results), options)
    if _alike(given_delta, dlse):
        with cupy.cuda.Device(given_delta.data.device_id), temporaries():
            given_delta, dlse = given_delta - dlse, None
    gradients = tuple(extra_gradients(features, options.return_dbias, options.return_dsink))
    names, arrays, settings, seed = split_features({**features, "dlse": dlse})
    arguments = arguments_of("backward", names, gradients)
    results = unpack_out(out, arguments.results)
    return run(arguments, (q, k, v, o, lse, do, given_delta, *arrays, *results), options, settings, seed)


def _alike(given_delta, dlse) -> bool:
    """Whether both are there and fit each other, so that one can be subtracted from the other."""
    both = isinstance(given_delta, cupy.ndarray) and isinstance(dlse, cupy.ndarray)
    if not both or given_delta.data.device_id != dlse.data.device_id:
        return False
    return (given_delta.shape, given_delta.dtype) == (dlse.shape, dlse.dtype)
