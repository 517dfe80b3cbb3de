"""Prepared calls on CuPy arrays: allocation of results and workspaces, and the launches of a plan."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import cupy
from cupy.cuda import runtime

from ..plan.stages import Plan
from ..plan.tile_lists import stages_of_map
from ..problem.arguments import OverlapCheck
from ..problem.checks import Result
from .arguments import Arguments
from .device_memory import allocator_of, zeros
from .kept_lists import KeptLists
from .launch import ABSENT, bind_plan

__all__ = ["KernelCall", "NotBoundError", "binds", "bound_call", "overlap_check"]

_ALIGNMENT = 512  # bytes, like that of CuPy's allocations
#: Results of together at most so many bytes are parts of one allocation, which lasts as long as any of them: an
#: allocation takes the host as long as a third of a launch.
_MOST_TOGETHER = 8 << 20


class _Thread(threading.local):
    has_context = False
    #: Gets the calls of `bound_call`; None while calls are made.
    found: list[tuple[KernelCall, list[int]]] | None = None


_thread = _Thread()


class NotBoundError(Exception):
    """A call does more than queue kernels with the addresses of its arrays."""


def binds() -> bool:
    """True if `bound_call` runs in this thread, so that nothing may be queued."""
    return _thread.found is not None


def bound_call(function: Callable[..., object], *args: Any) -> tuple[KernelCall, list[int]] | None:
    """The kernels that a function queues, which makes one call, and the addresses that they take.

    Nothing is queued. The arrays need no memory; all results are given. None if the function does more than queue
    kernels with these addresses.
    """
    found: list[tuple[KernelCall, list[int]]] = []
    _thread.found = found
    try:
        function(*args)
    except NotBoundError:
        return None
    finally:
        _thread.found = None
    ((call, addresses),) = found
    return (call, addresses) if call.lists is None and not call.cleared and not call.allocated else None


def overlap_check(
    arguments: Arguments, arrays: tuple[cupy.ndarray | None, ...], written: Collection[str] = ()
) -> Callable[[list[int]], None]:
    """Makes a function that raises ValueError if an array, at given addresses, overlaps one that the call writes.

    A call writes its results, and the inputs in `written`.
    """
    layouts = [
        None if array is None else (arguments.labels[name], array.shape, array.strides, array.itemsize)
        for name, array in zip(arguments.names, arrays, strict=True)
    ]
    outputs = {*arguments.results, *written}
    return OverlapCheck(layouts, [position for position, name in enumerate(arguments.names) if name in outputs])


class KernelCall:
    """A prepared call on arrays that the kernels take as they are.

    Addresses are numbered: first those of the arguments, then those of the workspaces, and last 0, for arrays that a
    kernel takes and the call does not have. Everything that a call allocates is known when it is prepared.

    Parameters
    ----------
    plan : Plan
    ordinal : int
        Number of the device.
    arguments : Arguments
    results : tuple of Result
    given : collection of str, optional
        Names of the results that the caller passes an array for; the others are allocated.
    check_overlap : callable, optional
        Raises ValueError if arrays at the given addresses overlap.
    replaced : mapping of str by str, optional
        Names of arrays that kernels get in place of those that have no element.
    """

    def __init__(
        self,
        plan: Plan,
        ordinal: int,
        arguments: Arguments,
        results: tuple[Result, ...],
        given: Collection[str] = (),
        check_overlap: Callable[[list[int]], None] | None = None,
        replaced: Mapping[str, str] | None = None,
    ):
        self.ordinal = ordinal
        self.check_overlap = check_overlap
        self.first_result = len(arguments.inputs)
        self.allocated, self.result_bytes = [], 0
        for index, result in enumerate(results):
            if result.name not in given:
                place = index, self.first_result + index
                self.allocated.append((*place, result.shape, result.dtype, self.result_bytes))
                self.result_bytes += _aligned(math.prod(result.shape) * result.dtype.itemsize)
        positions = {name: position for position, name in enumerate(arguments.kernel_names)}
        positions |= {name: positions[other] for name, other in (replaced or {}).items()}
        # The lists of a map are the map's. Other workspaces are parts of one allocation. Those that are cleared come
        # last, so that one memset clears them.
        of_map, written = stages_of_map(plan) if "block_mask" in arguments.inputs else ([], set())
        lists = {one.name: one.nbytes for one in plan.workspaces if one.name in written}
        workspaces = [one for one in plan.workspaces if one.name not in lists and not one.stays_zero]
        workspaces.sort(key=lambda workspace: workspace.name in plan.cleared)
        zero = next((one for one in plan.workspaces if one.stays_zero), None)
        self.cleared = [positions[name] - self.first_result for name in plan.cleared if name in positions]
        self.workspace_bytes = self.kept_bytes = 0
        self.offsets = []
        num_given = len(arguments.names) + len(lists)
        positions |= dict(zip(lists, range(len(arguments.names), num_given), strict=True))
        # A workspace replaces an absent argument of the same name: delta.
        for position, workspace in enumerate(workspaces, start=num_given):
            positions[workspace.name] = position
            self.offsets.append(self.workspace_bytes)
            self.workspace_bytes += _aligned(workspace.nbytes)
            if workspace.name not in plan.cleared:
                self.kept_bytes = self.workspace_bytes
        self.zero_bytes = None
        if zero is not None:
            self.zero_bytes = zero.nbytes
            positions[zero.name] = num_given + len(workspaces)
        positions[ABSENT] = num_given + len(workspaces) + (zero is not None)
        others = tuple([stage for stage in plan.stages if stage not in of_map])
        with cupy.cuda.Device(ordinal):
            self.stages = bind_plan(replace(plan, stages=others), positions)
            self.lists = None
            if lists:
                bound = bind_plan(replace(plan, stages=tuple(of_map)), positions)
                self.lists = KeptLists(of_map, bound, lists, positions[ABSENT] + 1)

    def __call__(
        self, arrays: tuple[cupy.ndarray | None, ...], addresses: list[int], sparse: Any = None
    ) -> tuple[cupy.ndarray, ...]:
        """The results, on the current stream of the device.

        `addresses` are those of `arrays`, 0 for None, and `sparse` is the map of the call, if it has one.
        """
        if _thread.found is not None:
            _thread.found.append((self, addresses))
            return arrays[self.first_result :]
        if self.check_overlap is not None:
            self.check_overlap(addresses)
        if not _thread.has_context:
            # The driver API needs a current context, and a new thread has none: memory from CuPy's pool creates none.
            runtime.free(0)
            _thread.has_context = True
        run = self._run if self.lists is None else partial(self._run_with_lists, sparse=sparse)
        if runtime.getDevice() == self.ordinal:
            return run(arrays, addresses)
        with cupy.cuda.Device(self.ordinal):
            return run(arrays, addresses)

    def queue(self, addresses: list[int]) -> None:
        """Queues the kernels of `bound_call` on the current stream of the device, which is current."""
        self._run((), addresses)

    def _run_with_lists(
        self, arrays: tuple[cupy.ndarray | None, ...], addresses: list[int], sparse: Any
    ) -> tuple[cupy.ndarray, ...]:
        assert self.lists is not None
        held = self.lists.add_to(addresses, cupy.cuda.get_current_stream().ptr, sparse)
        results = self._run(arrays, addresses)
        del held  # freed behind the launches
        return results

    def _run(self, arrays: tuple[cupy.ndarray | None, ...], addresses: list[int]) -> tuple[cupy.ndarray, ...]:
        results = list(arrays[self.first_result :])
        if 0 < self.result_bytes <= _MOST_TOGETHER:
            together = cupy.cuda.alloc(self.result_bytes)
            start = together.ptr
            for index, position, shape, dtype, offset in self.allocated:
                results[index] = cupy.ndarray(shape, dtype, together + offset)
                addresses[position] = start + offset
        else:
            for index, position, shape, dtype, _ in self.allocated:
                array = results[index] = cupy.ndarray(shape, dtype)
                addresses[position] = array.data.ptr
        stream = cupy.cuda.get_current_stream().ptr
        if self.workspace_bytes:
            memory = allocator_of(stream)(self.workspace_bytes)  # freed behind the launches
            start = memory.ptr
            addresses += [start + offset for offset in self.offsets]
            if self.kept_bytes < self.workspace_bytes:
                runtime.memsetAsync(start + self.kept_bytes, 0, self.workspace_bytes - self.kept_bytes, stream)
        else:
            addresses += self.offsets  # all are empty
        if self.zero_bytes is not None:
            found_zero = zeros(self.zero_bytes, self.ordinal, stream)
            addresses.append(found_zero.ptr)
        addresses.append(0)
        for index in self.cleared:
            _clear(results[index])
        for stage in self.stages:
            stage(addresses, stream)
        return tuple(results)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _clear(array: cupy.ndarray) -> None:
    if array.flags.c_contiguous:
        array.data.memset_async(0, array.nbytes)
    else:
        array.fill(0)
