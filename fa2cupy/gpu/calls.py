"""The calls of the package on CuPy arrays."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping
from typing import Any

import cupy

from ..problem.arguments import unpack_out
from ..problem.block_mask import BlockMask
from ..problem.feature_checks import extra_gradients
from ..problem.features import ARRAY_KEYWORDS
from ..problem.function_checks import program_of, sequence_of
from ..problem.options import CallOptions
from .arguments import arguments_of
from .device_memory import temporaries
from .signatures import run
from .tile_states import tile_states

__all__ = ["backward", "decode", "delta", "forward", "merge", "tile_states"]

_FORWARD, _DELTA, _BACKWARD = map(arguments_of, ("forward", "delta", "backward"))
_DECODE, _MERGE = map(arguments_of, ("decode", "merge"))

_ARRAYS = frozenset((*ARRAY_KEYWORDS, "dlse"))
_ROLES = (("score_mod", "score_args"), ("mask_mod", "mask_args"))
_OF_FUNCTIONS = frozenset(name for names in _ROLES for name in names)


def forward(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """`fa2cupy.forward` on CuPy arrays."""
    o, lse = (None, None) if out is None else unpack_out(out, _FORWARD.results)
    if not keywords:
        return run(_FORWARD, (q, k, v, o, lse), options)
    names, arrays, scalars, seed = _split(keywords)
    return run(arguments_of("forward", names), (q, k, v, *arrays, o, lse), options, scalars, seed)


def delta(o: cupy.ndarray, do: cupy.ndarray, out: cupy.ndarray | None, options: CallOptions) -> cupy.ndarray:
    """`fa2cupy.delta` on CuPy arrays."""
    return run(_DELTA, (o, do, out), options)[0]


def decode(
    q: cupy.ndarray,
    k_cache: cupy.ndarray,
    v_cache: cupy.ndarray,
    cache_seqlens: cupy.ndarray,
    k: cupy.ndarray | None,
    v: cupy.ndarray | None,
    block_table: cupy.ndarray | None,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """`fa2cupy.decode` on CuPy arrays."""
    o, lse = (None, None) if out is None else unpack_out(out, _DECODE.results)
    if not keywords:
        return run(_DECODE, (q, k_cache, v_cache, cache_seqlens, k, v, block_table, o, lse), options)
    names, arrays, scalars, _ = _split(keywords)
    inputs = (q, k_cache, v_cache, cache_seqlens, k, v, block_table, *arrays)
    return run(arguments_of("decode", names), (*inputs, o, lse), options, scalars)


def merge(
    o_parts: cupy.ndarray,
    lse_parts: cupy.ndarray,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
) -> tuple[cupy.ndarray, ...]:
    """`fa2cupy.merge` on CuPy arrays."""
    return run(_MERGE, (o_parts, lse_parts, *unpack_out(out, _MERGE.results)), options)


def backward(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    o: cupy.ndarray,
    lse: cupy.ndarray,
    do: cupy.ndarray,
    given_delta: cupy.ndarray | None,
    dlse: cupy.ndarray | None,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """`fa2cupy.backward` on CuPy arrays."""
    if not keywords and dlse is None and not _has_extra(options):
        results = (None, None, None) if out is None else unpack_out(out, _BACKWARD.results)
        return run(_BACKWARD, (q, k, v, o, lse, do, given_delta, *results), options)
    if given_delta is not None and dlse is not None and _alike(given_delta, dlse):
        with cupy.cuda.Device(given_delta.data.device_id), temporaries():
            given_delta, dlse = given_delta - dlse, None
    gradients = tuple(extra_gradients(keywords, options.return_dbias, options.return_dsink, options.return_dscore_args))
    names, arrays, scalars, seed = _split({**keywords, "dlse": dlse})
    arguments = arguments_of("backward", names, gradients)
    results = unpack_out(out, arguments.results)
    return run(arguments, (q, k, v, o, lse, do, given_delta, *arrays, *results), options, scalars, seed)


def _has_extra(options: CallOptions) -> bool:
    """True if a call has options for further gradients, legal or not."""
    return not (options.return_dbias is options.return_dsink is options.return_dscore_args is False)


def _split(
    keywords: Mapping[str, object],
) -> tuple[tuple[str, ...], tuple[cupy.ndarray | None, ...], tuple[tuple[str, object], ...], int | None]:
    """Splits the keywords of features into names of arrays, arrays, scalars and the seed.

    The seed is None unless it is legal. It travels in the place of an address, so that no call is prepared anew for it.
    """
    arrays: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    for name, x in keywords.items():
        if name in _ARRAYS:
            if x is not None:
                arrays[name] = x
        elif name not in _OF_FUNCTIONS:
            scalars[name] = x
    if not _OF_FUNCTIONS.isdisjoint(keywords):
        for role, args in _ROLES:
            _add_function(role, args, keywords, arrays, scalars)
    sparse = scalars.get("block_mask")
    if isinstance(sparse, BlockMask):
        arrays["block_mask"], scalars["block_mask"] = sparse.states, sparse.layout
    window = scalars.get("window")
    if isinstance(window, list):  # a list cannot be hashed
        scalars["window"] = tuple(window)
    seed = scalars.get("seed")
    number = -1 if seed is None or isinstance(seed, bool) or not isinstance(seed, numbers.Integral) else int(seed)
    if not 0 <= number < 2**64:
        return tuple(arrays), tuple(arrays.values()), tuple(scalars.items()), None  # the checks will report it
    scalars["seed"] = 0
    return (*arrays, "seed"), (*arrays.values(), None), tuple(scalars.items()), number


def _add_function(
    role: str, args: str, keywords: Mapping[str, object], arrays: dict[str, Any], scalars: dict[str, Any]
) -> None:
    """Adds the traced function of a role to the scalars, and each of its arrays under its own name.

    A call is then prepared once for functions that compute the same, and prepared calls keep no function alive.
    """
    function: Any = keywords.get(role)
    given: Any = keywords.get(args, ())
    if function is not None:
        scalars[role] = program_of(role, function, given)
    elif sequence_of(args, given):
        raise ValueError(f"{args}: there is no {role}")
    if not given:
        return
    for name, array in zip(_names(args, len(given)), given, strict=True):
        if array.size == 0:
            raise ValueError(f"{name}: expected at least one element, got shape {array.shape}")
        arrays[name] = array


@functools.lru_cache(maxsize=None)
def _names(args: str, number: int) -> tuple[str, ...]:
    return tuple(f"{args}[{i}]" for i in range(number))


def _alike(given_delta: cupy.ndarray, dlse: cupy.ndarray) -> bool:
    """True if both are arrays of one device, shape and dtype, so that one can be subtracted from the other."""
    if not (isinstance(given_delta, cupy.ndarray) and isinstance(dlse, cupy.ndarray)):
        return False
    if given_delta.data.device_id != dlse.data.device_id:
        return False
    return (given_delta.shape, given_delta.dtype) == (dlse.shape, dlse.dtype)
