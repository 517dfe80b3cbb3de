"""Prepares a call: checks it, chooses and plans its kernels, and finds which arrays must be copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cupy
import numpy as np

from ..families.choice import Choice, choose_with_copies
from ..families.device import DeviceInfo
from ..families.family import Family
from ..jit.spec import KernelSpec
from ..plan.decode import plan_decode
from ..plan.plans import (
    plan_backward,
    plan_delta,
    plan_forward,
    plan_gradient_tangents,
    plan_jvp,
    plan_merge,
    plan_output_jvp,
    plan_tile_states,
)
from ..plan.stages import Plan
from ..problem.arguments import check_outputs, takes_rows
from ..problem.attention import MAX_HEAD_DIM, AttentionProblem
from ..problem.checks import (
    Request,
    Result,
    check_backward,
    check_delta,
    check_forward,
    check_merge,
    check_tile_states,
    with_band,
)
from ..problem.decoding import CACHES, check_caches, check_decode
from ..problem.features import OFFSETS
from ..problem.options import CallOptions
from ..problem.strides import (
    AnyStrides,
    argument_layouts,
    contiguous_score_strides,
    feature_strides,
    score_strides,
)
from ..problem.tangents import (
    COTANGENTS,
    TANGENTS,
    Tangents,
    check_backward_jvp,
    check_double_backward,
    check_jvp,
    check_output_jvp,
)
from .arguments import IN_KERNELS, TENSORS, Arguments
from .copies import CopyingCall
from .prepared import KernelCall, overlap_check

__all__ = ["kernels_of", "prepare"]

_CONTIGUOUS = (
    "lse",
    "lset",
    "gdlse",
    "dlset",
    "lse_parts",
    "delta",
    "dlse",
    "dsink",
    "dsinkt",
    "gsink",
    "cache_seqlens",
    "block_table",
    *OFFSETS,
)

_Arrays = Mapping[str, Any]


def prepare(
    arguments: Arguments,
    arrays: tuple[cupy.ndarray | None, ...],
    options: CallOptions,
    keywords: Mapping[str, Any],
) -> KernelCall | CopyingCall:
    """Makes the object that runs all calls of one signature, given their arrays and addresses.

    Parameters
    ----------
    arguments : Arguments
        Names of the arrays.
    arrays : tuple of (cupy.ndarray or None)
        CuPy arrays of the signature; their contents are not used.
    options : CallOptions
    keywords : mapping
        Those of features, with programs in place of functions.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError
        As for `fa2cupy.forward`.
    """
    named = dict(zip(arguments.names, arrays, strict=True))
    (problem, results), ordinal, taken, plan = _planned(arguments, named, options, keywords)
    given = [name for name in arguments.results if named[name] is not None and name not in taken.copied]
    written = CACHES if problem.cache is not None and problem.cache.num_new else ()
    compared = arrays
    if problem.head_dim > MAX_HEAD_DIM:  # v_cache lies in k_cache
        compared = tuple(None if n == "v_cache" else array for n, array in zip(arguments.names, arrays, strict=True))
    check_overlap = overlap_check(arguments, compared, written)
    # Kernels read an element for a packed sequence even if none has a key. A row of q has the bytes of one.
    inputs = {name: named[name] for name in arguments.inputs if problem.is_packed and name not in TENSORS}
    empty = [name for name, array in inputs.items() if array is not None and not array.size]
    replaced = dict.fromkeys(empty, "q")
    if not taken.copied:
        overlap = check_overlap if given or written else None
        return KernelCall(plan, ordinal, arguments, results, given, overlap, replaced)
    inner = KernelCall(plan, ordinal, arguments, _inner_results(taken, results), given, replaced=replaced)
    return CopyingCall(inner, arguments, results, taken.copied, taken.problem.columns_of, check_overlap)


def kernels_of(
    arguments: Arguments,
    inputs: tuple[cupy.ndarray, ...],
    options: CallOptions,
    keywords: Mapping[str, Any],
) -> list[KernelSpec]:
    """The kernels of a backward that follows a forward with these inputs, before there are o, lse and do.

    Parameters are those of `prepare`, but for q, k, v and the features' arrays in place of all arrays.
    """
    named: dict[str, Any] = dict.fromkeys(arguments.names)
    named |= zip(("q", "k", "v", *arguments.inputs[7:]), inputs, strict=True)
    results = check_forward(named, options, keywords).results
    o, lse = (cupy.ndarray(result.shape, result.dtype, inputs[0].data) for result in results)  # nothing reads them
    *_, plan = _planned(arguments, named | {"o": o, "lse": lse, "do": o}, options, keywords)
    return [stage.spec for stage in plan.stages]


def _planned(
    arguments: Arguments, named: _Arrays, options: CallOptions, keywords: Mapping[str, Any]
) -> tuple[Request, int, _Taken, Plan]:
    """The checked call, the number of its device, what kernels take of it, and its plan."""
    call = arguments.call
    request = _CHECKS[call](named, options, keywords)
    if request.problem.settings.functions and call != "tile_states":  # which evaluates the function
        request = request._replace(problem=with_band(request.problem))
    ordinal, device = _device_of(arguments, named)
    check_outputs(request.results, tuple([named[name] for name in arguments.results]))
    taken_by = functools.cache(functools.partial(_taken_by, arguments, named, request, keywords))
    choice = choose_with_copies(call, request.problem, device, lambda family: taken_by(family, False)[:2], options)
    taken = taken_by(choice.family, choice.owns_dbias)
    return request, ordinal, taken, _plan(call, named, taken, device, choice, options)


#: The check of each kind of call.
_CHECKS: dict[str, Callable[[_Arrays, CallOptions, Mapping[str, Any]], Request]] = {
    "forward": check_forward,
    "delta": lambda arrays, options, keywords: check_delta(arrays, options),
    "backward": check_backward,
    "decode": check_decode,
    "merge": lambda arrays, options, keywords: check_merge(arrays, options),
    "tile_states": lambda arrays, options, keywords: check_tile_states(keywords),
    "jvp": lambda arrays, *more: check_jvp(arrays, _tangents(TANGENTS, arrays), *more),
    "output_jvp": lambda arrays, *more: check_output_jvp(arrays, _tangents(TANGENTS, arrays), *more),
    "backward_jvp": lambda arrays, *more: check_backward_jvp(arrays, _tangents(TANGENTS, arrays), *more),
    "double_backward": lambda arrays, *more: check_double_backward(arrays, _tangents(COTANGENTS, arrays), *more),
}


def _tangents(names: tuple[str, ...], named: _Arrays) -> Tangents:
    return Tangents(*(named.get(name) for name in names))


#: The plans of calls that need nothing besides.
_PLANS = {
    "forward": plan_forward,
    "delta": plan_delta,
    "tile_states": plan_tile_states,
    "jvp": plan_jvp,
    "output_jvp": plan_output_jvp,
    "backward_jvp": plan_gradient_tangents,
    "double_backward": plan_gradient_tangents,
}


def _plan(
    call: str,
    named: _Arrays,
    taken: _Taken,
    device: DeviceInfo,
    choice: Choice,
    options: CallOptions,
) -> Plan:
    problem, strides = taken.problem, taken.strides
    if call == "decode":
        return plan_decode(problem, device, strides, choice, cuts_jobs=options.num_splits is None)
    if call == "backward":
        return plan_backward(problem, device, strides, choice, with_delta=named["delta"] is None)
    if call == "merge":
        parts = named["o_parts"]
        is_copied = "o_parts" in taken.copied
        part_stride = problem.num_elements if is_copied else parts.strides[0] // problem.itemsize
        return plan_merge(problem, device, strides, choice, parts.shape[0], part_stride)
    return _PLANS[call](problem, device, strides, choice)


class _Taken(NamedTuple):
    """A call as the kernels of a family take it.

    Attributes
    ----------
    problem : AttentionProblem
        With the head_dim of the kernels.
    strides : dict
        Those of all tensors and of the features' arrays, by their names in kernels.
    copied : tuple of str
        The inputs and results that kernels cannot take as they are, among them tensors for which they have another
        head_dim, and gradients that they add up in the accumulators' dtype.
    """

    problem: AttentionProblem
    strides: dict[str, AnyStrides]
    copied: tuple[str, ...]


def _taken_by(
    arguments: Arguments,
    named: _Arrays,
    request: Request,
    keywords: Mapping[str, Any],
    family: Family,
    owns_dbias: bool,
) -> _Taken:
    problem = request.problem
    alignment, padded = family.row_alignment, family.padded(problem)
    if arguments.call == "decode":
        addresses = [named[name].data.ptr for name in CACHES]
        check_caches(named, problem, family.head_dim_step, alignment, addresses)
    elif arguments.call in ("merge", "tile_states") and padded is not problem:
        alignment, padded = 1, problem  # their kernels take single elements then
    widened: set[str] = set()
    if padded is not problem:
        widened = {name for name in TENSORS if padded.columns_of(name) != problem.columns_of(name)}
        problem = padded
    copied = tuple(
        name
        for name, array in named.items()
        if name in widened
        or _is_summed(name, problem, owns_dbias)
        or _must_be_copied(name, array, alignment)
        or _is_not_flat(name, array, problem)
    )
    strides: dict[str, AnyStrides] = {}
    if keywords:
        strides |= feature_strides(keywords, problem.leading) | argument_layouts(keywords)
    shapes = {result.name: result.shape for result in request.results}
    for name, in_kernel in zip(arguments.names, arguments.kernel_names, strict=True):
        array = named[name]
        is_new = array is None or name in copied
        shape = shapes.get(name, ()) if array is None else array.shape
        if in_kernel == "dbias":
            strides[in_kernel] = (
                contiguous_score_strides(shape, problem.leading)
                if is_new or not array.size
                else score_strides(in_kernel, array, problem.leading)
            )
        elif in_kernel in ("bias_tangent", "sink_tangent"):
            strides[in_kernel] = score_strides(in_kernel, array, problem.leading)
        if name not in TENSORS:
            continue
        if not shape:
            strides[in_kernel] = (0, 0, 0)  # there is no such input
            continue
        if name in widened:
            shape = *shape[:-1], problem.columns_of(name)
        of_array = None if is_new else array.strides
        if name == "o_parts":
            shape, of_array = shape[1:], None if of_array is None else of_array[1:]
        strides[in_kernel] = problem.kernel_strides(shape, of_array)
    return _Taken(problem, strides, copied)


def _is_summed(name: str, problem: AttentionProblem, owns_dbias: bool) -> bool:
    """True if kernels add a gradient up in the accumulators' dtype, so that it is rounded afterwards."""
    is_dbias = IN_KERNELS.get(name, name) == "dbias"
    return name.startswith("dscore_args") or (is_dbias and problem.settings.sums_dbias and not owns_dbias)


