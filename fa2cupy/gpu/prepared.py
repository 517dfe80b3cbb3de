"""Prepared calls on CuPy arrays: what is left to do once the plan of a call is known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import cupy
import numpy as np
from cupy.cuda import runtime

from ..problem.arguments import OverlapCheck, array_backend, output_name
from .device_memory import allocator_of, is_capturing, temporaries
from ..families.choice import Family
from ..problem.features import ARRAY_FEATURES, OFFSETS
from .launch import bind_plan
from ..plan.calls import Plan
from ..problem.attention import AttentionProblem

__all__ = ["AdaptedCall", "Arguments", "KernelCall", "Outputs", "takes_rows"]

_STATISTICS = ("lse", "delta", "dlse")  # one number a row, instead of head_dim columns
_WITHOUT_COLUMNS = (*_STATISTICS, "dbias", "dsink")
_known_threads = threading.local()


class Arguments(NamedTuple):
    """The arrays of an operation in the order of its call: what it reads, which of that may be None, and its results."""

    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    results: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """As messages call them."""
        return (*self.inputs, *map(output_name, self.results))

    def with_inputs(self, names: tuple[str, ...]) -> Arguments:
        """The same with further arrays that it reads, after the others."""
        return self._replace(inputs=(*self.inputs, *names), optional=(*self.optional, *names))

    def check_backend(self, arrays: tuple) -> None:
        """All are CuPy arrays."""
        named = dict(zip(self.names, arrays, strict=True))
        optional = {name: named.pop(name) for name in self.names if name in self.optional or name not in self.inputs}
        array_backend(named, optional)


#: (name, shape, dtype) of each result of a call.
Outputs = tuple[tuple[str, tuple[int, ...], np.dtype], ...]


def takes_rows(family: Family, array) -> bool:
    """Whether the family's kernels take the rows of an array where they lie."""
    if array.size == 0:
        return True
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return False
    step = family.row_alignment
    starts = (s for s, length in zip(array.strides[:-1], array.shape[:-1], strict=True) if length > 1)
    return array.data.ptr % step == 0 and all(s % step == 0 for s in starts)


def _overlap_check(arguments: Arguments, arrays: tuple) -> Callable[[list[int]], None]:
    layouts = [
        None if array is None else (name, array.shape, array.strides, array.itemsize)
        for name, array in zip(arguments.names, arrays, strict=True)
    ]
    return OverlapCheck(layouts, len(arguments.inputs))


class KernelCall:
    """A prepared call on arrays that the kernels take as they are.

    Buffers are numbered: the arguments, then the workspaces. What a call allocates is known when it is prepared.
    """

    def __init__(self, plan: Plan, ordinal: int, arguments: Arguments, outputs: Outputs, arrays: tuple):
        self.ordinal = ordinal
        self.first_result = len(arguments.inputs)
        # The kernels' name for `do`, which C++ keeps for itself.
        buffers = ["dout" if name == "do" else name for name in (*arguments.inputs, *arguments.results)]
        if any(w.name == "delta" for w in plan.workspaces):
            buffers[buffers.index("delta")] = "no delta given"
        buffers += [w.name for w in plan.workspaces]
        self.allocated = [
            (position, shape, dtype)
            for position, (_, shape, dtype) in enumerate(outputs, start=self.first_result)
            if arrays[position] is None
        ]
        self.check_overlap = _overlap_check(arguments, arrays) if len(self.allocated) < len(outputs) else None
        self.workspace_bytes = [max(w.nbytes, 1) for w in plan.workspaces]
        self.cleared = [buffers.index(name) for name in plan.cleared]
        with cupy.cuda.Device(ordinal):
            self.stages = bind_plan(plan, tuple(buffers))

    def __call__(self, arrays: tuple, addresses: list[int]) -> tuple:
        if self.check_overlap is not None:
            self.check_overlap(addresses)
        if not hasattr(_known_threads, "have_context"):
            # The driver, which launches and makes tensor maps, knows no device in a thread that has not used one: memory
            # may have come out of CuPy's pool.
            runtime.free(0)
            _known_threads.have_context = True
        if runtime.getDevice() == self.ordinal:
            return self._run(arrays, addresses)
        with cupy.cuda.Device(self.ordinal):
            return self._run(arrays, addresses)

    def _run(self, arrays: tuple, addresses: list[int]) -> tuple:
        buffers = list(arrays)
        for position, shape, dtype in self.allocated:
            array = buffers[position] = cupy.ndarray(shape, dtype)
            addresses[position] = array.data.ptr
        stream = cupy.cuda.get_current_stream().ptr
        if self.workspace_bytes:
            allocate = allocator_of(stream)
            for nbytes in self.workspace_bytes:
                memory = allocate(nbytes)
                buffers.append(memory)
                addresses.append(memory.ptr)
        for position in self.cleared:
            self._clear(buffers[position], position - len(arrays))
        for stage in self.stages:
            stage(addresses, stream)
        return tuple(buffers[self.first_result : len(arrays)])

    def _clear(self, buffer, workspace: int) -> None:
        if workspace >= 0:
            buffer.memset_async(0, self.workspace_bytes[workspace])
        elif buffer.flags.c_contiguous:
            buffer.data.memset_async(0, buffer.nbytes)
        else:
            buffer.fill(0)


