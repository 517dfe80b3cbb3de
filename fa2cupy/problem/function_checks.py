"""Checks of the caller's functions of scores, and of their arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedProblemError
from ..functions.bounds import MAX_POSITION
from ..functions.expressions import FLOAT
from ..functions.tracing import BoundFunction, Program, argument_kind, trace
from .arguments import array_backend
from .array_types import Array
from .conversions import Absent

__all__ = [
    "ARGUMENTS",
    "bound_function",
    "check_mask_mod",
    "check_positions",
    "check_score_mod",
    "floating_arguments",
    "function_arrays",
    "program_of",
    "sequence_of",
    "traced_now",
]


#: Keywords of arrays, by role.
ARGUMENTS = {"score_mod": "score_args", "mask_mod": "mask_args"}


def check_score_mod(keywords: Mapping[str, Any], problem: Any) -> dict[str, Any]:
    """``score_mod=`` and ``score_args=``. A function that computes a soft cap sets `softcap` instead."""
    found = _checked("score_mod", keywords, problem)
    cap = found["score_mod"].program.soft_cap if found else None
    return found if cap is None or keywords.get("softcap") is not None else {"softcap": cap}


def check_mask_mod(keywords: Mapping[str, Any], problem: Any) -> dict[str, Any]:
    """``mask_mod=`` and ``mask_args=``."""
    return _checked("mask_mod", keywords, problem)


def check_positions(role: str, shape: Sequence[int]) -> None:
    """Checks that sums of two positions of a function do not exceed its ints."""
    if max(shape) > MAX_POSITION:
        raise UnsupportedProblemError(f"{role}: there may be up to {MAX_POSITION} positions, got shape {tuple(shape)}")


def _checked(role: str, keywords: Mapping[str, Any], problem: Any) -> dict[str, Any]:
    function, name = keywords.get(role), ARGUMENTS[role]
    arrays = sequence_of(name, keywords.get(name, ()))
    if function is None:
        if arrays:
            raise ValueError(f"{name}: there is no {role}")
        return {}
    check_positions(role, problem.score_shape)
    return {role: bound_function(role, function, arrays)}


def program_of(role: str, function: object, arrays: object) -> Program:
    """The traced function of a role, after checks of its arrays."""
    name = ARGUMENTS[role]
    arrays = sequence_of(name, arrays)
    named = {f"{name}[{number}]": array for number, array in enumerate(arrays)}
    if named:
        array_backend(named)
    for one, array in named.items():
        if 0 in array.shape:
            raise ValueError(f"{one}: expected at least one element, got shape {array.shape}")
    program = trace(role, function, tuple(argument_kind(one, array) for one, array in named.items()))
    for one, array in named.items():
        _check_range(one, array)
    program.check_lengths(tuple(arrays))
    return program


def bound_function(role: str, function: object, arrays: object) -> BoundFunction:
    """The same with the properties of the arrays that kernels depend on."""
    program = program_of(role, function, arrays)
    given = sequence_of(ARGUMENTS[role], arrays)
    summed = {axis for axes in program.loops for axis in axes}
    lengths = tuple(array.shape[-1] if axis in summed else 0 for axis, array in enumerate(given))
    return BoundFunction(program, tuple(array.dtype.name for array in given), lengths)


def traced_now(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords with programs in place of functions, so that later calls compute what the functions do now."""
    found = dict(keywords)
    for role, name in ARGUMENTS.items():
        if keywords.get(role) is not None:
            with contextlib.suppress(Exception):  # the call reports what is not legal
                found[role] = program_of(role, keywords[role], keywords.get(name, ()))
    return found


def function_arrays(keywords: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of functions by names such as ``"score_args[0]"``."""
    return {
        f"{name}[{number}]": array
        for name in ARGUMENTS.values()
        for number, array in enumerate(sequence_of(name, keywords.get(name, ())))
    }


def floating_arguments(keywords: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays of `score_mod` that have a gradient, by names such as ``"score_args[0]"``."""
    arrays = function_arrays({"score_args": keywords.get("score_args", ())})
    if arrays:
        array_backend(arrays)
    return {name: array for name, array in arrays.items() if argument_kind(name, array).kind == FLOAT}


def sequence_of(name: str, arrays: Any) -> Sequence[Any]:
    """The arrays of a function, under the name of their keyword. Raises TypeError unless they are a tuple or a list."""
    if isinstance(arrays, Absent):
        raise TypeError(arrays.text({}))
    if not isinstance(arrays, tuple | list):
        hint = f"; write {name}=(array,)" if hasattr(arrays, "dtype") else "; it is () for a function without arrays"
        raise TypeError(f"{name}: expected a tuple of arrays, got {type(arrays).__name__}{hint}")
    return arrays


def _check_range(name: str, array: Array) -> None:
    """Raises ValueError unless ints fit the 32 bits of functions. CuPy arrays are not read on the host."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or np.can_cast(array.dtype, "int32"):
        return
    largest = np.iinfo("int32")
    if array.size and not (largest.min <= array.min() and array.max() <= largest.max):
        raise ValueError(f"{name}: functions have ints of 32 bits, and an element has more")
