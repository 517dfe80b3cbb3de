"""Calls on CuPy arrays: plan once for a signature, then pack addresses and launch.

What a call must find out about its arrays depends on their shapes, strides, dtypes, devices and alignment and on the
options only. A call is therefore prepared once for each such signature, checks included, and a warm call is a dictionary
lookup, the allocation of its results and a launch per kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import cupy
import numpy as np

from . import tma
from .arguments import check_outputs, unpack_out
from .device import DeviceInfo
from .errors import UnsupportedProblemError
from .families import Family, choose_family, choose_method
from .plan import plan_backward, plan_delta, plan_forward
from .prepared import AdaptedCall, Arguments, KernelCall, Outputs, takes_rows
from .problem import AttentionProblem

__all__ = ["backward", "delta", "forward"]

_MAX_PREPARED = 4096
_prepared: dict[Hashable, Callable] = {}
_lock = threading.Lock()

_FORWARD = Arguments(("q", "k", "v"), (), ("o", "lse"))
_DELTA = Arguments(("o", "do"), (), ("delta",))
_BACKWARD = Arguments(("q", "k", "v", "o", "lse", "do", "delta"), ("delta",), ("dq", "dk", "dv"))


def forward(q, k, v, causal, softmax_scale, layout, out, config, family):
    """`fa2cupy.forward` on CuPy arrays."""
    o, lse = (None, None) if out is None else unpack_out(out, ("o", "lse"))
    return _call(_prepare_forward, _FORWARD, (q, k, v, o, lse), (causal, softmax_scale, layout, config, family))


def delta(o, do, layout, out):
    """`fa2cupy.delta` on CuPy arrays."""
    return _call(_prepare_delta, _DELTA, (o, do, out), (layout,))[0]


def backward(q, k, v, o, lse, do, causal, softmax_scale, given_delta, method, deterministic, layout, out, config, family):
    """`fa2cupy.backward` on CuPy arrays."""
    dq, dk, dv = (None, None, None) if out is None else unpack_out(out, ("dq", "dk", "dv"))
    arrays = (q, k, v, o, lse, do, given_delta, dq, dk, dv)
    options = (causal, softmax_scale, method, deterministic, layout, config, family)
    return _call(_prepare_backward, _BACKWARD, arrays, options)


def _call(prepare: Callable, arguments: Arguments, arrays: tuple, options: tuple) -> tuple:
    addresses = []
    signature = [prepare, options]
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
    key = tuple(signature)
    try:
        call = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed: a dict of tiles, or a mistake that the checks will name
        return _prepare_checked(prepare, arguments, arrays, options)(arrays, addresses)
    if call is None:
        call = _prepare_checked(prepare, arguments, arrays, options)
        with _lock:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = call
    return call(arrays, addresses)


def _prepare_checked(prepare: Callable, arguments: Arguments, arrays: tuple, options: tuple) -> Callable:
    arguments.check_backend(arrays)
    return prepare(arrays, options)


def _prepare_forward(arrays: tuple, options: tuple) -> Callable:
    q, k, v, o, lse = arrays
    causal, softmax_scale, layout, config, family = options
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    ordinal, device = _device(arrays, _FORWARD)
    outputs = (("o", problem.q_shape, q.dtype), ("lse", problem.lse_shape, np.dtype(problem.accumulator_dtype)))
    check_outputs(outputs, (o, lse))
    row = choose_family("forward", problem.dtype, device, family)
    if not _direct(row, problem, (q, k, v, o), (lse,)):

        def run(copies):
            return forward(*copies, causal, problem.softmax_scale, layout, None, config, family)

        return AdaptedCall(run, row, problem, _FORWARD, arrays)
    family = _without_tma(row, family)
    plan = plan_forward(problem, device, _strides(problem, outputs, q=q, k=k, v=v, o=o), config, family)
    return KernelCall(plan, ordinal, _FORWARD, outputs, arrays)


def _prepare_delta(arrays: tuple, options: tuple) -> Callable:
    o, do, out = arrays
    (layout,) = options
    problem = AttentionProblem.from_outputs(o, do, layout=layout)
    ordinal, device = _device(arrays, _DELTA)
    outputs = (("delta", problem.lse_shape, np.dtype(problem.accumulator_dtype)),)
    check_outputs(outputs, (out,))
    row = choose_family("delta", problem.dtype, device)
    if not _direct(row, problem, (o, do), (out,)):
        return AdaptedCall(lambda copies: (delta(*copies, layout, None),), row, problem, _DELTA, arrays)
    plan = plan_delta(problem, device, _strides(problem, outputs, o=o, dout=do))
    return KernelCall(plan, ordinal, _DELTA, outputs, arrays)


def _prepare_backward(arrays: tuple, options: tuple) -> Callable:
    q, k, v, o, lse, do, given_delta, dq, dk, dv = arrays
    causal, softmax_scale, method, deterministic, layout, config, family = options
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    problem.check_backward_inputs(o, lse, do, given_delta)
    ordinal, device = _device(arrays, _BACKWARD)
    outputs = (("dq", problem.q_shape, q.dtype), ("dk", problem.k_shape, q.dtype), ("dv", problem.k_shape, q.dtype))
    check_outputs(outputs, (dq, dk, dv))
    row = choose_family("backward", problem.dtype, device, family)
    method = choose_method(row.name, problem, method, deterministic)
    if not _direct(row, problem, (q, k, v, o, do, dq, dk, dv), (lse, given_delta)):

        def run(copies):
            return backward(
                *copies[:6], causal, problem.softmax_scale, copies[6], method, deterministic, layout, None, config, family
            )

        return AdaptedCall(run, row, problem, _BACKWARD, arrays)
    strides = _strides(problem, outputs, q=q, k=k, v=v, o=o, dout=do, dq=dq, dk=dk, dv=dv)
    family = _without_tma(row, family)
    plan = plan_backward(problem, device, strides, method, config, family, with_delta=given_delta is None)
    return KernelCall(plan, ordinal, _BACKWARD, outputs, arrays)


def _without_tma(row: Family, family: str | None) -> str | None:
    """The caller's family, or the one to insist on where tensor maps cannot be made."""
    if row.name != "sm90" or tma.is_available():
        return family
    if family:
        raise UnsupportedProblemError("family 'sm90' needs cuda-bindings: pip install 'fa2cupy[cuda12]'")
    return "sm80"


def _device(arrays: tuple, arguments: Arguments) -> tuple[int, DeviceInfo]:
    first = arrays[0].data.device_id
    for name, array in zip(arguments.names, arrays, strict=True):
        if array is not None and array.data.device_id != first:
            like = f"device {first} like {arguments.inputs[0]}"
            raise ValueError(f"{name}: expected an array on {like}, got device {array.data.device_id}")
    with cupy.cuda.Device(first):
        return first, DeviceInfo.current()


def _strides(problem: AttentionProblem, outputs: Outputs, **tensors) -> dict[str, tuple[int, int, int]]:
    shapes = {name: shape for name, shape, _ in outputs}
    return {
        name: problem.kernel_strides(shapes[name]) if array is None else problem.kernel_strides(array.shape, array.strides)
        for name, array in tensors.items()
    }


def _direct(family: Family, problem: AttentionProblem, tensors: tuple, statistics: tuple) -> bool:
    """Whether the kernels take all arrays as they are (None stands for one that will be allocated)."""
    return (
        problem.head_dim % family.head_dim_step == 0
        and all(a is None or takes_rows(family, a) for a in tensors)
        and all(a is None or a.size == 0 or a.flags.c_contiguous for a in statistics)
    )