class AdaptedCall:
    """A prepared call with arrays that the kernels do not take: it runs on copies, and copies the results back."""

    def __init__(
        self, run: Callable, family: Family, problem: AttentionProblem, arguments: Arguments, outputs: Outputs, arrays: tuple
    ):
        self.run = run
        self.family = family
        # Zeros in further columns change no product, so that kernels may have one head_dim for all.
        self.columns = {name: problem.head_dim_v or problem.head_dim for name in ("v", "o", "do", "dv")}
        self.head_dim = problem.head_dim
        widest = max(self.head_dim, *self.columns.values())
        self.padded = -(-widest // family.head_dim_step) * family.head_dim_step
        self.arguments = arguments
        self.outputs = outputs
        self.check_overlap = _overlap_check(arguments, arrays)

    def __call__(self, arrays: tuple, addresses: list[int]) -> tuple:
        self.check_overlap(addresses)
        first_result = len(self.arguments.inputs)
        inputs, results = arrays[:first_result], arrays[first_result:]
        with cupy.cuda.Device(arrays[0].data.device_id):
            if is_capturing(cupy.cuda.get_current_stream().ptr):
                # All that is allocated from here on is the graph's; results are not.
                kinds = zip(self.outputs, results, strict=True)
                results = tuple([cupy.ndarray(*kind[1:]) if array is None else array for kind, array in kinds])
            with temporaries():
                return self._run(inputs, addresses, results)

    def _run(self, inputs: tuple, addresses: list[int], results: tuple) -> tuple:
        names = self.arguments.inputs
        copies = [self._copy(*pair) for pair in zip(names, inputs, strict=True)]
        if "seed" in names:
            copies[names.index("seed")] = addresses[names.index("seed")]
        delivered = zip(self.outputs, self.run(copies), results, strict=True)
        return tuple([self._deliver(name, dtype, result, given) for (name, _, dtype), result, given in delivered])

    def _copy(self, name: str, array):
        if array is None:
            return None
        if name in (*_STATISTICS, *OFFSETS):
            return cupy.ascontiguousarray(array)
        if name in ARRAY_FEATURES:
            return array
        if self.padded != array.shape[-1]:
            padded = cupy.zeros((*array.shape[:-1], self.padded), array.dtype)
            padded[..., : array.shape[-1]] = array
            return padded
        return array if takes_rows(self.family, array) else array.copy(order="C")

    def _deliver(self, name: str, dtype: np.dtype, result, given):
        if name not in _WITHOUT_COLUMNS:
            result = result[..., : self.columns.get(name, self.head_dim)]
        if given is None:
            return cupy.ascontiguousarray(result.astype(dtype, copy=False))
        given[...] = result
        return given
