"""Checks of functions of scores that the caller writes, and of their arrays."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedProblemError
from ..functions.bounds import MAX_POSITION
from ..functions.expressions import FLOAT
from ..functions.tracing import BoundFunction, Program, argument_kind, trace
from .arguments import array_backend
from .array_types import Array

__all__ = [
    "ARGUMENTS",
    "FunctionKey",
    "bound_function",
    "check_mask_mod",
    "check_positions",
    "check_score_mod",
    "floating_arguments",
    "function_arrays",
    "function_key",
    "program_of",
    "sequence_of",
]


#: Keywords of arrays, by role.
ARGUMENTS = {"score_mod": "score_args", "mask_mod": "mask_args"}
#: Programs whose arrays have been checked, by function.
_programs: weakref.WeakKeyDictionary[Any, dict[object, Program]] = weakref.WeakKeyDictionary()


class FunctionKey:
    """Stands for a function in the keys of calls, which so keep no function alive.

    A program depends on the kinds of its arrays, too. Keys of calls have these anyway, so that a warm call looks for no
    program.
    """

    def __init__(self, function: object):
        self._function = weakref.ref(function)

    def program(self, role: str, arrays: Sequence[Any]) -> Program:
        """The traced function of a role and its arrays, while the function is alive."""
        return program_of(role, self._function(), arrays)


_keys: weakref.WeakKeyDictionary[Any, FunctionKey] = weakref.WeakKeyDictionary()


def function_key(function: object) -> FunctionKey | None:
    """The key of a function, always the same; None for what cannot be hashed or referred to weakly."""
    try:
        return _keys[function]
    except KeyError:
        return _keys.setdefault(function, FunctionKey(function))
    except TypeError:
        return None


def check_score_mod(keywords: Mapping[str, Any], problem: Any) -> dict[str, Any]:
    """``score_mod=`` and ``score_args=``. A function that is a soft cap is the setting of that keyword."""
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
    """The traced function of a role and its arrays, which are checked.

    The checks of CuPy arrays depend on what the key has of them, so that they are made once.
    """
    given = sequence_of(ARGUMENTS[role], arrays)
    try:
        key = (role, tuple([(type(x), x.dtype, x.ndim, x.shape[-1:]) for x in given]))
        return _programs[function][key]
    except (KeyError, AttributeError, TypeError):  # a new one, or arguments that are not legal
        program = _checked_program(role, function, given)
    if not any(isinstance(array, np.ndarray) for array in given):
        with contextlib.suppress(TypeError):  # functions that cannot be hashed or referred to weakly
            _programs.setdefault(function, {})[key] = program
    return program


def _checked_program(role: str, function: object, arrays: Sequence[Any]) -> Program:
    name = ARGUMENTS[role]
    named = {f"{name}[{number}]": array for number, array in enumerate(arrays)}
    if named:
        array_backend(named)
    program = trace(role, function, tuple(argument_kind(one, array) for one, array in named.items()))
    for one, array in named.items():
        _check_range(one, array)
    program.check_lengths(tuple(arrays))
    return program


def bound_function(role: str, function: object, arrays: object) -> BoundFunction:
    """The same with what kernels depend on of the arrays."""
    program = program_of(role, function, arrays)
    given = sequence_of(ARGUMENTS[role], arrays)
    summed = {axis for axes in program.loops for axis in axes}
    lengths = tuple(array.shape[-1] if axis in summed else 0 for axis, array in enumerate(given))
    return BoundFunction(program, tuple(array.dtype.name for array in given), lengths)


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
    if not isinstance(arrays, tuple | list):
        hint = f"; write {name}=(array,)" if hasattr(arrays, "dtype") else ""
        raise TypeError(f"{name}: expected a tuple of arrays, got {type(arrays).__name__}{hint}")
    return arrays


def _check_range(name: str, array: Array) -> None:
    """Functions compute with 32-bit ints. CuPy arrays are not read on the host."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or np.can_cast(array.dtype, "int32"):
        return
    largest = np.iinfo("int32")
    if array.size and not (largest.min <= array.min() and array.max() <= largest.max):
        raise ValueError(f"{name}: functions have ints of 32 bits, and an element has more")
