"""Calls on CuPy arrays."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import cupy

from ..problem.arguments import unpack_out
from ..problem.feature_checks import extra_gradients
from ..problem.features import ARRAY_KEYWORDS
from ..problem.options import CallOptions
from .arguments import arguments_of
from .device_memory import temporaries
from .signatures import run

__all__ = ["backward", "delta", "forward"]

_FORWARD, _DELTA, _BACKWARD = arguments_of("forward"), arguments_of("delta"), arguments_of("backward")


def forward(q, k, v, out, options: CallOptions, keywords: Mapping[str, object]):
    """`fa2cupy.forward` on CuPy arrays."""
    o, lse = (None, None) if out is None else unpack_out(out, _FORWARD.results)
    if not keywords:
        return run(_FORWARD, (q, k, v, o, lse), options)
    names, arrays, scalars, seed = _split(keywords)
    return run(arguments_of("forward", names), (q, k, v, *arrays, o, lse), options, scalars, seed)


def delta(o, do, out, options: CallOptions):
    """`fa2cupy.delta` on CuPy arrays."""
    return run(_DELTA, (o, do, out), options)[0]


def backward(q, k, v, o, lse, do, given_delta, dlse, out, options: CallOptions, keywords: Mapping[str, object]):
    """`fa2cupy.backward` on CuPy arrays."""
    if not keywords and dlse is None and options.return_dbias is False and options.return_dsink is False:
        results = (None, None, None) if out is None else unpack_out(out, _BACKWARD.results)
        return run(_BACKWARD, (q, k, v, o, lse, do, given_delta, *results), options)
    if _alike(given_delta, dlse):
        with cupy.cuda.Device(given_delta.data.device_id), temporaries():
            given_delta, dlse = given_delta - dlse, None
    gradients = tuple(extra_gradients(keywords, options.return_dbias, options.return_dsink))
    names, arrays, scalars, seed = _split({**keywords, "dlse": dlse})
    arguments = arguments_of("backward", names, gradients)
    results = unpack_out(out, arguments.results)
    return run(arguments, (q, k, v, o, lse, do, given_delta, *arrays, *results), options, scalars, seed)


def _split(keywords: Mapping[str, object]) -> tuple[tuple[str, ...], tuple, tuple, int | None]:
    """The arrays among the keywords of features, by name, the other keywords, and a seed that is legal.

    A call is not prepared anew for each seed: that is handed over like an address.
    """
    arrays = {name: x for name, x in keywords.items() if x is not None and name in (*ARRAY_KEYWORDS, "dlse")}
    scalars = {name: x for name, x in keywords.items() if name not in (*ARRAY_KEYWORDS, "dlse")}
    if isinstance(scalars.get("window"), list):  # which could not be hashed
        scalars["window"] = tuple(scalars["window"])
    seed = scalars.get("seed")
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        return tuple(arrays), tuple(arrays.values()), tuple(scalars.items()), None  # which the checks will name
    scalars["seed"] = 0
    return (*arrays, "seed"), (*arrays.values(), None), tuple(scalars.items()), int(seed)


def _alike(given_delta, dlse) -> bool:
    """Whether both are there and fit each other, so that one can be subtracted from the other."""
    both = isinstance(given_delta, cupy.ndarray) and isinstance(dlse, cupy.ndarray)
    if not both or given_delta.data.device_id != dlse.data.device_id:
        return False
    return (given_delta.shape, given_delta.dtype) == (dlse.shape, dlse.dtype)
