"""What a function computes with besides its arguments.

A function is traced again when something that it reads has changed. A plain function reads its code, its defaults and
the values of names from its closure and its module, and the functions among these read theirs. Where all of these are
numbers, strings, or tuples, lists and dicts of them, they are compared at each call. A bound method, a callable object,
or a function that reads an attribute of an object has no such state and is traced in each call.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import math
import types
from collections.abc import Hashable, Iterator

import numpy as np

__all__ = ["Unchanging", "state_of"]

_PURE_NAMES = (
    "abs all any bool dict divmod enumerate filter float int isinstance len list map max min pow print range reversed "
    "round set sorted sum tuple zip"
)
#: Functions and types of Python whose results depend on their operands alone, and modules of such, by identity.
_PURE = {id(np), id(math), *(id(getattr(builtins, name)) for name in _PURE_NAMES.split())}
_SCALARS = (np.number, np.bool_)
#: Types of functions and types of NumPy and math.
_OF_LIBRARIES = (np.ufunc, type, types.BuiltinFunctionType, types.FunctionType, type(np.where))
#: Types of values that are equal only if they are the same.
_PLAIN = frozenset((int, bool, str))
#: The most functions, tuples, lists and dicts that are searched, and the longest ones.
_MOST, _LONGEST = 100, 4096


class Unchanging:
    """Base of objects that never change; equal ones compute the same."""


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
    if kind in _PLAIN or value is None:
        return kind, value
    if kind is float:
        return kind, value or repr(value)  # 0.0 and -0.0 are equal
    if id(value) in _PURE:
        return id(value)
    if isinstance(value, _SCALARS) and kind.__module__ == "numpy":
        return kind, repr(value)
    if isinstance(value, Unchanging):
        return value
    if isinstance(value, _OF_LIBRARIES) and any(vars(one).get(value.__name__) is value for one in (np, math)):
        return id(value)
    if id(value) in seen:
        return seen[id(value)]
    if len(seen) == _MOST:
        raise _UnknownError
    seen[id(value)] = len(seen)
    return _of_function(value, seen) if isinstance(value, types.FunctionType) else _of_container(value, seen)


def _of_container(value: object, seen: dict[int, int]) -> Hashable:
    kind = type(value)
    if kind is dict:
        # Not in pairs: `seen` has identities, and those of objects that are made here could be had by others later.
        items = tuple(itertools.chain.from_iterable(tuple(value.items())))  # type: ignore[attr-defined]
    elif kind is tuple or kind is list:
        items = tuple(value)  # type: ignore[arg-type]
    else:
        raise _UnknownError
    if len(items) > _LONGEST:
        raise _UnknownError
    kinds = tuple(map(type, items))
    return kind, kinds, items if _PLAIN.issuperset(kinds) else tuple([_of(x, seen) for x in items])


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
