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
from cupy.cuda import runtime

from .device import DeviceInfo
from .families import Family, choose_family, choose_method
from .launch import bind_plan
from .plan import Plan, plan_backward, plan_delta, plan_forward
from .problem import AttentionProblem, array_backend, check_outputs, check_overlap, unpack_out

__all__ = ["backward", "delta", "forward"]

_MAX_PREPARED = 4096
_prepared: dict[Hashable, Callable] = {}
_lock = threading.Lock()

_STATISTICS = ("lse", "delta")  # one number a row, instead of head_dim columns
_FORWARD = ("q", "k", "v", "o", "lse")
_DELTA = ("o", "do", "delta")
_BACKWARD = ("q", "k", "v", "o", "lse", "do", "delta", "dq", "dk", "dv")

#: (name, shape, dtype) of each result of a call.
Outputs = tuple[tuple[str, tuple[int, ...], np.dtype], ...]


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


def _call(prepare: Callable, names: tuple[str, ...], arrays: tuple, options: tuple) -> tuple:
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
        array_backend(**dict(zip(names, arrays, strict=True)))  # says which argument is no CuPy array
        raise
    key = tuple(signature)
    try:
        call = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed: a dict of tiles, or a mistake that the checks will name
        return prepare(arrays, options)(arrays, addresses)
    if call is None:
        call = prepare(arrays, options)
        with _lock:
            if len(_prepared) >= _MAX_PREPARED:
                _prepared.clear()
            _prepared[key] = call
    return call(arrays, addresses)


def _prepare_forward(arrays: tuple, options: tuple) -> Callable:
    q, k, v, o, lse = arrays
    causal, softmax_scale, layout, config, family = options
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    ordinal, device = _device(arrays, _FORWARD)
    outputs = (("o", problem.q_shape, q.dtype), ("lse", problem.lse_shape, np.dtype(problem.accumulator_dtype)))
    check_outputs(outputs, (o, lse))
    row = choose_family(problem.dtype, device, family)
    if not _direct(row, problem, (q, k, v, o), (lse,)):

        def run(copies):
            return forward(*copies, causal, problem.softmax_scale, layout, None, config, family)

        return _Adapted(run, row, problem, _FORWARD, outputs)
    plan = plan_forward(problem, device, _strides(problem, outputs, q=q, k=k, v=v, o=o), config, row.name)
    return _Call(plan, ordinal, _FORWARD, outputs, arrays)


def _prepare_delta(arrays: tuple, options: tuple) -> Callable:
    o, do, out = arrays
    (layout,) = options
    problem = AttentionProblem.from_outputs(o, do, layout=layout)
    ordinal, device = _device(arrays, _DELTA)
    outputs = (("delta", problem.lse_shape, np.dtype(problem.accumulator_dtype)),)
    check_outputs(outputs, (out,))
    row = choose_family(problem.dtype, device)
    if not _direct(row, problem, (o, do), (out,)):
        return _Adapted(lambda copies: (delta(*copies, layout, None),), row, problem, _DELTA, outputs)
    plan = plan_delta(problem, device, _strides(problem, outputs, o=o, dout=do))
    return _Call(plan, ordinal, _DELTA, outputs, arrays)


