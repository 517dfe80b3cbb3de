"""Calls by their signature: prepared once, then looked up.

The checks, the choice of kernels and their plan depend only on the options and on the shapes, strides, dtypes, devices
and alignment of the arrays. A call is therefore prepared once for each such signature. A warm call is a dictionary
lookup, the allocation of its results and one launch per kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..functions.state import state_of
from ..problem.function_checks import ARGUMENTS, program_of
from ..problem.options import CallOptions
from ..system.recent import RecentlyUsed
from .arguments import Arguments, function_arguments
from .prepare import prepare
from .prepare_decode import prepare_decode
from .prepare_merge import prepare_merge

if TYPE_CHECKING:
    import cupy

    from .copies import CopyingCall
    from .prepared import KernelCall

__all__ = ["Items", "run"]

#: Names and values.
Items = tuple[tuple[str, object], ...]

#: What prepares calls that are not attention.
_PREPARE = {"decode": prepare_decode, "merge": prepare_merge}
_prepared: RecentlyUsed[KernelCall | CopyingCall] = RecentlyUsed(4096)


def run(
    arguments: Arguments,
    arrays: tuple[cupy.ndarray | None, ...],
    options: CallOptions,
    scalars: Items = (),
    functions: Items = (),
    seed: int | None = None,
) -> tuple[cupy.ndarray, ...]:
    """The results of a call.

    Parameters
    ----------
    arguments : Arguments
        Names of the arrays.
    arrays : tuple of (cupy.ndarray or None)
    options : CallOptions
    scalars : tuple of (name, value), optional
        Keywords of features that are not arrays.
    functions : tuple of (name, callable or Program), optional
        The caller's functions by role.
    seed : int, optional
        Seed of dropout. It takes the place of an address, so that no call is prepared anew for it.
    """
    addresses = []
    # Types distinguish values that are equal but not all legal: True, 1 and 1.0. Options compare their own.
    types = _types(tuple([value for _, value in scalars])) if scalars else ()
    states = _states(functions) if functions else ()
    signature = [states, arguments, options, scalars, types]
    try:
        for array in arrays:
            if array is None:
                addresses.append(0)
                signature.append(None)
            else:
                memory = array.data
                address = memory.ptr
                addresses.append(address)
                signature.append((array.shape, array.strides, array.dtype, memory.device_id, address & 15))
    except AttributeError:
        arguments.check_backend(arrays)  # names the argument that is not a CuPy array
        raise
    if seed is not None:
        addresses[arguments.inputs.index("seed")] = seed
    key = tuple(signature)
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed is not legal: the checks will report it
        prepared = _prepare(arguments, arrays, options, (*scalars, *_programs_of(functions, arguments, arrays)))
        return prepared(arrays, addresses)
    if prepared is None:
        programs = _programs_of(functions, arguments, arrays)
        signature[0] = programs  # functions that compute the same share a prepared call
        key_of_programs = tuple(signature)
        prepared = _prepared.get(key_of_programs)
        if prepared is None:
            prepared = _prepare(arguments, arrays, options, (*scalars, *programs))
            prepared = _prepared.put(key_of_programs, prepared)
        if functions and states == _states(functions):  # else functions have changed meanwhile, or have no state
            _prepared.put(key, prepared)
    return prepared(arrays, addresses)


def _prepare(
    arguments: Arguments, arrays: tuple[cupy.ndarray | None, ...], options: CallOptions, scalars: Items
) -> KernelCall | CopyingCall:
    return _PREPARE.get(arguments.call, prepare)(arguments, arrays, options, scalars)


def _programs_of(functions: Items, arguments: Arguments, arrays: tuple[cupy.ndarray | None, ...]) -> Items:
    """The traced functions by role, after checks of their arrays."""
    if not functions:
        return ()
    arguments.check_backend(arrays)
    named = function_arguments(arguments.named(arrays))
    for name, given in named.items():
        for number, array in enumerate(given):
            if array is not None and array.size == 0:
                raise ValueError(f"{name}[{number}]: expected at least one element, got shape {array.shape}")
    return tuple((role, program_of(role, function, named[ARGUMENTS[role]])) for role, function in functions)


def _states(functions: Items) -> tuple[tuple[str, object], ...]:
    """The states of functions by role. A function without one has an object that is equal to no other."""
    return tuple([(role, object() if (state := state_of(function)) is None else state) for role, function in functions])


def _types(values: tuple[object, ...]) -> tuple[object, ...]:
    return tuple([_types(x) if type(x) is tuple else type(x) for x in values])
