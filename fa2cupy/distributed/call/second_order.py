"""The calls of second order: their arrays by name, and how they call the package."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...problem.options import CallOptions
from ...problem.tangents import COTANGENTS, TANGENTS, Tangents

__all__ = ["CALLS", "TANGENTS_OF_FEATURES", "call_backend", "direction_of", "tangents_of_features"]

#: By call, the names of the arrays that are the direction.
CALLS = {"jvp": TANGENTS, "output_jvp": TANGENTS, "backward_jvp": TANGENTS, "double_backward": COTANGENTS}
#: The names of tangents and cotangents of features in the features' table.
TANGENTS_OF_FEATURES = TANGENTS[3:]


def direction_of(call: str, arrays: Mapping[str, Any]) -> Tangents:
    """The direction of a call, from its arrays by name."""
    return Tangents(*(arrays.get(name) for name in CALLS[call]))


def tangents_of_features(call: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The tangents or cotangents of features that a call has, by their names in the features' table."""
    given = zip(TANGENTS_OF_FEATURES, CALLS.get(call, ())[3:], strict=False)
    return {name: arrays[own] for name, own in given if arrays.get(own) is not None}


def call_backend(
    backend: ModuleType,
    call: str,
    arrays: Mapping[str, Any],
    out: tuple[Any, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, Any],
) -> tuple[Any, ...]:
    """Makes a call of the package, given its arrays by name; those that are None may be missing."""
    inputs, direction = tuple(arrays[name] for name in ("q", "k", "v")), direction_of(call, arrays)
    if call == "jvp":
        return backend.jvp(*inputs, direction, out, options, keywords)
    optional = {"backward_jvp": ("dot", "dlse", "dlset"), "double_backward": ("dlse",)}
    results: dict[str, Any] = dict.fromkeys(optional.get(call, ()))
    results |= {name: x for name, x in arrays.items() if name not in ("q", "k", "v", *CALLS[call])}
    return getattr(backend, call)(inputs, results, direction, out, options, keywords)