def _prepare_backward(arrays: tuple, options: tuple) -> Callable:
    q, k, v, o, lse, do, given_delta, dq, dk, dv = arrays
    causal, softmax_scale, method, deterministic, layout, config, family = options
    problem = AttentionProblem.from_arrays(q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout)
    problem.check_backward_inputs(o, lse, do, given_delta)
    ordinal, device = _device(arrays, _BACKWARD)
    outputs = (("dq", problem.q_shape, q.dtype), ("dk", problem.k_shape, q.dtype), ("dv", problem.k_shape, q.dtype))
    check_outputs(outputs, (dq, dk, dv))
    row = choose_family(problem.dtype, device, family)
    method = choose_method(row.name, method, deterministic)
    if not _direct(row, problem, (q, k, v, o, do, dq, dk, dv), (lse, given_delta)):

        def run(copies):
            return backward(
                *copies[:6], causal, problem.softmax_scale, copies[6], method, deterministic, layout, None, config, family
            )

        return _Adapted(run, row, problem, _BACKWARD, outputs)
    strides = _strides(problem, outputs, q=q, k=k, v=v, o=o, dout=do, dq=dq, dk=dk, dv=dv)
    plan = plan_backward(problem, device, strides, method, config, row.name, with_delta=given_delta is None)
    return _Call(plan, ordinal, _BACKWARD, outputs, arrays)


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
    """A prepared call on arrays that the kernels take as they are.

    Buffers are numbered: the arguments, then the workspaces. What a call allocates is known when it is prepared.
    """

    def __init__(self, plan: Plan, ordinal: int, names: tuple[str, ...], outputs: Outputs, arrays: tuple):
        self.ordinal = ordinal
        self.names = names
        self.num_inputs = len(names) - len(outputs)
        self.outputs = outputs
        # The kernels' name for `do`, which C++ keeps for itself.
        buffers = [*["dout" if name == "do" else name for name in names], *[w.name for w in plan.workspaces]]
        if "delta" not in names[self.num_inputs :] and any(w.name == "delta" for w in plan.workspaces):
            buffers[names.index("delta")] = "no delta given"
        self.allocated = [
            (position, shape, dtype)
            for position, (_, shape, dtype) in enumerate(outputs, start=self.num_inputs)
            if arrays[position] is None
        ]
        self.writes_given = len(self.allocated) < len(outputs)
        self.workspace_bytes = [max(w.nbytes, 1) for w in plan.workspaces]
        self.cleared = [buffers.index(name) for name in plan.cleared]
        with cupy.cuda.Device(ordinal):
            self.stages = bind_plan(plan, tuple(buffers))

    def __call__(self, arrays: tuple, addresses: list[int]) -> tuple:
        if runtime.getDevice() == self.ordinal:
            return self._run(arrays, addresses)
        with cupy.cuda.Device(self.ordinal):
            return self._run(arrays, addresses)

    def _run(self, arrays: tuple, addresses: list[int]) -> tuple:
        if self.writes_given:
            _check_given(self.names, self.num_inputs, arrays)
        buffers = list(arrays)
        for position, shape, dtype in self.allocated:
            array = buffers[position] = cupy.empty(shape, dtype)
            addresses[position] = array.data.ptr
        # Freed on return, before the kernels end: CuPy's pool hands the memory only to later work of the same stream.
        for nbytes in self.workspace_bytes:
            memory = cupy.cuda.alloc(nbytes)
            buffers.append(memory)
            addresses.append(memory.ptr)
        for position in self.cleared:
            self._clear(buffers[position], position)
        for stage in self.stages:
            stage(addresses)
        return tuple(buffers[self.num_inputs : len(arrays)])

    def _clear(self, buffer, position: int) -> None:
        if position >= len(self.names):
            buffer.memset_async(0, self.workspace_bytes[position - len(self.names)])
        elif buffer.flags.c_contiguous:
            buffer.data.memset_async(0, buffer.nbytes)
        else:
            buffer.fill(0)


class _Adapted:
    """A prepared call with arrays that the kernels do not take: it runs on copies, and copies the results back."""

    def __init__(self, run: Callable, family: Family, problem: AttentionProblem, names: tuple[str, ...], outputs: Outputs):
        self.run = run
        self.family = family
        self.head_dim = problem.head_dim
        self.padded = -(-problem.head_dim // family.head_dim_step) * family.head_dim_step
        self.names = names
        self.num_inputs = len(names) - len(outputs)

    def __call__(self, arrays: tuple, _: list[int]) -> tuple:
        _check_given(self.names, self.num_inputs, arrays)
        names, count = self.names, self.num_inputs
        with cupy.cuda.Device(arrays[0].data.device_id):
            results = self.run([self._copy(*pair) for pair in zip(names[:count], arrays[:count], strict=True)])
            delivered = zip(names[count:], results, arrays[count:], strict=True)
            return tuple([self._deliver(*triple) for triple in delivered])

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


def _check_given(names: tuple[str, ...], num_inputs: int, arrays: tuple) -> None:
    named = [(name, array) for name, array in zip(names, arrays, strict=True) if array is not None]
    inputs = {name: array for name, array in named if name in names[:num_inputs]}
    check_overlap({f"out ({name})": array for name, array in named if name not in inputs}, inputs)
