"""Calls by their signature: prepared once, then looked up.

What a call must find out about its arrays depends on their shapes, strides, dtypes, devices and alignment and on the
options only. A call is therefore prepared once for each such signature, checks included, and a warm call is a dictionary
lookup, the allocation of its results and a launch per kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from ..problem.options import CallOptions
from ..system.locks import new_lock
from .arguments import Arguments
from .prepare import prepare

__all__ = ["run"]

_MAX_PREPARED = 4096
_prepared: dict[Hashable, Callable] = {}
_lock = new_lock()


class _Tiles(dict):
    """A dict of tiles that a signature can have."""

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))


def run(
    arguments: Arguments, arrays: tuple, options: CallOptions, scalars: tuple = (), seed: int | None = None
) -> tuple:
    """The results of a call.

    Parameters
    ----------
    arguments : Arguments
        Which arrays these are.
    arrays : tuple of (cupy.ndarray or None)
    options : CallOptions
    scalars : tuple of (name, value), optional
        Keywords of features that are no arrays.
    seed : int, optional
        Travels in the place of an address: no call is prepared anew for it.
    """
    if options.config is not None and isinstance(options.config, Mapping):
        options = options._replace(config=_Tiles(options.config))
    addresses = []
    # Types tell options apart that are equal, and not equally legal: True, 1 and 1.0.
    signature = [arguments, options, tuple(map(type, options)), scalars, _types(scalars)]
    try:
        for array in arrays:
            if array is None:
                addresses.append(0)
                signature.append(None)
            else:
                memory = array.data
                address = memory.ptr
                addresses.append(address)
                signature.append((array.shape, array.strides, array.dtype.num, memory.device_id, address & 15))
    except AttributeError:
        arguments.check_backend(arrays)  # says which is no CuPy array
        raise
    if seed is not None:
        addresses[arguments.inputs.index("seed")] = seed
    key = tuple(signature)
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed: a mistake that the checks will name
        return prepare(arguments, arrays, options, scalars)(arrays, addresses)
    if prepared is None:
        prepared = prepare(arguments, arrays, options, scalars)
        with _lock:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared(arrays, addresses)


def _types(values: tuple) -> tuple:
    return tuple([_types(x) if type(x) is tuple else type(x) for x in values])
