"""The calls of the package on CuPy arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cupy

from ..jit.spec import KernelSpec
from ..problem.arguments import unpack_out
from ..problem.block_mask import (
    COLUMN_INTERVALS,
    MOST_INTERVALS,
    NO_INTERVALS,
    ROW_INTERVALS,
    BlockMask,
    Intervals,
    MapLayout,
    is_captured,
    may_have_intervals,
)
from ..problem.feature_checks import extra_gradients, is_seed
from ..problem.features import ARRAY_KEYWORDS
from ..problem.function_checks import ARGUMENTS, sequence_of
from ..problem.options import CallOptions
from ..problem.tangents import COTANGENTS, TANGENTS, Tangents
from .arguments import Arguments, arguments_of
from .device_memory import temporaries
from .prepared import KernelCall, bound_call
from .signatures import Items, kernels_ahead, run

__all__ = [
    "backward",
    "backward_jvp",
    "bound",
    "copied",
    "decode",
    "delta",
    "double_backward",
    "forward",
    "jvp",
    "kernels_of_backward",
    "merge",
    "output_jvp",
    "tile_states",
]

_FORWARD, _DELTA, _BACKWARD = map(arguments_of, ("forward", "delta", "backward"))
_DECODE, _MERGE = map(arguments_of, ("decode", "merge"))
_JVP, _OUTPUT_JVP = map(arguments_of, ("jvp", "output_jvp"))
_BACKWARD_JVP, _DOUBLE_BACKWARD = map(arguments_of, ("backward_jvp", "double_backward"))

_ARRAYS = frozenset((*ARRAY_KEYWORDS, "dlse"))
_FUNCTIONS = {args: role for role, args in ARGUMENTS.items()}


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
    names, arrays, values = _split(keywords)
    return run(arguments_of("forward", names), (q, k, v, *arrays, o, lse), options, values, keywords)


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
    names, arrays, values = _split(keywords)
    inputs = (q, k_cache, v_cache, cache_seqlens, k, v, block_table, *arrays)
    return run(arguments_of("decode", names), (*inputs, o, lse), options, values, keywords)


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
    if not keywords and dlse is None and not options.returns_more:
        results = (None, None, None) if out is None else unpack_out(out, _BACKWARD.results)
        return run(_BACKWARD, (q, k, v, o, lse, do, given_delta, *results), options)
    if given_delta is not None and dlse is not None and _alike(given_delta, dlse):
        with cupy.cuda.Device(given_delta.data.device_id), temporaries():
            given_delta, dlse = given_delta - dlse, None
    gradients = _gradients_of_features(options, keywords)
    names, arrays, values = _split(keywords if dlse is None else {**keywords, "dlse": dlse})
    arguments = arguments_of("backward", names, gradients)
    results = unpack_out(out, arguments.results)
    return run(arguments, (q, k, v, o, lse, do, given_delta, *arrays, *results), options, values, keywords)


def kernels_of_backward(
    q: cupy.ndarray, k: cupy.ndarray, v: cupy.ndarray, options: CallOptions, keywords: Mapping[str, object]
) -> list[KernelSpec]:
    """The kernels of `fa2cupy.backward` on CuPy arrays, without dlse, of a forward that has not returned."""
    names, arrays, _ = _split(keywords)
    arguments = arguments_of("backward", names, _gradients_of_features(options, keywords))
    return kernels_ahead(arguments, (q, k, v, *arrays), options, keywords)


def _gradients_of_features(options: CallOptions, keywords: Mapping[str, object]) -> tuple[str, ...]:
    """The names of the gradients that a backward returns besides dq, dk and dv."""
    if not options.returns_more:
        return ()
    return tuple(extra_gradients(keywords, options.return_dbias, options.return_dsink, options.return_dscore_args))


def jvp(
    q: cupy.ndarray,
    k: cupy.ndarray,
    v: cupy.ndarray,
    tangents: Tangents,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """`fa2cupy.jvp` on CuPy arrays."""
    return _second_order(_JVP, (q, k, v, *tangents[:3]), None, tangents, (), out, options, keywords)


def output_jvp(
    inputs: tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray],
    results: Mapping[str, cupy.ndarray | None],
    tangents: Tangents,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """The tangents that `fa2cupy.jvp` returns for given `results`, o and lse, on CuPy arrays."""
    arrays = (*inputs, results["o"], results["lse"], *tangents[:3])
    return _second_order(_OUTPUT_JVP, arrays, None, tangents, (), out, options, keywords)


def backward_jvp(
    inputs: tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray],
    results: Mapping[str, cupy.ndarray | None],
    tangents: Tangents,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """`fa2cupy.backward_jvp` on CuPy arrays; `results` are o, lse, their gradients, and tangents of all these."""
    more = tuple([f"{name}t" for name in _gradients_of_features(options, keywords)])
    moved = results["ot"], results["lset"], results["dot"], results["dlset"]
    arrays = (*inputs, results["o"], results["lse"], results["do"], *tangents[:3], *moved)
    return _second_order(_BACKWARD_JVP, arrays, results["dlse"], tangents, more, out, options, keywords)


def double_backward(
    inputs: tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray],
    results: Mapping[str, cupy.ndarray | None],
    cotangents: Tangents,
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """`fa2cupy.double_backward` on CuPy arrays; `results` are o, lse and their gradients."""
    of_dlse = () if results["dlse"] is None else ("gdlse",)
    more = (*of_dlse, *[f"g{name.removeprefix('d')}" for name in _gradients_of_features(options, keywords)])
    arrays = (*inputs, results["o"], results["lse"], results["do"], *cotangents[:3])
    return _second_order(_DOUBLE_BACKWARD, arrays, results["dlse"], cotangents, more, out, options, keywords)


def _second_order(
    plain: Arguments,
    own: tuple[cupy.ndarray | None, ...],
    dlse: cupy.ndarray | None,
    tangents: Tangents,
    more: tuple[str, ...],
    out: tuple[cupy.ndarray | None, ...] | None,
    options: CallOptions,
    keywords: Mapping[str, object],
) -> tuple[cupy.ndarray, ...]:
    """The results of a call of second order.

    Parameters
    ----------
    plain : Arguments
        The arrays of a call without features.
    own : tuple of (cupy.ndarray or None)
        Its inputs.
    dlse, tangents, out, options, keywords
        As the public functions have them.
    more : tuple of str
        The results besides those of `plain`.
    """
    _, _, _, bias_tangent, sink_tangent = tangents
    if not keywords and dlse is None and bias_tangent is None and sink_tangent is None and not more:
        return run(plain, (*own, *unpack_out(out, plain.results)), options)
    names, arrays, values = _split(keywords if dlse is None else {**keywords, "dlse": dlse})
    given = zip((COTANGENTS if plain is _DOUBLE_BACKWARD else TANGENTS)[3:], tangents[3:], strict=True)
    of_features = {name: array for name, array in given if array is not None}
    arguments = arguments_of(plain.call, (*names, *of_features), more)
    results = unpack_out(out, arguments.results)
    return run(arguments, (*own, *arrays, *of_features.values(), *results), options, values, keywords)


def bound(function: Callable[..., object], *args: Any) -> tuple[KernelCall, list[int]] | None:
    """What one of these functions queues for given results, and the addresses of its arrays: see `bound_call`.

    None if it depends on more than addresses: on a seed, a sparse map, or functions, whose states may change.
    """
    keywords = args[-1] if isinstance(args[-1], Mapping) else {}
    if any(name in ARGUMENTS or name in ("seed", "block_mask") for name in keywords):
        return None
    return bound_call(function, *args)


def copied(arrays: Sequence[cupy.ndarray]) -> tuple[cupy.ndarray, ...]:
    """Copies of arrays on their devices, by the current streams there."""

    def copy(array: cupy.ndarray) -> cupy.ndarray:
        with cupy.cuda.Device(array.data.device_id):
            return array.copy()

    return tuple(map(copy, arrays))


def tile_states(
    layout: MapLayout, like: cupy.ndarray | None, keywords: Mapping[str, object]
) -> tuple[cupy.ndarray, Intervals]:
    """`fa2cupy.block_mask` on CuPy arrays: one kernel evaluates the function. See `fa2cupy.cpu.tile_states`.

    Waits for the GPU once, unless a graph captures the call: whether there are intervals decides on later kernels.
    """
    names, arrays, _ = _split(keywords)
    found: tuple[str, ...] = ()
    if may_have_intervals(layout) and not is_captured(like if like is not None else arrays[0]):
        layout, found = layout._replace(intervals=(True, True)), (ROW_INTERVALS, COLUMN_INTERVALS, MOST_INTERVALS)
    keywords = {**keywords, "block_mask": layout}
    *_, values = _split(keywords)
    arguments = arguments_of("tile_states", (*names, "like"), found)
    given = (*arrays, like, *[None] * len(arguments.results))
    states, *more = run(arguments, given, CallOptions(), values, keywords)
    if not found:
        return states, NO_INTERVALS
    *intervals, most = more
    return states, Intervals(*(side if n <= 2 else None for side, n in zip(intervals, most.get(), strict=True)))


def _split(keywords: Mapping[str, object]) -> tuple[tuple[str, ...], list[cupy.ndarray | None], Items]:
    """Divides the keywords of features, without functions, for a signature: names of arrays, arrays, and other values.

    A legal seed is passed in the place of an address, so that a call with another seed is not prepared anew.
    """
    names: list[str] = []
    arrays: list[Any] = []
    values: list[tuple[str, object]] = []
    has_seed = False
    for name, x in keywords.items():
        if name in _ARRAYS:
            if x is not None:
                names.append(name)
                arrays.append(x)
        elif name in ARGUMENTS:
            continue
        elif name in _FUNCTIONS:
            given = x if type(x) is tuple else sequence_of(name, x)
            if given:
                if keywords.get(_FUNCTIONS[name]) is None:
                    raise ValueError(f"{name}: there is no {_FUNCTIONS[name]}")
                names += _names(name, len(given))
                arrays += given
        elif name == "block_mask" and isinstance(x, BlockMask):
            names.append(name)
            arrays.append(x.states)
            if any(x.layout.intervals):
                names += (ROW_INTERVALS, COLUMN_INTERVALS)
                arrays += x.intervals
            values.append((name, x.layout))
        elif name == "seed" and is_seed(x):
            has_seed = True
        else:
            values.append((name, tuple(x) if isinstance(x, list) else x))  # a list cannot be hashed
    if has_seed:
        names.append("seed")
        arrays.append(None)
    return tuple(names), arrays, tuple(values)


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