def _must_be_copied(name: str, array: cupy.ndarray | None, alignment: int) -> bool:
    """True if the kernels cannot take the rows of the array. None is an absent input, or a result to allocate."""
    if array is None or array.size == 0 or name in CACHES:
        return False
    if name in TENSORS:
        return not takes_rows(alignment, array, array.data.ptr)
    return name in _CONTIGUOUS and not array.flags.c_contiguous


def _is_not_flat(name: str, array: cupy.ndarray | None, problem: AttentionProblem) -> bool:
    """True if the leading axes of a tensor have no stride in common."""
    return bool(problem.leading) and array is not None and name in TENSORS and not problem.has_flat_batch(array)


def _inner_results(taken: _Taken, results: tuple[Result, ...]) -> tuple[Result, ...]:
    """The results that kernels of the padded problem write."""
    problem = taken.problem

    def of(result: Result) -> Result:
        if result.name in TENSORS:
            return result._replace(shape=(*result.shape[:-1], problem.columns_of(result.name)))
        if result.name in taken.copied and _is_summed(result.name, problem, False):
            return result._replace(dtype=np.dtype(problem.accumulator_dtype))
        return result

    return tuple(map(of, results))


def _device_of(arguments: Arguments, named: _Arrays) -> tuple[int, DeviceInfo]:
    """The device of all arrays. Raises ValueError if there are several."""
    ordinals = {name: array.data.device_id for name, array in named.items() if array is not None}
    first_name, first = next(iter(ordinals.items()))
    for name, ordinal in ordinals.items():
        if ordinal != first:
            like = f"device {first} like {first_name}"
            raise ValueError(f"{arguments.labels[name]}: expected an array on {like}, got device {ordinal}")
    with cupy.cuda.Device(first):
        return first, DeviceInfo.current()
