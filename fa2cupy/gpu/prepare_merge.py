"""Prepares calls of `fa2cupy.merge`."""

from __future__ import annotations

import cupy

from ..families.choice import choose
from ..plan.calls import plan_merge
from ..problem.arguments import check_outputs
from ..problem.checks import check_merge
from ..problem.options import CallOptions
from .arguments import Arguments
from .copies import CopyingCall
from .placement import device_of, takes_rows
from .prepared import KernelCall, overlap_check

__all__ = ["prepare_merge"]


def prepare_merge(
    arguments: Arguments,
    arrays: tuple[cupy.ndarray | None, ...],
    options: CallOptions,
    scalars: tuple[tuple[str, object], ...],
) -> KernelCall | CopyingCall:
    """Makes the object that runs all calls of one signature; see `fa2cupy.gpu.prepare.prepare`."""
    arguments.check_backend(arrays)
    named = arguments.named(arrays)
    problem, results = check_merge(named, options)
    ordinal, device = device_of(arguments, named)
    check_outputs(results, tuple(named[name] for name in arguments.results))
    choice = choose("merge", problem, device, {}, options)
    check_overlap = overlap_check(arguments, arrays)
    step = choice.family.row_alignment if problem.head_dim % choice.family.head_dim_step == 0 else 1
    copied = [
        name
        for name, array in named.items()
        if array is not None
        and array.size
        and not (array.flags.c_contiguous if name.startswith("lse") else takes_rows(step, array))
    ]
    in_place = {name: named[name] for name in arguments.inputs if name not in copied}
    if not copied:
        in_place |= {name: named[name] for name in arguments.results}
    parts = in_place.get("o_parts")
    num_parts = named["o_parts"].shape[0]  # type: ignore[union-attr]  # it has been checked
    shape = (num_parts, *problem.q_shape)
    between = problem.kernel_strides(*((shape[1:],) if parts is None else (shape[1:], parts.strides[1:])))
    o = in_place.get("o")
    strides = {
        "o_parts": between,
        "o": problem.kernel_strides(*((problem.o_shape,) if o is None else (o.shape, o.strides))),
    }
    part_stride = problem.num_elements if parts is None else parts.strides[0] // problem.itemsize
    plan = plan_merge(problem, device, strides, choice, num_parts, part_stride)
    if not copied:
        given = [name for name in arguments.results if named[name] is not None]
        return KernelCall(plan, ordinal, arguments, results, given, check_overlap if given else None)
    inner = KernelCall(plan, ordinal, arguments, results)
    return CopyingCall(inner, arguments, results, copied, problem.head_dim, check_overlap)
