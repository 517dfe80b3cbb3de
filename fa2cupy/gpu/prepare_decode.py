"""Prepares calls of `fa2cupy.decode`."""

from __future__ import annotations

from typing import Any

import cupy

from ..errors import UnsupportedProblemError
from ..families.choice import choose_decode
from ..families.family import Family
from ..plan.decode import plan_decode
from ..problem.arguments import check_outputs
from ..problem.attention import AttentionProblem
from ..problem.decoding import check_decode
from ..problem.features import feature_arrays
from ..problem.options import CallOptions
from ..problem.strides import AnyStrides, feature_strides
from .arguments import Arguments
from .copies import CopyingCall
from .placement import device_of, takes_rows
from .prepared import KernelCall, overlap_check

__all__ = ["prepare_decode"]

_CACHES = ("k_cache", "v_cache")
_TENSORS = ("q", "k", "v", "o")
_CONTIGUOUS = ("cache_seqlens", "block_table", "lse")


def prepare_decode(
    arguments: Arguments,
    arrays: tuple[cupy.ndarray | None, ...],
    options: CallOptions,
    scalars: tuple[tuple[str, object], ...],
) -> KernelCall | CopyingCall:
    """Makes the object that runs all calls of one signature; see `fa2cupy.gpu.prepare.prepare`."""
    arguments.check_backend(arrays)
    named: dict[str, Any] = arguments.named(arrays)
    features = feature_arrays(named)
    problem, cache, results = check_decode(named, options, dict(scalars) | features)
    ordinal, device = device_of(arguments, named)
    check_outputs(results, tuple(named[name] for name in arguments.results))
    choice = choose_decode(problem, device, options)
    _check_cache_rows(named, problem, choice.family)
    given = {name: array for name, array in named.items() if array is not None and array.size}
    copied = [name for name in _TENSORS if name in given and not takes_rows(choice.family.row_alignment, given[name])]
    copied += [name for name in _CONTIGUOUS if name in given and not given[name].flags.c_contiguous]
    strides: dict[str, AnyStrides] = dict(feature_strides(features))
    for name in (*_CACHES, *_TENSORS):
        array = named[name]
        if array is None and name != "o":
            strides[name] = (0, 0, 0)
        elif name in copied or array is None or (copied and name == "o"):
            strides[name] = problem.kernel_strides(problem.q_shape if array is None else array.shape)
        else:
            strides[name] = problem.kernel_strides(array.shape, array.strides)
    plan = plan_decode(problem, cache, device, strides, choice, cuts_jobs=options.num_splits is None)
    written = _CACHES if cache.num_new else ()
    check_overlap = overlap_check(arguments, arrays, written)
    if not copied:
        passed = [name for name in arguments.results if named[name] is not None]
        return KernelCall(plan, ordinal, arguments, results, passed, check_overlap if passed or written else None)
    inner = KernelCall(plan, ordinal, arguments, results)
    return CopyingCall(inner, arguments, results, copied, problem.head_dim, check_overlap)


def _check_cache_rows(named: dict[str, Any], problem: AttentionProblem, family: Family) -> None:
    """Checks that kernels can take the caches as they are: a cache is written in place, and too large to copy."""
    if problem.head_dim % family.head_dim_step:
        raise UnsupportedProblemError(
            f"k_cache: for {problem.dtype} a head_dim that is a multiple of {family.head_dim_step} is supported, "
            f"got {problem.head_dim}"
        )
    for name in _CACHES:
        array = named[name]
        if array.size and not takes_rows(family.row_alignment, array):
            raise ValueError(
                f"{name}: expected contiguous rows that start on {family.row_alignment} bytes, because a cache is not "
                f"copied, got strides {array.strides} at {array.data.ptr:#x}"
            )
