"""Tangents of a call's arrays, and the checks of the calls of second order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from .arguments import array_backend, check_array
from .array_types import Array
from .checks import Request, Result, check_backward, check_forward
from .feature_checks import check_deterministic_tangents
from .options import CallOptions

__all__ = [
    "COTANGENTS",
    "TANGENTS",
    "Tangents",
    "check_backward_jvp",
    "check_double_backward",
    "check_jvp",
    "check_output_jvp",
    "check_tangents",
]


class Tangents(NamedTuple):
    """The direction in which the arrays of a call change; None where one does not.

    Attributes
    ----------
    q, k, v, bias, sink : ndarray or None
    """

    q: Array | None
    k: Array | None
    v: Array | None
    bias: Array | None
    sink: Array | None


#: The arguments of `jvp` and `backward_jvp` that are fields of `Tangents`, in their order.
TANGENTS = ("qt", "kt", "vt", "bias_tangent", "sink_tangent")
#: The same of `double_backward`, where cotangents of gradients take the places of tangents.
COTANGENTS = ("gdq", "gdk", "gdv", "gdbias", "gdsink")


def check_jvp(
    arrays: Mapping[str, Any], tangents: Tangents, options: CallOptions, keywords: Mapping[str, Any]
) -> Request:
    """Checks a call of `fa2cupy.jvp`: q, k and v by name, their tangents, its options and keywords of features."""
    request = check_forward(arrays, options, keywords)
    check_tangents(TANGENTS, tangents, arrays, keywords)
    request = _with_tangents(request, tangents)
    o, lse = request.results
    return request._replace(results=(o, lse, o._replace(name="ot"), lse._replace(name="lset")))


def check_output_jvp(
    arrays: Mapping[str, Any], tangents: Tangents, options: CallOptions, keywords: Mapping[str, Any]
) -> Request:
    """The same for a call with o and lse, which are no results of it."""
    array_backend({name: arrays[name] for name in ("q", "o", "lse")})
    request = check_jvp(arrays, tangents, options, keywords)
    o, lse, *moved = request.results
    for result in (o, lse):
        check_array(result.name, arrays[result.name], result.shape, result.dtype, "q")
    return request._replace(results=tuple(moved))


def check_backward_jvp(
    arrays: Mapping[str, Any], tangents: Tangents, options: CallOptions, keywords: Mapping[str, Any]
) -> Request:
    """Checks a call of `fa2cupy.backward_jvp`: its arrays by name, without `tangents`; some may be None or missing."""
    request = _check_backward(arrays, options, keywords)
    check_tangents(TANGENTS, tangents, arrays, keywords)
    for name, like in (("ot", "o"), ("lset", "lse"), ("dot", "o"), ("dlset", "lse")):
        _check_like(name, arrays.get(name), like, arrays[like])
    request = _with_tangents(request, tangents, arrays.get("dot"))
    return request._replace(results=tuple(one._replace(name=f"{one.name}t") for one in request.results))


def check_double_backward(
    arrays: Mapping[str, Any], cotangents: Tangents, options: CallOptions, keywords: Mapping[str, Any]
) -> Request:
    """Checks a call of `fa2cupy.double_backward`: its arrays by name, without `cotangents`; dlse may be None."""
    request = _check_backward(arrays, options, keywords)
    check_tangents(COTANGENTS, cotangents, arrays, keywords)
    request = _with_tangents(request, cotangents)
    of_inputs = [one._replace(name=f"g{one.name.removeprefix('d')}") for one in request.results]
    given = [name for name in ("do", "dlse") if arrays.get(name) is not None]
    of_outputs = [Result(f"g{name}", arrays[name].shape, arrays[name].dtype) for name in given]
    return request._replace(results=(*of_inputs[:3], *of_outputs, *of_inputs[3:]))


def _check_backward(arrays: Mapping[str, Any], options: CallOptions, keywords: Mapping[str, Any]) -> Request:
    """Checks the backward that a call differentiates."""
    request = check_backward(arrays, options, keywords)
    if options.deterministic:
        check_deterministic_tangents(request.problem.settings, keywords)
    return request


def check_tangents(
    names: tuple[str, ...], tangents: Tangents, arrays: Mapping[str, Any], keywords: Mapping[str, Any]
) -> None:
    """Checks tangents, which are arguments of these names, against q, k and v in `arrays` and against features."""
    array_backend({"q": arrays["q"]}, dict(zip(names, tangents, strict=True)))
    for name, source, tangent in zip(names, Tangents._fields, tangents, strict=True):
        like = arrays[source] if source in arrays else keywords.get(source)
        if tangent is not None and like is None:
            raise ValueError(f"{name}: there is no {source}; pass that of the forward")
        _check_like(name, tangent, source, like)


def _with_tangents(request: Request, tangents: Tangents, of_do: Array | None = None) -> Request:
    """The request with settings that say which tangents it has."""
    given = {"q": tangents.q, "k": tangents.k, "v": tangents.v, "o": of_do}
    problem = request.problem
    settings = dataclasses.replace(
        problem.settings,
        tangents="".join(letter for letter, array in given.items() if array is not None),
        bias_tangent=tangents.bias is not None,
        sink_tangent=tangents.sink is not None,
    )
    return request._replace(problem=problem.with_settings(settings))


def _check_like(name: str, array: Array | None, source: str, like: Any) -> None:
    if array is not None:
        check_array(name, array, like.shape, like.dtype, source)
