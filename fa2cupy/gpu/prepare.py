"""Prepares a call: checks it, chooses and plans its kernels, and finds which arrays must be copied."""

from __future__ import annotations

from collections.abc import Mapping

import cupy
import numpy as np

from ..errors import UnsupportedProblemError
from ..families.choice import choose
from ..families.device import DeviceInfo
from ..families.family import Family
from ..families.registry import choose_family
from ..plan.calls import plan_backward, plan_delta, plan_forward
from ..plan.stages import Plan
from ..problem.arguments import check_outputs
from ..problem.attention import ROWS_OF, AttentionProblem
from ..problem.checks import Request, Result, check_backward, check_delta, check_forward
from ..problem.features import OFFSETS, feature_arrays
from ..problem.options import CallOptions
from ..problem.strides import (
    AnyStrides,
    argument_layouts,
    contiguous_score_strides,
    feature_strides,
    score_strides,
)
from .arguments import Arguments, function_arguments, kernel_name
from .copies import CopyingCall
from .placement import device_of, takes_rows
from .prepared import KernelCall, overlap_check

__all__ = ["prepare"]

_CONTIGUOUS = ("lse", "delta", "dlse", "dsink", *OFFSETS)


def prepare(
    arguments: Arguments,
    arrays: tuple[cupy.ndarray | None, ...],
    options: CallOptions,
    scalars: tuple[tuple[str, object], ...],
) -> KernelCall | CopyingCall:
    """Makes the object that runs all calls of one signature, given their arrays and addresses.

    Parameters
    ----------
    arguments : Arguments
        Names of the arrays.
    arrays : tuple of (cupy.ndarray or None)
        Arrays of the signature; their contents are not used.
    options : CallOptions
    scalars : tuple of (name, value)
        Keywords of features that are not arrays.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError
        As for `fa2cupy.forward`.
    """
    arguments.check_backend(arrays)
    named = arguments.named(arrays)
    features = feature_arrays(named)
    keywords = dict(scalars) | features | function_arguments(named)
    problem, results = _check(arguments.call, named, options, keywords)
    ordinal, device = device_of(arguments, named)
    check_outputs(results, tuple(named[name] for name in arguments.results))
    settings = problem.settings
    sums_dbias = settings.dbias and not settings.full_dbias
    if options.deterministic:
        _check_deterministic(problem, features)
    family = choose_family(arguments.call, problem.dtype, device, options.family, problem.features, options.precision)
    kernels = _Kernels(arguments, named, options, device)
    check_overlap = overlap_check(arguments, arrays)
    copied = [name for name in arguments.names if _must_be_copied(name, named[name], problem, family)]
    if not (copied or sums_dbias or settings.dscore_args):
        given = [name for name in arguments.results if named[name] is not None]
        plan = kernels.plan(problem, in_place=named)
        return KernelCall(plan, ordinal, arguments, results, given, check_overlap if given else None)
    padded = problem.padded(family.head_dim_step)
    in_place = {name: named[name] for name in arguments.inputs if name not in copied}
    inner_results = _padded_results(padded, results, sums_dbias)
    inner = KernelCall(kernels.plan(padded, in_place), ordinal, arguments, inner_results)
    return CopyingCall(inner, arguments, results, copied, padded.head_dim, check_overlap)


class _Kernels:
    """Plans the kernels of a call, for its problem or for the padded one."""

    def __init__(
        self,
        arguments: Arguments,
        named: Mapping[str, cupy.ndarray | None],
        options: CallOptions,
        device: DeviceInfo,
    ):
        self._call = arguments.call
        self._tensors = [name for name in arguments.names if _is_tensor(name)]
        self._features = feature_arrays(named)
        self._arguments = function_arguments(named)
        self._with_delta = named.get("delta") is None
        self._options, self._device = options, device

    def plan(self, problem: AttentionProblem, in_place: Mapping[str, cupy.ndarray | None]) -> Plan:
        """Chooses and plans the kernels. Tensors outside `in_place` lie in C order, in the problem's shapes."""
        strides = self._strides(problem, in_place)
        device = self._device
        choice = choose(self._call, problem, device, strides, self._options)
        if self._call == "forward":
            return plan_forward(problem, device, strides, choice)
        if self._call == "delta":
            return plan_delta(problem, device, strides, choice)
        return plan_backward(problem, device, strides, choice, with_delta=self._with_delta)

    def _strides(self, problem: AttentionProblem, in_place: Mapping[str, cupy.ndarray | None]) -> dict[str, AnyStrides]:
        strides: dict[str, AnyStrides] = dict(feature_strides(self._features))
        strides |= argument_layouts(self._arguments)
        for name in self._tensors:
            in_kernel, array = kernel_name(name), in_place.get(name)
            layout = (problem.shape_of(in_kernel),) if array is None else (array.shape, array.strides)
            strides[in_kernel] = problem.kernel_strides(*layout)
        if problem.settings.dbias:
            given = in_place.get("dbias")
            shape = self._features["bias"].shape
            strides["dbias"] = contiguous_score_strides(shape) if given is None else score_strides("dbias", given)
        return strides


def _check(
    call: str, named: Mapping[str, cupy.ndarray | None], options: CallOptions, keywords: Mapping[str, object]
) -> Request:
    if call == "delta":
        return check_delta(named, options)
    return (check_forward if call == "forward" else check_backward)(named, options, keywords)


def _check_deterministic(problem: AttentionProblem, features: Mapping[str, cupy.ndarray]) -> None:
    """Raises UnsupportedProblemError if the call returns gradients that its kernels add up in any order."""
    settings = problem.settings
    if settings.dbias and not settings.full_dbias:
        raise UnsupportedProblemError(
            f"return_dbias: for a bias that is broadcast, here {features['bias'].shape}, it is summed atomically; "
            "not with deterministic"
        )
    if settings.dscore_args:
        raise UnsupportedProblemError("return_dscore_args: they are summed atomically; not with deterministic")


def _is_tensor(name: str) -> bool:
    """True if the array has head_dim columns."""
    return ROWS_OF.get(kernel_name(name)) in ("queries", "keys")


def _must_be_copied(name: str, array: cupy.ndarray | None, problem: AttentionProblem, family: Family) -> bool:
    """True if the kernels cannot take the array as it is. None stands for an absent input or a result to allocate."""
    if _is_tensor(name) and (problem.head_dim_v is not None or problem.head_dim % family.head_dim_step):
        return True
    if array is None or array.size == 0:
        return False
    if _is_tensor(name):
        return not takes_rows(family.row_alignment, array)
    return name in _CONTIGUOUS and not array.flags.c_contiguous


def _padded_results(padded: AttentionProblem, results: tuple[Result, ...], sums_dbias: bool) -> tuple[Result, ...]:
    """The results that kernels of the padded problem write: sums of dbias and dscore_args are rounded afterwards."""

    def of(result: Result) -> Result:
        if _is_tensor(result.name):
            return result._replace(shape=padded.shape_of(kernel_name(result.name)))
        if result.name.startswith("dscore_args") or (result.name == "dbias" and sums_dbias):
            return result._replace(dtype=np.dtype(padded.accumulator_dtype))
        return result

    return tuple(map(of, results))
