"""Calls on CuPy arrays: plan once for a signature, then pack addresses and launch.

What a call must find out about its arrays depends on their shapes, strides, dtypes, devices and alignment and on the
options only. A call is therefore prepared once for each such signature, checks included, and a warm call is a dictionary
lookup, the allocation of its results and a launch per kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import cupy
from cupy.cuda import runtime

from .device import DeviceInfo
from .families import Family, choose_family, choose_method
from .launch import bind_plan
from .plan import Plan, plan_backward, plan_delta, plan_forward
from .problem import AttentionProblem, check_array, check_outputs, check_overlap, unpack_out

__all__ = ["backward", "delta", "forward"]

_MAX_PREPARED = 4096
_prepared: dict[Hashable, Callable] = {}
_lock = threading.Lock()

_STATISTICS = ("lse", "delta")  # one number a row, instead of head_dim columns

#: (name, shape, dtype) of each result of a call.
Outputs = tuple[tuple[str, tuple[int, ...], object], ...]


def forward(q, k, v, causal, softmax_scale, layout, out, config, family):
    """`fa2cupy.forward` on CuPy arrays."""
    arrays = (q, k, v, *unpack_out(out, ("o", "lse")))
    return _call(_prepare_forward, arrays, (causal, softmax_scale, layout, config, family))


def delta(o, do, layout, out):
    """`fa2cupy.delta` on CuPy arrays."""
    return _call(_prepare_delta, (o, do, out), (layout,))[0]


def backward(q, k, v, o, lse, do, causal, softmax_scale, given_delta, method, deterministic, layout, out, config, family):
    """`fa2cupy.backward` on CuPy arrays."""
    arrays = (q, k, v, o, lse, do, given_delta, *unpack_out(out, ("dq", "dk", "dv")))
    return _call(_prepare_backward, arrays, (causal, softmax_scale, method, deterministic, layout, config, family))


def _call(prepare: Callable, arrays: tuple, options: tuple) -> tuple:
    signature = [None if a is None else (a.shape, a.strides, a.dtype, a.data.device_id, a.data.ptr % 16) for a in arrays]
    key = (prepare, options, *signature)
    try:
        call = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed: a dict of tiles, or a mistake that the checks will name
        return prepare(arrays, options)(arrays)
    if call is None:
        call = prepare(arrays, options)
        with _lock:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = call
    return call(arrays)


def _prepare_forward(arrays: tuple, options: tuple) -> Callable:
    q, k, v, o, lse = arrays
    causal, softmax_scale, layout, config, family = options
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    ordinal, device = _device(arrays, ("q", "k", "v", "o", "lse"))
    outputs = (("o", problem.q_shape, q.dtype), ("lse", problem.lse_shape, problem.accumulator_dtype))
    check_outputs(outputs, (o, lse))
    row = choose_family(problem.dtype, device, family)
    if not _direct(row, problem, (q, k, v, o), (lse,)):

        def run(copies):
            return forward(*copies, causal, problem.softmax_scale, layout, None, config, family)

        return _Adapted(run, row, problem, ("q", "k", "v"), outputs)
    plan = plan_forward(problem, device, _strides(problem, outputs, q=q, k=k, v=v, o=o), config, row.name)
    return _Call(plan, ordinal, ("q", "k", "v"), outputs)


def _prepare_delta(arrays: tuple, options: tuple) -> Callable:
    o, do, out = arrays
    (layout,) = options
    problem = AttentionProblem.from_outputs(o, do, layout=layout)
    ordinal, device = _device(arrays, ("o", "do", "out"))
    outputs = (("delta", problem.lse_shape, problem.accumulator_dtype),)
    check_outputs(outputs, (out,))
    row = choose_family(problem.dtype, device)
    if not _direct(row, problem, (o, do), (out,)):
        return _Adapted(lambda copies: (delta(*copies, layout, None),), row, problem, ("o", "do"), outputs)
    plan = plan_delta(problem, device, _strides(problem, outputs, o=o, dout=do))
    return _Call(plan, ordinal, ("o", "dout"), outputs)


def _prepare_backward(arrays: tuple, options: tuple) -> Callable:
    q, k, v, o, lse, do, given_delta, dq, dk, dv = arrays
    causal, softmax_scale, method, deterministic, layout, config, family = options
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    problem.check_backward_inputs(o, lse, do, given_delta)
    ordinal, device = _device(arrays, ("q", "k", "v", "o", "lse", "do", "delta", "dq", "dk", "dv"))
    outputs = (("dq", problem.q_shape, q.dtype), ("dk", problem.k_shape, q.dtype), ("dv", problem.k_shape, q.dtype))
    check_outputs(outputs, (dq, dk, dv))
    row = choose_family(problem.dtype, device, family)
    method = choose_method(row.name, method, deterministic)
    inputs = ("q", "k", "v", "o", "lse", "dout", "delta")
    if not _direct(row, problem, (q, k, v, o, do, dq, dk, dv), (lse, given_delta)):

        def run(copies):
            return backward(
                *copies[:6], causal, problem.softmax_scale, copies[6], method, deterministic, layout, None, config, family
            )

        return _Adapted(run, row, problem, inputs, outputs)
    strides = _strides(problem, outputs, q=q, k=k, v=v, o=o, dout=do, dq=dq, dk=dk, dv=dv)
    plan = plan_backward(problem, device, strides, method, config, row.name, with_delta=given_delta is None)
    return _Call(plan, ordinal, inputs, outputs)


def _device(arrays: tuple, names: tuple[str, ...]) -> tuple[int, DeviceInfo]:
    first = arrays[0].data.device_id
    for name, array in zip(names, arrays, strict=True):
        if array is not None and array.data.device_id != first:
            raise ValueError(f"{name}: expected an array on device {first} like {names[0]}, got device {array.data.device_id}")
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
        and all(a is None or _takes_rows(family, a) for a in tensors)
        and all(a is None or a.flags.c_contiguous for a in statistics)
    )


def _takes_rows(family: Family, array) -> bool:
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return False
    step = family.row_alignment
    starts = (s for s, length in zip(array.strides[:-1], array.shape[:-1], strict=True) if length > 1)
    return array.data.ptr % step == 0 and all(s % step == 0 for s in starts)


class _Call:
    """A prepared call on arrays that the kernels take as they are."""

    def __init__(self, plan: Plan, ordinal: int, inputs: tuple[str, ...], outputs: Outputs):
        self.ordinal = ordinal
        self.inputs = inputs
        self.outputs = outputs
        self.workspaces = plan.workspaces
        self.cleared = plan.cleared
        with cupy.cuda.Device(ordinal):
            self.stages = bind_plan(plan)

    def __call__(self, arrays: tuple) -> tuple:
        if runtime.getDevice() == self.ordinal:
            return self._run(arrays)
        with cupy.cuda.Device(self.ordinal):
            return self._run(arrays)

    def _run(self, arrays: tuple) -> tuple:
        buffers = dict(zip(self.inputs, arrays, strict=False))
        given = arrays[len(self.inputs) :]
        if given.count(None) != len(given):
            _check_given(self.inputs, self.outputs, arrays)
        for (name, shape, dtype), array in zip(self.outputs, given, strict=True):
            buffers[name] = cupy.empty(shape, dtype) if array is None else array
        # Freed on return, before the kernels end: CuPy's pool hands the memory only to later work of the same stream.
        for workspace in self.workspaces:
            buffers[workspace.name] = cupy.empty(workspace.elements, workspace.dtype)
        for name in self.cleared:
            _clear(buffers[name])
        addresses = {name: array.data.ptr for name, array in buffers.items() if array is not None}
        for stage in self.stages:
            stage(addresses)
        return tuple([buffers[name] for name, _, _ in self.outputs])


class _Adapted:
    """A prepared call with arrays that the kernels do not take: it runs on copies, and copies the results back."""

    def __init__(self, run: Callable, family: Family, problem: AttentionProblem, inputs: tuple[str, ...], outputs: Outputs):
        self.run = run
        self.family = family
        self.head_dim = problem.head_dim
        self.padded = -(-problem.head_dim // family.head_dim_step) * family.head_dim_step
        self.inputs = inputs
        self.outputs = outputs

    def __call__(self, arrays: tuple) -> tuple:
        given = arrays[len(self.inputs) :]
        _check_given(self.inputs, self.outputs, arrays)
        with cupy.cuda.Device(arrays[0].data.device_id):
            results = self.run([self._copy(name, a) for name, a in zip(self.inputs, arrays, strict=False)])
            return tuple([
                self._deliver(name, r, g) for (name, _, _), r, g in zip(self.outputs, results, given, strict=True)
            ])

    def _copy(self, name: str, array):
        if array is None:
            return None
        if name in _STATISTICS:
            return cupy.ascontiguousarray(array)
        if self.padded != self.head_dim:
            padded = cupy.zeros((*array.shape[:-1], self.padded), array.dtype)
            padded[..., : self.head_dim] = array
            return padded
        return array if _takes_rows(self.family, array) else array.copy(order="C")

    def _deliver(self, name: str, result, given):
        if name not in _STATISTICS:
            result = result[..., : self.head_dim]
        if given is None:
            return cupy.ascontiguousarray(result)
        given[...] = result
        return given


def _check_given(inputs: tuple[str, ...], outputs: Outputs, arrays: tuple) -> None:
    named = dict(zip((*inputs, *[name for name, _, _ in outputs]), arrays, strict=True))
    written = {name for name, _, _ in outputs}
    check_overlap(
        {name: a for name, a in named.items() if name in written and a is not None},
        {name: a for name, a in named.items() if name not in written and a is not None},
    )


def _clear(array) -> None:
    if array.flags.c_contiguous:
        array.data.memset_async(0, array.nbytes)
    else:
        array.fill(0)
