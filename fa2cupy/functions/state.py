"""What a function computes with besides its arguments.

A function is traced again when something has changed that it reads. Of a plain function, that are its code, its
defaults and the values of names from its closure and its module, and those of the functions among them. Where all of
these are numbers, strings, or tuples, lists and dicts of them, they are compared at each call. A bound method, a
callable object, or a function that reads an attribute of an object has no such state and is traced in each call.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from collections.abc import Hashable, Iterator

import numpy as np

__all__ = ["Unchanging", "state_of"]

_PURE_NAMES = (
    "abs all any bool dict divmod enumerate filter float int isinstance len list map max min pow print range reversed "
    "round set sorted sum tuple zip"
)
#: Functions and types of Python whose results depend on their operands alone, by identity.
_PURE = {id(getattr(builtins, name)) for name in _PURE_NAMES.split()}
#: The most functions, tuples, lists and dicts that are searched, and the longest ones.
_MOST, _LONGEST = 100, 4096


class Unchanging:
    """Base of objects that never change, and of which equal ones compute the same."""


class _UnknownError(Exception):
    """A function reads what can change."""


def state_of(function: object) -> Hashable | None:
    """A key of what a function computes. None if it reads what can change and cannot be compared.

    If the keys of two functions are equal, both compute the same, also if they are one function at different times.
    """
    try:
        return _of(function, {})
    except _UnknownError:
        return None


def _of(value: object, seen: dict[int, int]) -> Hashable:
    """The state of a function, or a key of a value. What was `seen`, by identity, is numbered."""
    kind = type(value)
    if kind is int or kind is bool or kind is str or value is None:
        return kind, value
    if kind is float:
        return kind, value or repr(value)  # 0.0 and -0.0 are equal
    if isinstance(value, np.number | np.bool_) and kind.__module__ == "numpy":
        return kind, repr(value)
    if isinstance(value, Unchanging):
        return value
    if value is np or value is math or id(value) in _PURE or _is_of_a_library(value):
        return id(value)
    if id(value) in seen:
        return seen[id(value)]
    if len(seen) == _MOST or (kind in (tuple, list, dict) and len(value) > _LONGEST):  # type: ignore[arg-type]
        raise _UnknownError
    seen[id(value)] = len(seen)
    if kind is types.FunctionType:
        return _of_function(value, seen)  # type: ignore[arg-type]
    if kind is tuple or kind is list:
        return kind, tuple([_of(x, seen) for x in value])  # type: ignore[attr-defined]
    if kind is dict:
        return kind, tuple([(_of(name, seen), _of(x, seen)) for name, x in tuple(value.items())])  # type: ignore[attr-defined]
    raise _UnknownError


def _of_function(function: types.FunctionType, seen: dict[int, int]) -> Hashable:
    code, around = function.__code__, function.__globals__
    names = _global_names(code)
    if names is None or function.__dict__:  # it can read its attributes by its own name
        raise _UnknownError
    found: list[Hashable] = [code]
    for name in names:
        if name not in around and not hasattr(builtins, name):
            raise _UnknownError
        found.append(_of(around[name] if name in around else getattr(builtins, name), seen))
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a name that has no value yet
            raise _UnknownError from None
        found.append(_of(value, seen))
    if function.__defaults__ or function.__kwdefaults__:
        found += [_of(function.__defaults__, seen), _of(function.__kwdefaults__, seen)]
    return tuple(found)


def _is_of_a_library(value: object) -> bool:
    """True for functions and types of NumPy and math."""
    if not isinstance(value, np.ufunc | type | types.BuiltinFunctionType | types.FunctionType | type(np.where)):
        return False
    return any(vars(library).get(value.__name__) is value for library in (np, math))


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...] | None:
    """The names that a function takes from its module; None if it reads what cannot be told from its code."""
    try:
        return tuple(dict.fromkeys(_names(code)))
    except _UnknownError:
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind == "LOAD_GLOBAL":
            yield name
        elif kind != "KW_NAMES" and any(part in kind for part in ("GLOBAL", "NAME", "CLASS", "IMPORT")):
            raise _UnknownError
        elif kind in ("LOAD_ATTR", "LOAD_METHOD") and (name.startswith("__") or name == "random"):
            raise _UnknownError  # function.__globals__, np.random
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
