"""Calls by their signature: prepared once, then looked up.

The checks, the choice of kernels and their plan depend only on the options and on the shapes, strides, dtypes, devices
and alignment of the arrays. A call is therefore prepared once for each such signature. A warm call is a dictionary
lookup, the allocation of its results and one launch per kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..functions.state import state_of
from ..functions.tracing import Program
from ..problem.arguments import array_backend
from ..problem.features import ARRAYS
from ..problem.function_checks import ARGUMENTS, program_of
from ..problem.options import CallOptions
from ..system.recent import RecentlyUsed
from .arguments import Arguments
from .prepare import kernels_of, prepare

if TYPE_CHECKING:
    import cupy

    from ..jit.spec import KernelSpec
    from .copies import CopyingCall
    from .prepared import KernelCall

__all__ = ["Items", "kernels_ahead", "run"]

#: Names and values.
Items = tuple[tuple[str, object], ...]

_NO_KEYWORDS: Mapping[str, Any] = {}
_ROLES = frozenset(ARGUMENTS)
_prepared: RecentlyUsed[KernelCall | CopyingCall] = RecentlyUsed(4096)


def run(
    arguments: Arguments,
    arrays: tuple[cupy.ndarray | None, ...],
    options: CallOptions,
    values: Items = (),
    keywords: Mapping[str, Any] = _NO_KEYWORDS,
) -> tuple[cupy.ndarray, ...]:
    """The results of a call.

    Parameters
    ----------
    arguments : Arguments
        Names of the arrays.
    arrays : tuple of (cupy.ndarray or None)
    options : CallOptions
    values : tuple of (name, value), optional
        The keywords of features that are neither arrays nor functions, nor a seed.
    keywords : mapping, optional
        All keywords of features.
    """
    addresses = []
    # Types distinguish values that are equal but not all legal: True, 1 and 1.0. Options do so themselves.
    types = _types(tuple([value for _, value in values])) if values else ()
    states = _states(keywords) if keywords and not _ROLES.isdisjoint(keywords) else ()
    signature = [states, arguments, options, values, types]
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
        _check_backend(arguments, arrays)  # names the argument that is not a CuPy array
        raise
    if arguments.seed is not None:
        addresses[arguments.seed] = int(keywords["seed"])
    key = tuple(signature)
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed is not legal: the checks will report it
        _check_backend(arguments, arrays)
        prepared = prepare(arguments, arrays, options, {**keywords, **_programs(keywords)})
        return prepared(arrays, addresses, keywords.get("block_mask"))
    if prepared is None:
        _check_backend(arguments, arrays)
        programs = _programs(keywords)
        # Functions that compute the same, and of which the same is known, share a prepared call.
        signature[0] = tuple((role, program, program.known) for role, program in programs.items())
        key_of_programs = tuple(signature)
        prepared = _prepared.get(key_of_programs)
        if prepared is None:
            prepared = prepare(arguments, arrays, options, {**keywords, **programs})
            prepared = _prepared.put(key_of_programs, prepared)
        if programs and states == _states(keywords):  # else functions have changed meanwhile, or have no state
            _prepared.put(key, prepared)
    return prepared(arrays, addresses, keywords.get("block_mask"))


def kernels_ahead(
    arguments: Arguments, inputs: tuple[cupy.ndarray, ...], options: CallOptions, keywords: Mapping[str, Any]
) -> list[KernelSpec]:
    """The kernels of a call whose other arrays do not exist yet: see `kernels_of`."""
    return kernels_of(arguments, inputs, options, {**keywords, **_programs(keywords)})


def _check_backend(arguments: Arguments, arrays: tuple[cupy.ndarray | None, ...]) -> None:
    """Raises TypeError unless all arrays are CuPy's; results and optional inputs may be None."""
    required: dict[str, object] = {}
    optional: dict[str, object] = {}
    for name, array in zip(arguments.names, arrays, strict=True):
        (optional if name in arguments.may_be_none else required)[arguments.labels[name]] = array
    array_backend(required, optional, ARRAYS)


def _programs(keywords: Mapping[str, Any]) -> dict[str, Program]:
    """The traced functions by role."""
    found = {}
    for role, name in ARGUMENTS.items():
        function = keywords.get(role)
        if function is not None:
            found[role] = program_of(role, function, keywords.get(name, ()))
    return found


def _states(keywords: Mapping[str, Any]) -> tuple[tuple[str, object], ...]:
    """The states of functions by role. A function without one has an object that is equal to no other."""
    states = []
    for role in ARGUMENTS:
        function = keywords.get(role)
        if function is not None:
            state = state_of(function)
            states.append((role, object() if state is None else state))
    return tuple(states)


def _types(values: tuple[object, ...]) -> tuple[object, ...]:
    return tuple([_types(x) if type(x) is tuple else type(x) for x in values])
